"""The server from /proc: load, processors, memory, pressure and disks, and processes in uninterruptible sleep.

No read waits for a device. The parsers raise one of PARSE_ERRORS for text in another format. What a kernel does not
report has no entry. A hung driver or file system shows first as processes in state D: only the first thread of each
process is read; /proc/PID/stat takes no lock that such a process can hold; where it sleeps (wchan) is read for a few.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.columns import count_column, value_column
from agents.collectors.kernel_files import ProcFile, read_text
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Event

SignalValues = dict[str, float | int]
PARSE_ERRORS = (ValueError, IndexError, OverflowError)
_TAIL = re.compile(r"\nctxt (\d+)")


def parse_loadavg(text: str) -> SignalValues:
    """Parses /proc/loadavg."""
    words = text.split()
    return {"node.load1": float(words[0]), "node.load5": float(words[1])}


def parse_stat(text: str, tick_ms: float) -> SignalValues:
    """Parses /proc/stat, whose times are in ticks of `tick_ms` (kernel Documentation/filesystems/proc, section 1.7)."""
    lines = text.partition("\nintr")[0].splitlines()
    ticks = [int(t) for t in lines[0].split()[1:9]] + [0] * 8
    user, nice, system, _, iowait, irq, softirq, steal = (int(t * tick_ms) for t in ticks[:8])  # user includes guests
    found: SignalValues = {
        "node.cpu_count": len(lines) - 1,
        "node.cpu_busy_time": int(sum(ticks[:8]) * tick_ms) - int((ticks[3] + ticks[4]) * tick_ms),
        "node.cpu_idle_time": int((ticks[3] + ticks[4]) * tick_ms),
        "node.cpu_user_time": user + nice,
        "node.cpu_system_time": system,
        "node.cpu_iowait_time": iowait,
        "node.cpu_irq_time": irq + softirq,
        "node.cpu_steal_time": steal,
    }
    if switches := _TAIL.search(text):
        found["node.context_switches"] = int(switches[1])
    return found


MAX_DECREASE_MS = 60_000
"""Up to so much less, the idle times are no reset. Chosen: the unfinished idle periods of some hundred processors."""


@dataclass
class IdleTimes:
    """The idle times of /proc/stat, which may decrease without a reset: then the largest one so far.

    An idle processor's wait for I/O becomes idle time when the waiting task continues on another processor; the value
    of iowait "will decrease in certain conditions" (kernel Documentation/filesystems/proc.rst, section 1.7). The idle
    time contains it and is not read at the same moment.
    """

    _largest: SignalValues = field(default_factory=dict)

    def hold(self, values: SignalValues) -> None:
        """Replaces values that are a little smaller than before; takes a greater decrease as a reset."""
        for name in ("node.cpu_idle_time", "node.cpu_iowait_time"):
            if name in values:
                before = self._largest.get(name, 0)
                if 0 < before - values[name] <= MAX_DECREASE_MS:
                    values[name] = before
                self._largest[name] = values[name]


_MEMORY = {
    # signal -> lines of /proc/meminfo that are added; all must exist
    "node.memory_total": ("MemTotal",),
    "node.memory_available": ("MemAvailable",),
    "node.memory_cached": ("Cached", "Buffers"),
    "node.memory_dirty": ("Dirty", "Writeback"),
    "node.memory_kernel": ("SUnreclaim",),
    "node.memory_poisoned": ("HardwareCorrupted",),
}


def parse_meminfo(text: str) -> SignalValues:
    """Parses /proc/meminfo. Sizes are in KiB; huge pages are counted in pages of `Hugepagesize`."""
    reported = _parse_number_lines(text)
    found: SignalValues = {
        signal: 1024 * sum(reported[line] for line in lines)
        for signal, lines in _MEMORY.items()
        if all(line in reported for line in lines)
    }
    if "SwapTotal" in reported and "SwapFree" in reported:
        found["node.swap_used"] = (reported["SwapTotal"] - reported["SwapFree"]) * 1024
    if size := reported.get("Hugepagesize", 0) * 1024:
        for signal, line in (("total", "HugePages_Total"), ("free", "HugePages_Free")):
            if line in reported:
                found[f"node.hugepages_{signal}"] = reported[line] * size
    return found


def parse_numa_meminfo(texts: Iterable[str]) -> SignalValues:
    """Parses /sys/devices/system/node/nodeN/meminfo. Memory without processors, such as a GPU's, is included."""
    free = [reported["MemFree"] * 1024 for text in texts if "MemFree" in (reported := _parse_number_lines(text))]
    return {"node.numa_free_min": min(free)} if free else {}


