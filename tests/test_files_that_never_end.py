"""Files that keys of the configuration name and that are pipes: each is an error, and nothing waits at it."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.bmc.redfish_http import RedfishConnection
from agents.collectors.exporters.scraper import PageFetcher, read_token
from agents.collectors.gpu.xid_table import read_toml
from agents.collectors.jobs.kubernetes import PodPoller
from agents.gateway.gateway import open_http
from agents.otlp.delivery import HttpDelivery
from pipeline.commands import doctor_senders
from pipeline.config.acts import KubernetesAccess
from pipeline.config.sections import Gateway, Kafka, Opentelemetry
from pipeline.foreign.mapping import load_mapping
from pipeline.http import certificates
from pipeline.model import regular_files
from pipeline.transport import diagnosis, kerberos, oauth_tokens
from tests.pipeline.acts_world import ON

ROOT = Path(__file__).parents[1]
HANGS_S = 10.0
"""Time after which something counts as waiting for good. Chosen: all of these end within a second."""
REFUSED = "is no regular file, and reading it may never end"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe without a writer."""
    os.mkfifo(path := tmp_path / "pipe", 0o600)
    yield path
    path.unlink()


def end(work: Callable[[], object], pipe: Path) -> BaseException | None:
    """Returns the error that a piece of work ended with; fails if it waits at the pipe, where no signal ends it."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    if thread.is_alive():
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # releases it
        thread.join(HANGS_S)
        pytest.fail("waits at the pipe")
    return found[0]


def kafka(**keys: Any) -> Kafka:
    return Kafka("127.0.0.1:1", security_protocol="SSL", **keys)


def pod_list(account: Path) -> object:
    return PodPoller(account / "socket", account, "https://127.0.0.1:1", "n1", 1.0)._read_pod_list()


def pod_list_of(token: Path, trusted: Path) -> object:
    """Reads the list of pods with a service account of these two files."""
    (account := token.parent / "account").mkdir()
    (account / "token").symlink_to(token)
    (account / "ca.crt").symlink_to(trusted)
    return pod_list(account)


def fetch_token(pipe: Path) -> None:
    (secret := pipe.with_name("secret")).write_text("x")
    keys: dict[str, Any] = {"username": "u", "password_file": secret, "token_endpoint": "https://127.0.0.1:1/"}
    fetch = oauth_tokens._Fetch(Kafka(token_ca_file=pipe, **keys), lambda: 0.0)
    if not fetch.finished.wait(HANGS_S / 2):
        threading.Event().wait()
    assert fetch.problem is not None
    raise oauth_tokens.LoginError(fetch.problem)


def start_gateway(certificate: Path, key: Path | None) -> None:
    settings = Gateway(certificate_file=certificate, key_file=key)
    open_http("127.0.0.1", 0, None, settings)  # type: ignore[arg-type] # it ends before


def make_kerberos(pipe: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kerberos, "find_spec", lambda _: True)
        kerberos.kerberos_settings(Kafka(username="u", keytab_file=pipe))


def begin_tls(settings: Kafka) -> None:
    ours, _other = socket.socketpair()
    with ours, _other:
        diagnosis._start_tls(settings, ours, "broker", "broker:1")


def make_kubernetes(pipe: Path) -> None:
    adapter = pytest.importorskip("pipeline.acts.adapters.kubernetes")
    adapter.Kubernetes(replace(ON, kubernetes=KubernetesAccess(pipe)))


PLACES: dict[str, Callable[[Path, Path], object]] = {
    "agent, [opentelemetry] ca_file": lambda pipe, _: HttpDelivery(
        Opentelemetry(endpoint="https://127.0.0.1:1", ca_file=pipe), "f.toml"
    ),
    "prometheus ca_file": lambda pipe, _: PageFetcher("https://127.0.0.1:1/", 1.0, pipe)._tls_context(),
    "prometheus token_file": lambda pipe, _: read_token(pipe),
    "prometheus mapping": lambda pipe, _: load_mapping(str(pipe)),
    "redfish ca_file": lambda pipe, _: RedfishConnection("https://127.0.0.1:1", 1.0, pipe).request("GET", "/", {}),
    "xid_table and patterns": lambda pipe, _: read_toml(pipe),
    "pods, token": lambda pipe, pem: pod_list_of(pipe, pem),
    "pods, ca.crt": lambda pipe, pem: pod_list_of(pem, pipe),
    "gateway certificate_file": lambda pipe, _: start_gateway(pipe, None),
    "gateway key_file": lambda pipe, pem: start_gateway(pem, pipe),
    "doctor, gateway certificate_file": lambda pipe, _: doctor_senders._get(Gateway(certificate_file=pipe), "/readyz"),
    "kafka ca_file": lambda pipe, _: begin_tls(kafka(ca_file=pipe)),
    "kafka certificate_file": lambda pipe, pem: begin_tls(kafka(certificate_file=pipe, key_file=pem)),
    "kafka key_file": lambda pipe, pem: begin_tls(kafka(certificate_file=pem, key_file=pipe)),
    "kafka token_ca_file": lambda pipe, _: fetch_token(pipe),
    "kafka keytab_file": lambda pipe, _: make_kerberos(pipe),
    "acts.kubernetes kubeconfig": lambda pipe, _: make_kubernetes(pipe),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_is_an_error_and_is_not_waited_at(place: str, pipe: Path, certificate: Path) -> None:
    """Start and reload of the agent hung for good at [opentelemetry] ca_file, and ignored SIGTERM."""
    error = end(lambda: PLACES[place](pipe, certificate), pipe)
    assert isinstance(error, Exception)
    assert REFUSED in str(error)


def test_an_agent_whose_ca_file_is_a_pipe_ends_at_once(pipe: Path, tmp_path: Path) -> None:
    (config := tmp_path / "fleetpulse.toml").write_text(
        f"[spool]\ndirectory = '{tmp_path}/spool'\n"
        f"[opentelemetry]\nendpoint = 'https://127.0.0.1:1'\nca_file = '{pipe}'\n"
    )
    words = [sys.executable, "-m", "fleetpulse", "agent", "--config", str(config)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "[opentelemetry] ca_file" in ended.stderr
    assert REFUSED in ended.stderr


def test_a_file_of_certificates_that_is_too_large_or_empty_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "file").write_bytes(b"")
    for empty in (file, Path(os.devnull)):  # the system's certificates must not be trusted in their place
        with pytest.raises(ssl.SSLError):
            certificates.trust(empty)
    monkeypatch.setattr(regular_files, "MAX_BYTES", 10)
    file.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="has more than 10 bytes"):
        certificates.trust(file)


def test_certificates_are_trusted_and_shown_as_before(certificate: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(certificate)
    context = certificates.trust(link)
    certificates.load_own(context, link, None)
    certificates.load_own(context, link, certificate)
    assert context.cert_store_stats()["x509"] == 1
    certificates.load_trusted(other := ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate)
    assert other.get_ca_certs() == context.get_ca_certs()
