"""Cohorts of ranks many of whose GPUs throttle at once: their coolant or power has failed, and others tell of that.

Their median is no normal any more (it breaks down at a half, Huber, Robust Statistics, 1981): who is well would learn
that it is quicker than its peers, and be found slow once they are well again. So nobody of them learns, those that
throttle are not judged, and the others are compared with each other alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.streams import LEARN, Bools, Floats, Step, Streams
from detectors.straggler.allowance import Allowance
from detectors.straggler.places import MOST, PEERS, Places
from pipeline.records import SECOND

_NODES = 3  # on which they throttle: two nodes coincide, or share a fault of their own; chosen, as Crowds has it
_FRESH = 60 * SECOND  # how long a throttle bit counts; as a cause of slowness
_SETTLES = 600 * SECOND  # how long after it they are still unlike each other: the plates cool one by one; as Crowds


@dataclass(frozen=True, slots=True)
class Ruling:
    """(S,) of struck cohorts: who learns nothing, who of those throttled of late, and who is not judged; and the slots
    that are judged again from now on."""

    still: Bools
    sick: Bools
    out: Bools
    back: list[int]


class Struck:
    """Array by slot: until when its cohort is struck; who is not judged, which lasts no longer than the allowance."""

    def __init__(self) -> None:
        self.until, self.out = np.empty(0, np.int64), np.empty(0, bool)
        self.allowance = Allowance()

    def take(self, throttled: NDArray[np.int64], places: Places, time: int) -> Ruling:
        """What holds of each rank now. throttled: when each last was, 0 never."""
        size = len(places)
        if (more := size - len(self.until)) > 0:
            self.until, self.out = (
                np.append(self.until, np.zeros(more, np.int64)),
                np.append(self.out, np.zeros(more, bool)),
            )
        last = throttled[:size]
        now = (last > time - _FRESH) & (last <= time)
        if now.any():
            self._mark(now, places, time)
        self.until[self.until <= time] = 0
        still = self.until[:size] > 0
        spent = self.allowance.take(still, time)
        sick = still & (last > time - _SETTLES)
        before, self.out[:size] = self.out[:size].copy(), still & ~spent & (sick | ~_enough(still & ~sick, places))
        return Ruling(still, sick, self.out[:size], np.flatnonzero(before & ~self.out[:size]).tolist())

    def _mark(self, now: Bools, places: Places, time: int) -> None:
        groups, nodes, there = places.groups, places.of["node"], places.at >= 0
        for group in np.unique(groups[now & (groups >= 0)]).tolist():
            mine = (groups == group) & there
            many = np.count_nonzero(mine & now) > MOST * np.count_nonzero(mine)
            if many and len(np.unique(nodes[mine & now])) >= _NODES:
                self.until[: len(mine)][mine] = time + _SETTLES

    def forget(self, slots: Sequence[int]) -> None:
        """Other ranks, or ranks elsewhere."""
        known = [slot for slot in slots if slot < len(self.until)]
        self.until[known], self.out[known] = 0, False
        self.allowance.used[[slot for slot in known if slot < len(self.allowance.used)]] = 0

    def snapshot(self) -> dict[str, Any]:
        return {"until": self.until.copy(), "out": self.out.copy(), "allowance": self.allowance.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.until, self.out = np.array(state["until"]), np.array(state["out"])
        self.allowance.restore(state["allowance"])


def _enough(well: Bools, places: Places) -> Bools:
    """(S,) whose cohort has enough ranks that are well to compare them with each other."""
    if not well.any():
        return well
    mine = well & (places.at >= 0) & (places.groups >= 0)
    count = np.bincount(places.groups[mine], minlength=int(places.groups.max(initial=0)) + 1)
    return np.asarray((count[places.groups] >= PEERS) & (places.groups >= 0))


def stepped(streams: Streams, values: Floats, groups: NDArray[np.int32], time: int, gate: Bools, still: Bools) -> Step:
    """One sample of streams of which some learn nothing."""
    slots = np.flatnonzero(still[: streams.cells.shape[1]])
    if not len(slots):
        return streams.step(values, groups, time, gate)
    slots = slots[streams.counts[slots] >= LEARN]
    learnt = streams.cells[: kernel.VARIANCE + 1, slots].copy()
    step = streams.step(values, groups, time, gate)
    kept = streams.counts[slots] >= LEARN  # else it was forgotten just now
    streams.cells[: kernel.VARIANCE + 1, slots[kept]] = learnt[:, kept]
    return step
