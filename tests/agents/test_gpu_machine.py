"""On a machine with NVIDIA GPUs: what the collectors read agrees with nvidia-smi, and the GPUs compute correctly."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from agents.collector import Device, Reading
from agents.collectors.gpu.nvml import Nvml
from agents.collectors.gpu.xid import XidEvents
from agents.node.batches import build_blocks, check_reading
from tests.parts import do_without

ROOT = Path(__file__).parents[2]
MEBI = 1 << 20
SAME: Mapping[str, tuple[str, float]] = {
    # signal: place in the output of `nvidia-smi -q -x`, factor to the signal's unit
    "gpu.power_limit": ("gpu_power_readings/current_power_limit", 1),
    "gpu.power_limit_requested": ("gpu_power_readings/requested_power_limit", 1),
    "gpu.power_limit_default": ("gpu_power_readings/default_power_limit", 1),
    "gpu.power_limit_min": ("gpu_power_readings/min_power_limit", 1),
    "gpu.power_limit_max": ("gpu_power_readings/max_power_limit", 1),
    "gpu.sm_clock_max": ("max_clocks/sm_clock", 1),
    "gpu.memory_clock_max": ("max_clocks/mem_clock", 1),
    "gpu.memory_total": ("fb_memory_usage/total", MEBI),
    "gpu.memory_reserved": ("fb_memory_usage/reserved", MEBI),
    "gpu.pcie_generation_max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen", 1),
    "gpu.pcie_width_max": ("pci/pci_gpu_link_info/link_widths/max_link_width", 1),
    "gpu.pcie_width": ("pci/pci_gpu_link_info/link_widths/current_link_width", 1),
    "gpu.pcie_replays": ("pci/replay_counter", 1),
    "gpu.dram_corrected": ("ecc_errors/volatile/dram_correctable", 1),
    "gpu.dram_uncorrected_total": ("ecc_errors/aggregate/dram_uncorrectable", 1),
    "gpu.sram_corrected_total": ("ecc_errors/aggregate/sram_correctable", 1),
    "gpu.sram_parity_total": ("ecc_errors/aggregate/sram_uncorrectable_parity", 1),
    "gpu.sram_l2_total": ("ecc_errors/aggregate_uncorrectable_sram_sources/sram_l2", 1),
    "gpu.rows_corrected": ("remapped_rows/remapped_row_corr", 1),
    "gpu.rows_uncorrected": ("remapped_rows/remapped_row_unc", 1),
    "gpu.banks_max": ("remapped_rows/row_remapper_histogram/row_remapper_histogram_max", 1),
    "gpu.banks_none": ("remapped_rows/row_remapper_histogram/row_remapper_histogram_none", 1),
    "gpu.shutdown_margin": ("temperature/gpu_temp_max_tlimit_threshold", 1),
    "gpu.slowdown_margin": ("temperature/gpu_temp_slow_tlimit_threshold", 1),
    "gpu.memory_max_margin": ("temperature/gpu_temp_max_mem_tlimit_threshold", 1),
}
NEAR: Mapping[str, tuple[str, float]] = {
    # signal: place, and by how much it may change between the two readings
    "gpu.temperature": ("temperature/gpu_temp", 5),
    "gpu.memory_temperature": ("temperature/memory_temp", 5),
    "gpu.thermal_margin": ("temperature/gpu_temp_tlimit", 5),
}
ATTRIBUTES: Mapping[str, str] = {
    "sku": "product_name",
    "uuid": "uuid",
    "serial": "serial",
    "part_number": "board_part_number",
    "vbios": "vbios_version",
    "inforom": "inforom_version/img_version",
    "gsp_firmware": "gsp_firmware_version",
    "chassis_serial": "platformInfo/chassis_serial_number",
    "slot": "platformInfo/slot_number",
    "tray": "platformInfo/tray_index",
    "module_id": "platformInfo/module_id",
}
pytestmark = pytest.mark.gpu

Seen = tuple[tuple[Reading, ...], Mapping[str, Device], dict[str, ElementTree.Element]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The first reading of this machine's GPUs, their inventory, and what nvidia-smi prints of each UUID."""
    try:
        ran = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        do_without("gpu", "no NVIDIA GPU with a working driver here")
    printed = {str(gpu.findtext("uuid")): gpu for gpu in ElementTree.fromstring(ran.stdout).iter("gpu")}
    collector = Nvml(seen=tmp_path_factory.mktemp("state") / "seen.json")
    collector.open("n1")
    yield collector.read(), collector.inventory(), printed
    collector.close()


