"""When each open case is looked at next, so that pages that hold cost nothing between their repeats.

In its first hour a case is repeated each minute, which costs about 0.1 ms a case in the instant that repeats it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import REPEAT
from detectors.base.topology_index import FramePositions
from detectors.xid import cases
from detectors.xid.cases import Case
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

QUIET = 600 * SECOND
"""After which what does not hold is over, as for the Desk."""
REPEATED = 3600 * SECOND
"""How long a condition that holds is repeated; the Desk keeps it open; chosen."""
SWEEP = 3600 * SECOND
"""How often all cases are looked at, whatever is due; chosen: a 72nd of GONE."""
GONE = 72 * 3600 * SECOND
"""Who is not heard of for so long was taken away, and its server with it; chosen: a long weekend."""
STRANGERS = 1000
"""Open cases of entities that are in no frame and no topology at most: a log may name any number; chosen."""
STRANGE = f"gave way to {STRANGERS} newer cases that are in no frame and no topology either"


class Looks:
    """What is due, derived from cases and frames: a new one looks at everything once."""

    def __init__(self, open_cases: Iterable[str] = ()) -> None:
        self._at: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []
        self._touched: set[str] = set()
        self._strange: set[str] = set()  # entities in no frame and no topology, and others that were asked about
        self._time = self._swept = 0
        self._lives: dict[str, NDArray[np.float64]] = {}
        self._places = {"gpu": FramePositions(), "node": FramePositions()}
        for entity in open_cases:
            self.news(entity)

    def news(self, entity: str) -> None:
        """Something was told of a case: looks at it now."""
        self._touched.add(entity)
        self.at(entity, 0)

    def at(self, entity: str, time: int) -> None:
        """Looks at a case at `time`, and not before unless something happens to it."""
        self._at[entity] = time
        heapq.heappush(self._queue, (time, entity))

    def due(
        self,
        open_cases: Mapping[str, Case],
        frames: Mapping[str, Frame],
        time: int,
        gpus: Callable[[str], Collection[str]],
    ) -> list[str]:
        """Whom to look at now; all of them where the time steps back. gpus: those of a server."""
        if time < self._time:
            self._swept, self._queue, self._at = min(self._swept, time), [], {}
            for entity in open_cases:
                self.at(entity, 0)
        self._time, found = time, set[str]()
        for entity in self._reborn(frames):
            found |= {entity, *gpus(entity)} if kind_of(entity) == "node" else {entity}
        while self._queue and self._queue[0][0] <= time:
            at, entity = heapq.heappop(self._queue)
            if self._at.get(entity) == at:
                del self._at[entity]
                found.add(entity)
        return sorted(open_cases) if self._sweeps(open_cases, frames, time) else sorted(found & open_cases.keys())

    def strangers(self, open_cases: Mapping[str, Case], frames: Mapping[str, Frame], topology: Topology) -> list[str]:
        """Cases to end: the oldest of entities in no frame and no topology, where there are too many of them."""
        new = self._touched - topology.parents.keys()
        self._touched.clear()
        self._strange.update(new)
        if not new or len(self._strange) <= STRANGERS:
            return []
        known = set(topology.parents).union(*(f.entities for f in frames.values()))
        strange = [e for e in open_cases if e in self._strange and e not in known]
        self._strange = set(strange[-STRANGERS:])
        return strange[:-STRANGERS]

    def again(self, entity: str, case: Case, known: Mapping[str, Any] | None, worked: bool, time: int) -> None:
        """Says when a case is due again: it may still grow, it is repeated, it ends; one that holds waits for news.

        known: what was told of it.   worked: people work on it, after which it may be louder.
        """
        over = case["last"] + QUIET + 1
        if known is None and not case["fresh"] and cases.of_a_link(case):
            self.at(entity, over)
        elif case["fresh"] or known is None or (worked and known["level"] != "page"):
            self.at(entity, time + 1)
        elif time - case["last"] <= REPEATED:
            repeat = known["told"] + REPEAT
            self.at(entity, repeat if cases.holds(case, known["level"]) else min(repeat, over))

    def life(self, entity: str, frames: Mapping[str, Frame], topology: Topology) -> float:
        """When the counters of a GPU or its server began their newest life; NaN or 0 where nobody tells."""
        node = topology.ancestor_of_kind(entity, "node") or ""
        own = (
            self._places["gpu"].value(frames.get("gpu"), "gpu.generation", entity) if kind_of(entity) == "gpu" else 0.0
        )
        return float(np.fmax(own, self._places["node"].value(frames.get("node"), "node.generation", node)))

    def _reborn(self, frames: Mapping[str, Frame]) -> Iterator[str]:
        """GPUs and nodes whose counters began another life since the last instant."""
        for device_class in ("gpu", "node"):
            frame = frames.get(device_class)
            if frame is None or f"{device_class}.generation" not in frame.values:
                continue
            now, known = frame[f"{device_class}.generation"], self._lives.get(device_class, np.empty(0))
            known = np.append(known, np.full(max(0, len(now) - len(known)), np.nan))
            changed = ~np.isnan(now) & (now != known[: len(now)])
            known[: len(now)][changed] = now[changed]
            self._lives[device_class] = known
            yield from (frame.entities[i] for i in np.flatnonzero(changed).tolist())

    def _sweeps(self, open_cases: Mapping[str, Case], frames: Mapping[str, Frame], time: int) -> bool:
        """Whether all are to be looked at, which notes for how long nothing was heard of each and its node."""
        self._swept = self._swept or time
        since = time - self._swept
        if since < SWEEP:
            return False
        self._swept = time
        heard = {e for frame in frames.values() for e in _speaking(frame)}
        if not heard:
            return False
        topology = next(iter(frames.values())).topology
        for entity, case in open_cases.items():
            lives = entity in heard or _node(entity, topology) in heard
            case["away"] = 0 if lives else case.get("away", 0) + min(since, 2 * SWEEP)
        return True


def _node(entity: str, topology: Topology) -> str | None:
    return topology.ancestor_of_kind(entity, "node")


def _speaking(frame: Frame) -> Iterator[str]:
    """Those of whom anything was measured."""
    told = np.zeros(len(frame.entities), bool)
    for column in frame.values.values():
        values: NDArray[Any] = np.asarray(column)
        told[: len(values)] |= ~np.isnan(values)
    return (frame.entities[i] for i in np.flatnonzero(told).tolist())
