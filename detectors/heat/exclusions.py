"""Times when the thermal resistance of a GPU does not depend on its cooling, and is not judged.

CohortShift: all GPUs of a cohort move together: the supply's sensor is wrong, or the loop flows less.
SensorDoubts: a core is warmer and the memory on the same plate is not: the core's sensor.
exclude_idle_cohorts: too few GPUs of a cohort work: the few that do while a job waits are atypical.
CoolantCollapses: the loop has almost no flow: plates and paste cannot be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import edge_events
from detectors.base.kernel import compiled
from detectors.base.state import State, memory, notes
from detectors.base.streams import Bools, Floats, Singles, Step
from detectors.base.topology_index import per_topology
from detectors.heat.resistance import ResistanceSample
from pipeline.model.records import SECOND, Frame

_MOVED = 0.06  # ln R of all GPUs of a cohort; a supply sensor that is wrong by 2 K of 30; chosen
_SHIFT_SETTLES = 300 * SECOND  # us in which no GPU is judged: dies, coolant and filters settle by then; chosen
_NOW = 120.0  # s over which the shift is averaged: a load step moves it for less; chosen
_MEMORY = 6 * 3600.0  # s in which a shift becomes the cohort's usual; chosen
_MOST = 0.12  # what one GPU adds to the mean of its cohort at most; twice _MOVED, chosen
_LEAST_MEMBERS = 4  # working members from which a median holds for all; chosen


@compiled
def _add_cohorts(
    usual: Floats,
    now: Floats,
    until: Floats,
    ln_r: Floats,
    usable: Bools,
    own: Singles,
    groups: NDArray[np.int32],
    count: int,
    gains: Floats,
    time: int,
    counted: Bools,
) -> bool:
    """Adds the mean departure of each cohort; returns whether a shifted one has settled. counted: filled with the GPUs
    that were counted."""
    total, members, due = np.zeros(count), np.zeros(count), False
    for i in range(len(ln_r)):
        off = ln_r[i] - usual[i] - own[i]
        counted[i] = (groups[i] >= 0) and usable[i] and np.isfinite(off)
        if counted[i]:
            total[groups[i]] += min(max(off, -_MOST), _MOST)
            members[groups[i]] += 1
    for i in range(len(ln_r)):
        g = groups[i]
        common = total[g] / members[g] if (g >= 0) and (members[g] > 0) else 0.0
        now[i] += gains[0] * (common - now[i])
        usual[i] += gains[1] * common
        if (abs(now[i]) > _MOVED) and (until[i] == 0):
            until[i] = time + _SHIFT_SETTLES
        until[i] = min(until[i], time + _SHIFT_SETTLES)  # the clock may have been set back
        due = due or ((g >= 0) and (until[i] > 0) and (until[i] <= time))
    return due


@dataclass
class CohortShift(State):
    """(N,) per GPU, the same for a cohort.

    usual: ln R of the cohort.   now: departure of all its GPUs from it.   until: when a shifted cohort has settled, 0
    none.   error: K by which the supply's sensor was found to be wrong, from all members alike.

    A wrong sensor moves ln R of a cool GPU more than that of a hot one. The median of the cohort removes only a common
    factor, so the error is removed in K, before the logarithm, where that explains the members better.
    """

    usual: Floats = memory(np.nan)
    now: Floats = memory(0.0)
    until: Floats = memory(0.0)
    error: Floats = memory(0.0)

    def supply_error(self, size: int) -> Floats:
        """Returns (N,) K by which the supply reads too low."""
        self.grow(size)
        return self.error[:size]

    def is_settling(self, size: int) -> Bools:
        """Returns (N,) GPUs whose cohort has just shifted."""
        self.grow(size)
        return np.asarray(self.until[:size] > 0)

    def update(
        self,
        sample: ResistanceSample,
        step: Step,
        own: Singles,
        groups: NDArray[np.int32],
        time: int,
        seconds: float,
    ) -> None:
        """Adds one instant. own: (N,) learned offset of each GPU from its cohort."""
        n, grouped = len(groups), groups >= 0
        self.grow(n)
        usual, now, until = self.usual[:n], self.now[:n], self.until[:n]
        # the usual value is known once the members are learned: in a cohort seen once it may be a cold plate
        fresh = np.isnan(usual) & grouped
        if fresh.any() and (fresh := fresh & step.judged).any():
            usual[fresh], now[fresh] = step.median[fresh], 0.0
        counted, count = np.zeros(n, bool), int(groups.max(initial=0)) + 1
        gains = -np.expm1(-np.array([seconds / _NOW, seconds / _MEMORY]))
        state = usual, now, until
        if not _add_cohorts(*state, sample.ln_r, sample.usable, own[:n], groups, count, gains, time, counted):
            return
        for group in np.unique(groups[grouped & (until > 0) & (until <= time)]).tolist():
            self._remove_shift(sample, own[:n], counted & (groups == group), groups == group, time)

    def _remove_shift(self, sample: ResistanceSample, own: Singles, counted: Bools, members: Bools, time: int) -> None:
        """Removes the shift as K of the supply or as a factor of R, whichever leaves the members closer together."""
        n = len(members)
        usual, now, until, error = self.usual[:n], self.now[:n], self.until[:n], self.error[:n]
        if np.count_nonzero(counted) < _LEAST_MEMBERS:
            until[members] = time + _SHIFT_SETTLES
            return
        expected = usual[counted] + own[counted]
        factor = sample.ln_r[counted] - expected
        kelvin = sample.rise[counted] - np.exp(expected) * sample.power[counted]
        common_factor, common_kelvin = float(np.median(factor)), float(np.median(kelvin))
        apart = np.median(np.abs(factor - common_factor))
        left = np.maximum(sample.rise[counted] - common_kelvin, 1e-3)
        if np.median(np.abs(np.log(left / sample.power[counted]) - expected)) < apart:
            error[members] += common_kelvin
        else:
            usual[members] += common_factor
        now[members], until[members] = 0.0, 0.0


_ALONE = 0.6  # share of a core's change that the memory on the same plate does not follow; chosen
_DOUBTED, _STAYS = 0.65, 0.45
"""The same share of a mean, from which the core's sensor is doubted, and until which it stays so; chosen."""
_MEAN_S = 160.0  # s of that mean: rounding makes 0.4 K of noise of six samples, and half of it of sixteen; chosen


