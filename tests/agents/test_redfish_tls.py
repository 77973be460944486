"""The collector redfish over TLS: trusted BMCs, and the reason for an untrusted one."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.collectors.bmc.redfish import Redfish
from agents.collectors.bmc.redfish_settings import BmcSettings
from pipeline.model.records import Event
from tests.agents.redfish_double import Double
from tests.agents.redfish_trees import cdu


@pytest.fixture
def secure(certificate: Path) -> Iterator[Double]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with Double(cdu(), tls=context, login=False) as made:
        yield made


def read_first_seconds(bmc: BmcSettings) -> tuple[set[str], list[Event]]:
    """The entities and events of the first seconds, until the first event or coolant unit."""
    collector, entities, events = Redfish(bmcs=(bmc,)), set[str](), list[Event]()
    collector.open("n1")
    try:
        until = time.monotonic() + 10
        while time.monotonic() < until and not events and "cdu:b1.C1" not in entities:
            for reading in collector.read():
                entities |= set(reading.entities)
                events += reading.events
            time.sleep(0.02)
    finally:
        collector.close()
    return entities, events


def test_a_bmc_with_a_trusted_issuer_is_read(secure: Double, certificate: Path) -> None:
    entities, events = read_first_seconds(BmcSettings("b1", secure.url, ca_file=certificate))
    assert "cdu:b1.C1" in entities
    assert events == []


def test_an_untrusted_bmc_is_not_read_with_a_reason(secure: Double) -> None:
    entities, events = read_first_seconds(BmcSettings("b1", secure.url))
    assert entities == {"bmc:b1"}
    assert events[0].kind == "bmc_lost"
    assert "its certificate is not trusted" in events[0].data["reason"]
    assert "ca_file" in events[0].data["reason"]


def test_a_bmc_is_read_without_verification_if_configured(secure: Double) -> None:
    assert "cdu:b1.C1" in read_first_seconds(BmcSettings("b1", secure.url, verify=False))[0]


def test_a_missing_certificate_file_is_reported(secure: Double, tmp_path: Path) -> None:
    _, events = read_first_seconds(BmcSettings("b1", secure.url, ca_file=tmp_path / "absent.pem"))
    assert (
        "absent.pem: No such file or directory; expected a readable file of PEM certificates"
        in events[0].data["reason"]
    )
