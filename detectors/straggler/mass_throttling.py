"""Many GPUs that throttle together are not stragglers: their coolant or power has failed, which others report.

Ranks: the median of a cohort of which many GPUs throttle does not hold (it breaks down at a half, Huber, Robust
Statistics, 1981): healthy ranks would learn that they are faster than their peers, and look slow once those are healthy
again. So none of them learns, throttled ranks are not judged, and the others are compared with each other alone.

GPUs of jobs that report no compute times: the same by cooling loop, else by rack, else for the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.cohorts import SpanningCohorts
from detectors.base.state import State, memory, notes, part
from detectors.base.streams import LEARN, Bools, Floats, Step, Streams
from detectors.straggler.rank_slots import LEAST_PEERS, MOST_OF_COHORT, RankSlots
from pipeline.model.records import SECOND, Frame

LONGEST_EXCUSE = 4 * 3600 * SECOND
"""us, half a shift: coolant or power is repaired by then, or it does not matter. Chosen."""
_GAP = 60 * SECOND  # us that a gap in the telemetry counts at most; chosen
_NODES = 3  # nodes that throttle: two may coincide, or share a fault of their own; chosen
_FRESH = 60 * SECOND  # us for which a throttle bit counts, as for a cause of slowness
_SETTLES = 600 * SECOND  # us after it during which GPUs are still unlike each other: plates cool one by one; chosen
_WARMER = 5.0  # K by which most GPUs of a loop are warmer than usual under load: five steps of NVML's rounding; chosen
_LOOP_SHARE = 0.05  # share of a loop's working GPUs that throttle together; chosen
_MOST_OF_LOOP = 0.3  # share that throttles from which the median of the others does not hold (Huber, 1981)
_GAIN = 3e-3  # of the usual temperature: about an hour at 10 s


@dataclass
class ExcuseAllowance(State):
    """For how long each may be excused: time that runs up while it is excused and down while it is not.

    Without a limit, a condition that recurs before its excuse ends would hide a fault permanently. used: us, at most
    twice the allowance, so that an excuse does not come back soon.
    """

    used: NDArray[np.int64] = memory(0, np.int64)
    last: int = notes(int)

    def spend(self, excused: Bools, time: int) -> Bools:
        """Adds an instant; returns (S,) which have used up their allowance."""
        self.grow(len(excused))
        since = min(max(time - self.last, 0), _GAP)
        self.last, used = time, self.used[: len(excused)]
        if excused.any() or used.any():
            np.clip(used + np.where(excused, since, -since), 0, 2 * LONGEST_EXCUSE, out=used)
        return np.asarray(used >= LONGEST_EXCUSE)


@dataclass(frozen=True, slots=True)
class CohortExclusions:
    """(S,) of throttling cohorts: frozen: learn nothing; throttled: recently; excluded: not judged.

    readmitted: slots that are judged again from now on.
    """

    frozen: Bools
    throttled: Bools
    excluded: Bools
    readmitted: list[int]


@dataclass
class ThrottlingCohorts(State):
    """By slot: until when its cohort counts as throttling, and whether it is excluded, for the allowance at most."""

    until: NDArray[np.int64] = memory(0, np.int64)
    excluded: Bools = memory(False, np.bool_)
    allowance: ExcuseAllowance = part(ExcuseAllowance)

    def update(self, throttled_at: NDArray[np.int64], ranks: RankSlots, time: int) -> CohortExclusions:
        """Returns what holds of each rank now. throttled_at: when each last throttled, 0 never."""
        size = len(ranks)
        self.grow(size)
        last = throttled_at[:size]
        now = (last > time - _FRESH) & (last <= time)
        if now.any():
            self._mark_cohorts(now, ranks, time)
        self.until[self.until <= time] = 0
        frozen = self.until[:size] > 0
        spent = self.allowance.spend(frozen, time)
        throttled = frozen & (last > time - _SETTLES)
        before, excluded = self.excluded[:size].copy(), self.excluded[:size]
        excluded[:] = frozen & ~spent & (throttled | ~_enough_healthy(frozen & ~throttled, ranks))
        return CohortExclusions(frozen, throttled, excluded, np.flatnonzero(before & ~excluded).tolist())

    def _mark_cohorts(self, now: Bools, ranks: RankSlots, time: int) -> None:
        groups, nodes, present = ranks.groups, ranks.numbers["node"], ranks.column >= 0
        for group in np.unique(groups[now & (groups >= 0)]).tolist():
            members = (groups == group) & present
            many = np.count_nonzero(members & now) > MOST_OF_COHORT * np.count_nonzero(members)
            if many and len(np.unique(nodes[members & now])) >= _NODES:
                self.until[: len(members)][members] = time + _SETTLES

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Resets slots with another rank, or a rank on another GPU."""
        known = [slot for slot in slots if slot < len(self.until)]
        self.until[known], self.excluded[known] = 0, False
        self.allowance.used[[slot for slot in known if slot < len(self.allowance.used)]] = 0


