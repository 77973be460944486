"""One piece of hardware, one entity: interfaces under their RDMA port's name, roles derived from locations."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import Reading
from agents.collectors.nic.infiniband import Infiniband, parse_leading_number, parse_rate
from agents.collectors.nic.link_state import MAX_BURST, REFILL_S
from agents.collectors.nic.network import Network
from agents.collectors.nic.ports import interface_of_port, parse_link_value, rdma_ports, rdma_ports_by_interface
from agents.collectors.nic.rdma_counters import classify_change
from agents.collectors.nic.roles import (
    PortTraits,
    default_route_interfaces,
    parse_default_routes,
    port_role,
    ports_near_gpus,
    shares_switch,
)
from agents.collectors.nic.sysfs import PAUSE_S, SysfsFile, list_names
from pipeline.model.records import SECOND, Event
from tests.agents.rdma_node import RdmaNode, h100, write


@pytest.fixture
def node(tmp_path: Path) -> RdmaNode:
    return h100(tmp_path, ports=2)


def network_of(node: RdmaNode) -> tuple[Network, tuple[Reading, ...]]:
    network = Network(root=node.net, proc=node.proc)
    network.open("n1")
    return network, network.read()


# --- names -----------------------------------------------------------------------------------------------------------


def test_no_signal_of_a_port_is_reported_by_two_collectors(node: RdmaNode) -> None:
    infiniband = Infiniband(root=node.rdma, proc=node.proc)
    infiniband.open("n1")
    network, readings = network_of(node)
    reported = [
        (e, c) for reading in (*infiniband.read(), *readings) for e in reading.entities for c in reading.columns
    ]
    assert len(set(reported)) == len(reported)
    entities = {entity for entity, _ in reported}
    assert entities == {f"port:n1.{name}" for name in ("mlx5_0", "mlx5_1", "mlx5_8", "eno1")}
    assert {c for e, c in reported if e == "port:n1.mlx5_8"} >= {"nic.rx_bytes", "nic.carrier_changes", "nic.rx_errors"}
    for collector in (infiniband, network):
        collector.close()


def test_the_interface_of_an_rdma_port_without_counters_reports_the_traffic(node: RdmaNode) -> None:
    shutil.rmtree(node.rdma / "mlx5_8/ports/1/counters")  # as with drivers that have none of their own
    network, readings = network_of(node)
    network.close()
    by_entity = {entity: reading for reading in readings for entity in reading.entities}
    assert by_entity["port:n1.mlx5_8"].columns["nic.tx_bytes"].tolist() == [1]
    assert "nic.tx_bytes" not in by_entity["port:n1.mlx5_0"].columns
    assert "nic.state" not in by_entity["port:n1.mlx5_8"].columns


def test_an_excluded_rdma_port_leaves_a_separate_interface(node: RdmaNode) -> None:
    network = Network(root=node.net, proc=node.proc, rdma_exclude=("mlx5_8",))
    network.open("n1")
    plain = network.read()[0]
    assert plain.entities == ("port:n1.eno1", "port:n1.ens8")
    assert plain.columns["nic.state"].tolist() == [1, 1]
    network.close()


def test_a_bond_belongs_to_its_rdma_device_and_its_members_stay_separate(node: RdmaNode) -> None:
    node.interface("bond0")
    write(node.rdma / "mlx5_8/ports/1/gid_attrs/ndevs/0", "bond0")
    assert {name: port.name for name, port in rdma_ports_by_interface(node.rdma, node.net).items()} == {
        "ib0": "mlx5_0",
        "ib1": "mlx5_1",
        "bond0": "mlx5_8",
    }


def test_two_ports_of_one_function_are_distinguished_by_number(tmp_path: Path) -> None:
    node = RdmaNode(tmp_path)
    place = node.pci("pci0000:0a/0000:0a:01.0/0000:0b:00.0")
    node.device("mlx4_0", place, ports=2)
    node.interface("ib0", place, dev_port=0)
    node.interface("ib1", place, dev_port=1)
    assert [interface_of_port(port, node.net) for port in rdma_ports(node.rdma)] == ["ib0", "ib1"]


# --- network: events and attributes ----------------------------------------------------------------------------------


def test_a_down_interface_is_reported_by_its_own_collector(node: RdmaNode) -> None:
    network, readings = network_of(node)
    assert readings[-1].events == ()
    for name in ("eno1", "ens8"):
        write(node.net / name / "operstate", "down")
    (event,) = [event for reading in network.read() for event in reading.events]
    assert (event.entity, event.kind) == ("port:n1.eno1", "link_state")
    assert event.data == {"state": "down", "from": "up", "to": "down"}
    (node.net / "eno1").unlink()
    (event,) = [event for reading in network.read() for event in reading.events]
    assert event.data == {"state": "down", "from": "down", "to": "gone"}
    network.close()


def test_an_interface_has_location_driver_and_role(node: RdmaNode) -> None:
    network, readings = network_of(node)
    found = {entity: device.attributes for entity, device in network.inventory().items()}
    network.close()
    assert found["port:n1.eno1"]["role"] == "management"
    assert found["port:n1.eno1"]["pci_address"] == "0000:02:00.0"
    assert "role" not in found["port:n1.mlx5_0"]  # the infiniband collector reports it
    assert found["port:n1.mlx5_0"]["interface"] == "ib0"
    plain = next(reading for reading in readings if reading.entities == ("port:n1.eno1",))
    assert plain.columns["nic.pcie_width"].tolist() == [16]


# --- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (PortTraits(rdma=True, ethernet=False, near_gpu=True), "compute"),
        (
            PortTraits(rdma=True, ethernet=False, near_gpu=True, up=False),
            "compute",
        ),  # its peers are up: it must be missed
        (PortTraits(rdma=True, near_gpu=True, default_route=True), "management"),
        (PortTraits(rdma=True, near_gpu=False), "storage"),
        (PortTraits(rdma=True, near_gpu=False, up=False), "unused"),
        (PortTraits(rdma=True, ethernet=False, near_gpu=None, up=False), "compute"),
        (PortTraits(rdma=True, ethernet=True, near_gpu=None), "compute"),
        (PortTraits(rdma=True, ethernet=True, near_gpu=None, beside_infiniband=True), "storage"),
        (PortTraits(rdma=True, ethernet=True, near_gpu=None, up=False), "unused"),
        (PortTraits(near_gpu=False), "management"),
        (PortTraits(up=False), "unused"),
        (PortTraits(up=False, default_route=True), "management"),
    ],
)
def test_a_role_follows_from_location_route_and_link(facts: PortTraits, wanted: str) -> None:
    assert port_role(facts) == wanted


def test_a_gpu_is_near_if_a_switch_connects_them() -> None:
    gpu = "/sys/devices/pci0000:1a/0000:1a:01.0/0000:1b:00.0/0000:1c:00.0/0000:1d:00.0"
    assert shares_switch("/sys/devices/pci0000:1a/0000:1a:01.0/0000:1b:00.0/0000:1c:01.0/0000:1e:00.0", [gpu])
    assert not shares_switch("/sys/devices/pci0000:1a/0000:1a:03.0/0000:20:00.0", [gpu])
    assert not shares_switch("/sys/devices/virtual/net/bond0", [gpu])
    flat = ["/sys/devices/pci0000:00/0000:00:05.0", "/sys/devices/pci0000:00/0000:00:06.0"]
    assert ports_near_gpus(flat, ["/sys/devices/pci0000:00/0000:00:07.0"]) == [
        None,
        None,
    ]  # a virtual machine's one bus


def test_a_default_route_is_followed_down_to_the_ports_of_a_bond(node: RdmaNode) -> None:
    bond = node.interface("bond0")
    for lower in ("eno1", "ens8"):
        (bond / f"lower_{lower}").symlink_to(node.net / lower)
    node.route("bond0")
    assert default_route_interfaces(node.proc, node.net) == {"bond0", "eno1", "ens8"}
    six = (
        f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 28} 00000400 1 0 00000003     ens8\n{'0' * 32} 00 {'0' * 32} 00 lo lo"
    )
    assert parse_default_routes("", six) == {"ens8"}


# --- parsers ---------------------------------------------------------------------------------------------------------


@given(st.text())
def test_no_text_breaks_a_parser(text: str) -> None:
    assert np.isnan(parse_leading_number(text)) or 0 <= parse_leading_number(text) < 1000
    speed, width = parse_rate(text)
    assert np.isnan(speed) or 0 <= speed < 1e9
    assert np.isnan(width) or 0 <= width < 100
    assert np.isnan(parse_link_value(text)) or 0 <= parse_link_value(text) < 1e6
    assert parse_default_routes(text, text) is not None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("400 Gb/sec (4X NDR)", (400_000, 4)),
        ("2.5 Gb/sec (1X SDR)\n", (2_500, 1)),
        ("800 Gb/sec", (800_000, np.nan)),
        ("", (np.nan, np.nan)),
    ],
)
def test_a_rate_is_read_with_its_lanes(text: str, wanted: tuple[float, float]) -> None:
    np.testing.assert_equal(parse_rate(text), wanted)


@given(st.integers(0, 2**33), st.integers(0, 2**33), st.sampled_from([4, 8, 16, 32]), st.booleans())
def test_a_growing_counter_is_never_wrapped_or_reset(a: int, b: int, bits: int, saturates: bool) -> None:
    found = classify_change(a, b, bits, saturates)
    assert (found in ("wrapped", "reset")) == (b < a)
    assert found != "wrapped" or not saturates


@pytest.mark.parametrize("bits", [16, 32])
def test_only_from_the_top_tenth_to_the_lowest_is_a_wrap(bits: int) -> None:
    def at(share: float) -> int:
        return round(share * ((1 << bits) - 1))

    assert classify_change(at(0.91), at(0.09), bits, False) == "wrapped"
    assert classify_change(at(0.89), at(0.09), bits, False) == classify_change(at(0.6), 0, bits, False) == "reset"
    assert classify_change(at(0.91), at(0.11), bits, False) == "reset"
    assert classify_change(at(1) + 1, 0, bits, False) == "reset"  # wider than declared


def test_a_link_that_is_unknown_is_missing() -> None:
    assert np.isnan(parse_link_value("Unknown"))
    assert np.isnan(parse_link_value("255"))
    assert parse_link_value("2.5 GT/s PCIe") == 2.5


def test_a_file_that_could_not_be_read_is_paused(tmp_path: Path) -> None:
    now = [0.0]
    file = SysfsFile(tmp_path / "x", rest=60, monotonic=lambda: now[0])
    assert file.number() is None
    write(tmp_path / "x", "7")
    now[0] = 59
    assert file.number() is None
    now[0] = 60
    assert file.number() == 7
    assert not file.gone  # it had never been there
    file.close()


@pytest.mark.parametrize(
    ("code", "rest"),
    [
        *((code, PAUSE_S) for code in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM)),
        (errno.ENOENT, PAUSE_S),
        *((code, 60) for code in (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)),
    ],
)
def test_a_transient_error_pauses_a_minute_and_a_permanent_one_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, rest: float
) -> None:
    now = [1.0]
    write(tmp_path / "x", "7")
    file = SysfsFile(tmp_path / "x", monotonic=lambda: now[0])
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(code, "no")))
        assert file.number() is None
    now[0] += rest - 1
    assert file.number() is None
    now[0] += 1
    assert file.number() == 7
    file.close()


def test_an_interface_removed_without_token_is_reported_later(node: RdmaNode) -> None:
    now, network = [1_800_000_000 * SECOND], Network(root=node.net, proc=node.proc)
    network._now = lambda: now[0]
    network.open("n1")
    reported: list[Event] = []
    for i in range(MAX_BURST + 1):
        write(node.net / "eno1" / "operstate", "up" if i % 2 else "down")
        reported += [event for reading in network.read() for event in reading.events]
    shutil.rmtree(node.net / "eno1") if not (node.net / "eno1").is_symlink() else (node.net / "eno1").unlink()
    for _ in range(REFILL_S + 1):
        now[0] += SECOND
        reported += [event for reading in network.read() for event in reading.events]
    assert reported[-1].data["to"] == "gone"
    network.close()


def test_an_interface_that_was_not_selected_is_checked_again_later(node: RdmaNode) -> None:
    node.interface("bond0", up=False)
    now, network = [1_800_000_000 * SECOND], Network(root=node.net, proc=node.proc)
    network._now = lambda: now[0]
    network.open("n1")
    assert "port:n1.bond0" not in network.read()[0].entities
    write(node.net / "bond0" / "carrier", "1")
    assert "port:n1.bond0" not in network.read()[0].entities
    now[0] += 30 * SECOND
    assert "port:n1.bond0" in network.read()[0].entities
    network.close()


def test_an_interface_that_comes_back_is_reported(node: RdmaNode) -> None:
    network, _ = network_of(node)
    (node.net / "eno1").unlink()
    network.read()
    node.interface("eno1", node.sys / "devices/pci0000:00/0000:00:1c.0/0000:02:00.1")
    events = [event.data for reading in network.read() for event in reading.events]
    assert events == [{"state": "up", "from": "gone", "to": "up"}]
    network.close()


def test_an_unprintable_name_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    os.mkdir(bytes(tmp_path) + b"/n\xf0")
    assert list_names(tmp_path) == ["eth0"]
