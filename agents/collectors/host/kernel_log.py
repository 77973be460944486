"""The kernel's log: XIDs and SXids with what they mean, and the other lines that tell of faults, as events.

A process of its own, since patterns of the user may be slow on some line: it can be killed.

Bounds how often the same thing is told, without losing count: what is held back is counted in a later event.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from agents.collector import Collector, NoData, Reading, wall_clock
from agents.collectors.gpu import xid_table
from agents.collectors.host import kernel_patterns
from agents.collectors.host.kernel_events import WORDS, GpuPlaces, Interpreter
from agents.collectors.host.kmsg import Kmsg, LogPlace, Record
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Event

MOST_KEYS = 4096
"""Most different things that are told apart; chosen: patterns times devices of a large node are some hundreds."""


@dataclass
class _Window:
    begun: int
    given: int = 0
    held: int = 0
    first: int = 0
    last: Event | None = None


@dataclass
class Repeats:
    """At most `burst` events per key and `window` microseconds; their `count` adds up to all that happened."""

    burst: int
    window: int
    most: int = MOST_KEYS
    _windows: OrderedDict[Hashable, _Window] = field(default_factory=OrderedDict, init=False, repr=False)

    def admit(self, key: Hashable, event: Event) -> list[Event]:
        """The events to send now: this one, what was counted before it, or none."""
        found, evicted = self._windows.get(key), []
        if found is None:
            found = self._windows[key] = _Window(event.time)
            if len(self._windows) > self.most:
                evicted = _told(self._windows.popitem(last=False)[1])
        elif not 0 <= event.time - found.begun < self.window:  # over, or the clock was set back behind its begin
            evicted = _told(found)
            found.begun, found.given = event.time, 0
        if found.given < self.burst:
            found.given += 1
            return [*evicted, replace(event, data={**event.data, "count": 1})]
        found.first = event.time if not found.held else found.first
        found.held, found.last = found.held + 1, event
        return evicted

    def due(self, now: int) -> list[Event]:
        """What was held back in windows that have ended; forgets keys that have been silent for a window."""
        found = []
        for key, window in list(self._windows.items()):
            if 0 <= now - window.begun < self.window:
                continue
            found += _told(window)
            del self._windows[key]
        return found

    def rest(self) -> list[Event]:
        """All that is held back."""
        return [event for window in self._windows.values() for event in _told(window)]


def _told(window: _Window) -> list[Event]:
    """One event for all that the window held back, as the last of them said it."""
    if window.last is None:
        return []
    event = replace(window.last, data={**window.last.data, "count": window.held, "since": window.first})
    window.held, window.last = 0, None
    return [event]


RECORDS = 10_000
"""Most records of one look; chosen: about 0.2 s of work. What is more waits in the kernel's ring for the next look."""


def since_boot() -> int:
    """Microseconds of the clock that stands still in sleep, as the kernel log's does."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


@dataclass
class KernelLog(Collector):
    """Events of /dev/kmsg. Where it was read up to is kept in `state`, so that a restart neither loses nor repeats.

    Without that file it begins `look_back` seconds in the past. path may be a FIFO or file of the same format.
    """

    name: ClassVar[str] = "kernel_log"
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("xid", "sxid", "kernel", "kernel_log_overrun")
    path: Path = Path("/dev/kmsg")
    driver: Path = Path("/proc/driver/nvidia")
    sys: Path = Path("/sys")
    state: Path = Path("/var/lib/fleetpulse/kernel_log")
    xid_table: Path | None = field(default=None, metadata=xid_table.WANTED)
    patterns: Path | None = field(default=None, metadata=kernel_patterns.WANTED)
    look_back: float = field(default=600.0, metadata=constraint("0 s or more", lambda v: v >= 0))
    burst: int = field(default=5, metadata=constraint("1 or more", lambda v: v >= 1))
    window: float = field(default=60.0, metadata=constraint("more than 0 s", lambda v: v > 0))
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _since_boot: Callable[[], int] = field(default_factory=lambda: since_boot, init=False, repr=False)
    _log: Kmsg | None = field(default=None, init=False, repr=False)
    _interpreter: Interpreter | None = field(default=None, init=False, repr=False)
    _repeats: Repeats | None = field(default=None, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _looked: int | None = field(default=None, init=False, repr=False)
    _begin: int = field(default=0, init=False, repr=False)
    _place: LogPlace | None = field(default=None, init=False, repr=False)
    _looks: int = field(default=0, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._looked, self._looks = node, None, 0
        try:
            table, patterns = xid_table.load(self.xid_table), kernel_patterns.load(self.patterns, WORDS)
        except ConfigError as error:
            raise NoData(str(error)) from None
        log = Kmsg(self.path)
        try:
            log.open()
        except OSError as error:
            raise NoData(_why(self.path, error)) from None
        self._place = LogPlace(self.state)
        log.next_sequence = self._place.open()
        goes_on = log.next_sequence is not None
        self._begin = 0 if goes_on else self._since_boot() - round(self.look_back * SECOND)
        places = GpuPlaces(self.driver)
        places.read()
        self._interpreter = Interpreter(node, table, patterns, places, self.sys)
        self._repeats = Repeats(self.burst, round(self.window * SECOND))
        self._log = log

    def read(self) -> tuple[Reading, ...]:
        """What was logged since the last look. The place is kept at the next look, when this one's events are taken."""
        if self._log is None or self._interpreter is None or self._repeats is None:
            raise NoData(f"{self.path}: not open")
        self._keep_place()
        self._looks += 1
        now, uptime = self._now(), self._since_boot()
        found: list[Event] = []
        missed = self._log.missed
        try:
            for record in self._log.records(RECORDS):
                if record.since_boot >= self._begin:
                    told = self._interpreter.event(record, self._time(record, now, uptime))
                    found += self._repeats.admit(*told) if told else ()
        except OSError as error:
            raise NoData(_why(self.path, error)) from None
        found += self._repeats.due(now)
        if self._log.missed > missed:
            found.append(self._overrun(now, self._log.missed - missed))
        self._looked = now
        return (Reading("node", (), {}, tuple(sorted(found, key=lambda event: event.time))),)

    def close(self) -> None:
        if self._log is not None:
            self._keep_place()
            self._log.close()
            self._log = None
        if self._place is not None:
            self._place.close()

    def _time(self, record: Record, now: int, uptime: int) -> int:
        """UTC: a record that was not there at the last look is younger than that look, whatever the log's clock says.

        That clock (sched_clock) is not disciplined and drifts from UTC by seconds in a month; see kernel/printk.
        """
        time = now - uptime + record.since_boot
        return min(max(time, self._looked or 0), now)

    def _overrun(self, now: int, missed: int) -> Event:
        return Event(now, f"node:{self._node}", "kernel_log_overrun", {"missed": missed, "path": str(self.path)})

    def _keep_place(self) -> None:
        """Not after a single look: `fleetpulse once` takes nothing from an agent that starts later."""
        if self._place is not None and self._log is not None and self._looks > 1:
            self._place.keep(self._log.next_sequence)


def _why(path: Path, error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"{path}: not readable: add CAP_SYSLOG"
    return f"{path}: {error.strerror or error}; wanted the kernel's log"
