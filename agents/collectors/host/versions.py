"""Software and firmware versions of the server as attributes of the node, and an event when one changes.

All but the names of the operating system and of the agent are in the kernel's memory. Those two are read once, at the
agent's start, since a hung root disk must not block the agent.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, Reading, SamplingSchedule, wall_clock
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import read_number, read_text
from pipeline.model.records import Event

_VERSIONS_S = 3600.0
_MODULES = ("nvidia", "mlx5_core", "gdrdrv", "nvidia_peermem", "lustre", "mmfs26", "knem", "efa", "ena")
_BOARD = ("sys_vendor", "product_name", "product_version", "board_name", "bios_vendor", "bios_version", "bios_date")
_MAX_TEXT = 200  # characters of one version; chosen: longer texts are not versions


def parse_os_release(text: str) -> dict[str, str]:
    """Parses KEY=VALUE lines, quoted as in a shell (os-release(5)). Lines in another format are skipped."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        try:
            words = shlex.split(value)
        except ValueError:  # an unclosed quote
            continue
        if equals and name.isidentifier() and len(words) == 1:
            found[name] = words[0][:_MAX_TEXT]
    return found


@dataclass
class Versions(Collector):
    """Attributes of the node: kernel, operating system, drivers, firmware, agent. Signal node.kernel_tainted."""

    name: ClassVar[str] = "versions"
    signals: ClassVar[tuple[str, ...]] = ("node.kernel_tainted",)
    events: ClassVar[tuple[str, ...]] = ("version",)
    interval: float = 60.0
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    release: tuple[Path, ...] = (Path("/etc/os-release"), Path("/usr/lib/os-release"))
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _os_release: Mapping[str, str] | None = field(default=None, init=False, repr=False)
    _agent_version: str | None = field(default=None, init=False, repr=False)
    _versions: Mapping[str, str] | None = field(default=None, init=False, repr=False)

    def open(self, node: str) -> None:
        """Reads the release of the operating system and the version of the agent."""
        self._node, self._schedule = node, SamplingSchedule(node)
        if self._os_release is None:
            texts = [text for path in self.release if (text := read_text(path))]
            self._os_release, self._agent_version = parse_os_release(texts[0]) if texts else {}, _installed_version()

    def read(self) -> tuple[Reading, ...]:
        """Returns the taint flags of the kernel, and an event if versions changed."""
        events = self._change_events() if self._schedule.due(_VERSIONS_S) else ()
        tainted = count_column([read_number(self.proc / "sys/kernel/tainted")])
        return (Reading("node", (f"node:{self._node}",), {"node.kernel_tainted": tainted}, events),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the node with versions and serial numbers."""
        return {f"node:{self._node}": Device((), {**(self._versions or {}), **self._serial_numbers()})}

    def _change_events(self) -> tuple[Event, ...]:
        """Returns an event of changed versions. The first read reports none; the inventory contains all of them."""
        before, self._versions = self._versions, self._read_versions()
        if before is None or before == self._versions:
            return ()
        names = sorted(n for n in before.keys() | self._versions.keys() if before.get(n) != self._versions.get(n))
        data = {"versions": {n: self._versions.get(n) for n in names}, "before": {n: before.get(n) for n in names}}
        return (Event(self._now(), f"node:{self._node}", "version", data),)

    def _read_versions(self) -> dict[str, str]:
        """Returns all versions. A module without a version is reported as loaded: the kernel's own drivers have the
        kernel's version.
        """
        found = {
            "kernel": read_text(self.proc / "sys/kernel/osrelease"),
            "operating_system": (self._os_release or {}).get("PRETTY_NAME"),
            "agent": self._agent_version,
        }
        for module in _MODULES:
            below = self.sys / "module" / module
            version = read_text(below / "version")
            found[f"{module}_driver"] = version or ("loaded" if below.is_dir() else None)
        for name in _BOARD:
            found[name] = read_text(self.sys / "class/dmi/id" / name)
        return {name: text[:_MAX_TEXT] for name, text in found.items() if text}

    def _serial_numbers(self) -> dict[str, str]:
        """Returns serial numbers by which people find the machine. Only root may read them."""
        reported_values = {
            n: read_text(self.sys / "class/dmi/id" / n) for n in ("product_serial", "board_serial", "product_uuid")
        }
        return {name: text[:_MAX_TEXT] for name, text in reported_values.items() if text}


def _installed_version() -> str | None:
    """Returns the agent's version from the folder name that the installer left; importlib.metadata would cost 4 MiB."""
    found = (path.name for folder in sys.path for path in Path(folder).glob("fleetpulse-*.dist-info"))
    return next((name.removeprefix("fleetpulse-").removesuffix(".dist-info") for name in found), None)
