"""Processors and their memory: frequency and thermal throttling, energy (RAPL), memory errors (EDAC).

Reading scaling_cur_freq takes a lock that a stuck change of governor holds, and on some processors queries the
firmware. So frequency and energy are two collectors. Memory errors are variables of the kernel's EDAC core, per
controller and per module (drivers/edac/edac_mc_sysfs.c); reading them accesses no device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.columns import count_column, readings_by_signals
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
        """Opens the files of clocks and throttle counts. Raises NoData if the kernel has neither."""
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
        """Returns mean and lowest clock of the cores, and the throttle count of all packages."""
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
        """Returns the node with governor, driver and maximum of its clocks."""
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
        """Closes the files."""
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


_ZONE = re.compile(r"(?P<type>[a-z][a-z0-9-]{0,40}):\d{1,4}(:\d{1,4})*")  # intel-rapl:0, intel-rapl:0:1 (powercap.rst)
_MISSING_VALUE = 2**64 - 1  # no counter has this value; it means "missing" in 64 bits
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
        """Opens the energy counters. Raises NoData if there is none, or none is readable."""
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
        """Returns the energy counter of each zone. Raises NoData if none can be read."""
        found = [file.number() for _, file in self._zones.values()]
        if all(value is None for value in found):
            raise NoData(f"none of {len(found)} energy counters below {self.root} can be read")
        values = [v if v is not None and 0 <= v < _MISSING_VALUE else None for v in found]
        entities = (f"sensor:{self._node}.{name}" for name in self._zones)
        return readings_by_signals((e, {"sensor.energy": v}) for e, v in zip(entities, values, strict=True))

    def inventory(self) -> Mapping[str, Device]:
        """Returns the zones with their attributes."""
        parents = (f"node:{self._node}",)
        return {
            f"sensor:{self._node}.{name}": Device(parents, _zone_attributes(f)) for name, (f, _) in self._zones.items()
        }

    def close(self) -> None:
        """Closes the files."""
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


_CONTROLLER = re.compile(r"mc\d+")
_MODULE = re.compile(r"(dimm|rank)\d+")  # drivers that count by chip-select row use rankN for modules
_FACTS = {
    "label": "dimm_label",
    "location": "dimm_location",
    "memory_type": "dimm_mem_type",
    "device_type": "dimm_dev_type",
    "ecc_mode": "dimm_edac_mode",
    "size_mib": "size",
}
MAX_MODULES = 1024
"""Most memory modules of one node. Chosen: 16 controllers of 2 channels with 2 modules each, 16 times over."""


@dataclass
class Edac(Collector):
    """dimm.*: one entity per memory module. node.memory_corrected and node.memory_uncorrected: sums over the
    controllers.
    """

    name: ClassVar[str] = "edac"
    signals: ClassVar[tuple[str, ...]] = (
        *("dimm.corrected", "dimm.uncorrected"),
        *("node.memory_corrected", "node.memory_uncorrected"),
    )
    interval: float = 30.0
    root: Path = Path("/sys/devices/system/edac/mc")
    _node: str = field(default="", init=False, repr=False)
    _controllers: tuple[Path, ...] = field(default=(), init=False, repr=False)
    _modules: Mapping[str, Path] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        """Finds the memory controllers and modules. Raises NoData without a controller."""
        self._node = node
        self._controllers = tuple(p for p in sorted(self.root.glob("mc*")) if _CONTROLLER.fullmatch(p.name))
        if not self._controllers:
            raise NoData(
                f"{self.root}: no memory controller; expected ECC memory and the EDAC driver of this processor"
                " (such as i10nm_edac, skx_edac or amd64_edac: modprobe it)"
            )
        found = [p for mc in self._controllers for p in sorted(mc.iterdir()) if _MODULE.fullmatch(p.name)]
        self._modules = {f"dimm:{node}.{p.parent.name}.{p.name}": p for p in found[:MAX_MODULES]}

    def read(self) -> tuple[Reading, ...]:
        """Returns corrected and uncorrected errors of the node and of each memory module."""
        corrected = [read_number(controller / "ce_count") for controller in self._controllers]
        if all(number is None for number in corrected):
            raise NoData(f"{self.root}: the memory controllers disappeared; expected {self._controllers[0]}/ce_count")
        uncorrected = [read_number(controller / "ue_count") for controller in self._controllers]
        sums = {"node.memory_corrected": _sum_of_all(corrected), "node.memory_uncorrected": _sum_of_all(uncorrected)}
        node = Reading("node", (f"node:{self._node}",), {signal: count_column([n]) for signal, n in sums.items()})
        if not self._modules:
            return (node,)
        columns = {
            "dimm.corrected": count_column(read_number(path / "dimm_ce_count") for path in self._modules.values()),
            "dimm.uncorrected": count_column(read_number(path / "dimm_ue_count") for path in self._modules.values()),
        }
        return (node, Reading("dimm", tuple(self._modules), columns))

    def inventory(self) -> Mapping[str, Device]:
        """Returns the memory modules, and the node with its EDAC drivers."""
        node = f"node:{self._node}"
        modules = {entity: Device((node,), _module_attributes(path)) for entity, path in self._modules.items()}
        drivers = sorted({name for path in self._controllers if (name := read_text(path / "mc_name"))})
        return {node: Device((), {"memory_controllers": drivers} if drivers else {}), **modules}


def _sum_of_all(numbers: list[int | None]) -> int | None:
    """Returns the sum over the controllers; None if one is missing, since the sum would then look like counters that
    decreased.
    """
    reported = [n for n in numbers if n is not None]
    return sum(reported) if len(reported) == len(numbers) else None


def _module_attributes(path: Path) -> dict[str, object]:
    """Returns the attributes of a module."""
    reported = {name: read_text(path / file) for name, file in _FACTS.items()}
    return {name: text for name, text in reported.items() if text}
