"""Brokers of the tests whose users log in with tokens (OAUTHBEARER) or Kerberos tickets (GSSAPI), and their servers.

The token endpoint is a small HTTP server that signs JWTs with openssl; the brokers check them with Kafka's own
validator. Kerberos is a real KDC (MIT krb5) with its database in a folder.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.kafka_broker import HOST, reserve_port
from tests.kafka_security import Security

AUDIENCE, ISSUER, KEY_ID = "kafka", "https://login.example", "one"
OAUTH = "org.apache.kafka.common.security.oauthbearer."


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class TokenEndpoint(ThreadingHTTPServer):
    """Issues tokens for clients that name `client` and its secret. Tests change its fields while it runs.

    life: of a token (s).  skew: added to the times in tokens (s).  audience: of tokens.
    broken: "" or "hangs", "fails", "html".  issued: tokens so far.
    """

    daemon_threads = True

    def __init__(self, folder: Path, client: str, secret: str) -> None:
        super().__init__((HOST, 0), _TokenHandler)
        self.client, self.secret, self.key = client, secret, folder / "signing.key"
        self.life, self.skew, self.audience, self.broken, self.issued = 300.0, 0.0, AUDIENCE, "", 0
        self.released = threading.Event()
        words = ["openssl", "genrsa", "-out", str(self.key), "2048"]
        subprocess.run(words, check=True, capture_output=True)
        shown = subprocess.run(
            ["openssl", "rsa", "-in", str(self.key), "-noout", "-modulus"], check=True, capture_output=True, text=True
        ).stdout
        modulus = bytes.fromhex(shown.strip().partition("=")[2])
        key = {"kty": "RSA", "kid": KEY_ID, "use": "sig", "alg": "RS256", "n": _encode(modulus), "e": "AQAB"}
        self.keys = {"keys": [key]}
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/token"

    def sign(self, subject: str) -> str:
        """Returns a token for `subject`."""
        now = time.time() + self.skew
        claims = {"iss": ISSUER, "sub": subject, "aud": self.audience, "iat": now, "nbf": now, "exp": now + self.life}
        header = {"alg": "RS256", "kid": KEY_ID, "typ": "JWT"}
        head = ".".join(_encode(json.dumps(part).encode()) for part in (header, claims))
        words = ["openssl", "dgst", "-sha256", "-sign", str(self.key)]
        signature = subprocess.run(words, input=head.encode(), check=True, capture_output=True).stdout
        self.issued += 1
        return f"{head}.{_encode(signature)}"

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class _TokenHandler(BaseHTTPRequestHandler):
    server: TokenEndpoint

    def log_message(self, *_: object) -> None: ...

    def _answer(self, status: int, answer: Any) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client may have closed it
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(200, self.server.keys)

    def do_POST(self) -> None:
        server = self.server
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if server.broken == "hangs":
            server.released.wait(60)
        if server.broken == "fails":
            return self._answer(503, {"error": "temporarily_unavailable"})
        if server.broken == "html":
            return self._answer(200, b"<html>log in</html>")
        expected = base64.b64encode(f"{server.client}:{server.secret}".encode()).decode()
        if self.headers["Authorization"] != f"Basic {expected}":
            return self._answer(401, {"error": "invalid_client", "error_description": "client authentication failed"})
        if form.get("grant_type") != ["client_credentials"]:
            return self._answer(400, {"error": "unsupported_grant_type"})
        if form.get("scope", ["fleet"]) != ["fleet"]:
            return self._answer(400, {"error": "invalid_scope", "error_description": "unknown scope"})
        return self._answer(
            200, {"access_token": server.sign(server.client), "token_type": "Bearer", "expires_in": server.life}
        )


@dataclass(frozen=True)
class TokenSecurity(Security):
    """A SASL_SSL broker that accepts tokens of `endpoint`."""

    endpoint: TokenEndpoint = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "endpoint", TokenEndpoint(self.folder, self.username, self.password))
        (self.folder / "jwks.json").write_text(json.dumps(self.endpoint.keys))

    def keys(self) -> dict[str, Any]:
        return {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "OAUTHBEARER",
            "username": self.username,
            "password_file": self.password_file,
            "token_endpoint": self.endpoint.url,
            "token_scope": "fleet",
            "ca_file": self.ca_file,
        }

    @property
    def _keys_url(self) -> str:
        return f"file://{self.file('jwks.json')}"

    def properties(self, listener: str) -> dict[str, str]:
        own = f"listener.name.{listener}."
        lines = super().properties(listener)
        lines = {key: text for key, text in lines.items() if "scram" not in key}
        return lines | {
            f"{own}sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{own}oauthbearer.sasl.jaas.config": f"{OAUTH}OAuthBearerLoginModule required;",
            f"{own}oauthbearer.sasl.server.callback.handler.class": f"{OAUTH}OAuthBearerValidatorCallbackHandler",
            f"{own}oauthbearer.sasl.oauthbearer.jwks.endpoint.url": self._keys_url,
            f"{own}oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
            f"{own}oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
            f"{own}oauthbearer.sasl.oauthbearer.clock.skew.seconds": "0",
            f"{own}oauthbearer.connections.max.reauth.ms": "3600000",
        }

    def format_words(self) -> list[str]:
        return []

    def java_words(self) -> list[str]:
        return [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self._keys_url}"]

    def close(self) -> None:
        self.endpoint.close()


REALM, SERVICE, CLIENT = "FLEET.TEST", f"kafka/{HOST}", "fleetpulse/agents"
REAUTH_MS = 3000
"""Sessions of the broker: clients log in again within this time. Chosen: a test sees several."""
KRB5 = """\
[libdefaults]
default_realm = {realm}
dns_lookup_kdc = false
dns_canonicalize_hostname = false
rdns = false
ignore_acceptor_hostname = true
udp_preference_limit = 1
[realms]
{realm} = {{
  kdc = {host}:{port}
}}
[domain_realm]
{host} = {realm}
"""
KDC = """\
[kdcdefaults]
kdc_ports = ""
kdc_tcp_ports = ""
kdc_listen = ""
kdc_tcp_listen = {host}:{port}
[realms]
{realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  acl_file = {folder}/acl
  max_life = 1h
}}
[logging]
kdc = FILE:{folder}/kdc.log
"""


def _add_gssapi() -> None:
    """Makes the package that `make parts` built importable, unless another one is installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetpulse" / "gssapi"
    if find_spec("gssapi") is None:
        sys.path += [str(folder) for folder in sorted(cache.glob("*"))[-1:]]
        invalidate_caches()