def _enough_healthy(healthy: Bools, ranks: RankSlots) -> Bools:
    """Returns (S,) whose cohort has enough healthy ranks to compare them with each other."""
    if not healthy.any():
        return healthy
    counted = healthy & (ranks.column >= 0) & (ranks.groups >= 0)
    count = np.bincount(ranks.groups[counted], minlength=int(ranks.groups.max(initial=0)) + 1)
    return np.asarray((count[ranks.groups] >= LEAST_PEERS) & (ranks.groups >= 0))


def step_frozen(
    streams: Streams, values: Floats, groups: NDArray[np.int32], time: int, gate: Bools, frozen: Bools
) -> Step:
    """Adds one sample to streams of which the frozen ones learn nothing."""
    slots = np.flatnonzero(frozen[: streams.cells.shape[1]])
    if not len(slots):
        return streams.step(values, groups, time, gate)
    slots = slots[streams.counts[slots] >= LEARN]
    learned = streams.cells[: kernel.VARIANCE + 1, slots].copy()
    step = streams.step(values, groups, time, gate)
    kept = streams.counts[slots] >= LEARN  # else it was reset just now
    streams.cells[: kernel.VARIANCE + 1, slots[kept]] = learned[:, kept]
    return step


@dataclass
class ThrottlingLoops(State):
    """Temperatures and throttling by loop, where there is none by rack, else of the whole fleet. (N,) by GPU.

    usual: temperature (Cel) under load, from `readings`.   until: until when all of its loop counts as throttling;
    some_until: until when the GPU itself does.

    The rest of a fleet may be several halls: there a few throttling GPUs prove nothing for the others, and where it is
    warm only those that throttle are excluded.
    """

    usual: Floats = memory(0.0)
    readings: NDArray[np.int64] = memory(0, np.int64)
    until: NDArray[np.int64] = memory(0, np.int64)
    some_until: NDArray[np.int64] = memory(0, np.int64)
    allowance: ExcuseAllowance = part(ExcuseAllowance)
    _units: SpanningCohorts = field(
        default_factory=lambda: SpanningCohorts("loop", "cdu", "rack", least=_NODES), init=False, repr=False
    )

    def find_members(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools) -> Bools:
        """Returns (N,) GPUs of a loop that throttles together, or did so recently. throttled: has a throttle bit."""
        n = len(frame.entities)
        self.grow(n)
        usual, readings = self.usual[:n], self.readings[:n]
        warmer = frame["gpu.temperature"] - usual
        if (busy & throttled).any():
            self._mark_units(frame, node, busy, throttled, warmer)
        some = frame.time < self.some_until[:n]
        members = (frame.time < self.until[:n]) | (some & ~self.allowance.spend(some, frame.time))
        known = busy & ~members & np.isfinite(warmer)
        readings[known] += 1
        usual[known] += np.maximum(1 / readings[known], _GAIN) * warmer[known]
        return members

    def _mark_units(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools, warmer: Floats) -> None:
        units, n = self._units.groups(frame), len(busy)
        for unit in np.unique(units[busy & throttled]).tolist():
            working = busy & (units == unit) & (unit >= 0)
            known = working & np.isfinite(warmer) & (self.readings[:n] > 0)
            affected = working & throttled
            wide = len(np.unique(node[affected])) >= _NODES
            share = int(np.count_nonzero(affected)) / max(int(np.count_nonzero(working)), 1)
            separate = unit != self._units.rest
            several = len(np.unique(node[working])) >= _NODES
            warm = several and known.any() and float(np.median(warmer[known])) >= _WARMER
            if (warm and separate) or (wide and share > _MOST_OF_LOOP):
                self.until[:n][units == unit] = frame.time + _SETTLES
            elif warm or (wide and separate and share >= _LOOP_SHARE):
                self.some_until[:n][affected] = frame.time + _SETTLES
