"""The contract that every collector keeps, and what each finds in a machine whose files we know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from agents.batches import wire_column
from agents.collector import Collector, NoData, Reading
from agents.collectors import COLLECTORS, configured
from agents.collectors.host import Host
from agents.collectors.network import Network
from pipeline.errors import ConfigError
from pipeline.signals import CATALOGUE, CLASSES

# --- every member ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=COLLECTORS, ids=lambda c: c.name)
def collector(request: pytest.FixtureRequest) -> Collector:
    made: Collector = request.param()
    return made


def readings_of(collector: Collector) -> tuple[Reading, ...]:
    """One look at this very machine; skips where the collector's hardware is not here."""
    try:
        collector.open("n1")
        return collector.read()
    except NoData as absent:
        pytest.skip(f"no data: {absent}")
    finally:
        collector.close()


def test_names_are_unique_and_can_be_written_in_toml() -> None:
    names = [c.name for c in COLLECTORS]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_every_signal_it_claims_is_in_the_catalogue(collector: Collector) -> None:
    assert collector.signals
    assert set(collector.signals) <= CATALOGUE.keys()


def test_its_configuration_has_defaults_and_an_interval_and_deadline(collector: Collector) -> None:
    assert collector.interval > 0
    assert collector.deadline > 0
    assert all(not f.name.startswith("_") for f in fields(collector) if f.init)


def test_it_delivers_only_what_it_claims_in_the_catalogues_range(collector: Collector) -> None:
    for reading in readings_of(collector):
        kind = CLASSES[reading.device_class]
        assert all(entity.startswith(f"{kind}:n1") for entity in reading.entities)
        assert len(set(reading.entities)) == len(reading.entities)
        assert set(reading.columns) <= set(collector.signals)
        for name, values in reading.columns.items():
            assert CATALOGUE[name].device_class == reading.device_class
            assert values.shape == (len(reading.entities),)
            wire_column(CATALOGUE[name], values)


def test_its_inventory_names_what_it_reads(collector: Collector) -> None:
    try:
        collector.open("n1")
        entities = {entity for reading in collector.read() for entity in reading.entities}
        inventory = collector.inventory()
    except NoData as absent:
        pytest.skip(f"no data: {absent}")
    finally:
        collector.close()
    assert inventory.keys() == entities
    for entity, device in inventory.items():
        assert device.parents == (() if entity == "node:n1" else ("node:n1",))


def test_it_can_be_closed_twice_and_without_open_and_opened_again(collector: Collector) -> None:
    collector.close()
    collector.close()
    for _ in range(2):
        readings_of(collector)


def test_configuration_reaches_the_collector_and_unknown_names_get_a_suggestion() -> None:
    made = configured({"network": {"exclude": ["lo", "ib*"], "interval": 5}}, "f.toml")
    assert [type(c) for c in made] == list(COLLECTORS)
    network = next(c for c in made if isinstance(c, Network))
    assert (network.exclude, network.interval) == (("lo", "ib*"), 5.0)
    with pytest.raises(ConfigError, match=r"f\.toml: \[collector\.netwrk\]: .*did you mean \[collector\.network\]"):
        configured({"netwrk": {}}, "f.toml")
    with pytest.raises(ConfigError, match=r"\[collector\.host\] prok.*did you mean 'proc'"):
        configured({"host": {"prok": "/proc"}}, "f.toml")


# --- host ------------------------------------------------------------------------------------------------------------

