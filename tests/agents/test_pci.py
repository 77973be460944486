"""PCI errors and GPU counts from a bus of known files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.gpu import pci
from agents.collectors.gpu.pci import Pci, parse_aer, total_errors
from pipeline.model.records import SECOND

CORRECTABLE = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF")
MISSING = 2**64 - 1


class Bus:
    """A bus in a folder, its collector and a stopped clock."""

    def __init__(self, root: Path, **settings: int) -> None:
        self.root, self.time = root, 1_000 * SECOND
        self.pci = Pci(root=root, **settings)
        self.pci._now = lambda: self.time

    def put(self, address: str, vendor: str, device_class: str, driver: str = "", errors: bool = True) -> None:
        below = self.root / address
        below.mkdir()
        for name, text in (("vendor", vendor), ("device", "0x2330"), ("class", device_class)):
            (below / name).write_text(f"{text}\n")
        if driver:
            (below / "driver").symlink_to(self.root.parent / driver)
        if errors:
            for kind in ("correctable", "nonfatal", "fatal"):
                self.errors(address, kind)

    def errors(self, address: str, kind: str = "correctable", **counts: int) -> None:
        short = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}[kind]
        lines = [f"{name} {counts.get(name, 0)}" for name in CORRECTABLE]
        lines.append(f"TOTAL_ERR_{short} {sum(counts.values())}")
        (self.root / address / f"aer_dev_{kind}").write_text("\n".join(lines) + "\n")

    def read_once(self) -> Reading:
        (reading,) = self.pci.read()
        return reading

    def value(self, signal: str) -> float:
        found: float = self.read_once().columns[signal][0]
        return found


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    """Two GPUs, a switch and a network card."""
    made = Bus(tmp_path)
    made.put("0000:18:00.0", "0x10de", "0x030200", "nvidia")
    made.put("0000:2a:00.0", "0x10de", "0x030200", "nvidia")
    made.put("0000:05:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
    made.put("0000:19:00.0", "0x15b3", "0x020700", "mlx5_core")
    made.pci.open("n1")
    return made


def test_gpus_are_counted_on_the_bus_and_with_a_driver(bus: Bus) -> None:
    (bus.root / "0000:2a:00.0" / "driver").unlink()
    found = {name: values[0] for name, values in bus.read_once().columns.items()}
    assert found == {
        **dict.fromkeys(("node.aer_correctable", "node.aer_nonfatal", "node.aer_fatal"), 0),
        "node.gpu_pci": 2,
        "node.gpu_driver": 1,
        "node.gpu_expected": 2,
    }
    assert bus.pci.inventory()["node:n1"].attributes == {"gpu_addresses": ["0000:18:00.0", "0000:2a:00.0"]}


def test_a_gpu_that_leaves_the_bus_is_an_event_with_its_address_and_its_return_another(bus: Bus) -> None:
    assert bus.read_once().events[0].data == {"expected": 2, "present": 2, "missing": [], "source": "pci"}
    assert bus.read_once().events == ()
    shutil.rmtree(bus.root / "0000:2a:00.0")
    reading = bus.read_once()
    assert [(e.kind, e.entity, e.time) for e in reading.events] == [("gpu_count", "node:n1", bus.time)]
    assert reading.events[0].data == {"expected": 2, "present": 1, "missing": ["0000:2a:00.0"], "source": "pci"}
    assert (reading.columns["node.gpu_pci"][0], reading.columns["node.gpu_expected"][0]) == (1, 2)
    assert bus.read_once().events == ()
    bus.put("0000:2a:00.0", "0x10de", "0x030200", "nvidia")
    assert bus.read_once().events[0].data == {"expected": 2, "present": 2, "missing": [], "source": "pci"}


def test_fewer_gpus_than_configured_are_reported_at_the_first_read(tmp_path: Path) -> None:
    bus = Bus(tmp_path, gpus_expected=8)
    bus.put("0000:18:00.0", "0x10de", "0x030000", "nvidia")
    bus.pci.open("n1")
    reading = bus.read_once()
    assert reading.events[0].data == {"expected": 8, "present": 1, "missing": [], "source": "pci"}
    assert reading.columns["node.gpu_expected"][0] == 8
    assert bus.read_once().events == ()


@pytest.mark.parametrize(("expected", "present"), [(8, 0), (0, 0), (1, 1), (0, 1)])
def test_the_first_read_reports_the_count_so_that_a_corrected_expectation_ends_a_page(
    expected: int, present: int, tmp_path: Path
) -> None:
    """A page of 0 of 8 GPUs stayed open when the expectation was removed: the collector had restarted."""
    bus = Bus(tmp_path, gpus_expected=expected)
    for number in range(present):
        bus.put(f"0000:{number:02x}:00.0", "0x10de", "0x030200", "nvidia")
    bus.pci.open("n1")
    (event,) = bus.read_once().events
    data = {"expected": expected or present, "present": present, "missing": [], "source": "pci"}
    assert (event.kind, event.data) == ("gpu_count", data)
    assert bus.read_once().events == ()


def test_errors_are_summed_over_devices(bus: Bus) -> None:
    bus.errors("0000:18:00.0", RxErr=3, BadTLP=1)
    bus.errors("0000:19:00.0", Timeout=10)
    bus.errors("0000:19:00.0", "fatal", RxErr=1)
    assert bus.value("node.aer_correctable") == 14
    assert bus.value("node.aer_fatal") == 1
    assert bus.value("node.aer_nonfatal") == 0


def test_growth_is_reported_once_in_five_minutes_with_its_errors(bus: Bus) -> None:
    bus.errors("0000:18:00.0", RxErr=3)
    assert [event.kind for event in bus.read_once().events] == ["gpu_count"]  # errors are from before we looked
    bus.errors("0000:18:00.0", RxErr=5, BadTLP=1)
    (event,) = bus.read_once().events
    assert (event.kind, event.entity) == ("aer", "node:n1")
    assert event.data == {
        "device": "0000:18:00.0",
        "id": "10de:2330",
        "kind": "correctable",
        "growth": 3,
        "total": 6,
        "errors": {"RxErr": 2, "BadTLP": 1},
    }
    bus.errors("0000:18:00.0", RxErr=6, BadTLP=1)
    assert bus.read_once().events == ()
    bus.errors("0000:19:00.0", Timeout=1)
    assert [e.data["device"] for e in bus.read_once().events] == ["0000:19:00.0"]
    bus.time += 300 * SECOND
    assert [(e.data["device"], e.data["growth"]) for e in bus.read_once().events] == [("0000:18:00.0", 1)]


def test_a_clock_set_back_silences_no_device(bus: Bus) -> None:
    bus.read_once()
    bus.errors("0000:18:00.0", RxErr=1)
    assert len(bus.read_once().events) == 1
    bus.time -= 900 * SECOND
    bus.errors("0000:18:00.0", RxErr=3)
    assert [event.data["growth"] for event in bus.read_once().events] == [2]


def test_a_device_that_was_reset_counts_from_there(bus: Bus) -> None:
    bus.errors("0000:18:00.0", RxErr=9)
    bus.read_once()
    bus.errors("0000:18:00.0", RxErr=2)
    assert bus.read_once().events == ()
    bus.errors("0000:18:00.0", RxErr=3)
    assert bus.read_once().events[0].data["growth"] == 1


def test_a_storm_is_bounded(tmp_path: Path) -> None:
    bus = Bus(tmp_path)
    for i in range(pci.MAX_EVENTS + 5):
        bus.put(f"0000:{i:02x}:00.0", "0x15b3", "0x020700")
    bus.pci.open("n1")
    bus.read_once()
    for i in range(pci.MAX_EVENTS + 5):
        bus.errors(f"0000:{i:02x}:00.0", RxErr=1)
    assert len(bus.read_once().events) == pci.MAX_EVENTS
    assert len(bus.read_once().events) == 5


def test_a_bus_without_error_reporting_has_missing_counts(tmp_path: Path) -> None:
    bus = Bus(tmp_path)
    bus.put("0000:18:00.0", "0x10de", "0x030200", errors=False)
    bus.pci.open("n1")
    assert bus.value("node.aer_correctable") == MISSING
    assert bus.value("node.gpu_pci") == 1


def test_missing_or_broken_files_affect_nothing_else(bus: Bus) -> None:
    bus.read_once()
    (bus.root / "0000:18:00.0" / "aer_dev_correctable").write_bytes(b"\xff\x00\n\nRxErr\nTOTAL_ERR_COR -5\n")
    (bus.root / "0000:2a:00.0" / "aer_dev_correctable").unlink()
    bus.errors("0000:19:00.0", RxErr=4)
    assert bus.value("node.aer_correctable") == 4


def test_no_bus_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no PCI bus"):
        Pci(root=tmp_path / "absent").open("n1")


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser_of_error_counts(text: str) -> None:
    assert total_errors(parse_aer(text)) >= 0
