"""Tokens that could leak, addresses that cannot work, and templates that no label can fill."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agents.collector import Reading
from agents.collectors.exporters.prometheus import Endpoint, Prometheus
from agents.collectors.exporters.scraper import PageFetcher, ScrapeError
from agents.collectors.registry import configured_collectors
from pipeline.foreign.mapping import load_mapping
from pipeline.model.errors import ConfigError
from tests.agents.exporter_double import OK, peer

# --- tokens and addresses --------------------------------------------------------------------------------------------


def endpoint(**message: Any) -> Mapping[str, Any]:
    return {"prometheus": {"endpoints": [{"name": "a", **message}]}}


@pytest.mark.parametrize("url", ["http://gateway.example/", "http://gateway/", "http://localhost.example/"])
def test_a_token_is_not_sent_unencrypted_to_a_host_name(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a: url = .* would send the token of token_file unencrypted; expected https"
    ):
        configured_collectors(endpoint(url=url, token_file="/t"), "f.toml")
    configured_collectors(endpoint(url=url), "f.toml")


def test_a_public_ipv4_address_in_ipv6_notation_is_public() -> None:
    with pytest.raises(ConfigError, match="https to public ones"):
        configured_collectors(endpoint(url="http://[::ffff:8.8.8.8]/"), "f.toml")
    configured_collectors(endpoint(url="http://[::ffff:10.0.0.7]/"), "f.toml")


@pytest.mark.parametrize("url", ["https://x.example/", "http://10.0.0.7:9/", "http://[::1]:9/", "http://localhost/"])
def test_a_token_may_be_sent_encrypted_or_in_private_networks(url: str) -> None:
    configured_collectors(endpoint(url=url, token_file="/t"), "f.toml")


@pytest.mark.parametrize(
    "url",
    ["http://x:99999/", "http://x:0/", "http://x:y/", "http://[::1/", "http://x/a b", "http://x/\n", "http://:@x/"],
)
def test_an_unusable_url_is_refused_at_configuration(url: str) -> None:
    with pytest.raises(ConfigError, match="a port of 1 to 65535"):
        configured_collectors(endpoint(url=url), "f.toml")


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (
            "sesame",
            0o644,
            "open to every user of this host (mode 0644); expected a file that others may not read: chmod 600",
        ),
        ("\n", 0o600, "expected one bearer token, a single word"),
        ("sesame\r\nX-Other: 1", 0o600, "expected one bearer token, a single word"),
        ("sesam\u00e9", 0o600, "is not text"),
        (None, 0o600, "No such file or directory; expected a readable file with the token"),
    ],
)
def test_an_unusable_token_affects_only_its_endpoint_and_a_fixed_one_works_immediately(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with peer(OK, b"\r\na 1\n") as url:
        made = Prometheus(endpoints=(Endpoint("x", url, token_file=path), Endpoint("y", url)))
        made.open("n1")
        try:
            found: list[Reading] = []
            while not {"exporter:x", "custom:y.a"} <= {e for r in found for e in r.entities}:
                found += made.read()
                time.sleep(0.01)
            (event,) = [e for r in found for e in r.events]
        finally:
            made.close()
        path.write_text("sesame")
        path.chmod(0o600)
        assert PageFetcher(url, 5.0, token_file=path)() == "a 1\n"
    assert message in event.data["reason"]
    assert "sesam" not in event.data["reason"]


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def test_an_exporter_is_verified_by_its_certificate_and_a_fixed_one_works_immediately(
    tmp_path: Path, certificate: Path, tls: ssl.SSLContext
) -> None:
    ca_file = tmp_path / "ca.pem"
    with peer(OK, b"Content-Length: 4\r\n\r\n", b"a 1\n", tls=tls) as url:
        with pytest.raises(ScrapeError, match="CERTIFICATE_VERIFY_FAILED"):
            PageFetcher(url, 5.0)()
        fetch = PageFetcher(url, 5.0, ca_file)
        with pytest.raises(ScrapeError, match=r"ca\.pem: .*No such file or directory; expected certificates in PEM"):
            fetch()
        ca_file.write_text("nothing")
        with pytest.raises(ScrapeError, match="expected certificates in PEM"):
            fetch()
        ca_file.write_text(certificate.read_text())
        assert fetch() == "a 1\n"
        with pytest.raises(ScrapeError, match=r"IP address mismatch|not valid for|doesn't match"):
            PageFetcher(url.replace("127.0.0.1", "localhost"), 5.0, ca_file)()


def test_a_slowly_dripping_tls_exporter_times_out(certificate: Path, tls: ssl.SSLContext) -> None:
    with peer(OK, b"X: ", drip=b"x", tls=tls) as url:
        began = time.monotonic()
        with pytest.raises(ScrapeError, match="timed out"):
            PageFetcher(url, 0.4, certificate)()
        assert time.monotonic() - began < 2.0


# --- mappings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["cdu:{target", "cdu:target}", "cdu:{0}", "cdu:{}", "cdu:{a!r}", "cdu:{a:>10}", "cdu:{a.b}"]
)
@pytest.mark.parametrize("place", ["[entities] coolant", "[parents] coolant", "[[metric]] flow"])
def test_invalid_templates_are_refused_with_their_place(tmp_path: Path, bad: str, place: str) -> None:
    entities = f'coolant = "{bad if "entities" in place else "cdu:x"}"'
    parents = f'coolant = ["{bad if "parents" in place else "row:{target}"}"]'
    own = f'entity = "{bad}"' if "metric" in place else ""
    metric = f'[[metric]]\nname = "flow"\nsignal = "coolant.flow"\n{own}\n'
    path = tmp_path / "own.toml"
    path.write_text(f"version = 1\n[entities]\n{entities}\n[parents]\n{parents}\n{metric}")
    with pytest.raises(ConfigError) as refused:
        load_mapping(str(path))
    assert f"own.toml: {place}: '{bad}'" in str(refused.value)