def parse_vmstat(text: str) -> SignalValues:
    """Parses /proc/vmstat."""
    reported = dict(line.split() for line in text.splitlines() if line.startswith(("numa_miss ", "oom_kill ")))
    names = {"node.numa_misses": "numa_miss", "node.oom_kills": "oom_kill"}
    return {signal: int(reported[line]) for signal, line in names.items() if line in reported}


def parse_uptime(text: str) -> SignalValues:
    """Parses /proc/uptime."""
    return {"node.uptime": float(text.split()[0])}


def parse_pressure(resource: str, text: str) -> SignalValues:
    """Parses /proc/pressure/RESOURCE: `total` is microseconds since boot (kernel Documentation/accounting/psi).

    For processors only `some` is meaningful system-wide: never do all tasks wait for a processor.
    """
    found: SignalValues = {}
    for line in text.splitlines():
        name = f"node.{resource}_pressure" + ("_full" if line.startswith("full ") else "")
        if "total=" in line and name != "node.cpu_pressure_full":
            found[name] = int(line.partition("total=")[2])
    return found


def _parse_number_lines(text: str) -> Mapping[str, int]:
    """Returns number by name from lines `[Node N] NAME: NUMBER [kB]`."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if rest:
            found[name.rpartition(" ")[2]] = int(rest.split()[0])
    return found


_SECTOR = 512  # bytes; the unit of /proc/diskstats for every disk (kernel Documentation/admin-guide/iostats)
_NOT_WHOLE = (
    "loop",
    "ram",
    "zram",
    "dm-",
    "md",
    "sr",
    "fd",
)  # not disks, or layers above disks that are already counted
_CONTROLLER = re.compile(r"nvme\d+")
_FIELDS = {
    # signal -> (position in a line, factor), kernel Documentation/admin-guide/iostats
    "disk.reads": (3, 1),
    "disk.read": (5, _SECTOR),
    "disk.read_time": (6, 1),
    "disk.writes": (7, 1),
    "disk.written": (9, _SECTOR),
    "disk.write_time": (10, 1),
    "disk.in_flight": (11, 1),
    "disk.io_time": (12, 1),
}
DISK_SIGNALS = (*_FIELDS, "node.disk_read", "node.disk_written")
MAX_DISKS = 256
"""Most disks of one node. Chosen: a storage server with 100 drives, twice over."""


def parse_diskstats(text: str) -> dict[str, dict[str, int]]:
    """Returns values by signal of each name in /proc/diskstats. Lines in another format or cut off are skipped."""
    found = {}
    for line in text[: text.rfind("\n") + 1].splitlines():
        words = line.split()
        if len(words) > 12 and all(w.isascii() and w.isdecimal() and len(w) < 21 for w in words[3:13]):
            found[words[2]] = {signal: int(words[at]) * factor for signal, (at, factor) in _FIELDS.items()}
    return found


class WholeDisks:
    """Whole disks, without partitions and layers. Each name is checked once."""

    def __init__(self, sys: Path, node: str) -> None:
        self._sys, self._node = sys, node
        self._known: dict[str, str | None] = {}
        self.entities: tuple[str, ...] = ()

    def read_diskstats(self, text: str) -> tuple[Reading, SignalValues]:
        """Returns the disks and their sums for the node. The namespaces of an NVMe controller are one disk."""
        disks: dict[str, dict[str, int]] = {}
        for name, values in parse_diskstats(text).items():
            disk = self._disk_of(name)
            if disk is not None and (disk in disks or len(disks) < MAX_DISKS):
                sums = disks.setdefault(disk, dict.fromkeys(_FIELDS, 0))
                for signal, value in values.items():
                    sums[signal] += value
        self.entities = tuple(f"disk:{self._node}.{disk}" for disk in disks)
        columns = {signal: count_column(values[signal] for values in disks.values()) for signal in _FIELDS}
        read = sum(values["disk.read"] for values in disks.values())
        written = sum(values["disk.written"] for values in disks.values())
        return Reading("disk", self.entities, columns), {"node.disk_read": read, "node.disk_written": written}

    def _disk_of(self, name: str) -> str | None:
        """Returns the disk of a name in diskstats; None for a partition or a layer."""
        if name not in self._known:
            below = self._sys / "block" / name.replace("/", "!")
            whole = not name.startswith(_NOT_WHOLE) and below.exists()
            controller = (below / "device").resolve().name
            self._known[name] = (controller if _CONTROLLER.fullmatch(controller) else name) if whole else None
        return self._known[name]


_FAST = ("loadavg", "stat", "uptime", "pressure/cpu", "pressure/memory", "pressure/io")
_SLOW = ("meminfo", "vmstat", "diskstats")
_LISTS = ("vmstat",)  # files that the kernel returns in pieces
_SLOW_S = 10.0
_TIMES = ("busy", "idle", "user", "system", "iowait", "irq", "steal")


@dataclass
class Host(Collector):
    """node.*: one entity, this server. disk.*: its whole disks. All of it is the kernel's own accounting."""

    name: ClassVar[str] = "host"
    signals: ClassVar[tuple[str, ...]] = (
        *("node.load1", "node.load5", "node.cpu_count", "node.uptime", "node.context_switches"),
        *(f"node.cpu_{time}_time" for time in _TIMES),
        *(f"node.memory_{part}" for part in ("total", "available", "cached", "dirty", "kernel", "poisoned")),
        *("node.hugepages_total", "node.hugepages_free", "node.swap_used"),
        *("node.numa_free_min", "node.numa_misses", "node.oom_kills"),
        *("node.cpu_pressure", "node.memory_pressure", "node.memory_pressure_full"),
        *("node.io_pressure", "node.io_pressure_full"),
        *DISK_SIGNALS,
    )
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    _files: dict[str, ProcFile] = field(default_factory=dict, init=False, repr=False)
    _numa: list[ProcFile] = field(default_factory=list, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        """Opens the files below /proc and /sys. Raises NoData without kernel statistics."""
        self.close()
        self._node, self._schedule = node, SamplingSchedule(node)
        self._tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
        self._disks, self._idle_times = WholeDisks(self.sys, node), IdleTimes()
        self._files = {name: ProcFile(self.proc / name) for name in (*_FAST, *_SLOW)}
        self._numa = [ProcFile(p) for p in sorted((self.sys / "devices/system/node").glob("node[0-9]*/meminfo"))]
        if not any(file.present for file in self._files.values()):
            raise NoData(f"no Linux kernel statistics below {self.proc}")

    def read(self) -> tuple[Reading, ...]:
        """Returns load, processors and pressure at each call; memory and disks if due."""
        values: SignalValues = {}
        self._add_values(values, "loadavg", parse_loadavg)
        self._add_values(values, "stat", lambda text: parse_stat(text, self._tick_ms))
        self._idle_times.hold(values)
        self._add_values(values, "uptime", parse_uptime)
        for resource in ("cpu", "memory", "io"):
            self._add_values(values, f"pressure/{resource}", partial(parse_pressure, resource))
        disks = self._read_slow(values) if self._schedule.due(_SLOW_S) else ()
        columns = {name: value_column(value) for name, value in values.items()}
        return (Reading("node", (f"node:{self._node}",), columns), *disks)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the node with kernel and architecture, and its disks."""
        facts: dict[str, Any] = {
            "kernel": read_text(self.proc / "sys/kernel/osrelease"),
            "architecture": os.uname().machine,
            "numa_nodes": len(self._numa),
        }
        node = f"node:{self._node}"
        disks = {disk: Device((node,)) for disk in self._disks.entities}
        return {node: Device((), {key: value for key, value in facts.items() if value}), **disks}

    def close(self) -> None:
        """Closes the files."""
        for file in (*self._files.values(), *self._numa):
            file.close()

    def _read_slow(self, values: SignalValues) -> tuple[Reading, ...]:
        """Reads what changes slowly or costs more: memory and disks."""
        self._add_values(values, "meminfo", parse_meminfo)
        self._add_values(values, "vmstat", parse_vmstat)
        numa = [text for file in self._numa if (text := file.text())]
        with suppress(*PARSE_ERRORS):  # see _add_values
            values |= parse_numa_meminfo(numa)
        if (text := self._files["diskstats"].full_text()) is None:
            return ()
        reading, sums = self._disks.read_diskstats(text)
        values |= sums
        return (reading,) if reading.entities else ()

    def _add_values(self, values: SignalValues, name: str, parse: Callable[[str], SignalValues]) -> None:
        """Adds the values of one file. A missing file or one in another format costs only its own signals."""
        file = self._files[name]
        if text := file.full_text() if name in _LISTS else file.text():
            with suppress(*PARSE_ERRORS):  # they are missing, which the store shows
                values |= parse(text)


_MAX_STAT = 1024  # bytes; 52 numbers and a name of at most 64 (kernel fs/proc/array.c)
MAX_PROCESSES = 32768
"""Most processes of one read: the kernel's default pid_max. Reading that many takes half a second."""
MAX_EVENTS = 8
"""Most events of one read. Chosen: what blocks one process blocks them all."""
_STATE, _USER_TIME, _SYSTEM_TIME, _START = 0, 11, 12, 19  # positions after the name, proc_pid_stat(5) less 3


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process: `start` and `cpu_time` in clock ticks, since boot and of processor time."""

    comm: str
    state: str
    start: int
    cpu_time: int


def parse_task_stat(text: bytes) -> ProcessStat | None:
    """Parses /proc/PID/stat; None if it has another format. A name may contain spaces and parentheses."""
    head, _, tail = text.rpartition(b")")
    words = tail.split()
    try:
        numbers = [int(words[at]) for at in (_START, _USER_TIME, _SYSTEM_TIME)]
    except (ValueError, IndexError):
        return None
    comm = head.partition(b"(")[2].decode("utf-8", "replace")
    return ProcessStat(comm, words[_STATE].decode("ascii", "replace"), numbers[0], numbers[1] + numbers[2])


@dataclass
class _BlockedTask:
    """One sleep in progress: the process at the first read, and the time of that read."""

    task: ProcessStat
    since: int
    reported: bool = False


def compile_patterns(patterns: Sequence[str]) -> re.Pattern[str]:
    """Returns an expression that matches where one of the patterns does; nothing if there are none. Raises ConfigError
    for an invalid one.
    """
    for text in (*patterns, "|".join(f"(?:{pattern})" for pattern in patterns)):
        try:
            whole = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{text!r} is not a regular expression: {error}") from None
    return whole if patterns else re.compile(r"(?!)")


@dataclass
class Tasks(Collector):
    """node.tasks_blocked*. `gpu`: regular expressions of the names of driver and training processes.

    A sleep continues as long as the process is in state D at every read and used no processor time in between. A sleep
    of `told_after` seconds (by default the kernel's hung_task_timeout_secs) is an event.
    """

    name: ClassVar[str] = "tasks"
    signals: ClassVar[tuple[str, ...]] = (
        *("node.tasks_blocked", "node.tasks_blocked_gpu"),
        "node.tasks_blocked_longest",
    )
    events: ClassVar[tuple[str, ...]] = ("task_blocked",)
    interval: float = 30.0
    proc: Path = Path("/proc")
    gpu: tuple[str, ...] = field(
        default=("^nvidia", "^nv-", "^python", "^pt_"),
        metadata=constraint("regular expressions, flags such as (?i) as (?i:...)", lambda v: bool(compile_patterns(v))),
    )
    told_after: float = 120.0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _blocked: dict[int, _BlockedTask] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        """Checks that /proc is mounted. Raises NoData if it is not."""
        self._node = node
        self._gpu = compile_patterns(self.gpu)
        if not (self.proc / "self" / "stat").exists():
            raise NoData(f"{self.proc}: no processes; expected /proc mounted")

    def read(self) -> tuple[Reading, ...]:
        """Returns the number of blocked tasks and the longest wait, and events of long waits."""
        now, before = self._now(), self._blocked
        self._blocked = {}
        for pid, found in blocked_processes(self.proc):
            known = before.get(pid)
            self._blocked[pid] = known if known is not None and known.task == found else _BlockedTask(found, now)
        waits = self._blocked.values()
        columns = {
            "node.tasks_blocked": value_column(len(waits)),
            "node.tasks_blocked_gpu": value_column(sum(self._gpu.search(wait.task.comm) is not None for wait in waits)),
            "node.tasks_blocked_longest": value_column(max((now - w.since for w in waits), default=0) / SECOND),
        }
        return (Reading("node", (f"node:{self._node}",), columns, tuple(self._blocked_events(now))),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the node."""
        return {f"node:{self._node}": Device()}

    def _blocked_events(self, now: int) -> list[Event]:
        """Returns events of the longest sleeps first; each is reported once."""
        long = [(w.since, pid) for pid, w in self._blocked.items() if not w.reported and self._is_long(now - w.since)]
        events = []
        for since, pid in sorted(long)[:MAX_EVENTS]:
            self._blocked[pid].reported = True
            where = read_text(self.proc / str(pid) / "wchan")
            data = {"pid": pid, "comm": self._blocked[pid].task.comm, "seconds": (now - since) / SECOND}
            data["wchan"] = where if where and where != "0" else None  # 0: no permission, or it woke up
            events.append(Event(now, f"node:{self._node}", "task_blocked", data))
        return events

    def _is_long(self, microseconds: int) -> bool:
        return microseconds >= self.told_after * SECOND


def blocked_processes(proc: Path) -> Iterator[tuple[int, ProcessStat]]:
    """Yields every process in state D. A process that ends during the read is skipped."""
    pids = [int(name) for name in os.listdir(proc) if name.isascii() and name.isdecimal()]
    for pid in pids[:MAX_PROCESSES]:
        text = _read_stat(f"{proc}/{pid}/stat")
        if b") D " in text and (found := parse_task_stat(text)) is not None and found.state == "D":
            yield pid, found


def _read_stat(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it has ended
        return b""
    try:
        return os.read(handle, _MAX_STAT)
    except OSError:  # it has ended (ESRCH)
        return b""
    finally:
        os.close(handle)
