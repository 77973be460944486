"""Statistical streams: a peer-conditioned, clipped CUSUM of one metric of all entities of a class (docs/detectors.md).

A sample is compared with the median of its cohort, less the device's own slowly learnt offset, in a scale between its
own variance and that of the cohort, widened for autocorrelation. Clipped, it is summed as in Page (1954), Biometrika
41, 100-115. Threshold and least effect follow from the quiet streams of the site (detectors.base.calibration). A cohort
of which too many members are off on one side is itself the event: with more than three in ten the median is near its
breakdown (Huber, Robust Statistics, 1981, section 1.4), so no member is blamed, except those that stand out of the
others by far. Single precision: 24 bytes a stream, and 5 for its quiet tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.calibration import BLOCK_S, Kinds, QuietTail, arl0
from detectors.base.findings import SET_BACK
from detectors.base.state import N, State, memory, notes, part
from pipeline.model.records import SECOND

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Bools = NDArray[np.bool_]

# What a stream learns and when it alarms.
LEARN = 20  # samples before a stream is judged: the replay contract
USUAL_STEP = 10.0  # s; the grid for which thresholds are given
SLACK = 0.5  # k of the CUSUM: half of the smallest shift looked for, in scales (Page 1954)
CLIP = 3.0  # scales that a sample counts at most: with Student-t4 noise ARL0 at h = 20 rises from 1.8e5 to 1.3e10
ALONE = 4.0  # added to the threshold of a stream without peers: what moves the whole fleet moves it too
_DOUBT = 3.0  # standard errors of the baseline that count as no shift: it was learnt from few samples at first; chosen
_FROZEN = 2.0  # a sum above it stops learning, so that a fault does not become the baseline
_ALPHA = 0.15  # of the smoothed effect: about 6 samples of memory
_GAIN = 5e-4  # least learning rate: a memory of about 2,000 samples
_PRIOR = 16.0  # samples that the scale of the cohort is worth against the own variance
_MOST_EFFECT = 64.0  # deltas by which one sample moves the effect at most, so that the effect of an outlier is short
_ABSURD = 1e9  # no temperature, logarithm or share is as large: such a value counts as missing
_LOWEST, _HIGHEST = 15.0, 30.0  # thresholds: below, false alarms within days; above, never an alarm
LIFT = 24 * 3600
"""s after which the state of a shifted cohort, or of a stream better than normal, becomes its normal: what a site
leaves for a day, with a ticket open, is intended. Chosen: sooner, what waits for a spare part would be normal."""

# When a cohort is the event.
MOST = 0.3  # share of a cohort on one side above which the cohort is the event: Huber's breakdown, see above
LEAST_COHORT = 4  # members from which a share means something; chosen
LINGERS = 300 * SECOND  # a cohort stays shifted so long after its share was last too large: half of a page's hold
KNOWN = 900  # s for which a member was off before the others: it has been blamed, and others do not change that
LONG = 300  # s off that count as a condition where more than MOST were off for as long: half of a hold; chosen
_BEYOND = 1.5
"""Times the effect of the others, plus one delta, from which a member stands out of a shifted cohort: members that one
cause moves differ by less. Chosen."""
_SURE = 600  # s for which it must: what moves a cohort reaches its members one after another


@dataclass(frozen=True, slots=True)
class Channel:
    """Settings of one metric class.

    floor:     least scale, in units of the transformed signal (0.01 = 1 % where it is a logarithm).
    delta:     least smoothed effect that matters, in the same units; below it statistics alone mean nothing. Where the
               quiet streams of the site depart further, more is needed.
    phi:       autocorrelation of neighbouring samples; it widens the scale by sqrt((1 + phi) / (1 - phi)).
    threshold: of the sum at a tick of 10 s, for normal noise; detectors.base.budget computes its false alarms, and
               the site's own noise decides which threshold has as few.
    both:      whether less than normal is harm too.
    clip:      False: samples count in full (for the ablation).   frozen: False: a fault is learnt (likewise).
    """

    floor: float
    delta: float
    phi: float = 0.3
    threshold: float = 18.5
    both: bool = False
    clip: bool = True
    frozen: bool = True

    def settings(self) -> Singles:
        """Returns the settings in the order of kernel.advance_streams."""
        shrink = math.sqrt((1 - self.phi) / (1 + self.phi))
        clip, frozen = CLIP if self.clip else 1e6, _FROZEN if self.frozen else 1e9
        numbers = (self.floor, self.delta, shrink, float(self.both), LEARN, SLACK, _DOUBT, clip, frozen)
        return np.array([*numbers, _ALPHA, _GAIN, _PRIOR, _MOST_EFFECT], np.float32)

    def limit(self, step: float) -> float:
        """Returns the threshold at a tick of `step` s, for the same alarms a day: ARL0 grows as e**h (k = 0.5)."""
        return min(max(self.threshold + math.log(USUAL_STEP / step), _LOWEST), _HIGHEST)

    def target(self, step: float) -> float:
        """Returns the share of its blocks in which a quiet stream may exceed its limit: that of normal noise."""
        return (1 + self.both) * BLOCK_S / step / arl0(self.limit(step))


@dataclass(frozen=True, slots=True)
class Cohort:
    """All cohorts of one instant. groups: (N,) of each entity, -1 none; median, spread, size: (G,)."""

    groups: NDArray[np.int32]
    median: Singles
    spread: Singles
    size: NDArray[np.int32]


class Step:
    """All streams after a sample: (N,) each, computed when read; valid until the next sample.

    on:       a condition holds that began with the sum above its threshold.   below: it is one of less than normal.
    effect:   smoothed departure from own normal, transformed units.   score: the larger of the two sums.
    held:     seconds for which the effect has been at least `least`, on its side.
    least:    effect that it takes at this site: the channel's delta, or more (detectors.base.calibration).
    median, spread, size: of the cohort at this instant (size counts the entity itself); own normal, NaN and 0 without.
    measured: had a sample.   judged: and has learnt enough.   groups: its cohort.   alone: compared with its past only.
    off:      has a condition, or is as far off without one yet: +1 more than normal, -1 less, 0 neither.
    moved:    too many of its cohort are off on one side: the cohort is the event, and no member is blamed.
    """

    def __init__(
        self, cells: Singles, words: NDArray[np.uint32], residual: Singles, cohort: Cohort, least: Singles
    ) -> None:
        self._cells, self._words, self._residual, self._cohort = cells, words, residual, cohort
        self.least = least
        up, down = (words & kernel.ON_UP) != 0, (words & kernel.ON_DOWN) != 0
        self.on, self.below = up | down, down & ~up
        self.alone = cohort.groups < 0
        self.moved = np.zeros(len(residual), bool)

    @property
    def off(self) -> NDArray[np.int8]:
        """(N,) see the class."""
        off = np.empty(len(self._words), np.int8)
        kernel.find_sides(self._words, self._cells[kernel.EFFECT], self.least, off)
        return off

    @property
    def effect(self) -> Singles:
        """(N,) see the class."""
        return np.asarray(self._cells[kernel.EFFECT])

    @property
    def score(self) -> Singles:
        """(N,) see the class."""
        return np.asarray(np.maximum(self._cells[kernel.UP], self._cells[kernel.DOWN]))

    @property
    def held(self) -> NDArray[np.int64]:
        """(N,) see the class."""
        return (self._words & kernel.HELD_BITS).astype(np.int64)

    @property
    def judged(self) -> Bools:
        """(N,) see the class."""
        return np.asarray((_sample_counts(self._words) >= LEARN) & self.measured)

    @property
    def measured(self) -> Bools:
        """(N,) see the class."""
        return np.asarray(np.isfinite(self._residual))

    @property
    def groups(self) -> NDArray[np.int32]:
        """(N,) see the class."""
        return self._cohort.groups

    @property
    def median(self) -> Singles:
        """(N,) see the class."""
        of_cohort = np.append(self._cohort.median, np.nan)[self._cohort.groups]
        return np.where(self.alone, self._cells[kernel.BASELINE], of_cohort)

    @property
    def spread(self) -> Singles:
        """(N,) see the class."""
        return np.asarray(np.append(self._cohort.spread, np.nan)[self._cohort.groups])

    @property
    def size(self) -> NDArray[np.int32]:
        """(N,) see the class."""
        return np.asarray(np.append(self._cohort.size, 0)[self._cohort.groups])


@dataclass
class CohortShift(State):
    """Which cohorts of one metric are off as one; a part of Streams.

    cohort: (N,) whether the cohort of a stream is.   seen: (N,) when its share was last too large.
    known:  (N,) was off long before its cohort shifted.
    """

    cohort: Bools = memory(False, np.bool_)
    seen: NDArray[np.int64] = memory(0, np.int64)
    known: Bools = memory(False, np.bool_)

    def update(self, step: Step, size: NDArray[np.int32], delta: float, time: int) -> Bools:
        """Returns (N,) streams whose cohort has shifted, except those that stand out of it.

        size: (G,) members of each cohort that were measured.   delta: least effect that matters.

        Many that are off alike widen the spread of their cohort, and the sums of some rise late, at exactly half of the
        cohort never. So they count as soon as one of them has a condition or so many were off for LONG. A cohort
        without a measured member stays as it is.
        """
        n = len(step.groups)
        cohort, known = self.cohort[:n], self.known[:n]
        off = step.off
        if not (off.any() or cohort.any()):
            known[:] = False
            return np.zeros(n, bool)
        over = _too_many_off(step, off, size)
        if over.any() or cohort.any():
            self._follow(step.groups, over, size == 0, time)
        known[:] = step.on & (known | ((step.held >= KNOWN) & ~cohort))
        moved = cohort & ~known
        return moved & ~_stand_out(step, off, moved, delta) if moved.any() else moved

    def _follow(self, groups: NDArray[np.int32], over: Bools, unseen: Bools, time: int) -> None:
        """Updates which cohorts are shifted, and when the share of each was last too large. over, unseen: (G,)"""
        cohort, seen, mine = self.cohort[: len(groups)], self.seen[: len(groups)], groups >= 0
        before = np.bincount(groups[mine & cohort], minlength=len(over)) > 0
        last = np.zeros(len(over), np.int64)
        np.maximum.at(last, groups[mine], seen[mine])
        last[over | (before & unseen)] = time
        goes_on = over | (before & (time - last >= 0) & (time - last <= LINGERS))
        cohort[:] = np.append(goes_on, False)[groups]
        seen[:] = np.where(cohort, np.append(last, 0)[groups], 0)


def _too_many_off(step: Step, off: NDArray[np.int8], size: NDArray[np.int32]) -> Bools:
    """(G,) cohorts of which more than MOST are off on one side."""
    over = np.zeros(len(size), bool)
    at = np.flatnonzero((off != 0) & (step.groups >= 0))
    for side in (1, -1):
        mine = at[off[at] == side]
        if len(mine) and (_count_members(step.groups[mine], size) > MOST * size).any():
            mine = mine[step.measured[mine]]
            chosen = (mine, mine[step.on[mine]], mine[step.held[mine] >= LONG])
            many, on, long = (_count_members(step.groups[one], size) for one in chosen)
            over |= (many > MOST * size) & ((on > 0) | (long > MOST * size)) & (size >= LEAST_COHORT)
    return over


def _count_members(groups: NDArray[np.int32], size: NDArray[np.int32]) -> NDArray[np.int64]:
    """(G,) how often each cohort is in `groups`."""
    return np.bincount(groups, minlength=len(size))


def _stand_out(step: Step, off: NDArray[np.int8], moved: Bools, delta: float) -> Bools:
    """(N,) members that are off by far more than the others of their cohort that are off, and have been for long."""
    at = np.flatnonzero(moved & (off != 0))
    effect = np.abs(step.effect[at])
    key = 2 * step.groups[at].astype(np.int64) + (off[at] > 0)  # one for the members of a cohort that are off on a side
    order = np.lexsort((effect, key))
    _, first, inverse, many = np.unique(key[order], return_index=True, return_inverse=True, return_counts=True)
    ranked = effect[order]
    median = (ranked[first + (many - 1) // 2] + ranked[first + many // 2]) / 2
    beyond = np.zeros(len(moved), bool)
    beyond[at[order]] = ranked >= _BEYOND * median[inverse] + delta
    return np.asarray(beyond & step.on & (step.held >= _SURE))


_NO_LIMITS = (0.0, 0.0, -1), np.empty(0, np.float32), np.empty(0, np.float32)


@dataclass
class Streams(State):
    """One metric of all entities of a class; a part() of a detector.

    cells: (6, N) see detectors.base.kernel.   last: time of the newest sample.   step_s: usual length of a tick.
    """

    channel: Channel
    cells: Singles = memory(0.0, np.float32, shape=(6, N))
    last: int = notes(int)
    step_s: float = notes(float)
    quiet: QuietTail = part(QuietTail)
    _moved: CohortShift = part(CohortShift, kept=True)
    _alone: Bools = notes(lambda: np.zeros(0, bool))
    _room: Singles = field(default_factory=lambda: np.empty((4, 0), np.float32), init=False, repr=False)
    _groups: NDArray[np.int32] | None = field(default=None, init=False, repr=False)
    _limits: tuple[tuple[float, float, int], Singles, Singles] = field(default=_NO_LIMITS, init=False, repr=False)
    _settings: tuple[Channel, Singles] | None = field(default=None, init=False, repr=False)
    _order: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)
    _first: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64), init=False, repr=False)

    @property
    def counts(self) -> NDArray[np.uint32]:
        """(N,) samples that each stream has learnt from, 2,047 at most."""
        return _sample_counts(self.cells[kernel.WORD].view(np.uint32))

    def step(
        self,
        values: Floats,
        groups: NDArray[np.int32],
        time: int,
        gate: Bools | None = None,
        kinds: Kinds | None = None,
    ) -> Step:
        """Adds one sample per entity: positive is harm, NaN is none; an instant not after the last one is ignored.

        groups: cohort of each entity, -1 = own past only; pass the same array as long as no entity moves, for speed.
        gate:   False: this sample is neither judged nor learnt from.
        kinds:  kind of device of each entity, whose quiet tails differ (Detector.kinds); none: all are of one kind.
        """
        size = len(values)
        self.grow(size)
        sample, residual, scale, wide = self._room[:, :size]
        seconds = self._tick_seconds(time)
        kernel.read_samples(np.asarray(values, np.float64), gate, _ABSURD, sample)
        if seconds is None:
            sample[:] = np.nan
        cohort = self._order_by_cohort(groups, size)
        of_cohorts = cohort.median, cohort.spread, cohort.size
        kernel.cohorts(sample, self.cells[kernel.BASELINE], self._order, self._first, scale, *of_cohorts)
        kernel.residuals(sample, groups, *of_cohorts, np.float32(self.channel.floor), residual, scale, wide)
        limit, least, nominal = self._site_limits(size, kinds)
        cells, words = self.cells[:, :size], self.cells[kernel.WORD].view(np.uint32)[:size]
        if self._settings is None or self._settings[0] is not self.channel:
            self._settings = self.channel, self.channel.settings()
        kept = self._shifted_cells(words) if self._moved.cohort[:size].any() else None
        kernel.advance_streams(
            cells, words, residual, scale, wide, limit, least, self._settings[1], np.uint32(seconds or 0)
        )
        if kept is not None:
            still, learnt, young, as_they_were = kept
            cells[: len(learnt), still], cells[:, young] = learnt, as_they_were
        kernel.raise_peaks(cells, words, residual, nominal, self._settings[1], self.quiet.peak[:size])
        step = Step(cells, words, residual, cohort, least)
        step.moved = self._moved.update(step, cohort.size, self.channel.delta, self.last)
        if self.quiet.is_over(self.last):
            self.quiet.close_block(step.on, self._moved.cohort[:size], self.channel.target(self.step_s))
        self._relearn_old(step)
        return step

    def needed(self, factor: float) -> tuple[float, float]:
        """Returns the threshold of the sum and the least effect that a factor means, as rounded numbers."""
        limit = min(max(self.channel.limit(self.step_s or USUAL_STEP) * factor, _LOWEST), _HIGHEST)
        return round(limit, 2), float(f"{self.channel.delta * max(factor, 1):.4g}")

    def grow(self, size: int) -> None:
        """See `State.grow`; also the working arrays."""
        super().grow(size)
        self._moved.grow(size)
        self.quiet.grow(size)
        if size > self._room.shape[1]:
            self._room = np.empty((4, size), np.float32)

    def clear_conditions(self, positions: Sequence[int] | NDArray[np.intp]) -> None:
        """Ends the conditions of some streams and restarts their sums; their baselines stay."""
        known = [i for i in positions if i < self.cells.shape[1]]
        self.cells[[[kernel.UP], [kernel.DOWN], [kernel.EFFECT]], known] = 0.0
        self.cells[kernel.WORD].view(np.uint32)[known] &= ~(kernel.ON_UP | kernel.ON_DOWN | kernel.HELD_BITS)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the order of the cohorts is computed with the next sample."""
        super().restore(state)
        self._groups = None

    def _site_limits(self, size: int, kinds: Kinds | None) -> tuple[Singles, Singles, np.float32]:
        """Returns (N,) threshold and least effect of each stream, and the shipped threshold."""
        # rounded, since the length of a tick is never twice the same
        nominal, delta = round(self.channel.limit(self.step_s), 2), self.channel.delta
        self.quiet.sort(size, kinds, self._alone)
        key = (nominal, delta, self.quiet.revision)
        if key != self._limits[0]:
            factors = self.quiet.factors()
            limit = np.clip(nominal * factors, _LOWEST, _HIGHEST) + ALONE * self._alone
            self._limits = key, limit.astype(np.float32), (delta * np.maximum(factors, 1)).astype(np.float32)
        return self._limits[1], self._limits[2], np.float32(nominal)

    def _shifted_cells(self, words: NDArray[np.uint32]) -> tuple[NDArray[np.intp], Singles, NDArray[np.intp], Singles]:
        """Returns the streams of shifted cohorts that learn nothing now, and their baseline and variance: their cohort
        has no median to learn from. Then those that had not learnt enough, and all of their cells: they begin when the
        cohort is normal."""
        moved = np.flatnonzero(self._moved.cohort[: len(words)])
        old = _sample_counts(words[moved]) >= LEARN
        still, young = moved[old], moved[~old]
        return still, self.cells[: kernel.VARIANCE + 1, still].copy(), young, self.cells[:, young].copy()

    def _relearn_old(self, step: Step) -> None:
        """Resets streams that are off for LIFT, with all of their cohort: else the others would stand out."""
        old = step.held >= LIFT
        if not old.any():
            return
        side, delta = step.off, self.channel.delta
        better = (step.effect <= -delta) & (not self.channel.both)
        for mine in ((side != 0) & step.moved, better):
            if (old & mine).any():
                alike = np.isin(step.groups, step.groups[old & mine]) & ~step.alone
                self.reset(mine & (alike | old))

    def _tick_seconds(self, time: int) -> float | None:
        """Returns the length of the tick; a gap in the telemetry counts as one tick. None: a sample out of order.

        A clock that was set back is followed: else no sample would count until it has caught up.
        """
        if self.last and time <= self.last:
            if self.last - time < SET_BACK:
                return None
            self.last = time
            return self.step_s
        since = (time - self.last) / SECOND if self.last else USUAL_STEP
        # samples of a tick may be dated a little apart, so the usual length is followed slowly, down more readily
        known = self.step_s or since
        self.step_s = known + (0.5 if since < known else 0.02) * (min(since, 2 * known) - known)
        self.last = time
        return min(since, 2 * self.step_s)

    def _order_by_cohort(self, groups: NDArray[np.int32], size: int) -> Cohort:
        """Returns the cohorts, still without figures, with the entities sorted by them."""
        self._sort_entities(groups[:size])
        count = len(self._first) - 1
        return Cohort(groups, np.empty(count, np.float32), np.empty(count, np.float32), np.zeros(count, np.int32))

    def _sort_entities(self, groups: NDArray[np.int32]) -> None:
        """Sorts the entities by cohort; a stream that loses or finds peers has another normal from then on."""
        alone = groups < 0
        if self._groups is groups or (self._groups is not None and np.array_equal(self._groups, groups)):
            return
        known = min(len(self._alone), len(alone))
        changed = np.zeros(len(alone), bool)
        changed[:known] = self._alone[:known] != alone[:known]
        if changed.any():
            self.reset(changed)
        count = int(groups.max(initial=-1)) + 1
        order = np.argsort(groups.astype(np.int16) if count < 2**15 else groups, kind="stable").astype(np.int32)
        self._order = order[np.count_nonzero(alone) :]
        self._first = np.append(0, np.cumsum(np.bincount(groups[~alone], minlength=count))).astype(np.int64)
        self._groups, self._alone = groups.copy(), alone


def _sample_counts(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.asarray((words >> kernel.COUNT_SHIFT) & kernel.COUNT_BITS)
