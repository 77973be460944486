"""The PCI bus: AER errors of devices, GPUs on the bus, and GPUs with a driver.

Reads only what the kernel has in memory (vendor, class, driver, error counts), never a device's configuration space, so
no read waits for a device that does not respond.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, NoData, Reading, wall_clock
from agents.collector import Device as Entity
from agents.collectors.columns import count_column, value_column
from agents.collectors.kernel_files import read_text
from pipeline.model.records import SECOND, Event

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # PCI Code and ID Assignment: VGA controller, 3D controller
_KINDS = ("correctable", "nonfatal", "fatal")
_TOTAL = "TOTAL_ERR_"  # kernel Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats
MAX_DEVICES = 2048
"""Most devices of the bus that are read. Chosen: 8 GPUs, NICs and their switches are about 200."""
MAX_EVENTS = 16
"""Most events of one read. Chosen: the counters still report the rest."""
EVENT_COOLDOWN_US = 300 * SECOND
"""Time without events about one device and kind of error after an event. Chosen: a bad link counts continuously."""


def parse_aer(text: str) -> dict[str, int]:
    """Returns the counts by name of an aer_dev_* file. Lines in another format are skipped."""
    found = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        if name and number.isascii() and number.isdecimal() and len(number) < 21:
            found[name] = int(number)
    return found


def total_errors(errors: Mapping[str, int]) -> int:
    """Returns the kernel's total if it provides one, else the sum."""
    reported = [n for name, n in errors.items() if name.startswith(_TOTAL)]
    return reported[0] if reported else sum(errors.values())


@dataclass(frozen=True, slots=True)
class _Device:
    """Vendor and device id as in lspci -n, and whether the device reports errors."""

    identity: str
    reports_errors: bool


@dataclass(frozen=True, slots=True)
class _ReportedErrors:
    """Time and counts of the last event of one device and kind."""

    time: int
    errors: Mapping[str, int]


@dataclass
class Pci(Collector):
    """node.aer_* and node.gpu_*. `gpus_expected`: number of GPUs of the node; 0 = the most seen since start."""

    name: ClassVar[str] = "pci"
    signals: ClassVar[tuple[str, ...]] = (
        *("node.aer_correctable", "node.aer_nonfatal", "node.aer_fatal"),
        *("node.gpu_pci", "node.gpu_driver", "node.gpu_expected"),
    )
    events: ClassVar[tuple[str, ...]] = ("aer", "gpu_count")
    interval: float = 30.0
    root: Path = Path("/sys/bus/pci/devices")
    gpus_expected: int = 0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _devices: dict[str, _Device] = field(default_factory=dict, init=False, repr=False)
    _gpus: dict[str, None] = field(default_factory=dict, init=False, repr=False)
    _reported: dict[tuple[str, str], _ReportedErrors] = field(default_factory=dict, init=False, repr=False)
    _gpu_count: int | None = field(default=None, init=False, repr=False)

    def open(self, node: str) -> None:
        """Checks that the kernel has a PCI bus. Raises NoData if it has not."""
        self._node = node
        if not self.root.is_dir():
            raise NoData(f"{self.root}: no PCI bus; expected a kernel with PCI and /sys mounted")

    def read(self) -> tuple[Reading, ...]:
        """Returns the sums of PCIe errors, and events of new errors and of GPUs that left the bus."""
        try:
            names = sorted(name for name in os.listdir(self.root) if _ADDRESS.fullmatch(name))[:MAX_DEVICES]
        except OSError as failed:
            raise NoData(f"{self.root}: {failed.strerror}; expected the devices of the PCI bus") from failed
        self._update_devices(names)
        sums, events = self._read_errors(names)
        present = [name for name in names if name in self._gpus]
        driven = sum((self.root / name / "driver").is_symlink() for name in present)
        expected = self.gpus_expected or len(self._gpus)
        columns = {f"node.aer_{kind}": count_column([sums[kind]]) for kind in _KINDS}
        columns |= {"node.gpu_pci": value_column(len(present)), "node.gpu_driver": value_column(driven)}
        columns["node.gpu_expected"] = value_column(expected)
        events += self._count_events(present, expected)
        return (Reading("node", (f"node:{self._node}",), columns, tuple(events)),)

    def inventory(self) -> Mapping[str, Entity]:
        """Returns the node with the PCI addresses of its GPUs."""
        return {f"node:{self._node}": Entity((), {"gpu_addresses": list(self._gpus)} if self._gpus else {})}

    def _update_devices(self, names: list[str]) -> None:
        """Reads the identity of new devices and drops removed ones. A GPU stays expected."""
        for name in self._devices.keys() - set(names):
            del self._devices[name]
            for kind in _KINDS:
                self._reported.pop((name, kind), None)
        for name in names:
            if name not in self._devices:
                below = self.root / name
                vendor, device, kind = (read_text(below / file) or "" for file in ("vendor", "device", "class"))
                reports = (below / "aer_dev_correctable").exists()
                self._devices[name] = _Device(f"{vendor}:{device}".replace("0x", ""), reports)
                if vendor == _NVIDIA and kind.startswith(_GPU_CLASSES) and len(self._gpus) < MAX_DEVICES:
                    self._gpus[name] = None

    def _read_errors(self, names: list[str]) -> tuple[dict[str, int | None], list[Event]]:
        """Returns the sums by kind, missing if no device reports errors, and the events of growth."""
        sums: dict[str, int | None] = dict.fromkeys(_KINDS)
        events: list[Event] = []
        for name, kind in product((n for n in names if self._devices[n].reports_errors), _KINDS):
            if errors := parse_aer(read_text(self.root / name / f"aer_dev_{kind}") or ""):
                sums[kind] = (sums[kind] or 0) + total_errors(errors)
                if len(events) < MAX_EVENTS and (event := self._growth_event(name, kind, errors)):
                    events.append(event)
        return sums, events

    def _growth_event(self, name: str, kind: str, errors: Mapping[str, int]) -> Event | None:
        """Returns an event if the counts of the device grew since the last event and its cooldown is over."""
        reported, now = self._reported.get((name, kind)), self._now()
        if reported is None or total_errors(errors) < total_errors(
            reported.errors
        ):  # first read, or the device was reset
            self._reported[name, kind] = _ReportedErrors(now - EVENT_COOLDOWN_US, errors)
            return None
        growth = total_errors(errors) - total_errors(reported.errors)
        if not growth or 0 <= now - reported.time < EVENT_COOLDOWN_US:  # below 0: the clock was set back
            return None
        self._reported[name, kind] = _ReportedErrors(now, errors)
        new = {e: n - reported.errors.get(e, 0) for e, n in errors.items() if not e.startswith(_TOTAL)}
        data = {
            "device": name,
            "id": self._devices[name].identity,
            "kind": kind,
            "growth": growth,
            "total": total_errors(errors),
        }
        return Event(now, f"node:{self._node}", "aer", {**data, "errors": {e: n for e, n in new.items() if n}})

    def _count_events(self, present: list[str], expected: int) -> list[Event]:
        """Returns an event when the number changed and at the first read, which ends what an earlier run reported."""
        before, self._gpu_count = self._gpu_count, len(present)
        if len(present) == before:
            return []
        missing = [name for name in self._gpus if name not in present]
        data = {"expected": expected, "present": len(present), "missing": missing, "source": "pci"}
        return [Event(self._now(), f"node:{self._node}", "gpu_count", data)]
