"""Processor clocks and throttling from a known sysfs tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.collector import NoData
from agents.collectors.host.processors import Processors

MISSING = 2**64 - 1


def machine(root: Path, clocks: dict[int, str], throttles: dict[int, tuple[int, str]]) -> Path:
    """clocks: processor -> kHz; throttles: processor -> (package, count)."""
    for cpu, text in clocks.items():
        policy = root / "cpufreq" / f"policy{cpu}"
        policy.mkdir(parents=True)
        reported = {"scaling_cur_freq": text, "scaling_governor": "performance", "scaling_driver": "intel_pstate"}
        for name, value in {**reported, "cpuinfo_max_freq": "3800000"}.items():
            (policy / name).write_text(f"{value}\n")
    for cpu, (package, count) in throttles.items():
        for name, value in (
            ("topology/physical_package_id", package),
            ("thermal_throttle/package_throttle_count", count),
        ):
            path = root / f"cpu{cpu}" / name
            path.parent.mkdir(parents=True)
            path.write_text(f"{value}\n")
    return root


def read_once(processors: Processors) -> dict[str, float]:
    (reading,) = processors.read()
    return {name: values[0] for name, values in reading.columns.items()}


def test_clocks_are_in_hertz_and_throttles_once_per_package(tmp_path: Path) -> None:
    throttles = {0: (0, "4"), 1: (0, "4"), 2: (1, "9"), 10: (1, "9")}
    processors = Processors(root=machine(tmp_path, {0: "3000000", 1: "1000000"}, throttles))
    processors.open("n1")
    assert read_once(processors) == {
        "node.cpu_frequency_mean": 2e9,
        "node.cpu_frequency_min": 1e9,
        "node.cpu_throttles": 13,
    }
    assert processors.inventory()["node:n1"].attributes == {
        "cpu_governor": "performance",
        "cpu_frequency_driver": "intel_pstate",
        "cpu_frequency_max": 3_800_000_000,
    }
    processors.close()


def test_a_processor_without_clock_is_left_out(tmp_path: Path) -> None:
    processors = Processors(root=machine(tmp_path, {0: "<unknown>", 1: "2000000"}, {}))
    processors.open("n1")
    found = read_once(processors)
    assert found["node.cpu_frequency_mean"] == found["node.cpu_frequency_min"] == 2e9
    assert found["node.cpu_throttles"] == MISSING
    processors.close()


def test_throttling_is_reported_without_frequencies(tmp_path: Path) -> None:
    processors = Processors(root=machine(tmp_path, {}, {0: (0, "4")}))
    processors.open("n1")
    found = read_once(processors)
    assert np.isnan(found["node.cpu_frequency_min"])
    assert found["node.cpu_throttles"] == 4
    assert processors.inventory() == {"node:n1": processors.inventory()["node:n1"]}
    processors.close()


def test_a_machine_with_neither_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no cpufreq and no thermal_throttle"):
        Processors(root=tmp_path).open("n1")
