"""Processes in uninterruptible sleep (state D) from /proc: a hung driver or file system shows there first.

Only the first thread of each process is read. /proc/PID/stat takes no lock that such a process can hold. Where it
sleeps (wchan) is read only for a few.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.columns import value_column
from agents.collectors.kernel_files import read_text
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Event

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


def parse_stat(text: bytes) -> ProcessStat | None:
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
        if b") D " in text and (found := parse_stat(text)) is not None and found.state == "D":
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
