"""Collectors that play a recording: each recorded collector says again what it saw, in its states, with new times.

They are handed to the agent in place of the configured ones. What a collector could not tell then, it cannot tell now:
no data, a fault and a hang are all played. Entities of the recorded node bear the name of the agent's.

A recording as a tape that runs: what each collector saw since it was last asked, in order, with nothing left out.

The tape moves by whole recorded ticks, the nearest to the time that has passed, so that a look some ms early or late
brings the tick that belongs to it. Memory holds one line per file and what was not yet asked for.
"""

from __future__ import annotations

import json
import re
import threading
import time as clock_time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.recording import files
from agents.recording.files import About, Change, Row
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, from_iso
from pipeline.model.signals import CATALOGUE

MAX_EVENTS = 10_000
"""Events kept for a collector that nobody asks meanwhile; chosen: 60 s of the most that a collector may send."""


class Timed(Protocol):
    """Anything with a tick."""

    @property
    def time(self) -> int: ...


T = TypeVar("T", bound=Timed)


@dataclass(slots=True)
class Track:
    """What one collector saw since it was last asked: class -> entity -> signal -> text."""

    state: str = "ok"
    reason: str = ""
    rows: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))


class Tape:
    """One recording, `speed` times as fast as it was. Starts at the first look; safe for many threads."""

    def __init__(
        self,
        directory: str | Path,
        speed: float = 1.0,
        monotonic: Callable[[], float] = clock_time.monotonic,
        wall: Callable[[], int] = wall_clock,
    ) -> None:
        """Raises UsageError where the folder is no recording, or holds not one tick."""
        self.directory = Path(directory)
        self.about: About = files.about(self.directory)
        self.interval: float = self.about.interval / speed
        paths = sorted(self.directory.glob("telemetry-*.csv"))
        happened, changed = self.directory / "events.jsonl", self.directory / "collectors.jsonl"
        self._rows = [_Stream(files.telemetry(path)) for path in paths]
        self._events, self._changes = _Stream(files.events(happened)), _Stream(files.changes(changed))
        heads = [*(stream.next for stream in self._rows), self._events.next, self._changes.next]
        starts = [head.time for head in heads if head is not None]
        if not starts:
            raise UsageError(f"{self.directory}: holds not one tick; wanted a recording of at least one")
        self.first: int = min(starts)
        self.last = max(_last_time(path, self.first) for path in (*paths, changed))
        self.on_start: Callable[[], object] = lambda: None
        self.speed, self._monotonic, self._wall = speed, monotonic, wall
        self._began: tuple[float, int] | None = None
        self._lock = threading.Lock()
        self._tracks = {name: Track() for name in self.about.collectors}
        self._coming: dict[str, deque[Change]] = {name: deque() for name in self.about.collectors}
        longest = max((claim.deadline for claim in self.about.collectors.values()), default=0.0)
        self._ahead = round(longest * SECOND)
        self._owners: dict[str, list[str]] = {}
        for name, claim in self.about.collectors.items():
            for entity in claim.entities:
                self._owners.setdefault(entity, []).append(name)

    @property
    def seconds(self) -> float:
        """How long it plays, from the first tick to the last."""
        return (self.last - self.first) / SECOND / self.speed

    def look(self, collector: str) -> Track:
        """What the collector saw since its last look; values that came several times are the newest.

        A hang was told when its deadline had passed: the look that hung began so long before, and so it does here.
        """
        with self._lock:
            until = self._advance()
            begun = until + round(self.about.collectors[collector].deadline * SECOND)
            found = self._tracks[collector]
            coming = (change for change in self._coming[collector] if change.time <= begun)
            if found.state == "hung" or any(change.state == "hung" for change in coming):
                return Track("hung")
            self._tracks[collector] = Track(found.state, found.reason)
            return found

    def state(self, collector: str) -> str:
        """The collector's state now; takes nothing off the tape."""
        with self._lock:
            self._advance()
            return self._tracks[collector].state

    def shifted(self, time: int) -> int:
        """A recorded time as one of this playing: the first tick was when it began."""
        began = self._began[1] if self._began else self._wall()
        return began + round((time - self.first) / self.speed)

    def _advance(self) -> int:
        """Takes up every tick until the one that is nearest to now; that time."""
        if self._began is None:
            self._began = self._monotonic(), self._wall()
            self.on_start()
        tick = round((self._monotonic() - self._began[0]) / self.interval)
        until = self.first + round((tick + 0.5) * self.about.interval * SECOND)
        for change in self._changes.until(until + self._ahead):
            if change.collector in self._coming:
                self._coming[change.collector].append(change)
        for name, coming in self._coming.items():
            while coming and coming[0].time <= until:
                change = coming.popleft()
                self._tracks[name].state, self._tracks[name].reason = change.state, change.reason
        for stream in self._rows:
            for row in stream.until(until):
                self._row(row)
        for seen in self._events.until(until):
            if seen.collector in self._tracks:
                self._tracks[seen.collector].events.append(seen.event)
        return until

    def _row(self, row: Row) -> None:
        """Gives each value to the collector that claims its signal and has seen its entity."""
        for signal, text in row.values.items():
            owner = self._owner(row.entity, signal)
            if owner is not None:
                classes = self._tracks[owner].rows
                entities = classes.setdefault(CATALOGUE[signal].device_class, {})
                entities.setdefault(row.entity, {})[signal] = text

    def _owner(self, entity: str, signal: str) -> str | None:
        claims = self.about.collectors
        near: Iterable[str] = self._owners.get(entity, ())
        return next((name for names in (near, claims) for name in names if signal in claims[name].signals), None)


