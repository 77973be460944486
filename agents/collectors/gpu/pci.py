"""The PCI bus as the kernel has it: errors reported by devices (AER), GPUs on the bus and GPUs with a driver.

Only what the kernel remembers is read (vendor, class, driver, error counts), never a device's configuration space, so
that no look can wait for a device that does not answer.
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
from agents.collectors.kernel_files import text_of
from pipeline.model.records import SECOND, Event

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # PCI Code and ID Assignment: VGA controller, 3D controller
_KINDS = ("correctable", "nonfatal", "fatal")
_TOTAL = "TOTAL_ERR_"  # kernel Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats
MAX_DEVICES = 2048
"""Most devices of one bus that are looked at; chosen: 8 GPUs, NICs and their switches are about 200."""
MAX_EVENTS = 16
"""Most events of one look; chosen: the counters go on telling the rest."""
QUIET = 300 * SECOND
"""How long one device stays silent about one kind of error after an event; chosen: a bad link counts for ever."""


def aer(text: str) -> dict[str, int]:
    """Counts by name of an aer_dev_* file; lines of another shape are left out."""
    found = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(" ")
        if name and number.isascii() and number.isdecimal() and len(number) < 21:
            found[name] = int(number)
    return found


def total(errors: Mapping[str, int]) -> int:
    """The kernel's own total where it gives one, else the sum."""
    told = [n for name, n in errors.items() if name.startswith(_TOTAL)]
    return told[0] if told else sum(errors.values())


@dataclass(frozen=True, slots=True)
class _Device:
    """vendor:device as in lspci -n, and whether the device reports errors."""

    identity: str
    reports: bool


@dataclass(frozen=True, slots=True)
class _Told:
    """What the last event of one device and kind said."""

    time: int
    errors: Mapping[str, int]


@dataclass
class Pci(Collector):
    """node.aer_* and node.gpu_*. `gpus_expected`: how many GPUs there must be; 0 = the most seen since start."""

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
    _told: dict[tuple[str, str], _Told] = field(default_factory=dict, init=False, repr=False)
    _present: int | None = field(default=None, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        if not self.root.is_dir():
            raise NoData(f"{self.root}: no PCI bus; wanted a kernel with PCI and /sys mounted")

    def read(self) -> tuple[Reading, ...]:
        try:
            names = sorted(name for name in os.listdir(self.root) if _ADDRESS.fullmatch(name))[:MAX_DEVICES]
        except OSError as failed:
            raise NoData(f"{self.root}: {failed.strerror}; wanted the devices of the PCI bus") from failed
        self._follow(names)
        sums, events = self._errors(names)
        present = [name for name in names if name in self._gpus]
        driven = sum((self.root / name / "driver").is_symlink() for name in present)
        expected = self.gpus_expected or len(self._gpus)
        columns = {f"node.aer_{kind}": count_column([sums[kind]]) for kind in _KINDS}
        columns |= {"node.gpu_pci": value_column(len(present)), "node.gpu_driver": value_column(driven)}
        columns["node.gpu_expected"] = value_column(expected)
        events += self._counted(present, expected)
        return (Reading("node", (f"node:{self._node}",), columns, tuple(events)),)

    def inventory(self) -> Mapping[str, Entity]:
        return {f"node:{self._node}": Entity((), {"gpu_addresses": list(self._gpus)} if self._gpus else {})}

    def _follow(self, names: list[str]) -> None:
        """Asks devices that came what they are, and forgets those that went; a GPU stays expected."""
        for name in self._devices.keys() - set(names):
            del self._devices[name]
            for kind in _KINDS:
                self._told.pop((name, kind), None)
        for name in names:
            if name not in self._devices:
                below = self.root / name
                vendor, device, kind = (text_of(below / file) or "" for file in ("vendor", "device", "class"))
                reports = (below / "aer_dev_correctable").exists()
                self._devices[name] = _Device(f"{vendor}:{device}".replace("0x", ""), reports)
                if vendor == _NVIDIA and kind.startswith(_DISPLAY) and len(self._gpus) < MAX_DEVICES:
                    self._gpus[name] = None

    def _errors(self, names: list[str]) -> tuple[dict[str, int | None], list[Event]]:
        """Sums by kind, missing if no device reports errors, and events of growth."""
        sums: dict[str, int | None] = dict.fromkeys(_KINDS)
        events: list[Event] = []
        for name, kind in product((n for n in names if self._devices[n].reports), _KINDS):
            if errors := aer(text_of(self.root / name / f"aer_dev_{kind}") or ""):
                sums[kind] = (sums[kind] or 0) + total(errors)
                if len(events) < MAX_EVENTS and (event := self._grown(name, kind, errors)):
                    events.append(event)
        return sums, events

    def _grown(self, name: str, kind: str, errors: Mapping[str, int]) -> Event | None:
        """The event, if the device counted more than the last one said and it was long enough ago."""
        told, now = self._told.get((name, kind)), self._now()
        if told is None or total(errors) < total(told.errors):  # first look, or the device was reset
            self._told[name, kind] = _Told(now - QUIET, errors)
            return None
        growth = total(errors) - total(told.errors)
        if not growth or 0 <= now - told.time < QUIET:  # below 0: the clock was set back
            return None
        self._told[name, kind] = _Told(now, errors)
        new = {e: n - told.errors.get(e, 0) for e, n in errors.items() if not e.startswith(_TOTAL)}
        data = {
            "device": name,
            "id": self._devices[name].identity,
            "kind": kind,
            "growth": growth,
            "total": total(errors),
        }
        return Event(now, f"node:{self._node}", "aer", {**data, "errors": {e: n for e, n in new.items() if n}})

    def _counted(self, present: list[str], expected: int) -> list[Event]:
        """The event, if the number of GPUs changed; at the first look only if it is not what is expected."""
        before, self._present = self._present, len(present)
        if len(present) == (expected if before is None else before):
            return []
        missing = [name for name in self._gpus if name not in present]
        data = {"expected": expected, "present": len(present), "missing": missing, "source": "pci"}
        return [Event(self._now(), f"node:{self._node}", "gpu_count", data)]
