"""The collector `amd`, on recordings of the amdsmi binding's answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collector import NoData, Reading
from agents.collectors.accelerators import amd
from agents.collectors.accelerators.amd import Amd
from agents.collectors.accelerators.answers import SignalColumns
from agents.node.batches import build_blocks, check_reading
from tests.agents.bindings import install, pci, recorded

MISSING = 2**64 - 1


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "kfd"
    path.touch()
    return path


def opened(recording: dict[str, Any], tmp_path: Path, patch: pytest.MonkeyPatch) -> Amd:
    install("amdsmi", recording, tmp_path, patch)
    collector = Amd(driver=tmp_path / "kfd", pci=pci(tmp_path, ("0x1002", "0x120000", "0x74a1")))
    collector.open("n1")
    return collector


def read_columns(collector: Amd) -> tuple[Reading, dict[str, list[float]]]:
    (reading,) = collector.read()
    return reading, {name: values.tolist() for name, values in reading.columns.items()}


def test_without_the_driver_there_is_no_data_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(NoData, match="kfd is missing"):
        Amd(driver=tmp_path / "kfd").open("n1")
    assert "amdsmi" not in sys.modules


def test_without_the_binding_the_message_has_the_fix(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(NoData, match=r"its Python binding amdsmi cannot be used .*: install it for the agent"):
        Amd(driver=driver).open("n1")


def test_a_binding_without_its_c_library_is_no_data(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = install("amdsmi", recorded("amd_mi300x.json"), tmp_path, monkeypatch)
    (place / "__init__.py").write_text("raise OSError('libamd_smi.so: cannot open shared object file')")
    with pytest.raises(NoData, match=r"libamd_smi\.so: cannot open shared object file"):
        Amd(driver=driver).open("n1")


def test_a_refusing_driver_is_no_data(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoData, match="AMD's driver does not respond: AMDSMI_STATUS_NO_PERM; is the agent in the groups"
    ):
        opened({"amdsmi_init": {"refused": "AMDSMI_STATUS_NO_PERM"}, "devices": []}, tmp_path, monkeypatch)


def test_no_device_at_all_is_no_data(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoData, match="the driver reports none"):
        opened({"devices": []}, tmp_path, monkeypatch)
    assert sys.modules["amdsmi"].STARTED == []


def test_an_mi300x_is_read_with_the_catalogues_names_and_units(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = opened(recorded("amd_mi300x.json"), tmp_path, monkeypatch)
    reading, columns = read_columns(collector)
    assert reading.entities == ("gpu:n1.0", "gpu:n1.1")  # in order of PCI addresses, not of the library
    assert columns["gpu.power"] == [702, 703]
    assert columns["gpu.temperature"] == [71, 72]
    assert np.isnan(columns["gpu.edge_temperature"]).all()
    assert columns["gpu.memory_temperature"] == [58, 58]
    assert columns["gpu.regulator_temperature"] == [63, 63]
    assert columns["gpu.utilization"] == [0.97, 0.96]
    assert columns["gpu.memory_used"] == [181245 * 2**20] * 2
    assert columns["gpu.power_limit"] == [750, 750]
    assert columns["gpu.energy"][0] == int(987654321000 * 15.259 / 1000)
    assert (columns["gpu.sm_clock"][0], columns["gpu.memory_clock_max"][0]) == (2088, 1300)
    assert [columns[f"gpu.ecc_{kind}"][0] for kind in ("corrected", "uncorrected", "deferred")] == [12, 0, 3]
    assert [columns[f"gpu.{part}_corrected"][0] for part in ("dram", "sram", "xgmi")] == [11, 1, 0]
    assert columns["gpu.xgmi_uncorrected"] == [2, 2]
    assert (columns["gpu.xgmi_rx_bytes"][0], columns["gpu.xgmi_tx_bytes"][0]) == (28000 * 1024, 280 * 1024)
    assert (columns["gpu.links"], columns["gpu.links_up"]) == ([7, 7], [7, 6])
    assert columns["gpu.limiter_thermal"] == [15, 16]
    assert columns["gpu.limiter_ticks"] == [44556677] * 2
    assert (columns["gpu.pcie_generation"], columns["gpu.pcie_width"]) == ([5, 5], [16, 16])
    assert (columns["gpu.pcie_replays"][0], columns["gpu.pcie_naks_received"][0]) == (4, 2)
    assert columns["gpu.pages_uncorrected"] == [0, 2]
    assert (columns["gpu.pages_pending"], columns["gpu.pages_failed"]) == ([0, 1], [0, 0])
    assert columns["gpu.present"] == [1, 1]
    assert columns["gpu.throttle_reasons"] == [MISSING] * 2  # "N/A" on this generation
    assert set(columns) == set(collector.signals)
    check_reading(reading, collector.inventory())
    assert build_blocks([reading])[0].columns["gpu.power"].tolist() == [[702, 703]]
    collector.close()
    assert sys.modules["amdsmi"].STARTED == []


def test_its_attributes_include_versions_and_serial_numbers(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = opened(recorded("amd_mi300x.json"), tmp_path, monkeypatch)
    device = collector.inventory()["gpu:n1.0"]
    collector.close()
    assert device.parents == ("node:n1",)
    assert device.attributes == {
        "vendor": "AMD",
        "sku": "AMD Instinct MI300X",
        "serial": "69243300017",
        "uuid": "c0ff74a1-0000-1000-80a4-5d1e3f0b7c20",
        "pci": "0000:1b:00.0",
        "driver": "6.12.12",
        "vbios": "022.040.003.043.000001",
        "part_number": "102-G30213-0B",
        "module_id": "0",
        "firmware": "00.85.113.01",
    }


def test_an_older_generation_and_library_give_the_same_signals(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = opened(recorded("amd_mi100.json"), tmp_path, monkeypatch)
    _, columns = read_columns(collector)
    attributes = collector.inventory()["gpu:n1.0"].attributes
    collector.close()
    assert (columns["gpu.power"], columns["gpu.power_limit"]) == ([38], [290])  # this library gives limits in watts
    assert (columns["gpu.temperature"], columns["gpu.edge_temperature"]) == ([57], [54])
    assert (columns["gpu.sm_clock"], columns["gpu.energy"]) == ([300], [15300])
    assert columns["gpu.throttle_reasons"] == [0x4 | 0x20 | 0x40]
    assert columns["gpu.throttled"] == [1]
    assert columns["gpu.ecc_corrected"] == [MISSING]
    assert columns["gpu.xgmi_rx_bytes"] == [MISSING]
    assert columns["gpu.pages_uncorrected"] == [0]
    assert (attributes["sku"], attributes["serial"]) == ("Arcturus GL-XL [Instinct MI100]", "0x77BA51F3720A6C11")


def test_a_device_that_stops_answering_keeps_its_number_and_harms_no_other(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = opened(recorded("amd_mi300x.json"), tmp_path, monkeypatch)
    read_columns(collector)
    sys.modules["amdsmi"].RECORDING["devices"][1].clear()  # the one at the lower address
    collector._rhythm._now = lambda: 10**12  # a read of everything
    reading, columns = read_columns(collector)
    collector.close()
    assert reading.entities == ("gpu:n1.0", "gpu:n1.1")
    assert np.isnan(columns["gpu.power"][0])
    assert columns["gpu.power"][1] == 703
    assert columns["gpu.present"] == [0, 1]


def test_a_virtual_machine_without_power_readings_still_counts_as_present(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded("amd_mi300x.json")
    for calls in recording["devices"]:
        del calls["amdsmi_get_power_info"]
    collector = opened(recording, tmp_path, monkeypatch)
    assert read_columns(collector)[1]["gpu.present"] == [1, 1]
    clock = [10**12]
    collector._rhythm._now = lambda: clock[0]
    reported = []
    for clock[0] in range(10**12, 10**12 + 20_000_000, 1_000_000):
        reported += read_columns(collector)[1].get("gpu.present", [])
    collector.close()
    assert set(reported) == {1}


def test_slow_signals_come_at_their_interval(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = opened(recorded("amd_mi300x.json"), tmp_path, monkeypatch)
    clock = [1_800_000_000_000_000]
    collector._rhythm._now = lambda: clock[0]
    seen: dict[str, int] = {}
    for _ in range(60):
        for name in collector.read()[0].columns:
            seen[name] = seen.get(name, 0) + 1
        clock[0] += 1_000_000
    collector.close()
    assert seen["gpu.power"] == 60
    assert seen["gpu.present"] == seen["gpu.temperature"]
    assert 11 <= seen["gpu.temperature"] <= 14
    assert 5 <= seen["gpu.energy"] <= 8
    assert 1 <= seen["gpu.power_limit"] <= 3


@pytest.mark.parametrize("other", [("0x10de", "0x030200", "0x2330")])
def test_names_differ_on_a_node_with_two_vendors(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: tuple[str, str, str]
) -> None:
    install("amdsmi", recorded("amd_mi300x.json"), tmp_path, monkeypatch)
    collector = Amd(driver=driver, pci=pci(tmp_path, ("0x1002", "0x120000", "0x74a1"), other))
    collector.open("n1")
    assert read_columns(collector)[0].entities == ("gpu:n1.amd0", "gpu:n1.amd1")
    collector.close()


ANSWER = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("N/A"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("gfx_activity", "current_socket_power", "power_cap", "energy_accumulator", "counter_resolution", "clk"),
        *("vram_used", "correctable_count", "pcie_metric", "pcie_static", "pcie_speed", "xgmi_link_status"),
        *("xgmi_read_data_acc", "indep_throttle_status", "throttle_status", "temperature_vrgfx", "status"),
        *("asic", "board", "firmware", "fw_list", "market_name", "uuid"),
    ]
)


@pytest.mark.slow
@given(st.dictionaries(NAMES, ANSWER, max_size=8), ANSWER)
def test_no_answer_of_the_library_breaks_a_read(answer: dict[str, Any], pages: object) -> None:
    columns = SignalColumns(Amd.signals, 1)
    for meaning in (
        amd.convert_activity,
        amd.convert_power,
        amd.convert_power_cap,
        amd.convert_energy,
        amd.convert_memory,
        amd.convert_pcie,
        amd.convert_metrics_table,
    ):
        columns.set_row(0, meaning(answer))
    columns.set_row(0, amd.convert_clock("gpu.sm_clock", answer))
    columns.set_row(0, amd.convert_error_counts(answer, "gpu.ecc_corrected", "gpu.ecc_uncorrected", "gpu.ecc_deferred"))
    columns.set_row(0, amd.convert_bad_pages(pages))
    assert all(isinstance(value, str) for value in amd.describe_device(answer).values())
    build_blocks([Reading("gpu", ("gpu:n1.0",), columns.arrays())])
