"""When each open case is checked next, so that pages that hold cost nothing between two reports.

In its first hour a case is reported every minute, which costs about 0.1 ms per case at that instant.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import REPEAT
from detectors.base.state import grown
from detectors.base.topology_index import FramePositions
from detectors.xid import cases
from detectors.xid.cases import Case
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

QUIET_FOR = 600 * SECOND
"""us after which a condition that is not latched is over, as for the Desk."""
REPEAT_FOR = 3600 * SECOND
"""us for which a condition that holds is reported again; the Desk keeps it open; chosen."""
SWEEP_EVERY = 3600 * SECOND
"""us between two checks of all cases; chosen: a 72nd of GONE_AFTER."""
GONE_AFTER = 72 * 3600 * SECOND
"""us of silence after which an entity, and its server with it, counts as removed; chosen: a long weekend."""
MAX_UNKNOWN = 1000
"""Open cases of entities that are in no frame and no topology: a log may name any number; chosen."""


class CaseSchedule:
    """Which cases are due. It is derived from cases and frames: a new one checks every case once."""

    def __init__(self, open_cases: Iterable[str] = ()) -> None:
        self._at: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []
        self._touched: set[str] = set()
        self._unknown: set[str] = set()  # touched entities that were in no topology
        self._time = self._swept = 0
        self._generations: dict[str, NDArray[np.float64]] = {}
        self._positions = {"gpu": FramePositions(), "node": FramePositions()}
        for entity in open_cases:
            self.schedule_now(entity)

    def schedule_now(self, entity: str) -> None:
        """Schedules a case that has changed for this instant."""
        self._touched.add(entity)
        self.schedule(entity, 0)

    def schedule(self, entity: str, time: int) -> None:
        """Schedules a case for `time`, and not before unless it changes."""
        self._at[entity] = time
        heapq.heappush(self._queue, (time, entity))

    def pop_due(
        self,
        open_cases: Mapping[str, Case],
        frames: Mapping[str, Frame],
        time: int,
        gpus: Callable[[str], Collection[str]],
    ) -> list[str]:
        """Returns the cases to check now; all of them where the time steps back. gpus: returns those of a server."""
        if time < self._time:
            self._swept, self._queue, self._at = min(self._swept, time), [], {}
            for entity in open_cases:
                self.schedule(entity, 0)
        self._time, found = time, set[str]()
        for entity in self._find_restarted(frames):
            found |= {entity, *gpus(entity)} if kind_of(entity) == "node" else {entity}
        while self._queue and self._queue[0][0] <= time:
            at, entity = heapq.heappop(self._queue)
            if self._at.get(entity) == at:
                del self._at[entity]
                found.add(entity)
        return sorted(open_cases) if self._sweep(open_cases, frames, time) else sorted(found & open_cases.keys())

    def find_unknown(
        self, open_cases: Mapping[str, Case], frames: Mapping[str, Frame], topology: Topology
    ) -> list[str]:
        """Returns cases to end: the oldest of entities in no frame and no topology, if there are too many of them."""
        new = self._touched - topology.parents.keys()
        self._touched.clear()
        self._unknown.update(new)
        if not new or len(self._unknown) <= MAX_UNKNOWN:
            return []
        known = set(topology.parents).union(*(f.entities for f in frames.values()))
        unknown = [e for e in open_cases if e in self._unknown and e not in known]
        self._unknown = set(unknown[-MAX_UNKNOWN:])
        return unknown[:-MAX_UNKNOWN]

    def reschedule(
        self, entity: str, case: Case, known: Mapping[str, Any] | None, maintenance: bool, time: int
    ) -> None:
        """Schedules the next check of a case, which may grow, be reported or end; a latched one waits for events.

        known: its open condition.   maintenance: people work on it, after which its level may rise.
        """
        over = case["last"] + QUIET_FOR + 1
        if known is None and not case["fresh"] and cases.is_link_only(case):
            self.schedule(entity, over)
        elif case["fresh"] or known is None or (maintenance and known["level"] != "page"):
            self.schedule(entity, time + 1)
        elif time - case["last"] <= REPEAT_FOR:
            repeat = known["reported"] + REPEAT
            self.schedule(entity, repeat if cases.is_latched(case, known["level"]) else min(repeat, over))

    def generation_start(self, entity: str, frames: Mapping[str, Frame], topology: Topology) -> float:
        """Returns when the counters of a GPU or its server last started; NaN or 0 if that is not reported."""
        node = topology.ancestor_of_kind(entity, "node") or ""
        own = 0.0
        if kind_of(entity) == "gpu":
            own = self._positions["gpu"].value(frames.get("gpu"), "gpu.generation", entity)
        return float(np.fmax(own, self._positions["node"].value(frames.get("node"), "node.generation", node)))

    def _find_restarted(self, frames: Mapping[str, Frame]) -> Iterator[str]:
        """Yields GPUs and nodes whose counters started again since the last instant."""
        for device_class in ("gpu", "node"):
            frame = frames.get(device_class)
            if frame is None or f"{device_class}.generation" not in frame.values:
                continue
            now = frame[f"{device_class}.generation"]
            known = grown(self._generations.get(device_class, np.empty(0)), len(now), np.nan)
            changed = ~np.isnan(now) & (now != known[: len(now)])
            known[: len(now)][changed] = now[changed]
            self._generations[device_class] = known
            yield from (frame.entities[i] for i in np.flatnonzero(changed).tolist())

    def _sweep(self, open_cases: Mapping[str, Case], frames: Mapping[str, Frame], time: int) -> bool:
        """Returns whether all cases are due; if so, adds to each how long it and its node have been silent."""
        self._swept = self._swept or time
        since = time - self._swept
        if since < SWEEP_EVERY:
            return False
        self._swept = time
        measured = {e for frame in frames.values() for e in _measured_entities(frame)}
        if not measured:
            return False
        topology = next(iter(frames.values())).topology
        for entity, case in open_cases.items():
            alive = entity in measured or topology.ancestor_of_kind(entity, "node") in measured
            case["away"] = 0 if alive else case.get("away", 0) + min(since, 2 * SWEEP_EVERY)
        return True


def _measured_entities(frame: Frame) -> Iterator[str]:
    """Yields the entities with any value in the frame."""
    measured = np.zeros(len(frame.entities), bool)
    for column in frame.values.values():
        values: NDArray[Any] = np.asarray(column)
        measured[: len(values)] |= ~np.isnan(values)
    return (frame.entities[i] for i in np.flatnonzero(measured).tolist())
