"""The server itself from /proc: load, processors, memory, pressure, disks. Nothing here can wait for a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.sources import diskstats, kernel_text
from agents.sources.diskstats import Disks
from agents.sources.kernel_text import Values
from agents.sources.procfile import ProcFile, text_of
from agents.sources.rows import value_column

_FAST = ("loadavg", "stat", "uptime", "pressure/cpu", "pressure/memory", "pressure/io")
_SLOW = ("meminfo", "vmstat", "diskstats")
_LISTS = ("vmstat",)  # files that come in pieces
_SLOW_S = 10.0
_TIMES = ("busy", "idle", "user", "system", "iowait", "irq", "steal")


@dataclass
class Host(Collector):
    """node.*: one entity, this server; disk.*: its whole disks. All of it is the kernel's own bookkeeping."""

    name: ClassVar[str] = "host"
    signals: ClassVar[tuple[str, ...]] = (
        *("node.load1", "node.load5", "node.cpu_count", "node.uptime", "node.context_switches"),
        *(f"node.cpu_{time}_time" for time in _TIMES),
        *(f"node.memory_{part}" for part in ("total", "available", "cached", "dirty", "kernel", "poisoned")),
        *("node.hugepages_total", "node.hugepages_free", "node.swap_used"),
        *("node.numa_free_min", "node.numa_misses", "node.oom_kills"),
        *("node.cpu_pressure", "node.memory_pressure", "node.memory_pressure_full"),
        *("node.io_pressure", "node.io_pressure_full"),
        *diskstats.SIGNALS,
    )
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    _files: dict[str, ProcFile] = field(default_factory=dict, init=False, repr=False)
    _numa: list[ProcFile] = field(default_factory=list, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node, self._rhythm = node, Rhythm(node)
        self._tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
        self._disks = Disks(self.sys, node)
        self._files = {name: ProcFile(self.proc / name) for name in (*_FAST, *_SLOW)}
        self._numa = [ProcFile(p) for p in sorted((self.sys / "devices/system/node").glob("node[0-9]*/meminfo"))]
        if not any(file.present for file in self._files.values()):
            raise NoData(f"no Linux kernel statistics below {self.proc}")

    def read(self) -> tuple[Reading, ...]:
        values: Values = {}
        self._add(values, "loadavg", kernel_text.load)
        self._add(values, "stat", lambda text: kernel_text.processors(text, self._tick_ms))
        self._add(values, "uptime", kernel_text.uptime)
        for resource in ("cpu", "memory", "io"):
            self._add(values, f"pressure/{resource}", partial(kernel_text.pressure, resource))
        disks = self._slow(values) if self._rhythm.due(_SLOW_S) else ()
        columns = {name: value_column(value) for name, value in values.items()}
        return (Reading("node", (f"node:{self._node}",), columns), *disks)

    def inventory(self) -> Mapping[str, Device]:
        facts: dict[str, Any] = {
            "kernel": text_of(self.proc / "sys/kernel/osrelease"),
            "architecture": os.uname().machine,
            "numa_nodes": len(self._numa),
        }
        node = f"node:{self._node}"
        disks = {disk: Device((node,)) for disk in self._disks.seen}
        return {node: Device((), {key: value for key, value in facts.items() if value}), **disks}

    def close(self) -> None:
        for file in (*self._files.values(), *self._numa):
            file.close()

    def _slow(self, values: Values) -> tuple[Reading, ...]:
        """What changes slowly or costs more: memory and disks."""
        self._add(values, "meminfo", kernel_text.memory)
        self._add(values, "vmstat", kernel_text.events)
        numa = [text for file in self._numa if (text := file.text())]
        with suppress(*kernel_text.BROKEN):  # as in _add
            values |= kernel_text.numa_free(numa)
        if (text := self._files["diskstats"].whole()) is None:
            return ()
        reading, sums = self._disks.read(text)
        values |= sums
        return (reading,) if reading.entities else ()

    def _add(self, values: Values, name: str, parse: Callable[[str], Values]) -> None:
        """A file of another shape than is known, or none, costs its own signals only."""
        file = self._files[name]
        if text := file.whole() if name in _LISTS else file.text():
            with suppress(*kernel_text.BROKEN):  # they are missing, which the store shows
                values |= parse(text)
