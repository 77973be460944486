"""Frequency and thermal throttling of the processors, from cpufreq and thermal_throttle in sysfs.

Reading scaling_cur_freq takes a lock that a stuck change of governor holds, and on some processors queries the
firmware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import ProcFile, read_number, read_text

MAX_POLICIES = 1024
"""Most frequency domains of one node, each of which is an open file. Chosen: twice two processors of 256 threads."""


@dataclass
class Processors(Collector):
    """node.cpu_frequency_*, node.cpu_throttles. The governor is an attribute of the node."""

    name: ClassVar[str] = "processors"
    signals: ClassVar[tuple[str, ...]] = ("node.cpu_frequency_mean", "node.cpu_frequency_min", "node.cpu_throttles")
    interval: float = 10.0
    root: Path = Path("/sys/devices/system/cpu")
    _node: str = field(default="", init=False, repr=False)
    _policies: list[Path] = field(default_factory=list, init=False, repr=False)
    _clocks: list[ProcFile] = field(default_factory=list, init=False, repr=False)
    _throttles: list[ProcFile] = field(default_factory=list, init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node = node
        self._policies = sorted((self.root / "cpufreq").glob("policy[0-9]*"))[:MAX_POLICIES]
        self._clocks = [ProcFile(policy / "scaling_cur_freq") for policy in self._policies]
        self._throttles = [
            ProcFile(cpu / "thermal_throttle/package_throttle_count") for cpu in self._first_of_packages()
        ]
        if not any(file.present for file in (*self._clocks, *self._throttles)):
            raise NoData(f"{self.root}: no cpufreq and no thermal_throttle, as in most virtual machines")

    def read(self) -> tuple[Reading, ...]:
        clocks = [1000.0 * khz for file in self._clocks if (khz := file.number()) is not None]
        throttles = [file.number() for file in self._throttles]
        reported = [n for n in throttles if n is not None]
        columns = {
            "node.cpu_frequency_mean": np.array([np.mean(clocks) if clocks else np.nan]),
            "node.cpu_frequency_min": np.array([min(clocks, default=np.nan)]),
            "node.cpu_throttles": count_column(
                [sum(reported) if reported and len(reported) == len(throttles) else None]
            ),
        }
        return (Reading("node", (f"node:{self._node}",), columns),)

    def inventory(self) -> Mapping[str, Device]:
        if not self._policies:
            return {f"node:{self._node}": Device()}
        first = self._policies[0]
        governors = sorted({text for policy in self._policies if (text := read_text(policy / "scaling_governor"))})
        highest = read_number(first / "cpuinfo_max_freq")
        facts: dict[str, object] = {
            "cpu_governor": ",".join(governors),
            "cpu_frequency_driver": read_text(first / "scaling_driver"),
            "cpu_frequency_max": 1000 * highest if highest else None,
        }
        return {f"node:{self._node}": Device((), {name: value for name, value in facts.items() if value})}

    def close(self) -> None:
        for file in (*self._clocks, *self._throttles):
            file.close()

    def _first_of_packages(self) -> list[Path]:
        """Returns the first processor of each package: all processors of a package show the same count."""
        first: dict[int, Path] = {}
        for cpu in sorted(self.root.glob("cpu[0-9]*"), key=lambda path: (len(path.name), path.name)):
            package = read_number(cpu / "topology/physical_package_id")
            if package is not None:
                first.setdefault(package, cpu)
        return list(first.values())
