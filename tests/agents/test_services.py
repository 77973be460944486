"""Services over a real D-Bus daemon, with a test service in place of systemd; and the messages themselves."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.host import services
from agents.collectors.host.services import Services, parse_unit_list
from tests.agents import bus
from tests.agents.bus import Service

MISSING = 2**64 - 1
SINCE = 1_700_000_123_000_000


SIX = tuple(f"{unit}.service" for unit in Services().units)


@dataclass
class Host:
    """A bus with systemd on it."""

    path: Path
    systemd: bus.Systemd

    def services(self, **settings: object) -> Services:
        made = Services(bus=str(self.path), **settings)
        made._now = lambda: 7
        return made


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    process, path = bus.daemon(tmp_path)
    systemd = bus.Systemd()
    try:
        systemd.start(path)
        yield Host(path, systemd)
        systemd.stop()
    finally:
        process.terminate()
        process.communicate()


def read_once(services: Services) -> Reading:
    (reading,) = services.read()
    return reading


def test_installed_services_are_reported_and_others_are_not(host: Host) -> None:
    host.systemd.units = {
        "nvidia-fabricmanager.service": Service(),
        "kubelet.service": Service("activating", restarts=12),
        "slurmd.service": Service("failed", restarts=None),
    }
    services = host.services()
    services.open("n1")
    reading = read_once(services)
    assert reading.entities == ("service:n1.nvidia-fabricmanager", "service:n1.slurmd", "service:n1.kubelet")
    assert reading.columns["service.state"].tolist() == [1, 3, 4]
    assert reading.columns["service.restarts"].tolist() == [0, MISSING, 12]
    assert reading.events == ()
    found = services.inventory()
    assert set(found) == set(reading.entities)
    assert found["service:n1.slurmd"].parents == ("node:n1",)
    assert found["service:n1.slurmd"].attributes == {"unit": "slurmd.service", "required": False}
    services.close()


def test_a_change_is_an_event_with_the_time_of_systemd(host: Host) -> None:
    host.systemd.units = {"slurmd.service": Service(), "kubelet.service": Service()}
    services = host.services()
    services.open("n1")
    read_once(services)
    host.systemd.units["slurmd.service"] = Service("failed", changed=SINCE)
    reading = read_once(services)
    assert [(e.time, e.entity, e.kind) for e in reading.events] == [(7, "service:n1.slurmd", "service")]
    assert reading.events[0].data == {
        "unit": "slurmd.service",
        "from": "active",
        "to": "failed",
        "since": "2023-11-14T22:15:23.000000Z",
    }
    assert read_once(services).events == ()
    services.close()


def test_a_required_service_that_is_not_installed_is_absent(host: Host) -> None:
    services = host.services(units=(), required=("nvidia-imex", "data.mount"))
    host.systemd.units = {"data.mount": Service(restarts=None)}
    services.open("n1")
    reading = read_once(services)
    assert reading.entities == ("service:n1.nvidia-imex", "service:n1.data.mount")
    assert reading.columns["service.state"].tolist() == [7, 1]
    host.systemd.units["nvidia-imex.service"] = Service()
    assert [(e.data["from"], e.data["to"]) for e in read_once(services).events] == [("absent", "active")]
    del host.systemd.units["nvidia-imex.service"]
    assert [(e.data["to"], e.data["since"]) for e in read_once(services).events] == [("absent", None)]
    services.close()


def test_a_service_that_is_removed_leaves_no_entity(host: Host) -> None:
    host.systemd.units = {"slurmd.service": Service(), "kubelet.service": Service()}
    services = host.services()
    services.open("n1")
    read_once(services)
    del host.systemd.units["kubelet.service"]
    reading = read_once(services)
    assert (reading.entities, reading.events) == (("service:n1.slurmd",), ())
    assert set(services.inventory()) == {"service:n1.slurmd"}
    services.close()


def test_a_host_with_none_of_the_services_is_no_data(host: Host) -> None:
    services = host.services(units=("slurmd",))
    services.open("n1")
    with pytest.raises(NoData, match=r"none of these is installed: slurmd\.service"):
        services.read()
    services.close()


def test_a_read_costs_one_call_and_one_per_service(host: Host) -> None:
    host.systemd.units = {name: Service() for name in SIX}
    services = host.services()
    services.open("n1")
    read_once(services)
    assert host.systemd.asked == ["ListUnitsByNames", *["Get"] * 6]
    services.close()


def test_a_systemd_without_response_is_no_data_after_the_timeout(host: Host) -> None:
    services = host.services(patience=0.2)
    host.systemd.silent = True
    services.open("n1")
    began = time.monotonic()
    with pytest.raises(NoData, match="timed out; expected a response of systemd"):
        services.read()
    assert time.monotonic() - began < 5
    services.close()


def test_a_change_during_a_bus_outage_is_reported_afterwards(host: Host) -> None:
    host.systemd.units = {"slurmd.service": Service()}
    services = host.services()
    services.open("n1")
    read_once(services)
    services.close()
    with pytest.raises(NoData, match="closed"):
        services.read()
    host.systemd.units["slurmd.service"] = Service("inactive")
    services.open("n1")
    assert [(e.data["from"], e.data["to"]) for e in read_once(services).events] == [("active", "inactive")]
    services.close()


def test_a_host_without_systemd_is_no_data(host: Host, tmp_path: Path) -> None:
    with pytest.raises(NoData, match="expected the system bus of a host with systemd"):
        Services(bus=str(tmp_path / "absent")).open("n1")
    host.systemd.stop()
    services = host.services()
    services.open("n1")
    with pytest.raises(NoData, match="ServiceUnknown"):
        services.read()
    services.close()
    host.systemd.start(host.path)


@pytest.mark.parametrize("answer", [b"REJECTED EXTERNAL\r\n", b"OK 1\r\n" + b"x" * 16, b"", b"OK " + b"y" * 600])
def test_a_socket_that_is_not_a_bus_is_no_data(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        listening.listen()

        def serve() -> None:
            link, _ = listening.accept()
            with link, contextlib.suppress(ConnectionError):  # the collector hangs up when it has seen enough
                link.recv(512)
                link.sendall(answer)
                link.shutdown(socket.SHUT_WR)
                while link.recv(512):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NoData, match="expected the system bus"):
            Services(bus=str(tmp_path / "bus"), patience=2.0).open("n1")
        thread.join()


# --- messages --------------------------------------------------------------------------------------------------------


def returned(signature: str, body: bytes, serial: int = 3) -> bytes:
    fields = bus.Writer().field(5, "u", serial).field(8, "g", signature)
    return bus.packed(2, 1, fields, body)


def test_a_reply_of_every_type_is_read() -> None:
    body = bus.Writer().number("B", 7).number("I", 1).number("h", -2).number("q", -3).text("/o").signature("ai")
    body.signature("d").pad(8).data += struct.pack("<d", 0.5)
    body.number("I", 0).pad(8)  # an empty list of pairs
    found = services.decode_reply(returned("ybnxogva{sv}", bytes(body.data)))
    assert found == (3, [7, 1, -2, -3, "/o", "ai", 0.5, []])


def test_a_reply_in_the_other_byte_order_is_read() -> None:
    fields = struct.pack(">BBsBI", 5, 1, b"u", 0, 3) + struct.pack(">BBsBB", 8, 1, b"g", 0, 1) + b"u\0"
    head = struct.pack(">cBBBIII", b"B", 2, 0, 1, 4, 1, len(fields)) + fields
    assert services.decode_reply(head + bytes(-len(head) % 8) + struct.pack(">I", 9)) == (3, [9])


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        services.message_length(struct.pack("<cBBBIII", b"l", 2, 0, 1, services.MAX_MESSAGE, 1, 0))


def test_endlessly_nested_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"too deep|beyond|broken"):
        services.decode_reply(returned("v", b"\x01v\0" * 100))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_expected_error(data: bytes) -> None:
    try:
        services.decode_reply(data)
    except (ValueError, services.DBusError):
        return


SIGNATURES = st.text(alphabet="ybnqiuxtdsogva(){}", max_size=12)


@given(SIGNATURES, st.binary(max_size=120))
def test_any_body_and_signature_are_a_message_or_an_expected_error(signature: str, body: bytes) -> None:
    try:
        found = services.decode_reply(returned(signature, body))
    except ValueError:
        return
    parse_unit_list(found[1])


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_reply_is_still_bounded(at: int, value: int) -> None:
    _, rows = bus.Systemd({"slurmd.service": Service()})._list(["slurmd.service"])
    data = bytearray(returned("a(ssssssouso)", bytes(rows.data)))
    data[at % len(data)] = value
    try:
        _, values = services.decode_reply(bytes(data))
    except (ValueError, services.DBusError):
        return
    for rows in values:
        parse_unit_list(rows)
