"""Energy counters of processors from /sys/class/powercap (RAPL)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.columns import readings_by_signals
from agents.collectors.kernel_files import ProcFile, read_number, read_text

_ZONE = re.compile(r"(?P<type>[a-z][a-z0-9-]{0,40}):\d{1,4}(:\d{1,4})*")  # intel-rapl:0, intel-rapl:0:1 (powercap.rst)
_MISSING_VALUE = 2**64 - 1  # no counter has this value; it stands for "missing" in 64 bits
MAX_ZONES = 256
"""Most zones of one node. Chosen: 16 packages with 15 zones each."""


@dataclass
class Powercap(Collector):
    """sensor.energy: one entity per zone. Raw: it restarts at 0 after `wraps_at`, which is an attribute."""

    name: ClassVar[str] = "powercap"
    signals: ClassVar[tuple[str, ...]] = ("sensor.energy",)
    interval: float = 10.0
    root: Path = Path("/sys/class/powercap")
    _zones: dict[str, tuple[Path, ProcFile]] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node = node
        for folder in _list_zones(self.root):
            name = _zone_name(folder)
            name = f"{name}.{folder.name.replace(':', '-')}" if name in self._zones else name
            self._zones[name] = folder, ProcFile(folder / "energy_uj")
        if not self._zones:
            raise NoData(f"no energy counter below {self.root}: no driver such as intel_rapl_msr is loaded")
        if not any(file.present for _, file in self._zones.values()):
            first = next(iter(self._zones.values()))[0] / "energy_uj"
            raise NoData(f"{first}: not readable: it is for root alone since CVE-2020-8694; add CAP_DAC_READ_SEARCH")

    def read(self) -> tuple[Reading, ...]:
        found = [file.number() for _, file in self._zones.values()]
        if all(value is None for value in found):
            raise NoData(f"none of {len(found)} energy counters below {self.root} can be read")
        values = [v if v is not None and 0 <= v < _MISSING_VALUE else None for v in found]
        entities = (f"sensor:{self._node}.{name}" for name in self._zones)
        return readings_by_signals((e, {"sensor.energy": v}) for e, v in zip(entities, values, strict=True))

    def inventory(self) -> Mapping[str, Device]:
        parents = (f"node:{self._node}",)
        return {
            f"sensor:{self._node}.{name}": Device(parents, _zone_attributes(f)) for name, (f, _) in self._zones.items()
        }

    def close(self) -> None:
        for _, file in self._zones.values():
            file.close()
        self._zones = {}


def _list_zones(root: Path) -> list[Path]:
    """Returns folders of zones in the kernel's order, each with a counter. A control type itself has none."""
    try:
        names = [name for name in os.listdir(root) if _ZONE.fullmatch(name)]
    except OSError:  # no powercap on this kernel
        return []
    names.sort(key=lambda name: [(len(part), part) for part in name.split(":")])
    return [root / name for name in names if (root / name / "energy_uj").exists()][:MAX_ZONES]


def _zone_name(folder: Path) -> str:
    """Returns control type, the zone's own name and those above it: intel-rapl.package-0.dram for intel-rapl:0:1."""
    control, *numbers = folder.name.split(":")
    above = [folder.with_name(":".join([control, *numbers[: i + 1]])) for i in range(len(numbers))]
    names = [read_text(zone / "name") or zone.name.replace(":", "-") for zone in above]
    return ".".join([control, *(re.sub(r"[^A-Za-z0-9_-]", "-", name) for name in names)])


def _zone_attributes(folder: Path) -> dict[str, Any]:
    """Returns the zone, where its counter restarts (uJ) and its caps (W), which an operator may change."""
    facts: dict[str, Any] = {"zone": folder.name}
    wraps_at = read_number(folder / "max_energy_range_uj")
    if wraps_at is not None and 0 < wraps_at < _MISSING_VALUE:
        facts["wraps_at"] = wraps_at
    for number in range(3):  # long term, short term, peak power (powercap.rst)
        name = read_text(folder / f"constraint_{number}_name")
        limit = read_number(folder / f"constraint_{number}_power_limit_uw")
        if name and limit is not None and 0 <= limit < _MISSING_VALUE:
            facts[f"limit_{name}"] = limit / 1e6
    return facts