Tree = Callable[[dict[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a folder."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


SERVER = {
    "proc/loadavg": "3.50 2.25 1.00 4/1200 4711\n",
    "proc/stat": "cpu  100 20 30 400 50 6 7 8 9 0\ncpu0 50 10 15 200 25 3 3 4 0 0\ncpu1 50 10 15 200 25 3 4 4 9 0\n"
    "intr 12345 0 0\nctxt 99\ncpus 7\n",
    "proc/meminfo": "MemTotal:       2000 kB\nMemFree:   10 kB\nMemAvailable:   1500 kB\n"
    "SwapTotal: 300 kB\nSwapFree: 100 kB\n",
    "proc/uptime": "98765.43 1000.00\n",
    "proc/diskstats": " 259 0 nvme0n1 10 0 2000 5 20 0 4000 7 0 0 0\n 259 1 nvme0n1p1 9 0 1999 5 20 0 3999 7 0 0 0\n"
    " 8 0 sda 1 0 8 5 2 0 16 7 0 0 0\n 253 0 dm-0 10 0 2000 5 20 0 4000 7 0 0 0\n 7 0 loop0 1 0 2 0 0 0 0 0 0 0 0\n",
    "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=111\nfull avg10=0.00 avg60=0.00 total=5\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=222\n",
    "proc/pressure/io": "some avg10=0.00 avg60=0.00 avg300=0.00 total=333\n",
    "proc/sys/kernel/osrelease": "6.8.0-test\n",
    **{f"sys/block/{disk}/size": "1\n" for disk in ("nvme0n1", "sda", "dm-0", "loop0")},
}


def values_of(host: Host) -> dict[str, float]:
    host.open("n1")
    (reading,) = host.read()
    host.close()
    return {name: values[0] for name, values in reading.columns.items()}


def test_the_host_is_read_in_the_units_of_the_catalogue(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    root = tree(SERVER)
    found = values_of(Host(proc=root / "proc", sys=root / "sys", disk=root))
    assert found.pop("node.disk_total") >= found.pop("node.disk_used") > 0
    assert found == {
        "node.load1": 3.5,
        "node.load5": 2.25,
        "node.cpu_count": 2,
        "node.cpu_busy_time": 1710,  # user, nice, system, irq, softirq and stolen: 171 ticks of 10 ms
        "node.cpu_idle_time": 4500,
        "node.memory_total": 2000 * 1024,
        "node.memory_available": 1500 * 1024,
        "node.swap_used": 200 * 1024,
        "node.uptime": 98765.43,
        "node.disk_read": (2000 + 8) * 512,  # no partition, no layer, no loop device
        "node.disk_written": (4000 + 16) * 512,
        "node.cpu_pressure": 111,
        "node.memory_pressure": 222,
        "node.io_pressure": 333,
    }


@pytest.mark.parametrize("absent", sorted(name for name in SERVER if name.count("/") < 3 and "proc" in name))
def test_a_file_that_the_kernel_lacks_costs_only_its_own_signals(tree: Tree, absent: str) -> None:
    root = tree({name: text for name, text in SERVER.items() if name != absent})
    found = values_of(Host(proc=root / "proc", sys=root / "sys", disk=root))
    assert len(found) >= 13


def test_a_host_without_any_kernel_statistics_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no Linux kernel statistics"):
        Host(proc=tmp_path / "absent").open("n1")


# --- network ---------------------------------------------------------------------------------------------------------


def port(name: str, hardware: bool = True, files: dict[str, str] | None = None) -> dict[str, str]:
    """The files of one interface; counters count 1, 2, 3, ... in the order of the catalogue."""
    counters = (
        "rx_bytes",
        "tx_bytes",
        "rx_packets",
        "tx_packets",
        "rx_errors",
        "tx_errors",
        "rx_dropped",
        "tx_dropped",
    )
    found = {f"statistics/{c}": f"{i}\n" for i, c in enumerate((*counters, "rx_crc_errors"), 1)}
    found |= {"operstate": "up\n", "carrier": "1\n", "speed": "400000\n", "carrier_changes": "10\n", **(files or {})}
    if hardware:
        found["device/uevent"] = "\n"
    return {f"{name}/{path}": text for path, text in found.items()}


def read(network: Network) -> tuple[tuple[str, ...], dict[str, list[float]]]:
    (reading,) = network.read()
    return reading.entities, {name: values.tolist() for name, values in reading.columns.items()}


def test_a_port_is_read_with_every_counter(tree: Tree) -> None:
    network = Network(root=tree(port("mlx5_0")))
    network.open("n1")
    entities, columns = read(network)
    network.close()
    assert entities == ("port:n1.mlx5_0",)
    assert [columns[name][0] for name in network.signals] == [1, 400000, *range(1, 11)]


def test_hardware_and_carrying_interfaces_are_taken_and_virtual_ones_are_not(tree: Tree) -> None:
    root = tree(
        port("eth0")
        | port("lo", hardware=False)
        | port("veth12", hardware=False)
        | port("docker0", hardware=False)
        | port("bond0", hardware=False)
        | port("bond1", hardware=False, files={"carrier": "0\n"})
        | port("ib0", files={"operstate": "down\n", "carrier": "0\n"})
    )
    network = Network(root=root)
    network.open("n1")
    entities, columns = read(network)
    network.close()
    assert entities == ("port:n1.bond0", "port:n1.eth0", "port:n1.ib0")
    assert columns["nic.state"] == [1, 1, 0]
    chosen = Network(root=root, include=("docker0",), exclude=("*",))
    chosen.open("n1")
    assert read(chosen)[0] == ("port:n1.docker0",)
    chosen.close()


def test_what_a_driver_does_not_tell_is_missing(tree: Tree) -> None:
    root = tree(port("eth0", files={"speed": "", "operstate": "unknown\n", "statistics/rx_crc_errors": "what\n"}))
    network = Network(root=root)
    network.open("n1")
    _, columns = read(network)
    network.close()
    assert np.isnan(columns["nic.speed"][0])
    assert columns["nic.state"] == [1]  # `unknown` with a carrier
    assert columns["nic.crc_errors"] == [2**64 - 1]


def test_interfaces_that_come_are_followed(tree: Tree) -> None:
    network = Network(root=tree(port("eth0")))
    network.open("n1")
    assert read(network)[0] == ("port:n1.eth0",)
    tree(port("eth1"))
    assert read(network)[0] == ("port:n1.eth0", "port:n1.eth1")
    assert network.inventory().keys() == {"port:n1.eth0", "port:n1.eth1"}
    network.close()


def test_radio_is_told_in_the_inventory(tree: Tree) -> None:
    root = tree(port("eth0") | port("wlan0"))
    (root / "wlan0" / "wireless").mkdir()
    network = Network(root=root)
    network.open("n1")
    read(network)
    found = network.inventory()
    network.close()
    assert found["port:n1.wlan0"].attributes["wireless"] is True
    assert "wireless" not in found["port:n1.eth0"].attributes


def test_no_interface_at_all_is_no_data(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(NoData):
        Network(root=tmp_path / "absent").open("n1")
    network = Network(root=tree(port("lo", hardware=False)))
    network.open("n1")
    with pytest.raises(NoData, match="is hardware or carries traffic"):
        network.read()
    network.close()
