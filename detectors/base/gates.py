"""Gates: reasons why unusual telemetry is not a fault: announced maintenance, new software, a reset, a job that just
began.

A detector keeps its own Gates, updated with the frames that it gets. What they hold is bounded in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import events_of, read_duration
from detectors.base.state import State, notes
from detectors.base.topology_index import below_mask, per_device_topology
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

LONGEST = 24 * 3600 * SECOND
"""us after which announced maintenance without an end counts as over; longer work is announced again. Chosen."""
SETTLES = 600 * SECOND
"""us that a device needs after work, a boot or a change of software: links train, caches and coolant warm up. Chosen:
twice the boot of a server with 8 GPUs."""
_REMEMBERED = 24 * 3600 * SECOND  # us after which changes and starts no longer matter; chosen
_LONGEST_WRITE_S = 3600.0  # s that a checkpoint excuses at most: a longer write has failed; chosen
_KINDS = frozenset({"maintenance_start", "maintenance_end", "version", "reset", "job_start", "job_end"})


@dataclass
class Gates(State):
    """Windows of time per entity. Call `update` once per instant, before other methods."""

    _working: dict[str, int] = notes()  # entity -> latest end of the work
    _worked: dict[str, int] = notes()  # entity -> when work on it ended
    _changed: dict[str, int] = notes()  # entity -> when versions changed or it was reset
    _started: dict[str, int] = notes()  # job -> its newest job_start, which may be of one node only
    _ended: dict[str, int] = notes()  # job -> its newest job_end
    _oldest: int = field(default=0, init=False, repr=False)  # no time that is remembered is before

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`."""
        super().restore(state)
        self._oldest = 0

    def update(self, frames: Mapping[str, Frame]) -> int | None:
        """Reads the events of an instant; returns its time, None without a frame."""
        time = max((frame.time for frame in frames.values()), default=None)
        if time is not None:
            for event in sorted(events_of(frames, *_KINDS), key=lambda e: (e.time, e.entity, e.kind)):
                self._record(event, time)
            self._drop_old(time)
        return time

    def _record(self, event: Event, now: int) -> None:
        at = min(event.time, now)  # an event dated far ahead would gate until then
        if event.kind == "maintenance_start":
            self._begin_work(event, now)
            return
        self._oldest = min(self._oldest, at)
        if event.kind == "maintenance_end":
            self._working.pop(event.entity, None)
            self._worked[event.entity] = at
        else:
            known = {"job_start": self._started, "job_end": self._ended}.get(event.kind, self._changed)
            known[event.entity] = at

    def _begin_work(self, event: Event, now: int) -> None:
        announced = read_duration(event.data.get("seconds"))
        # work may take half as long again as announced, and never longer than LONGEST
        until = LONGEST if announced is None else min(int(1.5 * announced * SECOND), LONGEST)
        self._working[event.entity] = min(event.time, now + LONGEST) + until  # may be announced ahead

    def _drop_old(self, time: int) -> None:
        for entity in [e for e, until in self._working.items() if until < time]:
            self._worked[entity] = ended = self._working.pop(entity)
            self._oldest = min(self._oldest, ended)
        if time - self._oldest <= _REMEMBERED:
            return
        self._oldest = time
        for known in (self._worked, self._changed, self._started, self._ended):
            for entity in [e for e, at in known.items() if time - at > _REMEMBERED]:
                del known[entity]
            self._oldest = min([self._oldest, *known.values()])

    def in_maintenance(self, entity: str, topology: Topology, time: int, settles: int = SETTLES) -> bool:
        """Returns whether it, or something that it is part of, is in maintenance or was less than `settles` us ago."""
        if not self._working and not self._worked:
            return False
        around = (entity, *topology.ancestors(entity))
        return any(e in self._working or time - self._worked.get(e, -LONGEST) <= settles for e in around)

    def entities_in_maintenance(self, time: int, settles: int = SETTLES) -> frozenset[str]:
        """Returns the entities that work was announced for and is under way, or ended less than `settles` us ago."""
        if not self._working and not self._worked:
            return frozenset()
        return frozenset(self._working).union(e for e, at in self._worked.items() if time - at <= settles)

    def maintenance_mask(self, frame: Frame, settles: int = SETTLES) -> NDArray[np.bool_]:
        """Returns (N,) `in_maintenance` of the entities of a frame."""
        named = self.entities_in_maintenance(frame.time, settles)
        return self._named_or_below(frame, named).copy() if named else np.zeros(len(frame.entities), bool)

    @per_device_topology
    def _named_or_below(self, frame: Frame, named: frozenset[str]) -> NDArray[np.bool_]:
        return below_mask(named, frame)

    def last_change(self, entity: str, topology: Topology) -> int | None:
        """Returns when its versions, or those of what it is part of, changed last, or it was reset; within a day."""
        times = [self._changed[e] for e in (entity, *topology.ancestors(entity)) if e in self._changed]
        return max(times, default=None)

    def job_started_at(self, job: str) -> int | None:
        """Returns the time of the newest start of a job within a day: ranks that move start it again."""
        return self._started.get(job)

    def job_ended_at(self, job: str) -> int | None:
        """Returns the time of the end of a job within a day; None if it started again since."""
        end = self._ended.get(job)
        return None if end is None or self._started.get(job, end - 1) >= end else end


@dataclass
class Checkpoints(State):
    """Jobs that write a checkpoint: its writers compute longer. until: job -> the end of it (us)."""

    until: dict[str, int] = notes()

    def update(self, frames: Mapping[str, Frame], time: int) -> list[str]:
        """Reads the events of an instant; returns the jobs that write a checkpoint."""
        for event in events_of(frames, "checkpoint"):
            if (lasts := read_duration(event.data.get("seconds"), _LONGEST_WRITE_S)) is not None:
                self.until[event.entity] = event.time + int(lasts * SECOND)
        self.until = {job: until for job, until in self.until.items() if until >= time}
        return list(self.until)


def find_relearned(frames: Mapping[str, Frame]) -> list[str]:
    """Returns the entities with other software, or back from maintenance, at this instant."""
    return [event.entity for event in events_of(frames, "version", "reset", "maintenance_end")]
