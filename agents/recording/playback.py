"""Collectors that play a recording: each recorded collector says again what it saw, in its states, with new times.

They are handed to the agent in place of the configured ones. What a collector could not tell then, it cannot tell now:
no data, a fault and a hang are all played. Entities of the recorded node bear the name of the agent's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading
from agents.recording.tape import Tape
from pipeline.model.records import Event
from pipeline.model.signals import CATALOGUE


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