@dataclass
class SensorDoubts(State):
    """(N,) each.

    apart: mean K by which a core left its memory.   doubted: whether its sensor is doubted.
    compared_at: when core and memory were last compared.
    """

    apart: Floats = memory(0.0)
    doubted: Bools = memory(False, np.bool_)
    compared_at: NDArray[np.int64] = memory(0, np.int64)

    def update(self, parted: Step, seconds: float) -> None:
        """Adds one instant. parted: stream of the core above its memory."""
        n = len(parted.on)
        self.grow(n)
        self.apart[:n] -= np.expm1(-seconds / _MEAN_S) * (parted.effect - self.apart[:n])

    def find_doubted(self, known: Bools, parted: Step, warmer: Floats, step: Step, hold: float, time: int) -> Bools:
        """Returns (N,) GPUs whose core sensor is to blame.

        known: compared with its memory now.   warmer: K by which each core is warmer.   It is decided within `hold` s
        of the change, and holds until the memory follows, or was not measured for as long.
        """
        n = len(known)
        doubted, compared_at, apart = self.doubted[:n], self.compared_at[:n], self.apart[:n]
        # an idle core is not judged in between; and the clock may have been set back
        compared_at[:] = np.where(known | ~step.judged, time, np.minimum(compared_at, time))
        fresh = known & (apart >= _DOUBTED * warmer) & (step.held <= hold)
        stays = doubted & (~known | (apart >= _STAYS * warmer)) & (time - compared_at <= hold * SECOND)
        doubted[:] = (fresh | stays) & step.on
        return np.asarray(doubted | (known & (parted.effect >= _ALONE * warmer)))


_LEAST_WORKING, _WORKING_SHARE = 4, 0.2  # members of a cohort, and share of it, that must be working; chosen


def exclude_idle_cohorts(gate: Bools, groups: NDArray[np.int32], sizes: NDArray[np.int64]) -> None:
    """Closes the gate for cohorts of which too few members work. sizes: members of each cohort."""
    _close_idle(gate, groups, sizes, _LEAST_WORKING, _WORKING_SHARE)


@compiled
def _close_idle(gate: Bools, groups: NDArray[np.int32], sizes: NDArray[np.int64], least: int, share: float) -> None:
    count = np.zeros(len(sizes))
    for i in range(len(gate)):
        if gate[i] and groups[i] >= 0:
            count[groups[i]] += 1
    for i in range(len(gate)):
        if groups[i] >= 0 and count[groups[i]] < max(least, share * sizes[groups[i]]):
            gate[i] = False


COLLAPSE_EVENTS = ("flow_collapse", "pressure_collapse")
_COLLAPSE_SETTLES = 300 * SECOND  # us after a collapse until dies, coolant and filters settle; chosen
_COLLAPSE_LASTS = 3600 * SECOND  # us of a collapse without an end event: dry GPUs are off long before; chosen


@dataclass
class CoolantCollapses(State):
    """Entity -> until when its collapse excludes measurements below it."""

    _until: dict[str, int] = notes()

    def update(self, frames: Mapping[str, Frame]) -> None:
        """Reads the events of an instant."""
        time = max((frame.time for frame in frames.values()), default=0)
        for event in edge_events(frames, COLLAPSE_EVENTS):
            # an event dated ahead, or a clock set back, excludes for no longer than any other event
            self._until[event.entity] = min(event.time, time) + (_COLLAPSE_LASTS if event.active else _COLLAPSE_SETTLES)
        if self._until and frames:
            self._until = {e: min(until, time + _COLLAPSE_LASTS) for e, until in self._until.items() if until >= time}

    def cooled_by(self, frame: Frame) -> Bools | None:
        """Returns (N,) entities that such a loop cools; None if there is no collapse."""
        return self._find_cooled(frame, frozenset(self._until)) if self._until else None

    @per_topology
    def _find_cooled(self, frame: Frame, loops: frozenset[str]) -> Bools:
        above = frame.topology.ancestors
        return np.fromiter((not loops.isdisjoint(above(e)) for e in frame.entities), bool, len(frame.entities))