def number(text: str | None) -> float | None:
    """The first number of a text of nvidia-smi, such as 16x or 700.00 W; None for N/A."""
    found = re.match(r"-?[\d.]+", text or "")
    return float(found[0]) if found else None


def pairs(seen: Seen, places: Mapping[str, tuple[str, float]]) -> Iterator[tuple[str, float, str | None, float]]:
    """(signal, value, nvidia-smi's text, third entry of the table) of each GPU; a missing value is NaN."""
    readings, inventory, printed = seen
    (reading,) = (r for r in readings if r.device_class == "gpu")
    for position, entity in enumerate(reading.entities):
        gpu = printed[inventory[entity].attributes["uuid"]]
        for signal, (place, more) in places.items():
            column = np.asarray(reading.columns[signal])
            missing = column.dtype.kind == "u" and column[position] == np.iinfo(np.uint64).max
            yield signal, float("nan") if missing else float(column[position]), gpu.findtext(place), more


def test_every_value_of_this_machines_gpus_is_kept_on_the_wire(seen: Seen) -> None:
    readings, inventory, _ = seen
    for reading in readings:
        check_reading(reading, inventory)
    wire = {name: column[0] for block in build_blocks(readings) for name, column in block.columns.items()}
    for name, column in ((n, np.asarray(c)) for reading in readings for n, c in reading.columns.items()):
        read = column != np.iinfo(np.uint64).max if column.dtype.kind == "u" else ~np.isnan(column)
        if read.any():
            sent = np.asarray(wire[name])
            kept = sent != np.iinfo(sent.dtype).max if sent.dtype.kind == "u" else ~np.isnan(sent)
            assert (kept == read).all(), name


def test_limits_counters_and_sizes_are_those_of_nvidia_smi(seen: Seen) -> None:
    for signal, value, text, factor in pairs(seen, SAME):
        wanted = number(text)
        assert (wanted is None) == np.isnan(value), signal
        assert wanted is None or abs(value - wanted * factor) <= (factor if factor > 1 else 1e-3), signal


def test_temperatures_are_those_of_nvidia_smi(seen: Seen) -> None:
    for signal, value, text, most in pairs(seen, NEAR):
        wanted = number(text)
        assert wanted is None or abs(value - wanted) <= most, signal


def test_each_gpu_has_the_identity_that_nvidia_smi_prints(seen: Seen) -> None:
    _, inventory, printed = seen
    gpus = [device.attributes for entity, device in inventory.items() if entity.startswith("gpu:")]
    assert {found["uuid"] for found in gpus} == set(printed)
    for found in gpus:
        texts = {key: printed[found["uuid"]].findtext(place) for key, place in ATTRIBUTES.items()}
        assert {key: str(found.get(key, "N/A")) for key in texts} == texts


@pytest.mark.usefixtures("seen")
def test_the_driver_accepts_the_registration_for_xids() -> None:
    collector = XidEvents()
    collector.open("n1")
    (reading,) = collector.read()
    collector.close()
    assert reading.device_class == "gpu"


@pytest.mark.usefixtures("seen")
@pytest.mark.torch
def test_a_gpu_computes_the_known_answer_to_every_problem(torch_python: str) -> None:
    words = [torch_python, "-m", "agents.collectors.canary.gpu_worker", "--seconds", "0", "--memory", "0.01"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    ran = subprocess.run([*words, "--variant", "5"], env=environ, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    if "absent" in lines[0]:
        do_without("gpu", lines[0]["absent"])
    begin, exact, *_ = lines
    assert exact["golden"], exact
    assert "lacking" in exact or exact["digest"] == begin["expected"]
