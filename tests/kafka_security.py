"""TLS and SASL/SCRAM for the broker of the tests: an authority, certificates and a user, made with openssl."""

from __future__ import annotations

import secrets
import socket
import ssl
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPENSSL = """\
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:127.0.0.1, DNS:localhost
[client]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""
DAYS = "2"
"""Chosen: longer than any run of the tests, and expired soon after."""
ITERATIONS = 4096
"""The minimum of Kafka for SCRAM; the tests' password is random and is deleted with their folder."""
MECHANISM = "SCRAM-SHA-512"
LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


@dataclass(frozen=True)
class Security:
    """Files of a SASL_SSL broker and its clients in `folder`. With `mutual`, clients need certificates too.

    `strangers_ca_file` is an authority that signed nothing here: a client that trusts it alone must refuse the broker.
    """

    folder: Path
    mutual: bool = False
    username: str = "fleetpulse"
    password: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "openssl.cnf").write_text(OPENSSL)
        self._sign("authority", "authority")
        self._sign("stranger", "authority")
        self._sign("server", "server", by="authority")
        self._sign("client", "client", by="authority")
        for name in ("server", "client"):  # Kafka requires key and certificate in one file
            both = self.file(f"{name}.key").read_text() + self.file(f"{name}.pem").read_text()
            self.file(f"{name}.both.pem").write_text(both)
        self._secret("password", self.password)
        self._secret("wrong_password", self.password[::-1] + "x")

    def file(self, name: str) -> Path:
        return self.folder / name

    @property
    def ca_file(self) -> Path:
        return self.file("authority.pem")

    @property
    def strangers_ca_file(self) -> Path:
        return self.file("stranger.pem")

    @property
    def certificate_file(self) -> Path:
        return self.file("client.pem")

    @property
    def key_file(self) -> Path:
        return self.file("client.key")

    @property
    def password_file(self) -> Path:
        return self.file("password")

    @property
    def wrong_password_file(self) -> Path:
        return self.file("wrong_password")

    def _secret(self, name: str, text: str) -> None:
        path = self.file(name)
        path.touch(mode=0o600)
        path.write_text(text + "\n")

    def _sign(self, name: str, kind: str, by: str = "") -> None:
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        words += ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", DAYS, "-subj", f"/CN={name}"]
        words += ["-config", "openssl.cnf", "-extensions", kind]
        words += ["-CA", f"{by}.pem", "-CAkey", f"{by}.key"] if by else []
        subprocess.run(words, cwd=self.folder, check=True, capture_output=True)

    def keys(self) -> dict[str, Any]:
        """Returns the keys of [kafka] with which a client logs in."""
        found: dict[str, Any] = {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": MECHANISM,
            "username": self.username,
            "password_file": self.password_file,
            "ca_file": self.ca_file,
        }
        if self.mutual:
            found |= {"certificate_file": self.certificate_file, "key_file": self.key_file}
        return found

    def java_words(self) -> list[str]:
        """Returns further arguments of the brokers' JVM."""
        return []

    def properties(self, listener: str) -> dict[str, str]:
        """Returns the lines of server.properties for the listener with this name."""
        own = f"listener.name.{listener}."
        lines = {
            f"{own}ssl.keystore.type": "PEM",
            f"{own}ssl.keystore.location": str(self.file("server.both.pem")),
            f"{own}sasl.enabled.mechanisms": MECHANISM,
            f"{own}{MECHANISM.lower()}.sasl.jaas.config": LOGIN,
        }
        if self.mutual:
            lines[f"{own}ssl.client.auth"] = "required"
            lines[f"{own}ssl.truststore.type"] = "PEM"
            lines[f"{own}ssl.truststore.location"] = str(self.ca_file)
        return lines

    def format_words(self) -> list[str]:
        """Arguments of Kafka's format tool that create the user."""
        user = f"name={self.username},password={self.password},iterations={ITERATIONS}"
        return ["--add-scram", f"{MECHANISM}=[{user}]"]

    def wrap(self, plain: socket.socket) -> socket.socket:
        """Returns the connection under TLS, with the broker's certificate verified."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if self.mutual:
            context.load_cert_chain(self.certificate_file, self.key_file)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")
