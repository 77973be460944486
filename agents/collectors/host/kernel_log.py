"""The kernel log: XIDs and SXids with their meaning, and other lines that report faults, as events.

It runs in its own process, since a user's pattern may be slow on some line: the process can be killed.
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
from agents.collectors.gpu.slots import default_state_file
from agents.collectors.host.kernel_events import PREFILTER_WORDS, GpuAddresses, KernelEventDecoder
from agents.collectors.host.kernel_patterns import PATTERNS_SETTING, load_patterns
from agents.collectors.host.kmsg import KmsgPosition, KmsgReader, KmsgRecord
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Event
from pipeline.runtime.log_line import write_log_line

MAX_KEYS = 4096
"""Most different keys that are counted. Chosen: patterns times devices of a large node are some hundreds."""


@dataclass
class _Window:
    start: int
    passed: int = 0
    suppressed: int = 0
    first: int = 0
    last: Event | None = None


@dataclass
class RepeatLimiter:
    """Passes at most `burst` events per key and `window` microseconds. The counts of all events add up to what
    happened.
    """

    burst: int
    window: int
    max_keys: int = MAX_KEYS
    _windows: OrderedDict[Hashable, _Window] = field(default_factory=OrderedDict, init=False, repr=False)

    def filter(self, key: Hashable, event: Event) -> list[Event]:
        """Returns the events to send now: this one, the count of those before it, or none."""
        found, evicted = self._windows.get(key), []
        if found is None:
            found = self._windows[key] = _Window(event.time)
            if len(self._windows) > self.max_keys:
                evicted = _suppressed_event(self._windows.popitem(last=False)[1])
        elif not 0 <= event.time - found.start < self.window:  # over, or the clock was set back before its start
            evicted = _suppressed_event(found)
            found.start, found.passed = event.time, 0
        if found.passed < self.burst:
            found.passed += 1
            return [*evicted, replace(event, data={**event.data, "count": 1})]
        found.first = event.time if not found.suppressed else found.first
        found.suppressed, found.last = found.suppressed + 1, event
        return evicted

    def end_windows(self, now: int) -> list[Event]:
        """Returns the suppressed counts of ended windows, and removes their keys."""
        found = []
        for key, window in list(self._windows.items()):
            if 0 <= now - window.start < self.window:
                continue
            found += _suppressed_event(window)
            del self._windows[key]
        return found

    def flush(self) -> list[Event]:
        """Returns all that is suppressed."""
        return [event for window in self._windows.values() for event in _suppressed_event(window)]


def _suppressed_event(window: _Window) -> list[Event]:
    """Returns one event for all that the window suppressed, with the data of the last one."""
    if window.last is None:
        return []
    event = replace(window.last, data={**window.last.data, "count": window.suppressed, "since": window.first})
    window.suppressed, window.last = 0, None
    return [event]


MAX_RECORDS = 10_000
"""Most records of one read. Chosen: about 0.2 s of work. Further ones wait in the kernel's ring buffer for the next
read."""


def since_boot() -> int:
    """Returns microseconds since boot without sleep, like the clock of the kernel log."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


