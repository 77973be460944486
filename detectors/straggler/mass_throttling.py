"""Cohorts of ranks many of whose GPUs throttle at once: their coolant or power has failed, and others tell of that.

Their median is no normal any more (it breaks down at a half, Huber, Robust Statistics, 1981): who is well would learn
that it is quicker than its peers, and be found slow once they are well again. So nobody of them learns, those that
throttle are not judged, and the others are compared with each other alone.

For how long something may be excused: time that runs up while it is and down while it is not, by slot.

Without an end, a condition that comes back before the excuse has lapsed would hide whoever it excuses for ever.

Many GPUs that throttle at once are no stragglers: their coolant has failed or their power, and others tell that.

Where so many do that the median is none any more, or their loop is warm, all of it is left to others; else only they.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.cohorts import SpanningCohorts
from detectors.base.streams import LEARN, Bools, Floats, Step, Streams
from detectors.straggler.rank_slots import LEAST_PEERS, MOST_OF_COHORT, RankSlots
from pipeline.model.records import SECOND, Frame

LONGEST_EXCUSE = 4 * 3600 * SECOND
"""Half a shift: whoever mends coolant or power has come by then, or nobody minds. Chosen."""
_HOLE = 60 * SECOND  # a hole in the telemetry counts at most so much; chosen


class ExcuseAllowance:
    """Array by slot: how much is used up, at most twice what is allowed, so that it does not come back at once."""

    def __init__(self) -> None:
        self.used, self.last = np.empty(0, np.int64), 0

    def spend(self, excused: Bools, time: int) -> Bools:
        """(S,) whose allowance is used up."""
        if (more := len(excused) - len(self.used)) > 0:
            self.used = np.append(self.used, np.zeros(more, np.int64))
        since = min(max(time - self.last, 0), _HOLE)
        self.last, used = time, self.used[: len(excused)]
        if excused.any() or used.any():
            np.clip(used + np.where(excused, since, -since), 0, 2 * LONGEST_EXCUSE, out=used)
        return np.asarray(used >= LONGEST_EXCUSE)

    def snapshot(self) -> dict[str, Any]:
        return {"used": self.used.copy(), "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.used, self.last = np.array(state["used"]), state["last"]


_NODES = 3  # on which they throttle: two nodes coincide, or share a fault of their own; chosen, as Crowds has it
_FRESH = 60 * SECOND  # how long a throttle bit counts; as a cause of slowness
_SETTLES = 600 * SECOND  # how long after it they are still unlike each other: the plates cool one by one; as Crowds


@dataclass(frozen=True, slots=True)
class CohortExclusions:
    """(S,) of struck cohorts: who learns nothing, who of those throttled of late, and who is not judged; and the slots
    that are judged again from now on."""

    frozen: Bools
    throttled: Bools
    excluded: Bools
    readmitted: list[int]


class ThrottlingCohorts:
    """Array by slot: until when its cohort is struck; who is not judged, which lasts no longer than the allowance."""

    def __init__(self) -> None:
        self.until, self.excluded = np.empty(0, np.int64), np.empty(0, bool)
        self.allowance = ExcuseAllowance()

    def update(self, throttled: NDArray[np.int64], places: RankSlots, time: int) -> CohortExclusions:
        """What holds of each rank now. throttled: when each last was, 0 never."""
        size = len(places)
        if (more := size - len(self.until)) > 0:
            self.until, self.excluded = (
                np.append(self.until, np.zeros(more, np.int64)),
                np.append(self.excluded, np.zeros(more, bool)),
            )
        last = throttled[:size]
        now = (last > time - _FRESH) & (last <= time)
        if now.any():
            self._mark_cohorts(now, places, time)
        self.until[self.until <= time] = 0
        still = self.until[:size] > 0
        spent = self.allowance.spend(still, time)
        sick = still & (last > time - _SETTLES)
        before, self.excluded[:size] = (
            self.excluded[:size].copy(),
            still & ~spent & (sick | ~_enough_healthy(still & ~sick, places)),
        )
        return CohortExclusions(
            still, sick, self.excluded[:size], np.flatnonzero(before & ~self.excluded[:size]).tolist()
        )

    def _mark_cohorts(self, now: Bools, places: RankSlots, time: int) -> None:
        groups, nodes, there = places.groups, places.numbers["node"], places.column >= 0
        for group in np.unique(groups[now & (groups >= 0)]).tolist():
            mine = (groups == group) & there
            many = np.count_nonzero(mine & now) > MOST_OF_COHORT * np.count_nonzero(mine)
            if many and len(np.unique(nodes[mine & now])) >= _NODES:
                self.until[: len(mine)][mine] = time + _SETTLES

    def reset(self, slots: Sequence[int]) -> None:
        """Other ranks, or ranks elsewhere."""
        known = [slot for slot in slots if slot < len(self.until)]
        self.until[known], self.excluded[known] = 0, False
        self.allowance.used[[slot for slot in known if slot < len(self.allowance.used)]] = 0

    def snapshot(self) -> dict[str, Any]:
        return {"until": self.until.copy(), "out": self.excluded.copy(), "allowance": self.allowance.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.until, self.excluded = np.array(state["until"]), np.array(state["out"])
        self.allowance.restore(state["allowance"])


def _enough_healthy(well: Bools, places: RankSlots) -> Bools:
    """(S,) whose cohort has enough ranks that are well to compare them with each other."""
    if not well.any():
        return well
    mine = well & (places.column >= 0) & (places.groups >= 0)
    count = np.bincount(places.groups[mine], minlength=int(places.groups.max(initial=0)) + 1)
    return np.asarray((count[places.groups] >= LEAST_PEERS) & (places.groups >= 0))


def step_frozen(
    streams: Streams, values: Floats, groups: NDArray[np.int32], time: int, gate: Bools, still: Bools
) -> Step:
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


_WARMER = 5.0  # K by which most GPUs of a loop are warmer than usual under load: five steps of NVML's rounding; chosen
_LOOP_NODES, _SHARE = 3, 0.05  # nodes of a loop on which, and share of its GPUs at work that throttle at once; chosen
_MOST_OF_LOOP = (
    0.3  # share that throttles from which the others have no median to go by (Huber, Robust Statistics, 1981)
)
_LOOP_SETTLES = 600 * SECOND  # how long after it GPUs are still unlike each other: the plates cool one by one; chosen
_GAIN = 3e-3  # of the usual temperature: about an hour at 10 s


class ThrottlingLoops:
    """Watches temperatures and throttle bits loop by loop, without loops rack by rack, else of all of the fleet.

    A part() of a detector. The rest of a fleet may be several halls: a few that throttle say nothing of each other
    there, and where it is warm only those that throttle are left to others."""

    def __init__(self) -> None:
        self.usual, self.readings = np.empty(0), np.empty(0, np.int64)
        self.until, self.some_until = np.empty(0, np.int64), np.empty(0, np.int64)  # of all of a loop; of who throttles
        self.allowance = ExcuseAllowance()
        self._units = SpanningCohorts("loop", "cdu", "rack", least=_LOOP_NODES)

    def find_members(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools) -> Bools:
        """(N,) GPUs that are in a crowd, or were lately. throttled: has a throttle bit that is no policy."""
        n = len(frame.entities)
        if (more := n - len(self.usual)) > 0:
            self.usual = np.append(self.usual, np.zeros(more))
            none = np.zeros(more, np.int64)
            self.readings, self.until, self.some_until = (
                np.append(a, none) for a in (self.readings, self.until, self.some_until)
            )
        warmer = frame["gpu.temperature"] - self.usual
        if (busy & throttled).any():
            self._mark_units(frame, node, busy, throttled, warmer)
        some = frame.time < self.some_until
        crowd = (frame.time < self.until) | (some & ~self.allowance.spend(some, frame.time))
        known = busy & ~crowd & np.isfinite(warmer)
        self.readings[known] += 1
        self.usual[known] += np.maximum(1 / self.readings[known], _GAIN) * warmer[known]
        return crowd

    def _mark_units(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools, warmer: Any) -> None:
        units = self._units.groups(frame)
        for unit in np.unique(units[busy & throttled]).tolist():
            mine = busy & (units == unit) & (unit >= 0)
            known = mine & np.isfinite(warmer) & (self.readings > 0)
            struck = mine & throttled
            wide = len(np.unique(node[struck])) >= _LOOP_NODES
            share = int(np.count_nonzero(struck)) / max(int(np.count_nonzero(mine)), 1)
            apart = unit != self._units.rest
            several = len(np.unique(node[mine])) >= _LOOP_NODES
            warm = several and known.any() and float(np.median(warmer[known])) >= _WARMER
            if (warm and apart) or (wide and share > _MOST_OF_LOOP):
                self.until[units == unit] = frame.time + _LOOP_SETTLES
            elif warm or (wide and apart and share >= _SHARE):
                self.some_until[struck] = frame.time + _LOOP_SETTLES

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in ("usual", "readings", "until", "some_until")}
        return {**arrays, "allowance": self.allowance.snapshot()}

    def restore(self, state: dict[str, Any]) -> None:
        self.usual, self.readings, self.until = state["usual"], state["readings"], state["until"]
        self.some_until = state["some_until"]
        self.allowance.restore(state["allowance"])
