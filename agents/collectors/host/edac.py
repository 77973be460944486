"""Memory errors counted by the memory controllers, from /sys/devices/system/edac: per controller and per module.

These files show variables of the kernel's EDAC core (drivers/edac/edac_mc_sysfs.c); reading them accesses no device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import read_number, read_text

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
