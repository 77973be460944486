"""The contract of all collectors, and the network collector on a machine of known files."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import agents.collectors
from agents.collector import Collector, NoData, Reading
from agents.collectors.nic.network import Network
from agents.collectors.registry import COLLECTORS, configured_collectors
from agents.node.batches import encode_column
from pipeline.model.errors import ConfigError
from pipeline.model.signals import CATALOGUE, kinds_of_class

# --- every member ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=COLLECTORS, ids=lambda c: c.name)
def collector(request: pytest.FixtureRequest) -> Collector:
    made: Collector = request.param()
    return made


def readings_of(collector: Collector) -> tuple[Reading, ...]:
    """Reads this machine once; skips if the collector's hardware is absent."""
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


def test_every_collector_class_below_the_folder_is_registered() -> None:
    for module in pkgutil.walk_packages(agents.collectors.__path__, "agents.collectors."):
        importlib.import_module(module.name)
    below = {cls for cls in subclasses(Collector) if cls.__module__.startswith("agents.collectors.")}
    missing = sorted(cls.__qualname__ for cls in below - set(COLLECTORS))
    assert not missing, f"add a line to _CLASSES in agents/collectors/registry.py for {missing}"
    assert below == set(COLLECTORS)


def subclasses(cls: type) -> Iterator[type]:
    """All classes derived from one, directly or not."""
    for derived in cls.__subclasses__():
        yield derived
        yield from subclasses(derived)


def test_every_declared_signal_is_in_the_catalogue(collector: Collector) -> None:
    assert collector.signals or collector.events
    unknown = set(collector.signals) - CATALOGUE.keys()
    assert not unknown, f"add a line to the file of its class in pipeline/model/signals/ for {sorted(unknown)}"


def test_its_configuration_has_defaults_and_an_interval_and_deadline(collector: Collector) -> None:
    assert collector.interval > 0
    assert collector.deadline > 0
    assert all(not f.name.startswith("_") for f in fields(collector) if f.init)


def test_it_returns_only_declared_signals_in_their_range(collector: Collector) -> None:
    for reading in readings_of(collector):
        name = "" if collector.remote else "n1"
        starts = tuple(f"{kind}:{name}" for kind in kinds_of_class(reading.device_class))
        assert all(entity.startswith(starts) for entity in reading.entities)
        assert len(set(reading.entities)) == len(reading.entities)
        assert set(reading.columns) <= set(collector.signals)
        for name, values in reading.columns.items():
            assert CATALOGUE[name].device_class == reading.device_class
            assert values.shape == (len(reading.entities),)
            encode_column(CATALOGUE[name], values)


def test_its_inventory_contains_all_read_entities(collector: Collector) -> None:
    try:
        collector.open("n1")
        entities = {entity for reading in collector.read() for entity in reading.entities}
        inventory = collector.inventory()
    except NoData as absent:
        pytest.skip(f"no data: {absent}")
    finally:
        collector.close()
    more = collector.remote or not collector.signals  # attributes of another collector's port, such as its peer
    hint = "inventory() must return every entity that read() returns"
    assert entities - inventory.keys() == set(), hint
    assert more or inventory.keys() - entities == set(), f"{hint}, and no other"
    for entity, device in inventory.items():
        if collector.remote:
            assert entity not in device.parents
            continue
        assert device.parents[-1:] == (() if entity == "node:n1" else ("node:n1",))
        assert set(device.parents) <= inventory.keys() | {"node:n1"}


def test_it_can_be_closed_twice_and_without_open_and_opened_again(collector: Collector) -> None:
    collector.close()
    collector.close()
    for _ in range(2):
        readings_of(collector)


def test_configuration_reaches_the_collector_and_unknown_names_get_a_suggestion() -> None:
    made = configured_collectors({"network": {"exclude": ["lo", "ib*"], "interval": 5}}, "f.toml")
    assert [type(c) for c in made] == [c for c in COLLECTORS if c().has_work()]
    network = next(c for c in made if isinstance(c, Network))
    assert (network.exclude, network.interval) == (("lo", "ib*"), 5.0)
    with pytest.raises(ConfigError, match=r"f\.toml: \[collector\.netwrk\]: .*did you mean \[collector\.network\]"):
        configured_collectors({"netwrk": {}}, "f.toml")
    with pytest.raises(ConfigError, match=r"\[collector\.host\] prok.*did you mean 'proc'"):
        configured_collectors({"host": {"prok": "/proc"}}, "f.toml")


