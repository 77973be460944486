"""Which software and firmware the server runs, as attributes of the node; an event when one changes while we watch.

All but the names of the operating system and of ourselves is memory of the kernel; those two are read once, while the
agent starts, since a root disk that hangs must not hold the agent.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, Reading, Rhythm, wall_clock
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import number_of, text_of
from pipeline.model.records import Event

_VERSIONS_S = 3600.0
_MODULES = ("nvidia", "mlx5_core", "gdrdrv", "nvidia_peermem", "lustre", "mmfs26", "knem", "efa", "ena")
_BOARD = ("sys_vendor", "product_name", "product_version", "board_name", "bios_vendor", "bios_version", "bios_date")
_MAX_TEXT = 200  # characters of one version; chosen: longer ones are no versions


def os_release(text: str) -> dict[str, str]:
    """KEY=VALUE lines, quoted as in a shell (os-release(5)); lines of another shape are left out."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        try:
            words = shlex.split(value)
        except ValueError:  # an open quote
            continue
        if equals and name.isidentifier() and len(words) == 1:
            found[name] = words[0][:_MAX_TEXT]
    return found


@dataclass
class Versions(Collector):
    """Attributes of the node: kernel, system, drivers, firmware, ourselves; node.kernel_tainted."""

    name: ClassVar[str] = "versions"
    signals: ClassVar[tuple[str, ...]] = ("node.kernel_tainted",)
    events: ClassVar[tuple[str, ...]] = ("version",)
    interval: float = 60.0
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    release: tuple[Path, ...] = (Path("/etc/os-release"), Path("/usr/lib/os-release"))
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _system: Mapping[str, str] | None = field(default=None, init=False, repr=False)
    _ours: str | None = field(default=None, init=False, repr=False)
    _versions: Mapping[str, str] | None = field(default=None, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._rhythm = node, Rhythm(node)
        if self._system is None:
            texts = [text for path in self.release if (text := text_of(path))]
            self._system, self._ours = os_release(texts[0]) if texts else {}, _our_version()

    def read(self) -> tuple[Reading, ...]:
        events = self._changes() if self._rhythm.due(_VERSIONS_S) else ()
        tainted = count_column([number_of(self.proc / "sys/kernel/tainted")])
        return (Reading("node", (f"node:{self._node}",), {"node.kernel_tainted": tainted}, events),)

    def inventory(self) -> Mapping[str, Device]:
        return {f"node:{self._node}": Device((), {**(self._versions or {}), **self._places()})}

    def _changes(self) -> tuple[Event, ...]:
        """The first look finds no change: inventory tells all of it."""
        before, self._versions = self._versions, self._found()
        if before is None or before == self._versions:
            return ()
        names = sorted(n for n in before.keys() | self._versions.keys() if before.get(n) != self._versions.get(n))
        data = {"versions": {n: self._versions.get(n) for n in names}, "before": {n: before.get(n) for n in names}}
        return (Event(self._now(), f"node:{self._node}", "version", data),)

    def _found(self) -> dict[str, str]:
        """A module without a version is told as loaded: the kernel's own drivers have that of the kernel."""
        found = {
            "kernel": text_of(self.proc / "sys/kernel/osrelease"),
            "operating_system": (self._system or {}).get("PRETTY_NAME"),
            "agent": self._ours,
        }
        for module in _MODULES:
            below = self.sys / "module" / module
            version = text_of(below / "version")
            found[f"{module}_driver"] = version or ("loaded" if below.is_dir() else None)
        for name in _BOARD:
            found[name] = text_of(self.sys / "class/dmi/id" / name)
        return {name: text[:_MAX_TEXT] for name, text in found.items() if text}

    def _places(self) -> dict[str, str]:
        """Serial numbers by which people find the machine; only root may read them."""
        told = {n: text_of(self.sys / "class/dmi/id" / n) for n in ("product_serial", "board_serial", "product_uuid")}
        return {name: text[:_MAX_TEXT] for name, text in told.items() if text}


def _our_version() -> str | None:
    """From the folder's name that the installer left; importlib.metadata would cost the agent 4 MiB."""
    found = (path.name for folder in sys.path for path in Path(folder).glob("fleetpulse-*.dist-info"))
    return next((name.removeprefix("fleetpulse-").removesuffix(".dist-info") for name in found), None)
