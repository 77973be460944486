"""Energy that processors, their memory and the platform used, from /sys/class/powercap (RAPL)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.columns import readings
from agents.collectors.kernel_files import ProcFile, number_of, text_of

_ZONE = re.compile(r"(?P<type>[a-z][a-z0-9-]{0,40}):\d{1,4}(:\d{1,4})*")  # intel-rapl:0, intel-rapl:0:1 (powercap.rst)
_TOO_MUCH = 2**64 - 1  # no counter says so; it is how one of 64 bits says "missing"
MAX_ZONES = 256
"""Most zones of one node; chosen: 16 packages with 15 zones each."""


@dataclass
class Powercap(Collector):
    """sensor.energy: one entity per zone. Raw: it starts again at 0 after `wraps_at`, which is an attribute."""

    name: ClassVar[str] = "powercap"
    signals: ClassVar[tuple[str, ...]] = ("sensor.energy",)
    interval: float = 10.0
    root: Path = Path("/sys/class/powercap")
    _zones: dict[str, tuple[Path, ProcFile]] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node = node
        for folder in _zones(self.root):
            name = _entity(folder)
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
            raise NoData(f"none of {len(found)} energy counters below {self.root} answers")
        values = [v if v is not None and 0 <= v < _TOO_MUCH else None for v in found]
        entities = (f"sensor:{self._node}.{name}" for name in self._zones)
        return readings((e, {"sensor.energy": v}) for e, v in zip(entities, values, strict=True))

    def inventory(self) -> Mapping[str, Device]:
        parents = (f"node:{self._node}",)
        return {f"sensor:{self._node}.{name}": Device(parents, _facts(f)) for name, (f, _) in self._zones.items()}

    def close(self) -> None:
        for _, file in self._zones.values():
            file.close()
        self._zones = {}


def _zones(root: Path) -> list[Path]:
    """Folders of zones in the kernel's order, each with a counter; a control type itself has none."""
    try:
        names = [name for name in os.listdir(root) if _ZONE.fullmatch(name)]
    except OSError:  # no powercap on this kernel
        return []
    names.sort(key=lambda name: [(len(part), part) for part in name.split(":")])
    return [root / name for name in names if (root / name / "energy_uj").exists()][:MAX_ZONES]


def _entity(folder: Path) -> str:
    """Control type, the zone's own name and those above it: intel-rapl.package-0.dram for intel-rapl:0:1."""
    control, *numbers = folder.name.split(":")
    above = [folder.with_name(":".join([control, *numbers[: i + 1]])) for i in range(len(numbers))]
    names = [text_of(zone / "name") or zone.name.replace(":", "-") for zone in above]
    return ".".join([control, *(re.sub(r"[^A-Za-z0-9_-]", "-", name) for name in names)])


def _facts(folder: Path) -> dict[str, Any]:
    """Zone, where its counter starts again (uJ) and the caps set on it (W), which an operator may change."""
    facts: dict[str, Any] = {"zone": folder.name}
    wraps_at = number_of(folder / "max_energy_range_uj")
    if wraps_at is not None and 0 < wraps_at < _TOO_MUCH:
        facts["wraps_at"] = wraps_at
    for number in range(3):  # long term, short term, peak power (powercap.rst)
        name = text_of(folder / f"constraint_{number}_name")
        limit = number_of(folder / f"constraint_{number}_power_limit_uw")
        if name and limit is not None and 0 <= limit < _TOO_MUCH:
            facts[f"limit_{name}"] = limit / 1e6
    return facts
