"""Step samples of ranks: the logarithm of their compute time, once per step, and for how long each is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import row_medians
from detectors.base.state import State, memory
from detectors.base.streams import Bools, Floats
from detectors.straggler.rank_slots import RankSlots
from pipeline.model.compiling import compiled
from pipeline.model.records import SECOND, Frame

Ints = NDArray[np.int64]
RING = 10  # steps whose median counts: the ratio of a single step is noise
_RESTS = 300 * SECOND
"""us without a step after which a rank restarts without suspicion: its job was stopped, and a hot GPU is cool again.
Chosen: beyond most evaluations, so that one in the middle of a slowdown does not restart the hold."""
_TIMES = 3  # usual gaps between steps, the limit of a rest where steps are long; chosen
_WENT_ON = 5  # steps since the sample before from which the job made steps in between: only some are sampled; chosen
_GAIN = 0.2  # of the usual gap: five steps show another one; chosen
_ABSURD_S = 86_400.0  # no step takes a day: such a reading is dropped; chosen


@dataclass
class StepSamples(State):
    """By slot, times in us. step: newest step.   sampled: newest sample.

    gap: usual time between two.   steps: samples so far.   recent: newest departures from the median of the team, from
    `count` samples; over: bits of those that exceed a limit, the newest lowest.   team: ln of the median of the team at
    the newest sample.   rested: slots with a first step after a rest.   passed: (S,) s since the sample before, at most
    thrice the usual gap.
    """

    step: Floats = memory(np.nan)
    sampled: Ints = memory(0, np.int64)
    gap: Ints = memory(0, np.int64)
    steps: Ints = memory(0, np.int64)
    recent: Floats = memory(0.0, shape=(-1, RING))
    over: NDArray[np.uint16] = memory(0, np.uint16)
    count: Ints = memory(0, np.int64)
    team: Floats = memory(np.nan)
    rested: Sequence[int] = field(default_factory=list, init=False, repr=False)
    passed: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)

    def read_steps(self, frame: Frame, ranks: RankSlots) -> Floats:
        """Returns (S,) ln(compute time) of the ranks that finished a step, NaN of others."""
        size = len(ranks)
        self.grow(size)
        compute, step = ranks.read_ranks(frame, "rank.compute_time"), ranks.read_ranks(frame, "rank.step")
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where((compute > 0) & (compute < _ABSURD_S), np.log(compute), np.nan)
        last = self.step[:size]
        times[step == last] = np.nan  # the same step reported twice counts once
        made = step - last
        known = np.isfinite(step)
        last[known] = step[known]
        new, sampled = np.isfinite(times), self.sampled[:size]
        went_on = (made > _WENT_ON) & np.isfinite(made)  # steps that were not sampled
        self._update_gaps(np.where(new & (sampled > 0), frame.time - sampled, 0), went_on)
        sampled[new] = frame.time
        self.steps[:size] += new
        return times

    def _update_gaps(self, gap: Ints, went_on: Bools) -> None:
        """Finds rests against the usual time between samples. gap: (S,) since the sample before, 0 without one now."""
        usual = self.gap[: len(gap)]
        longest = _TIMES * usual
        self.rested = np.flatnonzero((gap > np.maximum(longest, _RESTS)) & ~went_on).tolist()
        bounded = np.where(usual > 0, np.minimum(gap, longest), gap)
        self.passed = np.maximum(bounded, 0) / SECOND
        new = gap > 0
        known = np.where(usual > 0, usual + _GAIN * (bounded - usual), gap)
        usual[new] = known[new]

    def record(self, times: Floats, team: Floats, limit: float) -> Bools:
        """Adds the steps of an instant; returns (S,) ranks most of whose newest ten steps depart by over `limit`."""
        size = len(times)
        near = np.empty(size, bool)
        kept = self.recent[:size], self.over[:size], self.count[:size], self.team[:size]
        _record(times, team, limit, *kept, near)
        return near

    def is_silent(self, time: int, lasts: int) -> Bools:
        """Returns (S,) ranks without a sample for long: their job waits, or has ended."""
        return np.asarray(time - self.sampled > np.maximum(_TIMES * self.gap, lasts))

    def typical(self, slots: NDArray[np.intp]) -> Floats:
        """Returns the median of the newest departures of some slots; NaN where there are fewer than ten."""
        return np.where(self.count[slots] >= RING, row_medians(self.recent, slots), np.nan)

    def newest(self, slots: NDArray[np.intp], count: int) -> Floats:
        """Returns the least of the newest departures of some slots."""
        at = (self.count[slots, None] - 1 - np.arange(count)) % RING
        return np.asarray(np.take_along_axis(self.recent[slots], at, axis=1).min(axis=1))

    def restart(self, slots: Sequence[int]) -> None:
        """Removes the newest departures of some slots."""
        self.count[slots], self.over[slots] = 0, 0


@compiled
def _record(
    times: Floats,
    team: Floats,
    limit: float,
    recent: Floats,
    over: NDArray[np.uint16],
    count: Ints,
    team_at: Floats,
    near: NDArray[np.bool_],
) -> None:
    for i in range(len(times)):
        departure = times[i] - team[i]
        if departure == departure:
            recent[i, count[i] % RING] = departure
            count[i] += 1
            team_at[i] = team[i]
            over[i] = ((over[i] << 1) | np.uint16(departure > limit)) & 0x3FF
        bits, many = over[i], 0
        while bits:
            many += 1
            bits &= bits - 1
        near[i] = many > RING // 2
