"""The server itself from /proc, /sys and statvfs: load, processors, memory, pressure, disks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.procfile import ProcFile
from pipeline.signals import of_class

_FILES = ("loadavg", "stat", "meminfo", "uptime", "diskstats", "pressure/cpu", "pressure/memory", "pressure/io")
_SECTOR = 512  # bytes; the unit of /proc/diskstats whatever the disk's own (kernel Documentation/admin-guide/iostats)
_NOT_WHOLE = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")  # no disks, or layers over disks that are counted already
Values = dict[str, float | int]


@dataclass
class Host(Collector):
    """node.*: one entity, this server. `disk` is the path whose file system is watched."""

    name: ClassVar[str] = "host"
    signals: ClassVar[tuple[str, ...]] = tuple(s.name for s in of_class("node"))
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    disk: Path = Path("/")
    _files: dict[str, ProcFile] = field(default_factory=dict, init=False, repr=False)
    _disks: dict[str, bool] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        self._tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
        self._files = {name: ProcFile(self.proc / name) for name in _FILES}
        if not any(file.present for file in self._files.values()):
            raise NoData(f"no Linux kernel statistics below {self.proc}")

    def read(self) -> tuple[Reading, ...]:
        values: Values = {}
        for name, parse in (
            ("loadavg", _load),
            ("stat", self._processors),
            ("meminfo", _memory),
            ("uptime", _uptime),
            ("diskstats", self._transfers),
        ):
            if text := self._files[name].text():
                values |= parse(text)
        for resource in ("cpu", "memory", "io"):
            if text := self._files[f"pressure/{resource}"].text():
                values |= _pressure(resource, text)
        values |= self._space()
        columns = {name: np.array([value]) for name, value in values.items()}
        return (Reading("node", (f"node:{self._node}",), columns),)

    def inventory(self) -> Mapping[str, Device]:
        kernel = ProcFile(self.proc / "sys/kernel/osrelease")
        facts: dict[str, Any] = {"kernel": (kernel.text() or "").strip(), "architecture": os.uname().machine}
        kernel.close()
        return {f"node:{self._node}": Device((), {key: value for key, value in facts.items() if value})}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _processors(self, text: str) -> Values:
        lines = text.partition("\nintr")[0].splitlines()
        ticks = [int(t) for t in lines[0].split()[1:9]] + [0] * 8
        user, nice, system, idle, iowait, irq, softirq, steal = ticks[:8]  # guest time is part of user
        return {
            "node.cpu_count": len(lines) - 1,
            "node.cpu_busy_time": int((user + nice + system + irq + softirq + steal) * self._tick_ms),
            "node.cpu_idle_time": int((idle + iowait) * self._tick_ms),
        }

    def _transfers(self, text: str) -> Values:
        read = written = 0
        for line in text.splitlines():
            words = line.split()
            if len(words) > 9 and self._whole(words[2]):
                read += int(words[5])
                written += int(words[9])
        return {"node.disk_read": read * _SECTOR, "node.disk_written": written * _SECTOR}

    def _whole(self, name: str) -> bool:
        """Whether a name of diskstats is a disk and neither a partition nor a layer; looked up once per name."""
        if name not in self._disks:
            below = self.sys / "block" / name.replace("/", "!")
            self._disks[name] = not name.startswith(_NOT_WHOLE) and below.exists()
        return self._disks[name]

    def _space(self) -> Values:
        try:
            found = os.statvfs(self.disk)
        except OSError:  # the file system is gone: its signals are missing, the others are not
            return {}
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        return {"node.disk_used": used, "node.disk_total": found.f_blocks * found.f_frsize}


def _load(text: str) -> Values:
    words = text.split()
    return {"node.load1": float(words[0]), "node.load5": float(words[1])}


def _memory(text: str) -> Values:
    kib = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree"):
            kib[name] = int(rest.split()[0]) * 1024
    found: Values = {}
    if "MemTotal" in kib:
        found["node.memory_total"] = kib["MemTotal"]
    if "MemAvailable" in kib:
        found["node.memory_available"] = kib["MemAvailable"]
    if "SwapTotal" in kib and "SwapFree" in kib:
        found["node.swap_used"] = kib["SwapTotal"] - kib["SwapFree"]
    return found


def _uptime(text: str) -> Values:
    return {"node.uptime": float(text.split()[0])}


def _pressure(resource: str, text: str) -> Values:
    """`total` of the line `some`: microseconds since boot (kernel Documentation/accounting/psi)."""
    for line in text.splitlines():
        if line.startswith("some ") and "total=" in line:
            return {f"node.{resource}_pressure": int(line.partition("total=")[2])}
    return {}