class _Stream(Generic[T]):
    """Lines of one file, one ahead."""

    def __init__(self, lines: Iterator[T]) -> None:
        self._lines = lines
        self.next: T | None = next(lines, None)

    def until(self, time: int) -> Iterator[T]:
        """Everything up to and with `time`."""
        while self.next is not None and self.next.time <= time:
            found, self.next = self.next, next(self._lines, None)
            yield found


def _last_time(path: Path, otherwise: int) -> int:
    """The time of the last complete line of a telemetry file or of collectors.jsonl."""
    if not path.exists():
        return otherwise
    line = files.last_line(path)
    try:
        text = json.loads(line)["time"] if path.suffix == ".jsonl" else line.partition(",")[0]
        return from_iso(text)
    except (ValueError, KeyError, TypeError):  # a file without a line, or one that reading it will tell about
        return otherwise


@dataclass
class Playback(Collector):
    """One recorded collector; `collectors` makes a class of it for each, with its name and what it claimed."""

    name = "recording"
    signals = ()
    isolated = False
    tape: Tape | None = None
    _rename: Callable[[str], str] = field(default=str, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _seen: dict[str, None] = field(default_factory=dict, init=False, repr=False)
    _closed: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def open(self, node: str) -> None:
        tape = self._tape()
        self._node, self._rename = node, renamed(tape.about.node, node)
        self._seen = dict.fromkeys(tape.about.collectors[self.name].entities)
        self._closed.clear()

    def read(self) -> tuple[Reading, ...]:
        track = self._tape().look(self.name)
        if track.state == "hung":
            self._hang()
            return ()
        if track.state == "no data":
            raise NoData(track.reason)
        if track.state == "fault":
            raise fault(track.reason)
        events = tuple(self._event(event) for event in track.events)
        readings = [self._reading(device_class, rows) for device_class, rows in track.rows.items()]
        return (*readings, Reading("node", (), {}, events)) if events else tuple(readings)

    def inventory(self) -> Mapping[str, Device]:
        topology, node = self._tape().about.topology, f"node:{self._node}"
        found: dict[str, Device] = {}
        for entity in self._seen:
            name, above = self._rename(entity), topology.parents.get(entity, ())
            parents = tuple(map(self._rename, above)) or (() if name == node else (node,))
            found[name] = Device(parents, topology.attributes.get(entity, {}))
        return found

    def close(self) -> None:
        self._closed.set()

    def _tape(self) -> Tape:
        if self.tape is None:
            raise NoData("no recording; wanted --replay-recording DIR")
        return self.tape

    def _reading(self, device_class: str, rows: Mapping[str, Mapping[str, str]]) -> Reading:
        self._seen.update(dict.fromkeys(rows))
        names = [s for s in self._tape().about.collectors[self.name].signals if any(s in row for row in rows.values())]
        columns = {name: column(name, [row.get(name, "") for row in rows.values()]) for name in sorted(names)}
        return Reading(device_class, tuple(map(self._rename, rows)), columns)

    def _event(self, event: Event) -> Event:
        data = _renamed_in(dict(event.data), self._rename)
        return Event(self._tape().shifted(event.time), self._rename(event.entity), event.kind, data)

    def _hang(self) -> None:
        """Waits for as long as the recorded collector hung, and so long that it is given up as that one was."""
        tape, shut = self._tape(), self._closed.wait(self.deadline + self._tape().interval)
        while not shut and tape.state(self.name) == "hung":
            shut = self._closed.wait(tape.interval)


def collectors(tape: Tape) -> tuple[Collector, ...]:
    """One collector per recorded one, all at the tape's interval; deadlines are sped up too."""
    made = []
    for name, claim in tape.about.collectors.items():
        told = {"name": name, "signals": tuple(sorted(claim.signals)), "events": claim.events}
        deadline = max(claim.deadline / tape.speed, 2 * tape.interval)
        made.append(type(f"Playback_{name}", (Playback,), told)(interval=tape.interval, deadline=deadline, tape=tape))
    return tuple(made)


def renamed(recorded: str, node: str) -> Callable[[str], str]:
    """Gives entities of the recorded node, `kind:NODE` and `kind:NODE.part`, the name of another."""
    pattern = re.compile(rf"([a-z_]+:){re.escape(recorded)}(?=\.|\Z)")
    return lambda entity: (
        pattern.sub(lambda found: found[1] + node, entity, count=1) if pattern.match(entity) else entity
    )


def column(name: str, texts: list[str]) -> NDArray[Any]:
    """Values of one signal in its wire type: whole numbers exactly, missing as NaN or the highest unsigned value."""
    dtype = np.dtype(CATALOGUE[name].type)
    if dtype.kind == "f":
        return np.array([float(text) if text else np.nan for text in texts], dtype)
    highest = int(np.iinfo(dtype).max)
    return np.array([_whole(text, highest) for text in texts], dtype)


def _whole(text: str, highest: int) -> int:
    """A number from 0 to `highest`; `highest`, which is missing, for what is none."""
    if text.isdecimal():
        return min(int(text), highest)
    number = float(text) if text else np.nan
    return int(number) if 0 <= number < highest else highest


def fault(reason: str) -> Exception:
    """An error that is told as the recorded one was: `NVMLError: GPU is lost`."""
    kind, found, text = reason.partition(": ")
    if not (found and kind.isidentifier()):
        kind, text = "RuntimeError", reason
    error: Exception = type(kind, (RuntimeError,), {})(text)
    return error


def _renamed_in(value: Any, rename: Callable[[str], str]) -> Any:
    """Entities anywhere in an event's data under their new names."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, list):
        return [_renamed_in(one, rename) for one in value]
    if isinstance(value, dict):
        return {rename(key): _renamed_in(one, rename) for key, one in value.items()}
    return value