def missing_kerberos() -> str:
    """Returns the missing part of Kerberos; empty if nothing is missing."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    _add_gssapi()
    absent = [name for name in ("krb5kdc", "kdb5_util", "kadmin.local", "kinit") if not shutil.which(name, path=path)]
    if absent:
        return f"no {', '.join(absent)}"
    return "" if find_spec("gssapi") else "the Python package gssapi is not installed"


class Kdc:
    """A KDC with its own realm: it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True)
        self._port = reserve_port()
        given = {"host": HOST, "port": self._port.getsockname()[1], "realm": REALM, "folder": self.folder}
        (self.folder / "krb5.conf").write_text(KRB5.format(**given))
        (self.folder / "kdc.conf").write_text(KDC.format(**given))
        self.process: subprocess.Popen[bytes] | None = None
        self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "master")

    @property
    def environ(self) -> Mapping[str, str]:
        own = {"KRB5_CONFIG": str(self.folder / "krb5.conf"), "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf")}
        return {**os.environ, **own, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}

    def _run(self, *words: str, text: str = "") -> None:
        program = shutil.which(words[0], path=self.environ["PATH"]) or words[0]
        subprocess.run(
            [program, *words[1:]], check=True, capture_output=True, env=self.environ, input=text.encode(), timeout=30
        )

    def add(self, principal: str, keytab: Path | None = None, life: str = "1h") -> None:
        """Creates a principal with a random key, which goes into `keytab`; its tickets last `life`."""
        self._run("kadmin.local", "-q", f"addprinc -randkey -maxlife {life} {principal}")
        if keytab is not None:
            self._run("kadmin.local", "-q", f"ktadd -k {keytab} -norandkey {principal}")

    def change_key(self, principal: str) -> None:
        """Gives a principal another key, so that older keytabs are wrong."""
        self._run("kadmin.local", "-q", f"cpw -randkey {principal}")

    def kinit(self, keytab: Path, principal: str, cache: Path, life: str = "1h") -> None:
        """Gets a ticket into a cache file, as people and cron jobs do."""
        self._run("kinit", "-k", "-t", str(keytab), "-c", f"FILE:{cache}", "-l", life, principal)

    def start(self) -> None:
        program = shutil.which("krb5kdc", path=self.environ["PATH"]) or "krb5kdc"
        self.process = subprocess.Popen([program, "-n"], env=self.environ, start_new_session=True)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(self._port.getsockname(), 1.0):
                return
            time.sleep(0.02)
        raise AssertionError(f"the KDC did not start: {(self.folder / 'kdc.log').read_text()}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def count_requests(self, principal: str) -> int:
        """Returns how many initial tickets (AS_REQ) the principal has got."""
        lines = (self.folder / "kdc.log").read_text().splitlines()
        return sum("AS_REQ" in line and "ISSUE" in line and f"{principal}@{REALM}" in line for line in lines)

    def close(self) -> None:
        self.stop()
        self._port.close()


@dataclass(frozen=True)
class KerberosSecurity(Security):
    """A SASL_SSL broker with a principal of `kdc`, and a client's keytab."""

    username: str = CLIENT
    kdc: Kdc = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kdc", Kdc(self.folder / "kdc"))
        self.kdc.add(SERVICE, self.file("broker.keytab"))
        self.kdc.add(CLIENT, self.keytab_file)
        self.kdc.start()

    @property
    def keytab_file(self) -> Path:
        return self.file("client.keytab")

    def keys(self) -> dict[str, Any]:
        return {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "GSSAPI",
            "username": self.username,
            "keytab_file": self.keytab_file,
            "ca_file": self.ca_file,
        }

    def properties(self, listener: str) -> dict[str, str]:
        own = f"listener.name.{listener}."
        lines = super().properties(listener)
        lines = {key: text for key, text in lines.items() if "scram" not in key}
        login = (
            "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true doNotPrompt=true "
            f'keyTab="{self.file("broker.keytab")}" principal="{SERVICE}@{REALM}";'
        )
        return lines | {
            f"{own}sasl.enabled.mechanisms": "GSSAPI",
            f"{own}gssapi.sasl.jaas.config": login,
            f"{own}sasl.kerberos.service.name": "kafka",
            f"{own}gssapi.connections.max.reauth.ms": str(REAUTH_MS),
            "sasl.kerberos.principal.to.local.rules": "RULE:[2:$1](.*),RULE:[1:$1](short|changed|late)",
        }

    def format_words(self) -> list[str]:
        return []

    def java_words(self) -> list[str]:
        return [f"-Djava.security.krb5.conf={self.kdc.folder / 'krb5.conf'}"]

    def close(self) -> None:
        self.kdc.close()
