"""The real nvidia-ml-py over a driver library of our own: what a GPU does not tell is missing, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOOK = """
import json, sys
import numpy as np
from agents.collector import NoData
from agents.collectors.nvml import Nvml
collector, looks = Nvml(), []
try:
    collector.open("n1")
    for _ in range(int(sys.argv[1])):
        (reading,) = collector.read()
        columns = {name: [str(value) for value in column] for name, column in reading.columns.items()}
        looks.append({"entities": reading.entities, "columns": columns})
    devices = {e: [d.parents, d.attributes] for e, d in collector.inventory().items()}
    print(json.dumps({"looks": looks, "inventory": devices}))
except NoData as absent:
    print(json.dumps({"no data": str(absent)}))
collector.close()
collector.close()
"""
MISSING = str(2**64 - 1)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libnvidia-ml.so.1 built from nvml_stub.c."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: install it to test against a driver library")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "nvml_stub.c"
    command = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True)
    return folder


def look(library: Path, looks: int = 1, **stub: object) -> dict[str, Any]:
    """What the collector finds in a process of its own that loads the library from `library`."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library), **{k: str(v) for k, v in stub.items()}}
    command = [sys.executable, "-c", LOOK, str(looks)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_signal_of_every_gpu_is_read_in_the_units_of_the_catalogue(driver: Path) -> None:
    found = look(driver, STUB_GPUS=3)["looks"][0]
    assert found["entities"] == ["gpu:n1.0", "gpu:n1.1", "gpu:n1.2"]
    assert {name: values[0] for name, values in found["columns"].items()} == {
        "gpu.utilization": "0.87",
        "gpu.memory_utilization": "0.41",
        "gpu.memory_used": "85899344896.0",
        "gpu.memory_total": "85899345920.0",
        "gpu.sm_clock": "1980.0",
        "gpu.memory_clock": "2619.0",
        "gpu.throttle_reasons": "64",
        "gpu.temperature": "40.0",
        "gpu.power": "512.345",
        "gpu.energy": "9007199254740993",  # 2**53 + 1: counters keep every digit
        "gpu.ecc_corrected": "7",
        "gpu.ecc_uncorrected": "2",
        "gpu.pcie_generation": "5.0",
        "gpu.pcie_width": "16.0",
        "gpu.pcie_replays": "3",
    }


def test_inventory_names_parents_sku_serial_uuid_and_driver(driver: Path) -> None:
    parents, attributes = look(driver)["inventory"]["gpu:n1.1"]
    assert parents == ["node:n1"]
    assert attributes == {"driver": "590.48.01", "sku": "NVIDIA H100 80GB HBM3", "serial": "165001", "uuid": "GPU-1"}


def test_a_lost_gpu_keeps_its_place_and_the_others_go_on(driver: Path) -> None:
    found = look(driver, STUB_GPUS=3, STUB_LOST=1)
    columns = found["looks"][0]["columns"]
    assert columns["gpu.temperature"] == ["40.0", "nan", "42.0"]
    assert columns["gpu.energy"][1] == MISSING
    assert found["inventory"]["gpu:n1.1"][0] == ["node:n1"]


def test_what_a_gpu_does_not_support_is_missing_and_not_asked_again(driver: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    found = look(driver, looks=5, STUB_GPUS=2, STUB_UNSUPPORTED=0, STUB_CALLS=calls)
    columns = found["looks"][4]["columns"]
    assert columns["gpu.temperature"] == ["40.0", "41.0"]
    assert columns["gpu.power"] == ["nan", "512.345"]
    assert len(calls.read_bytes()) == 1 + 5


@pytest.mark.parametrize(
    ("stub", "reason"),
    [
        ({"STUB_GPUS": 0}, "no NVIDIA GPU"),
        ({"STUB_INIT": 9}, "the kernel module is not loaded"),
        ({"STUB_INIT": 18}, "the NVIDIA driver does not start"),
        ({"STUB_GPUS": 1, "STUB_LOST": 0}, "none of 1 NVIDIA GPUs answers"),
    ],
)
def test_a_driver_without_gpus_is_no_data_with_the_reason(driver: Path, stub: dict[str, int], reason: str) -> None:
    assert reason in look(driver, **stub)["no data"]


def test_a_node_without_a_driver_says_so(tmp_path: Path) -> None:
    found = look(tmp_path)
    if "looks" in found:
        pytest.skip("this machine has an NVIDIA driver")
    assert found == {"no data": "no NVIDIA driver"}