def test_an_agent_runs_only_the_configured_collectors() -> None:
    assert [c.name for c in configured_collectors({}, "f.toml", ("clock", "network"))] == ["network", "clock"]
    with pytest.raises(ConfigError, match=r"f\.toml: \[agent\] collectors has 'clok': .*did you mean 'clock'\?"):
        configured_collectors({}, "f.toml", ("clok",))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("collector", COLLECTORS, ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("key", "values", "wanted"),
    [
        ("deadline", (-1, 0, float("nan"), float("inf"), 1000, 25.1), "expected seconds, above 0 and at most 25"),
        ("interval", (-1, 0, float("nan"), float("inf"), 1e9), "expected seconds, above 0 and at most 3600"),
    ],
)
def test_no_collector_accepts_an_impossible_interval_or_deadline(
    collector: type[Collector], key: str, values: tuple[float, ...], wanted: str
) -> None:
    for value in values:
        with pytest.raises(ConfigError) as refused:
            configured_collectors({collector.name: {key: value}}, "f.toml")
        assert str(refused.value) == f"f.toml: [collector.{collector.name}] {key} = {float(value)!r}: {wanted}"


@pytest.mark.parametrize(
    ("collector", "table", "message"),
    [
        ("nvme", {"patience": 15}, "patience = 15.0: expected patience below `deadline` (15 s)"),
        ("nvme", {"deadline": 5}, "patience = 6.0: expected patience below `deadline` (5 s)"),
        ("filesystems", {"patience": 20}, "patience = 20.0: expected patience below `deadline` (15 s)"),
        ("ipmi", {"budget": 21}, "budget = 21.0: expected timeout and budget together below `deadline` (25 s)"),
        ("services", {"patience": 0}, "patience = 0.0: expected seconds, above 0 and below `deadline`"),
        ("clock", {"jump": float("nan")}, "jump = nan: expected a number, not negative"),
        ("pci", {"gpus_expected": -8}, "gpus_expected = -8: expected a number, not negative"),
        ("tasks", {"gpu": ["("]}, "gpu = ('(',): '(' is not a regular expression: missing ), unterminated subpattern"),
        ("tasks", {"gpu": ["a", "(?i)b"]}, "is not a regular expression: global flags not at the start"),
        ("tasks", {"gpu": ["a{99999999999999999999}"]}, "is not a regular expression: "),
        ("xid", {"xid_table": "/nonexistent"}, "xid_table = '/nonexistent': /nonexistent: "),
        ("kernel_log", {"patterns": "/nonexistent"}, "patterns = '/nonexistent': /nonexistent: "),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_file_key_value_and_expectation(
    collector: str, table: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        configured_collectors({collector: table}, "f.toml")
    text = str(refused.value)
    assert text.startswith(f"f.toml: [collector.{collector}] ")
    assert message in text
    assert "expected " in text


# --- a machine of known files -----------------------------------------------------------------------------------------

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
    assert [columns[name][0] for name in network.signals[:12]] == [1, 400000, *range(1, 11)]


def test_hardware_and_active_interfaces_are_selected_and_virtual_ones_are_not(tree: Tree) -> None:
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


def test_unsupported_driver_values_are_missing(tree: Tree) -> None:
    root = tree(port("eth0", files={"speed": "", "operstate": "unknown\n", "statistics/rx_crc_errors": "what\n"}))
    network = Network(root=root)
    network.open("n1")
    _, columns = read(network)
    network.close()
    assert np.isnan(columns["nic.speed"][0])
    assert columns["nic.state"] == [1]  # `unknown` with a carrier
    assert columns["nic.crc_errors"] == [2**64 - 1]


def test_new_interfaces_are_read(tree: Tree) -> None:
    network = Network(root=tree(port("eth0")))
    network.open("n1")
    assert read(network)[0] == ("port:n1.eth0",)
    tree(port("eth1"))
    assert read(network)[0] == ("port:n1.eth0", "port:n1.eth1")
    assert network.inventory().keys() == {"port:n1.eth0", "port:n1.eth1"}
    network.close()


def test_wireless_is_in_the_inventory(tree: Tree) -> None:
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
