"""When a canary's program runs: at fixed times, within its share of the device's time, one at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.canary.child_process import CanaryProcess
from agents.collectors.canary.ledger import MAX_EVENTS, ResultLedger
from pipeline.model.records import Event

MAX_SAVED_TURNS = 2.0
"""Turns whose unused time is kept. Chosen: a node that was busy for a day must not catch up in one go."""


@dataclass
class ProgramSchedule:
    """Runs one kind of canary: build_command(seconds) returns the command; `timeout` seconds later it is killed.

    `share` limits the program's own processor time, its start included. first_fraction: part of `every` before the
    first start, so that the nodes of a fleet start at different times.
    """

    every: float
    share: float
    timeout: float
    ledger: ResultLedger
    build_command: Callable[[float], list[str]]
    first_fraction: float = 1.0
    monotonic: Callable[[], float] = time.monotonic
    on_line: Callable[[dict[str, Any]], None] = lambda line: None
    cpu_used_s: float = 0.0
    last_failure: str = ""
    _child: CanaryProcess | None = field(default=None, init=False, repr=False)
    _absent: str = field(default="", init=False, repr=False)
    _credit: float = field(default=0.0, init=False, repr=False)
    _next_start: float = field(default=0.0, init=False, repr=False)
    _last_poll: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._last_poll = self.monotonic()
        self._next_start = self._last_poll + self.first_fraction * self.every

    def poll(self) -> list[Event]:
        """Returns events from new output of the program; starts the program when it is due. Never waits."""
        now = self.monotonic()
        self._credit = min(
            self._credit + self.share * (now - self._last_poll), MAX_SAVED_TURNS * self.share * self.every
        )
        self._last_poll = now
        if self._child is not None:
            return self._read_output(self._child, now)
        if now >= self._next_start and self._credit > 0:
            self._next_start = now + self.every - (now - self._next_start) % self.every
            try:
                self._child, self._absent = CanaryProcess(self.build_command(self._credit)), ""
            except OSError as error:  # no memory or no process available: the next turn tries again
                self.last_failure = f"cannot start: {error.strerror}"
        return []

    def _read_output(self, child: CanaryProcess, now: float) -> list[Event]:
        late = now - child.started_at > self.timeout
        if late:
            child.kill()
        over = child.has_ended()  # before the last lines are read, so that none is missed
        events = [event for line in child.read_lines() for event in self._handle_line(line)][:MAX_EVENTS]
        if over or late:
            self._credit -= child.cpu_s
            self.cpu_used_s += child.cpu_s
            failure = (
                "killed: it took too long"
                if late
                else f"{child.death_signal or 'failed'}: {self._absent or child.last_text}"
            )
            self.last_failure = self._absent if child.status == 0 else failure
            if child.death_signal and (event := self.ledger.record_death(child.death_signal)):
                events.append(event)
            child.close()
            self._child = None
        return events

    def _handle_line(self, line: dict[str, Any]) -> Iterable[Event]:
        self.on_line(line)
        if "skipped" in line:
            line = {**line, "absent": f"core {line.get('device')} cannot be tested: {line['skipped']}"}
        self._absent = str(line.get("absent", self._absent))[:200]
        event = self.ledger.record_line(line)
        return [event] if event else []

    @property
    def running_pid(self) -> int:
        """The program's pid; 0 if none runs."""
        return 0 if self._child is None else self._child.pid

    def close(self) -> None:
        """Ends a running program; the devices' counts stay."""
        if self._child is not None:
            self._child.close()
            self._child = None


@dataclass
class CoreRotation:
    """The cores in turn: each program continues after the last core of the one before."""

    cores: list[int]
    position: int = 0

    def order(self, first: Iterable[str]) -> list[int]:
        """Returns all cores, those with wrong answers first."""
        suspects = [int(core) for core in first if core.isdigit() and int(core) in self.cores]
        turned = self.cores[self.position :] + self.cores[: self.position]
        return list(dict.fromkeys([*suspects, *turned]))

    def advance(self, line: dict[str, Any]) -> None:
        """Moves on after a core that was tested or is offline; a suspect core out of its turn moves nothing."""
        core = line.get("device")
        came = line.get("begin") or "skipped" in line
        if came and isinstance(core, str) and core == str(self.cores[self.position]):
            self.position = (self.position + 1) % len(self.cores)


def list_cores(root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Returns one processor per core that we may use: threads of a core share their execution units."""
    allowed = os.sched_getaffinity(0)
    return sorted({min(_thread_siblings(root, cpu) & allowed, default=cpu) for cpu in allowed})


def _thread_siblings(root: Path, cpu: int) -> set[int]:
    try:
        text = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        ranges = [part.partition("-") for part in text.strip().split(",")]
        return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):  # unknown to this kernel: each processor counts as a core
        return {cpu}
