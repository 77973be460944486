"""When a canary's program runs: every so often, within its share of the device's time, one at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.canary.child_process import Child
from agents.collectors.canary.ledger import MOST_EVENTS, Ledger
from pipeline.model.records import Event

SAVED = 2.0
"""Turns whose unused time is kept. Chosen: a node that was busy for a day must not catch up at once."""


@dataclass
class Turns:
    """One kind of canary. words(seconds) is the program to start; longest, the seconds after which it is killed.

    The program's own processor time, its start included, is what `share` limits.
    """

    every: float
    share: float
    longest: float
    ledger: Ledger
    words: Callable[[float], list[str]]
    first: float = 1.0
    monotonic: Callable[[], float] = time.monotonic
    heard: Callable[[dict[str, Any]], None] = lambda line: None
    used: float = 0.0
    failed: str = ""
    _child: Child | None = field(default=None, init=False, repr=False)
    _absent: str = field(default="", init=False, repr=False)
    _credit: float = field(default=0.0, init=False, repr=False)
    _next: float = field(default=0.0, init=False, repr=False)
    _before: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._before = self.monotonic()
        self._next = self._before + self.first * self.every  # nodes of a fleet take turns

    def look(self) -> list[Event]:
        """What the program said since the last look; starts it when its turn has come. Never waits."""
        now = self.monotonic()
        self._credit = min(self._credit + self.share * (now - self._before), SAVED * self.share * self.every)
        self._before = now
        if self._child is not None:
            return self._listen(self._child, now)
        if now >= self._next and self._credit > 0:
            self._next = now + self.every - (now - self._next) % self.every
            try:
                self._child, self._absent = Child(self.words(self._credit)), ""
            except OSError as error:  # no memory or no process to be had: at the next turn again
                self.failed = f"cannot start: {error.strerror}"
        return []

    def _listen(self, child: Child, now: float) -> list[Event]:
        late = now - child.began > self.longest
        if late:
            child.end()
        over = child.ended()  # before the last lines are read, so that none is missed
        events = [event for line in child.lines() for event in self._taken(line)][:MOST_EVENTS]
        if over or late:
            self._credit -= child.cpu
            self.used += child.cpu
            said = "killed: it took too long" if late else f"{child.died or 'failed'}: {self._absent or child.last}"
            self.failed = self._absent if child.status == 0 else said
            if child.died and (event := self.ledger.died(child.died)):
                events.append(event)
            child.close()
            self._child = None
        return events

    def _taken(self, line: dict[str, Any]) -> Iterable[Event]:
        self.heard(line)
        if "skipped" in line:
            line = {**line, "absent": f"core {line.get('device')} cannot be tested: {line['skipped']}"}
        self._absent = str(line.get("absent", self._absent))[:200]
        event = self.ledger.take(line)
        return [event] if event else []

    @property
    def running(self) -> int:
        """The program's pid; 0 between turns."""
        return 0 if self._child is None else self._child.pid

    def close(self) -> None:
        """Ends what runs; the devices' counts stay."""
        if self._child is not None:
            self._child.close()
            self._child = None


@dataclass
class Cores:
    """The cores in turn: after a program that came to some of them the next one goes on behind them."""

    all: list[int]
    at: int = 0

    def order(self, first: Iterable[str]) -> list[int]:
        """All cores, those that gave wrong answers first."""
        suspects = [int(core) for core in first if core.isdigit() and int(core) in self.all]
        turned = self.all[self.at :] + self.all[: self.at]
        return list(dict.fromkeys([*suspects, *turned]))

    def heard(self, line: dict[str, Any]) -> None:
        """Goes on behind a core that had its turn or is offline; a suspect out of its turn moves nothing."""
        core = line.get("device")
        came = line.get("begin") or "skipped" in line
        if came and isinstance(core, str) and core == str(self.all[self.at]):
            self.at = (self.at + 1) % len(self.all)


def cores(root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One processor of each core that we may use, by its number: threads of a core share what computes."""
    allowed = os.sched_getaffinity(0)
    return sorted({min(_siblings(root, cpu) & allowed, default=cpu) for cpu in allowed})


def _siblings(root: Path, cpu: int) -> set[int]:
    try:
        text = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        ranges = [part.partition("-") for part in text.strip().split(",")]
        return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):  # a kernel that does not tell: each processor is a core
        return {cpu}
