"""Plays a recording, and runs the commands `fleetpulse record`, and `agent` and `once` on a recording.

Collectors return the readings of each recorded collector, in its states, with new times. The agent runs them in place
of the configured collectors. Missing values, no data, faults and hangs are played as recorded.
Entities of the recorded node get the name of the agent's node.

A tape moves by whole recorded ticks, to the tick nearest to the time passed, so that a read some ms early or late gets
the right one. Memory holds one line per file, and the values not read yet.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import time as clock_time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.registry import configured_collectors
from agents.node import agent
from agents.node.once import Output, print_once
from agents.node.workers.pool import WorkerPool
from agents.recording import files
from agents.recording.files import NodeRecordingWriter, RecordedEvent, RecordingInfo, StateChange, TelemetryRow
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, from_iso
from pipeline.model.signals import CATALOGUE
from pipeline.runtime.supervise import Stop

MAX_EVENTS = 10_000
"""Events kept for a collector between two reads. Chosen: 60 s of the most that a collector may send."""

T = TypeVar("T", TelemetryRow, StateChange, RecordedEvent)


@dataclass(slots=True)
class Track:
    """Data of one collector since its last read: class -> entity -> signal -> text."""

    state: str = "ok"
    reason: str = ""
    rows: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))


class Tape:
    """One recording, played at `speed` times its speed. Starts at the first read; thread-safe."""

    def __init__(
        self,
        directory: str | Path,
        speed: float = 1.0,
        monotonic: Callable[[], float] = clock_time.monotonic,
        wall: Callable[[], int] = wall_clock,
    ) -> None:
        """Raises UsageError if the folder is not a recording or has no tick."""
        self.directory = Path(directory)
        self.info: RecordingInfo = files.read_info(self.directory)
        self.interval: float = self.info.interval / speed
        paths = sorted(self.directory.glob("telemetry-*.csv"))
        happened, changed = self.directory / "events.jsonl", self.directory / "collectors.jsonl"
        self._rows = [_LineStream(files.read_rows(path)) for path in paths]
        self._events, self._changes = _LineStream(files.read_events(happened)), _LineStream(files.read_changes(changed))
        heads = [*(stream.next for stream in self._rows), self._events.next, self._changes.next]
        starts = [head.time for head in heads if head is not None]
        if not starts:
            raise UsageError(f"{self.directory}: the recording has no tick; expected at least one")
        self.first: int = min(starts)
        self.last = max(_read_last_time(path, self.first) for path in (*paths, changed))
        self.on_start: Callable[[], object] = lambda: None
        self.speed, self._monotonic, self._wall = speed, monotonic, wall
        self._began: tuple[float, int] | None = None
        self._lock = threading.Lock()
        self._tracks = {name: Track() for name in self.info.collectors}
        self._pending: dict[str, deque[StateChange]] = {name: deque() for name in self.info.collectors}
        longest = max((claim.deadline for claim in self.info.collectors.values()), default=0.0)
        self._lookahead = round(longest * SECOND)
        self._entity_collectors: dict[str, list[str]] = {}
        for name, claim in self.info.collectors.items():
            for entity in claim.entities:
                self._entity_collectors.setdefault(entity, []).append(name)

    @property
    def seconds(self) -> float:
        """Duration of the playback, from the first tick to the last."""
        return (self.last - self.first) / SECOND / self.speed

    def take_track(self, collector: str) -> Track:
        """Returns the collector's data since its last read; of several values the newest.

        A hang was recorded when its deadline had passed, so the hanging read began that long before, also here.
        """
        with self._lock:
            until = self._advance()
            begun = until + round(self.info.collectors[collector].deadline * SECOND)
            found = self._tracks[collector]
            coming = (change for change in self._pending[collector] if change.time <= begun)
            if found.state == "hung" or any(change.state == "hung" for change in coming):
                return Track("hung")
            self._tracks[collector] = Track(found.state, found.reason)
            return found

    def get_state(self, collector: str) -> str:
        """Returns the collector's state now; reads no data."""
        with self._lock:
            self._advance()
            return self._tracks[collector].state

    def shift_time(self, time: int) -> int:
        """Returns a recorded time as a time of this playback."""
        began = self._began[1] if self._began else self._wall()
        return began + round((time - self.first) / self.speed)

    def _advance(self) -> int:
        """Reads every tick up to the one nearest to now; returns its time."""
        if self._began is None:
            self._began = self._monotonic(), self._wall()
            self.on_start()
        tick = round((self._monotonic() - self._began[0]) / self.interval)
        until = self.first + round((tick + 0.5) * self.info.interval * SECOND)
        for change in self._changes.read_until(until + self._lookahead):
            if change.collector in self._pending:
                self._pending[change.collector].append(change)
        for name, coming in self._pending.items():
            while coming and coming[0].time <= until:
                change = coming.popleft()
                self._tracks[name].state, self._tracks[name].reason = change.state, change.reason
        for stream in self._rows:
            for row in stream.read_until(until):
                self._add_row(row)
        for recorded in self._events.read_until(until):
            if recorded.collector in self._tracks:
                self._tracks[recorded.collector].events.append(recorded.event)
        return until

    def _add_row(self, row: TelemetryRow) -> None:
        """Gives each value to the collector that has its signal and entity."""
        for signal, text in row.values.items():
            owner = self._find_owner(row.entity, signal)
            if owner is not None:
                classes = self._tracks[owner].rows
                entities = classes.setdefault(CATALOGUE[signal].device_class, {})
                entities.setdefault(row.entity, {})[signal] = text

    def _find_owner(self, entity: str, signal: str) -> str | None:
        claims = self.info.collectors
        near: Iterable[str] = self._entity_collectors.get(entity, ())
        return next((name for names in (near, claims) for name in names if signal in claims[name].signals), None)


