"""The collector `gaudi`, on a recording of the pyhlml binding's answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import NoData
from agents.collectors.accelerators.gaudi import Gaudi
from agents.node.batches import build_blocks, check_reading
from tests.agents.bindings import install, pci, recorded

HABANA = ("0x1da3", "0x120000", "0x1020")
MISSING = 2**64 - 1


def opened(tmp_path: Path, patch: pytest.MonkeyPatch, recording: dict[str, Any] | None = None) -> Gaudi:
    install("pyhlml", recording or recorded("gaudi2.json"), tmp_path, patch)
    collector = Gaudi(pci=pci(tmp_path, HABANA, HABANA))
    collector.open("n1")
    return collector


def test_without_hardware_there_is_no_data_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pyhlml", raising=False)
    with pytest.raises(NoData, match=r"no Gaudi accelerator: no PCI device of the vendor Habana"):
        Gaudi(pci=pci(tmp_path, ("0x10de", "0x030200", "0x2330"))).open("n1")
    assert "pyhlml" not in sys.modules


def test_without_the_binding_or_its_driver_the_message_has_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = pci(tmp_path, HABANA)
    monkeypatch.setitem(sys.modules, "pyhlml", None)
    with pytest.raises(NoData, match="its Python binding pyhlml cannot be used"):
        Gaudi(pci=bus).open("n1")
    install("pyhlml", {"hlmlInit": {"refused": 9}, "devices": []}, tmp_path, monkeypatch)
    with pytest.raises(NoData, match="the driver habanalabs does not respond"):
        Gaudi(pci=bus).open("n1")
    install("pyhlml", {"devices": []}, tmp_path, monkeypatch)
    with pytest.raises(NoData, match="the driver reports none"):
        Gaudi(pci=bus).open("n1")
    assert sys.modules["pyhlml"].STARTED == []


def test_a_gaudi2_is_read_with_the_catalogues_names_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = opened(tmp_path, monkeypatch)
    (reading,) = collector.read()
    columns = {name: values.tolist() for name, values in reading.columns.items()}
    assert reading.entities == ("gpu:n1.0", "gpu:n1.1")
    assert columns["gpu.temperature"] == [55, 54]  # the library's second device has the lower PCI address
    assert columns["gpu.board_temperature"] == [41, 41]
    assert (columns["gpu.power"], columns["gpu.power_limit_default"]) == ([431.25] * 2, [600] * 2)
    assert columns["gpu.utilization"] == [0.88, 0.88]
    assert (columns["gpu.sm_clock"], columns["gpu.sm_clock_max"]) == ([1650] * 2, [1650] * 2)
    assert columns["gpu.memory_used"] == [99857989632] * 2
    assert columns["gpu.memory_total"] == [103079215104] * 2
    assert [columns[f"gpu.ecc_{kind}"][0] for kind in ("corrected", "uncorrected")] == [7, 0]
    assert [columns[f"gpu.ecc_{kind}_total"][0] for kind in ("corrected", "uncorrected")] == [31, 1]
    assert [columns[f"gpu.{part}_corrected"][0] for part in ("dram", "sram")] == [6, 1]
    assert columns["gpu.sram_uncorrected"] == [MISSING] * 2  # the library refuses it
    assert [columns[f"gpu.rows_{kind}"] for kind in ("corrected", "uncorrected", "pending")] == [[2, 2], [1, 1], [1, 0]]
    assert columns["gpu.throttle_reasons"] == [0x4 | 0x20, 0]
    assert columns["gpu.energy"] == [123456789012] * 2
    assert (columns["gpu.pcie_generation"], columns["gpu.pcie_width"]) == ([4, 4], [16, 16])
    assert columns["gpu.pcie_replays"] == [9, 9]
    assert (columns["gpu.links"], columns["gpu.links_up"]) == ([24, 24], [23, 24])
    assert columns["gpu.present"] == [1, 1]
    assert set(columns) == set(collector.signals)
    check_reading(reading, collector.inventory())
    assert build_blocks([reading])[0].columns["gpu.links_up"].tolist() == [[23, 24]]
    attributes = collector.inventory()["gpu:n1.0"].attributes
    assert attributes == {
        "vendor": "Intel",
        "sku": "HL-225B",
        "serial": "AN180014471",
        "uuid": "01P1-HL2080A0-15-TNPS40-01-05-11",
        "part_number": "HL-225B",
        "firmware": "Preboot version hl-gaudi2-1.18.0-fw-53.1.1-sec-9",
        "cpld": "0x0000010f",
        "module_id": "4",
        "pci": "0000:19:00.0",
        "driver": "1.18.0-ee698fb",
    }
    collector.close()
    assert sys.modules["pyhlml"].STARTED == []


def test_a_device_that_stops_answering_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = opened(tmp_path, monkeypatch)
    collector.read()
    sys.modules["pyhlml"].RECORDING["devices"][1].clear()
    collector._rhythm._now = lambda: 10**12  # a read of everything
    (reading,) = collector.read()
    collector.close()
    assert reading.entities == ("gpu:n1.0", "gpu:n1.1")
    assert np.isnan(reading.columns["gpu.power"][0])
    assert reading.columns["gpu.power"][1] == 431.25
    assert reading.columns["gpu.present"].tolist() == [0, 1]


def test_a_function_that_an_older_binding_lacks_is_a_missing_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded("gaudi2.json")
    for calls in recording["devices"]:
        del calls["hlmlDeviceGetMacAddrInfo"], calls["hlmlDeviceGetReplacedRowsPendingStatus"]
    collector = opened(tmp_path, monkeypatch, recording)
    (reading,) = collector.read()
    collector.close()
    assert np.isnan(reading.columns["gpu.links"]).all()
    assert np.isnan(reading.columns["gpu.rows_pending"]).all()
    assert reading.columns["gpu.rows_corrected"].tolist() == [2, 2]