@dataclass
class KernelLog(Collector):
    """Events of /dev/kmsg. The position is kept in `state`, so that a restart neither loses nor repeats records.

    Without that file it starts `look_back` seconds in the past. path may be a FIFO or file of the same format. gpus:
    state file of the nvml collector's GPUs, by default in the service's folder.
    """

    name: ClassVar[str] = "kernel_log"
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("xid", "sxid", "kernel", "kernel_log_overrun")
    path: Path = Path("/dev/kmsg")
    driver: Path = Path("/proc/driver/nvidia")
    sys: Path = Path("/sys")
    state: Path = Path("/var/lib/fleetpulse/kernel_log")
    gpus: Path | None = field(default_factory=default_state_file)
    xid_table: Path | None = field(default=None, metadata=xid_table.XID_TABLE_SETTING)
    patterns: Path | None = field(default=None, metadata=PATTERNS_SETTING)
    look_back: float = field(default=600.0, metadata=constraint("0 s or more", lambda v: v >= 0))
    burst: int = field(default=5, metadata=constraint("1 or more", lambda v: v >= 1))
    window: float = field(default=60.0, metadata=constraint("more than 0 s", lambda v: v > 0))
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _since_boot: Callable[[], int] = field(default_factory=lambda: since_boot, init=False, repr=False)
    _log: KmsgReader | None = field(default=None, init=False, repr=False)
    _decoder: KernelEventDecoder | None = field(default=None, init=False, repr=False)
    _limiter: RepeatLimiter | None = field(default=None, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _last_read: int | None = field(default=None, init=False, repr=False)
    _first_record_time: int = field(default=0, init=False, repr=False)
    _position: KmsgPosition | None = field(default=None, init=False, repr=False)
    _problem_logged: str = field(default="", init=False, repr=False)
    _reads: int = field(default=0, init=False, repr=False)

    def open(self, node: str) -> None:
        """Opens the kernel log at the position of the last run. Raises NoData if it cannot be read."""
        self._node, self._last_read, self._reads = node, None, 0
        try:
            table, patterns = (
                xid_table.load_xid_table(self.xid_table),
                load_patterns(self.patterns, PREFILTER_WORDS),
            )
        except ConfigError as error:
            raise NoData(str(error)) from None
        log = KmsgReader(self.path)
        try:
            log.open()
        except OSError as error:
            raise NoData(_open_error(self.path, error)) from None
        self._position = KmsgPosition(self.state)
        log.next_sequence = self._position.open()
        goes_on = log.next_sequence is not None
        self._first_record_time = 0 if goes_on else self._since_boot() - round(self.look_back * SECOND)
        places = GpuAddresses(self.driver, slots=self.gpus)
        places.read()
        self._decoder = KernelEventDecoder(node, table, patterns, places, self.sys)
        self._limiter = RepeatLimiter(self.burst, round(self.window * SECOND))
        self._log = log

    def read(self) -> tuple[Reading, ...]:
        """Reads the records since the last read. The position is saved at the next read, when this one's events
        have been delivered.
        """
        if self._log is None or self._decoder is None or self._limiter is None:
            raise NoData(f"{self.path}: not open")
        self._save_position()
        self._reads += 1
        now, uptime = self._now(), self._since_boot()
        found: list[Event] = []
        missed = self._log.missed
        try:
            for record in self._log.read_records(MAX_RECORDS):
                if record.since_boot >= self._first_record_time:
                    reported = self._decoder.decode(record, self._event_time(record, now, uptime))
                    found += self._limiter.filter(*reported) if reported else ()
        except OSError as error:
            raise NoData(_open_error(self.path, error)) from None
        found += self._limiter.end_windows(now)
        if self._log.missed > missed:
            found.append(self._overrun_event(now, self._log.missed - missed))
        self._last_read = now
        return (Reading("node", (), {}, tuple(sorted(found, key=lambda event: event.time))),)

    def close(self) -> None:
        """Saves the position and closes the log."""
        if self._log is not None:
            log, position = self._log, self._position
            try:
                self._save_position()
            finally:
                self._log = self._position = None
                log.close()
                if position is not None:
                    position.close()

    def _event_time(self, record: KmsgRecord, now: int, uptime: int) -> int:
        """Returns the UTC time of a record, at least that of the last read, since it was not there then.

        The log's clock (sched_clock) is not disciplined and drifts from UTC by seconds per month; see kernel/printk.
        """
        time = now - uptime + record.since_boot
        return min(max(time, self._last_read or 0), now)

    def _overrun_event(self, now: int, missed: int) -> Event:
        return Event(now, f"node:{self._node}", "kernel_log_overrun", {"missed": missed, "path": str(self.path)})

    def _save_position(self) -> None:
        """Saves the position, but not after a single read: `fleetpulse once` must not consume records of an agent that
        starts later.
        """
        if self._position is not None and self._log is not None and self._reads > 1:
            self._position.save(self._log.next_sequence)
            if self._position.problem != self._problem_logged:
                self._problem_logged = self._position.problem
                write_log_line(f"collector kernel_log: {self._problem_logged or 'position: resolved'}")


def _open_error(path: Path, error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"{path}: not readable: add CAP_SYSLOG"
    return f"{path}: {error.strerror or error}; expected the kernel log"
