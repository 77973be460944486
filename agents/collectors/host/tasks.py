"""Processes in uninterruptible sleep (state D) from /proc: a wedged driver or file system shows there first.

Only the first thread of each process is looked at. /proc/PID/stat takes no lock that such a process can hold; where it
sleeps (wchan) is asked of few.
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
from agents.collectors.kernel_files import text_of
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Event

_MAX_STAT = 1024  # bytes; 52 numbers and a name of at most 64 (kernel fs/proc/array.c)
MAX_PROCESSES = 32768
"""Most processes of one look: the kernel's default pid_max; a look at so many takes half a second."""
MAX_EVENTS = 8
"""Most events of one look; chosen: what holds one process holds them all."""
_STATE, _USER_TIME, _SYSTEM_TIME, _START = 0, 11, 12, 19  # positions after the name, proc_pid_stat(5) less 3


@dataclass(frozen=True, slots=True)
class Task:
    """One process: `start` and `used` in clock ticks, since boot and of processor time."""

    comm: str
    state: str
    start: int
    used: int


def task(text: bytes) -> Task | None:
    """What /proc/PID/stat says; None if it has another shape. A name may hold spaces and parentheses."""
    head, _, tail = text.rpartition(b")")
    words = tail.split()
    try:
        numbers = [int(words[at]) for at in (_START, _USER_TIME, _SYSTEM_TIME)]
    except (ValueError, IndexError):
        return None
    comm = head.partition(b"(")[2].decode("utf-8", "replace")
    return Task(comm, words[_STATE].decode("ascii", "replace"), numbers[0], numbers[1] + numbers[2])


@dataclass
class _Wait:
    """One sleep under way: the process as it was at the first look, and when that was."""

    task: Task
    since: int
    told: bool = False


def expression(patterns: Sequence[str]) -> re.Pattern[str]:
    """What matches where one of the patterns does; nothing without any. Raises ConfigError where one is none."""
    for text in (*patterns, "|".join(f"(?:{pattern})" for pattern in patterns)):
        try:
            whole = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{text!r} is no regular expression: {error}") from None
    return whole if patterns else re.compile(r"(?!)")


@dataclass
class Tasks(Collector):
    """node.tasks_blocked*. `gpu`: regular expressions of the names of driver and training processes.

    A sleep counts as one as long as the process is in state D at every look and used no processor in between; one of
    `told_after` seconds (the kernel's own hung_task_timeout_secs by default) is an event.
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
        metadata=constraint("regular expressions, flags such as (?i) as (?i:...)", lambda v: bool(expression(v))),
    )
    told_after: float = 120.0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _waits: dict[int, _Wait] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        self._gpu = expression(self.gpu)
        if not (self.proc / "self" / "stat").exists():
            raise NoData(f"{self.proc}: no processes; wanted /proc mounted")

    def read(self) -> tuple[Reading, ...]:
        now, before = self._now(), self._waits
        self._waits = {}
        for pid, found in blocked(self.proc):
            known = before.get(pid)
            self._waits[pid] = known if known is not None and known.task == found else _Wait(found, now)
        waits = self._waits.values()
        columns = {
            "node.tasks_blocked": value_column(len(waits)),
            "node.tasks_blocked_gpu": value_column(sum(self._gpu.search(wait.task.comm) is not None for wait in waits)),
            "node.tasks_blocked_longest": value_column(max((now - w.since for w in waits), default=0) / SECOND),
        }
        return (Reading("node", (f"node:{self._node}",), columns, tuple(self._events(now))),)

    def inventory(self) -> Mapping[str, Device]:
        return {f"node:{self._node}": Device()}

    def _events(self, now: int) -> list[Event]:
        """The longest sleeps first; each is told once."""
        long = [(w.since, pid) for pid, w in self._waits.items() if not w.told and self._is_long(now - w.since)]
        events = []
        for since, pid in sorted(long)[:MAX_EVENTS]:
            self._waits[pid].told = True
            where = text_of(self.proc / str(pid) / "wchan")
            data = {"pid": pid, "comm": self._waits[pid].task.comm, "seconds": (now - since) / SECOND}
            data["wchan"] = where if where and where != "0" else None  # 0: not for us to know, or it woke
            events.append(Event(now, f"node:{self._node}", "task_blocked", data))
        return events

    def _is_long(self, microseconds: int) -> bool:
        return microseconds >= self.told_after * SECOND


def blocked(proc: Path) -> Iterator[tuple[int, Task]]:
    """Every process in state D; one that ends while it is looked at is none."""
    pids = [int(name) for name in os.listdir(proc) if name.isascii() and name.isdecimal()]
    for pid in pids[:MAX_PROCESSES]:
        text = _stat(f"{proc}/{pid}/stat")
        if b") D " in text and (found := task(text)) is not None and found.state == "D":
            yield pid, found


def _stat(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it ended
        return b""
    try:
        return os.read(handle, _MAX_STAT)
    except OSError:  # it ended (ESRCH)
        return b""
    finally:
        os.close(handle)
