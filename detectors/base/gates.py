"""What makes telemetry look wrong although nothing is: announced work, new software, a job that has only just begun.

Every detector that asks keeps its own Gates, fed with the frames that it sees; what it remembers is bounded in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import read_duration
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

LONGEST = 24 * 3600 * SECOND
"""Announced work whose end nobody tells is over after so long; longer work is announced anew. Chosen."""
SETTLES = 600 * SECOND
"""After work, a boot or a change of software a device needs so long until it is as it will be: links train, caches
and coolant warm. Chosen: twice the boot of a server with 8 GPUs."""
_REMEMBERED = 24 * 3600 * SECOND  # changes and starts older than that matter to nobody; chosen
_HEARD = frozenset({"maintenance_start", "maintenance_end", "version", "reset", "job_start", "job_end"})
State = dict[str, dict[str, int]]


class Gates:
    """Windows of time per entity; state is plain data. Feed `hear` once per instant, before asking."""

    def __init__(self) -> None:
        self._working: dict[str, int] = {}  # entity -> when the work ends at the latest
        self._worked: dict[str, int] = {}  # entity -> when work on it ended
        self._changed: dict[str, int] = {}  # entity -> when versions changed or it was reset
        self._started: dict[str, int] = {}  # job -> its newest job_start, which may be of one node only
        self._ended: dict[str, int] = {}  # job -> its newest job_end
        self._masks: dict[str, tuple[object, NDArray[np.bool_]]] = {}  # class -> newest answer of `working`

    def update(self, frames: Mapping[str, Frame]) -> int | None:
        """Takes the events of an instant; its time, None without a frame."""
        time = max((frame.time for frame in frames.values()), default=None)
        events = [e for frame in frames.values() for e in frame.events if e.kind in _HEARD]
        if time is not None:
            for event in sorted(events, key=lambda e: (e.time, e.entity, e.kind)):
                self._take(event, time)
            self._forget(time)
        return time

    def _take(self, event: Event, now: int) -> None:
        at = min(event.time, now)  # one dated far ahead would gate until then
        if event.kind == "maintenance_start":
            self._begins(event, now)
        elif event.kind == "maintenance_end":
            self._working.pop(event.entity, None)
            self._worked[event.entity] = at
        else:
            known = {"job_start": self._started, "job_end": self._ended}.get(event.kind, self._changed)
            known[event.entity] = at

    def _begins(self, event: Event, now: int) -> None:
        told = read_duration(event.data.get("seconds"))
        # who overruns what was announced by half is still at it; nobody is for longer than LONGEST
        until = LONGEST if told is None else min(int(1.5 * told * SECOND), LONGEST)
        self._working[event.entity] = min(event.time, now + LONGEST) + until  # may be announced ahead

    def _forget(self, time: int) -> None:
        for entity in [e for e, until in self._working.items() if until < time]:
            self._worked[entity] = self._working.pop(entity)
        for known in (self._worked, self._changed, self._started, self._ended):
            for entity in [e for e, at in known.items() if time - at > _REMEMBERED]:
                del known[entity]

    def in_maintenance(self, entity: str, topology: Topology, time: int, settles: int = SETTLES) -> bool:
        """Whether people work on it or on what it is part of, or did so less than `settles` us ago."""
        if not self._working and not self._worked:
            return False
        around = (entity, *topology.above(entity))
        return any(e in self._working or time - self._worked.get(e, -LONGEST) <= settles for e in around)

    def last_change(self, entity: str, topology: Topology) -> int | None:
        """When its versions, or those of what it is part of, changed last, or it was reset; within a day."""
        times = [self._changed[e] for e in (entity, *topology.above(entity)) if e in self._changed]
        return max(times, default=None)

    def job_started_at(self, job: str) -> int | None:
        """The newest start that was told of a job, within a day: ranks that move start it anew."""
        return self._started.get(job)

    def job_ended_at(self, job: str) -> int | None:
        """When the end of a job was told, within a day; a job that started anew since then has none."""
        end = self._ended.get(job)
        return None if end is None or self._started.get(job, end - 1) >= end else end

    def maintenance_mask(self, frame: Frame, settles: int = SETTLES) -> NDArray[np.bool_]:
        """(N,) `in_work` of a frame's entities."""
        if not self._working and not self._worked:
            return np.zeros(len(frame.entities), bool)
        recent = {e for e, at in self._worked.items() if frame.time - at <= settles}
        if not self._working and not recent:
            return np.zeros(len(frame.entities), bool)
        named = frozenset(recent | self._working.keys())
        key = (id(frame.topology), frame.topology.version, len(frame.entities), named)
        known = self._masks.get(frame.device_class)
        if known is None or known[0] != key:
            above = frame.topology.above
            mask = np.fromiter((e in named or not named.isdisjoint(above(e)) for e in frame.entities), bool)
            self._masks[frame.device_class] = known = (key, mask)
        return known[1].copy()

    def snapshot(self) -> State:
        names = ("_working", "_worked", "_changed", "_started", "_ended")
        return {name: dict(getattr(self, name)) for name in names}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, known in state.items():
            setattr(self, name, dict(known))
