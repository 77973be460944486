"""RDMA ports as files: values, remembered state, events and ignored ports of the collector."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import NoData, Reading
from agents.collectors.nic.infiniband import Infiniband
from agents.collectors.nic.rdma_counters import RDMA_COUNTERS
from agents.collectors.registry import configured_collectors
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from tests.agents.rdma_node import CLASSIC, HARDWARE, RdmaNode, h100, write
from tests.open_files import list_open

MISSING = 2**64 - 1


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000 * SECOND

    def __call__(self) -> int:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


def opened(node: RdmaNode, clock: Clock | None = None, **settings: Any) -> Infiniband:
    collector = Infiniband(root=node.rdma, proc=node.proc, **settings)
    collector._now = clock or Clock()
    collector.open("n1")
    return collector


def read_once(collector: Infiniband) -> Reading:
    (reading,) = collector.read()
    return reading


@pytest.fixture
def node(tmp_path: Path) -> RdmaNode:
    return h100(tmp_path, ports=2)


PORT = "mlx5_0/ports/1"


def test_every_counter_of_the_table_is_read_in_the_catalogues_unit(node: RdmaNode) -> None:
    collector = opened(node)
    reading = read_once(collector)
    collector.close()
    assert reading.entities == ("port:n1.mlx5_0", "port:n1.mlx5_1", "port:n1.mlx5_8")
    for counter in RDMA_COUNTERS:
        names = CLASSIC if counter.file.startswith("counters/") else HARDWARE
        wanted = names.index(counter.file.partition("/")[2]) * counter.scale
        assert reading.columns[counter.signal].tolist() == [wanted] * 3, counter.signal
    assert reading.columns["nic.rx_bytes"][0] == 4 * CLASSIC.index("port_rcv_data")  # words of 4 bytes
    assert set(reading.columns) == set(collector.signals) - {"nic.temperature"}  # no sensor here, so no column


def test_every_counter_has_the_interval_of_the_catalogue() -> None:
    for counter in RDMA_COUNTERS:
        assert (CATALOGUE[counter.signal].interval or 1.0) == counter.interval, counter.signal


def test_state_speed_and_link_are_reported(node: RdmaNode) -> None:
    write(node.rdma / PORT / "state", "2: INIT")
    write(node.rdma / PORT / "rate", "200 Gb/sec (2X NDR)")
    write(node.rdma / "mlx5_1/ports/1/state", "1: DOWN")
    write(node.rdma / "mlx5_1/ports/1/phys_state", "2: Polling")
    write(node.rdma / "mlx5_0/device/current_link_width", "8")
    write(node.rdma / "mlx5_0/device/hwmon/hwmon3/temp1_input", "61500")
    columns = read_once(opened(node)).columns
    assert columns["nic.state"].tolist() == [0, 0, 1]
    assert columns["nic.logical_state"].tolist() == [2, 1, 4]
    assert columns["nic.phys_state"].tolist() == [5, 2, 5]
    np.testing.assert_equal(columns["nic.speed"], [200_000, np.nan, 400_000])  # a link that is down has none
    np.testing.assert_equal(columns["nic.width"], [2, np.nan, 4])
    assert columns["nic.pcie_speed"].tolist() == [32, 32, 32]
    assert columns["nic.pcie_width"].tolist() == [8, 16, 16]
    np.testing.assert_equal(columns["nic.temperature"], [61.5, np.nan, np.nan])


def test_a_second_port_has_its_number_and_slower_signals_keep_their_interval(tmp_path: Path) -> None:
    node, clock = RdmaNode(tmp_path), Clock()
    node.device("mlx4_0", ports=2)
    collector = opened(node, clock)
    first = read_once(collector)
    assert first.entities == ("port:n1.mlx4_0", "port:n1.mlx4_0.2")
    seen: dict[str, int] = {}
    for _ in range(60):
        clock.pass_by(1)
        for name in read_once(collector).columns:
            seen[name] = seen.get(name, 0) + 1
    wanted = {1: 60, 5: 12, 10: 6, 30: 2, 60: 1}
    assert seen == {name: wanted[int(CATALOGUE[name].interval or 1)] for name in first.columns}
    collector.close()


def test_a_changed_link_is_reported_once_with_both_states(node: RdmaNode) -> None:
    clock = Clock()
    collector = opened(node, clock)
    assert read_once(collector).events == ()
    write(node.rdma / PORT / "state", "1: DOWN")
    clock.pass_by(1)
    (event,) = read_once(collector).events
    assert (event.entity, event.kind, event.time) == ("port:n1.mlx5_0", "link_state", clock.now)
    assert event.data == {"state": "down", "from": "active", "to": "down"}
    assert read_once(collector).events == ()
    write(node.rdma / PORT / "state", "4: ACTIVE")
    (event,) = read_once(collector).events
    assert event.data == {"state": "up", "from": "down", "to": "active"}
    collector.close()


def test_a_flapping_port_sends_a_bounded_number_of_events(node: RdmaNode) -> None:
    clock, events = Clock(), 0
    collector = opened(node, clock)
    for i in range(600):
        write(node.rdma / PORT / "state", "1: DOWN" if i % 2 else "4: ACTIVE")
        events += len(read_once(collector).events)
        clock.pass_by(1)
    assert 20 <= events <= 20 + 60
    last, state = collector._link_events._ports["port:n1.mlx5_0"].state, "4: ACTIVE" if i % 2 else "1: DOWN"
    write(node.rdma / PORT / "state", state)
    for _ in range(11):
        for event in read_once(collector).events:
            last = event.data["to"]
        clock.pass_by(1)
    assert last in state.lower()
    spent = collector._link_events._ports["port:n1.mlx5_0"]
    spent.tokens, spent.refilled = 0, clock.now
    shutil.rmtree(node.rdma / "mlx5_0") if not (node.rdma / "mlx5_0").is_symlink() else (node.rdma / "mlx5_0").unlink()
    gone: list[str] = []
    for _ in range(45):
        gone += [event.data["to"] for event in read_once(collector).events]
        clock.pass_by(1)
    assert gone == ["gone"]
    collector.close()


@pytest.mark.parametrize(
    ("file", "signal", "ceiling", "bits"),
    [
        ("counters/link_downed", "nic.link_downs", 255, 8),
        ("counters/port_xmit_discards", "nic.port_tx_discards", 65535, 16),
        ("counters/port_xmit_wait", "nic.port_tx_wait", 2**32 - 1, 32),
        ("counters/excessive_buffer_overrun_errors", "nic.buffer_overruns", 15, 4),
    ],
)
def test_a_saturated_counter_is_reported_once_and_still_sent(
    node: RdmaNode, file: str, signal: str, ceiling: int, bits: int
) -> None:
    clock, events = Clock(), []
    collector = opened(node, clock)
    for value in (ceiling - 1, ceiling, ceiling, ceiling, 0, ceiling, ceiling):
        write(node.rdma / PORT / file, str(value))
        reading = read_once(collector)
        assert reading.columns[signal][0] == value
        events.append([(e.kind, dict(e.data)) for e in reading.events])
        clock.pass_by(5)
    saturated = [("counter_saturated", {"signal": signal, "value": ceiling, "bits": bits})]
    assert events == [[], [], saturated, [], [], [], saturated]  # once, and again only after a reset
    collector.close()


def test_a_wrap_is_reported_and_a_reset_begins_a_new_generation(node: RdmaNode) -> None:
    clock, events = Clock(), []
    collector = opened(node, clock)
    for value in (2**32 - 7, 12, 4_000, 0):
        write(node.rdma / PORT / "hw_counters/out_of_sequence", str(value))
        events += read_once(collector).events
        clock.pass_by(5)
    assert [(e.kind, dict(e.data)) for e in events] == [
        ("counter_wrapped", {"signal": "nic.out_of_sequence", "before": 2**32 - 7, "bits": 32})
    ]
    collector.close()


def test_a_counter_with_an_error_is_read_once(node: RdmaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = node.rdma / PORT / "counters" / "symbol_error"
    broken.unlink()
    broken.mkdir()  # reading it is an error each time, as EINVAL of an internal port
    asked, opener = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (asked.append(str(path)), opener(path, *rest))[1])
    clock = Clock()
    collector = opened(node, clock)
    for _ in range(5):
        reading = read_once(collector)
        assert reading.columns["nic.symbol_errors"].tolist() == [MISSING, 0, 0]
        assert reading.columns["nic.link_downs"].tolist() == [2, 2, 2]
        clock.pass_by(5)
    assert asked.count(str(broken)) == 1
    collector.close()


def test_counters_that_no_port_has_have_no_column(node: RdmaNode) -> None:
    for device in os.listdir(node.rdma):
        shutil.rmtree(node.rdma / device / "ports/1/hw_counters")
    shutil.rmtree(node.rdma / "mlx5_1/ports/1/counters")
    columns = read_once(opened(node)).columns
    assert not [c for c in RDMA_COUNTERS if c.file.startswith("hw_") and c.signal in columns]
    assert columns["nic.link_downs"].tolist() == [2, MISSING, 2]


def test_a_port_is_usable_only_with_the_devices_that_programs_open(node: RdmaNode) -> None:
    assert read_once(opened(node)).columns["nic.usable"].tolist() == [1, 1, 1]
    shutil.rmtree(node.sys / "class/infiniband_mad/issm1")  # InfiniBand requires it, RoCE has none
    shutil.rmtree(node.sys / "class/infiniband_verbs/uverbs2")
    assert read_once(opened(node)).columns["nic.usable"].tolist() == [0, 0, 1]


def test_devices_are_excluded_by_pattern_and_virtual_functions_and_software_are_left_out(node: RdmaNode) -> None:
    node.device("rxe0", ethernet=True)
    share = node.pci("pci0000:1a/0000:1a:01.0/0000:1b:00.0/0000:1c:01.0/0000:1e:00.1")
    (share / "physfn").symlink_to(share.with_name("0000:1e:00.0"))
    node.device("mlx5_12", share)
    assert read_once(opened(node)).entities == ("port:n1.mlx5_0", "port:n1.mlx5_1", "port:n1.mlx5_8")
    chosen = opened(node, exclude=("mlx5_[01]",), include=("mlx5_12",))
    assert read_once(chosen).entities == ("port:n1.mlx5_12", "port:n1.mlx5_8", "port:n1.rxe0")
    with pytest.raises(NoData, match="excluded, or virtual functions"):
        opened(node, exclude=("*",)).read()


def test_new_and_removed_ports_are_noticed(node: RdmaNode) -> None:
    clock = Clock()
    collector = opened(node, clock)
    read_once(collector)
    shutil.rmtree(node.rdma / "mlx5_1")
    node.device("mlx5_9")
    clock.pass_by(30)
    reading = read_once(collector)
    assert reading.entities == ("port:n1.mlx5_0", "port:n1.mlx5_8", "port:n1.mlx5_9")
    (event,) = reading.events
    assert (event.entity, event.data["state"], event.data["to"]) == ("port:n1.mlx5_1", "down", "gone")
    assert collector.inventory().keys() == set(reading.entities)
    collector.close()


def test_the_inventory_has_attributes_and_role_of_a_port(node: RdmaNode) -> None:
    collector = opened(node, roles={"mlx5_1": "storage"})
    read_once(collector)
    found = {e: d.attributes for e, d in collector.inventory().items()}
    collector.close()
    first = dict(found["port:n1.mlx5_0"])
    assert first.pop("char_devices") == ["issm1", "umad1", "uverbs0"]
    assert first == {
        "device": "mlx5_0",
        "port": 1,
        "fw_ver": "28.41.1000",
        "board_id": "MT_0000000838",
        "hca_type": "MT4129",
        "node_guid": "a088:c203:0001:0002",
        "port_guid": "a088:c203:00ab:cdef",
        "link_layer": "InfiniBand",
        "lid": "0x1f",
        "interface": "ib0",
        "pci_address": "0000:1e:00.0",
        "numa_node": 0,
        "role": "compute",
    }
    assert found["port:n1.mlx5_1"]["role"] == "storage"  # as configured
    assert found["port:n1.mlx5_8"]["role"] == "storage"  # behind no GPU's switch
    assert found["port:n1.mlx5_8"]["interface"] == "ens8"


def test_no_adapter_is_no_data_and_a_wrong_role_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no RDMA device below"):
        Infiniband(root=tmp_path / "absent").open("n1")
    with pytest.raises(ConfigError, match=r"\[collector\.infiniband\] roles.*compute, storage, management"):
        configured_collectors({"infiniband": {"roles": {"mlx5_0": "spare"}}}, "f.toml")


def test_counters_that_appear_late_are_read(node: RdmaNode) -> None:
    late, clock = node.rdma / PORT / "hw_counters", Clock()
    shutil.move(late, node.root / "aside")
    collector = opened(node, clock)
    assert read_once(collector).columns["nic.out_of_sequence"].tolist() == [MISSING, 2, 2]
    shutil.move(node.root / "aside", late)
    clock.pass_by(30)
    assert read_once(collector).columns["nic.out_of_sequence"].tolist() == [2, 2, 2]
    collector.close()


def test_the_removal_of_the_last_port_is_reported_before_no_data(node: RdmaNode) -> None:
    clock = Clock()
    collector = opened(node, clock, exclude=("mlx5_[18]",))
    read_once(collector)
    shutil.rmtree(node.rdma / "mlx5_0")
    clock.pass_by(30)
    reading = read_once(collector)
    assert (reading.entities, [e.data["to"] for e in reading.events]) == ((), ["gone"])
    with pytest.raises(NoData):
        collector.read()
    collector.close()


@pytest.mark.slow
def test_open_files_stay_within_the_usual_limit(tmp_path: Path) -> None:
    node = RdmaNode(tmp_path)
    for i in range(20):
        node.device(f"mlx5_{i}")
    collector = opened(node)
    read_once(collector)
    assert 0 < len(list_open(tmp_path)) < 600
    assert not np.isnan(read_once(collector).columns["nic.state"]).any()
    collector.close()
    assert list_open(tmp_path) == []