class _LineStream(Generic[T]):
    """Lines of one file, one read ahead."""

    def __init__(self, lines: Iterator[T]) -> None:
        self._lines: Iterator[T] = lines
        self.next: T | None = next(lines, None)

    def read_until(self, time: int) -> Iterator[T]:
        """Yields everything up to and including `time`."""
        while self.next is not None and self.next.time <= time:
            found, self.next = self.next, next(self._lines, None)
            yield found


def _read_last_time(path: Path, otherwise: int) -> int:
    """Returns the time of the last complete line of a telemetry file or of collectors.jsonl."""
    if not path.exists():
        return otherwise
    line = files.read_last_line(path)
    try:
        text = json.loads(line)["time"] if path.suffix == ".jsonl" else line.partition(",")[0]
        return from_iso(text)
    except (ValueError, KeyError, TypeError):  # an empty file, or an invalid line, which reading reports
        return otherwise


@dataclass
class PlaybackCollector(Collector):
    """One recorded collector; `playback_collectors` makes a class for each, with its name, signals and events."""

    name = "recording"
    signals = ()
    isolated = False
    tape: Tape | None = None
    _rename: Callable[[str], str] = field(default=str, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _seen: dict[str, None] = field(default_factory=dict, init=False, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        tape = self._require_tape()
        self._node, self._rename = node, entity_renamer(tape.info.node, node)
        self._seen = dict.fromkeys(tape.info.collectors[self.name].entities)
        self._closed.clear()

    def read(self) -> tuple[Reading, ...]:
        """Returns the readings since the last read; raises or hangs as recorded."""
        track = self._require_tape().take_track(self.name)
        if track.state == "hung":
            self._wait_as_recorded()
            return ()
        if track.state == "no data":
            raise NoData(track.reason)
        if track.state == "fault":
            raise rebuild_fault(track.reason)
        events = tuple(self._rename_event(event) for event in track.events)
        readings = [self._build_reading(device_class, rows) for device_class, rows in track.rows.items()]
        return (*readings, Reading("node", (), {}, events)) if events else tuple(readings)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the recorded entities under their new names."""
        topology, node = self._require_tape().info.topology, f"node:{self._node}"
        found: dict[str, Device] = {}
        for entity in self._seen:
            name, above = self._rename(entity), topology.parents.get(entity, ())
            parents = tuple(map(self._rename, above)) or (() if name == node else (node,))
            found[name] = Device(parents, topology.attributes.get(entity, {}))
        return found

    def close(self) -> None:
        """Ends a hang."""
        self._closed.set()

    def _require_tape(self) -> Tape:
        if self.tape is None:
            raise NoData("no recording; set --replay-recording DIR")
        return self.tape

    def _build_reading(self, device_class: str, rows: Mapping[str, Mapping[str, str]]) -> Reading:
        self._seen.update(dict.fromkeys(rows))
        names = [
            s for s in self._require_tape().info.collectors[self.name].signals if any(s in row for row in rows.values())
        ]
        columns = {name: parse_column(name, [row.get(name, "") for row in rows.values()]) for name in sorted(names)}
        return Reading(device_class, tuple(map(self._rename, rows)), columns)

    def _rename_event(self, event: Event) -> Event:
        data = _rename_in(dict(event.data), self._rename)
        return Event(self._require_tape().shift_time(event.time), self._rename(event.entity), event.kind, data)

    def _wait_as_recorded(self) -> None:
        """Waits as long as the recorded collector hung, and long enough to be stopped like that one."""
        tape, shut = self._require_tape(), self._closed.wait(self.deadline + self._require_tape().interval)
        while not shut and tape.get_state(self.name) == "hung":
            shut = self._closed.wait(tape.interval)


def playback_collectors(tape: Tape) -> tuple[Collector, ...]:
    """Returns one collector per recorded one, all at the tape's interval; deadlines are shortened by its speed."""
    made = []
    for name, claim in tape.info.collectors.items():
        attributes = {"name": name, "signals": tuple(sorted(claim.signals)), "events": claim.events}
        deadline = max(claim.deadline / tape.speed, 2 * tape.interval)
        made.append(
            type(f"Playback_{name}", (PlaybackCollector,), attributes)(
                interval=tape.interval, deadline=deadline, tape=tape
            )
        )
    return tuple(made)


def entity_renamer(recorded: str, node: str) -> Callable[[str], str]:
    """Returns a function that renames entities of the recorded node, `kind:NODE` and `kind:NODE.part`."""
    pattern = re.compile(rf"([a-z_]+:){re.escape(recorded)}(?=\.|\Z)")
    return lambda entity: (
        pattern.sub(lambda found: found[1] + node, entity, count=1) if pattern.match(entity) else entity
    )


def parse_column(name: str, texts: list[str]) -> NDArray[Any]:
    """Returns the values of one signal in its wire type; missing is NaN, or the highest unsigned value."""
    dtype = np.dtype(CATALOGUE[name].type)
    if dtype.kind == "f":
        return np.array([float(text) if text else np.nan for text in texts], dtype)
    highest = int(np.iinfo(dtype).max)
    return np.array([_parse_unsigned(text, highest) for text in texts], dtype)


def _parse_unsigned(text: str, highest: int) -> int:
    """Returns a number from 0 to `highest`; `highest`, which means missing, for anything else."""
    if text.isdecimal():
        return min(int(text), highest)
    number = float(text) if text else np.nan
    return int(number) if 0 <= number < highest else highest


def rebuild_fault(reason: str) -> Exception:
    """Returns an error with the recorded name and text, such as `NVMLError: GPU is lost`."""
    kind, found, text = reason.partition(": ")
    if not (found and kind.isidentifier()):
        kind, text = "RuntimeError", reason
    error: Exception = type(kind, (RuntimeError,), {})(text)
    return error


def _rename_in(value: Any, rename: Callable[[str], str]) -> Any:
    """Renames entities anywhere in an event's data."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, list):
        return [_rename_in(one, rename) for one in value]
    if isinstance(value, dict):
        return {rename(key): _rename_in(one, rename) for key, one in value.items()}
    return value


WAIT_SHARE = 0.5
"""Share of the interval for which a tick waits for its collectors: the agent's own, so that both get the same
readings."""
CLOSE_S = 1.0
"""Longest wait for the collectors to close, as in the agent."""
EXTRA_PLAY_S = 0.5
"""Seconds to play beyond the last tick and one more: the time that a slow collector's answer may take."""


def record(config: Config, directory: str | Path, seconds: float | None, stop: threading.Event) -> int:
    """Runs the collectors and writes their readings, for so many seconds or until `stop`. Raises UsageError."""
    if seconds is not None and not seconds > 0:
        raise UsageError(f"record: --seconds {seconds:g}; expected more than 0")
    node, interval = config.agent.node, config.agent.interval
    found = configured_collectors(config.collector, config.source, config.agent.collectors)
    writer = NodeRecordingWriter(directory, node, interval, found)
    looking = WorkerPool(found, node, interval)
    until = f"for {seconds:g} s" if seconds is not None else "until Ctrl-C"
    _log(f"record: {node} into {directory}, every {interval:g} s {until}")
    try:
        ticks = _run_ticks(looking, writer, interval, seconds, stop)
    finally:
        looking.close(CLOSE_S)
        writer.close()
    _log(f"record: {ticks} ticks in {directory}")
    return 0


def _run_ticks(
    looking: WorkerPool, writer: NodeRecordingWriter, interval: float, seconds: float | None, stop: threading.Event
) -> int:
    """Runs the loop; ticks are whole intervals after the first, even if the wall clock is changed."""
    first = round(clock_time.time() / interval) * round(interval * SECOND)
    began, ticks, place = clock_time.monotonic(), 0, 0
    while seconds is None or place * interval < seconds:
        tick = first + round(place * interval * SECOND)
        delivered = looking.tick(tick, WAIT_SHARE * interval, with_inventory=place == 0)
        writer.write_tick(tick, [(worker.collector, delivery) for worker, delivery in delivered.items()])
        ticks, passed = ticks + 1, clock_time.monotonic() - began
        place = int(passed / interval) + 1
        if stop.wait(began + place * interval - clock_time.monotonic()):
            break
    return ticks


def play(config: Config, directory: str | Path | None, speed: float | None) -> int:
    """Runs the agent over a recording; returns 0 at its end, or on a stop request."""
    if directory is None:
        raise UsageError("agent: --speed applies to a recording; add --replay-recording DIR")
    speed = 1.0 if speed is None else speed
    tape, stop = _open_tape(directory, speed), Stop()
    ending = threading.Timer(tape.seconds + tape.interval + EXTRA_PLAY_S, lambda: _end_playback(tape, stop))
    ending.daemon = True
    tape.on_start = ending.start
    config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, interval=tape.interval))
    _log(f"recording: {directory} of {tape.info.node}, {tape.seconds:g} s at {speed:g} times its speed")
    try:
        return agent.run(config, stop, playback_collectors(tape), simulated=True)
    finally:
        ending.cancel()


def once(config: Config, directory: str | Path, output: Output) -> int:
    """Prints one reading of a recording: its first tick."""
    return print_once(config, output, playback_collectors(_open_tape(directory, 1.0)))


def _open_tape(directory: str | Path, speed: float) -> Tape:
    if not 0 < speed <= 1000:
        raise UsageError(f"--speed {speed:g}; expected more than 0 and at most 1000 times")
    return Tape(directory, speed)


def _end_playback(tape: Tape, stop: threading.Event) -> None:
    _log(f"recording: {tape.directory} has ended")
    stop.set()


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
