"""Statistics that distinguish a faulty instrument from a real change: stuck, noisy, shifted; usual heat of a cohort.

The loops are compiled: one pass over state and reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import AncestorIndex
from detectors.base.state import State, memory, part
from pipeline.model.compiling import compiled
from pipeline.model.records import Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

RHYTHM = 30
"""s from one judged reading to the next: a faulty instrument stays so for hours, every tick would be waste; chosen."""
# Readings are RHYTHM apart. Gains of exponential means:
_FAST = 0.15  # 7 readings, three minutes; chosen
_TREND = 0.3  # 3 changes and more: a ramp is followed within two minutes; chosen
_CALM = 0.05  # 20 readings, ten minutes: an instrument is noisy all the time, load now and then; chosen
_SLOW = 0.005  # 200 readings, an hour and a half; chosen
# Counts of readings:
_KNOWN = 40.0  # until an instrument is known: 20 minutes; chosen
_FOLLOWS = 4.0  # within which it shows what its witnesses showed: cold plates need 30 s, heat sinks in air 60; chosen
_LONG = 10.0  # of one value that no longer teach how often it changes; chosen
# Shares of the usual change:
_CLIP = 6.0  # that one change counts at most, so that the start of a job or a dip is not noise; chosen
ROUNDS = 0.5  # of the quantum: a reading that toggles at random changes by that on average
_TEACHES = 1.5  # above which a change teaches nothing: half of the least ratio and more; chosen
_RATES = (_CALM, _SLOW, _TREND, _CLIP, _TEACHES)


class GroupMedians:
    """Medians of groups; keeps the order of the groups for as long as they stay the same array."""

    def __init__(self) -> None:
        self._groups = np.empty(0, np.int32)
        self._table = np.empty((0, 0), np.intp)

    def medians(self, values: Floats, groups: NDArray[np.int32]) -> Floats:
        """Returns (N,) median of each one's group without missing values; NaN without a group or a value."""
        if groups is not self._groups:
            self._groups, self._table = groups, _member_table(groups)
        padded = np.append(values, np.nan)[self._table]
        padded.sort(axis=1)
        count = padded.shape[1] - np.isnan(padded).sum(axis=1)
        rows = np.arange(len(padded))
        low, high = padded[rows, np.maximum(count - 1, 0) // 2], padded[rows, np.maximum(count, 1) // 2]
        middle = np.append(np.where(count > 0, 0.5 * (low + high), np.nan), np.nan)
        return np.asarray(middle[groups], np.float64)


def _member_table(groups: NDArray[np.int32]) -> NDArray[np.intp]:
    """(groups, most members) positions of the members; one beyond the last where there are fewer."""
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    table = np.full((len(sizes), max(1, int(sizes.max()))), len(groups), np.intp)
    order = np.argsort(groups, kind="stable")[np.count_nonzero(groups < 0) :]
    starts = np.cumsum(sizes) - sizes
    table[groups[order], np.arange(len(order)) - starts[groups[order]]] = order
    return table


@dataclass
class WitnessRange(State):
    """Range of a related reading since an instrument last changed."""

    low: Floats = memory(np.nan)
    high: Floats = memory(np.nan)


@dataclass
class StuckReading(State):
    """For how many readings an instrument has shown the same value, and the range of related readings in that time.

    witnesses: names of the related readings.
    run, seen: readings of one value, and of any.   usual: share of readings that differ from the one before.
    quantum: smallest change of an instrument that was seen; what it rounds to, or near 0 where its noise is finer.
    """

    witnesses: tuple[str, ...]
    last: Floats = memory(np.nan)
    run: Floats = memory(0.0)
    usual: Floats = memory(0.0)
    seen: Floats = memory(0.0)
    quantum: Floats = memory(np.nan)
    after: Floats = memory(0.0)  # readings since it was suspected
    ranges: dict[str, WitnessRange] = part(dict)

    def __post_init__(self) -> None:
        self.ranges = {name: WitnessRange() for name in self.witnesses}

    def step(self, values: Floats, **witness: Floats) -> tuple[Floats, dict[str, Floats]]:
        """Returns (N,) readings since the last change, and by witness the range that it went through since."""
        size = len(values)
        self.grow(size)
        moved = np.empty(size, bool)
        state = (self.last, self.run, self.usual, self.seen, self.quantum)
        _count_same(values, state, moved, _SLOW, _LONG)
        spans = {}
        for name, other in witness.items():
            spans[name] = np.empty(size)
            self.ranges[name].grow(size)
            low, high = self.ranges[name].low, self.ranges[name].high
            _follow_range(values, np.asarray(other, np.float64), moved, low, high, spans[name])
        return self.run[:size], spans

    def stayed(self, values: Floats, suspected: Bools, calm: Bools) -> Bools:
        """Returns (N,) instruments that stayed stuck after they were suspected: heat follows load within a minute.

        calm: False where no judgement is possible now; these start over.
        """
        self.grow(len(values))
        out = np.empty(len(values), bool)
        _count_suspected(values, suspected, calm, self.after, self.run, _FOLLOWS, out)
        return out


@dataclass
class NoiseLevel(State):
    """Mean change from one reading to the next, now and usually, without a steady trend."""

    last: Floats = memory(np.nan)
    now: Floats = memory(0.0)
    usual: Floats = memory(0.0)
    seen: Floats = memory(0.0)
    held: Floats = memory(0.0)
    trend: Floats = memory(0.0)
    one_ago: Floats = memory(np.nan)
    two_ago: Floats = memory(np.nan)

    def step(
        self, values: Floats, least: float, ratio: float, calm: Bools | None = None, quantum: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Returns (N,) the change as a multiple of its usual, and for how many readings it was `ratio` or more.

        least: change below which no change is usual: noise of the instrument itself.   calm: False where no
        judgement is possible now; these start over.   quantum: what instruments round to: a value between two steps
        changes by one whenever it changes at all.
        """
        self.grow(len(values))
        times, floor = np.empty(len(values)), np.full(len(values), least)
        if quantum is not None:
            np.fmax(floor, ROUNDS * quantum, out=floor)
        state = (self.last, self.now, self.usual, self.seen, self.held, self.trend, self.one_ago, self.two_ago)
        _follow_changes(values, state, floor, ratio, _KNOWN, _RATES, times)
        held = self.held[: len(values)]
        if calm is not None and not calm.all():
            held[~calm] = 0
        return times, held


@dataclass
class LevelShift(State):
    """Shift of a reading from its usual: a mean of minutes against one of hours, which frozen readings do not teach."""

    now: Floats = memory(np.nan)
    usual: Floats = memory(np.nan)
    seen: Floats = memory(0.0)

    def step(self, values: Floats, frozen: Bools) -> Floats:
        """Returns (N,) shift, NaN until it is known. frozen: instruments whose usual stays as it is."""
        self.grow(len(values))
        shifted = np.empty(len(values))
        _follow_level(values, frozen, self.now, self.usual, self.seen, _KNOWN, _FAST, _SLOW, shifted)
        return shifted


UNUSUAL_K = 3.0  # shift from which a cohort is another than before: three roundings; chosen
_USUAL_K_PER_W = 0.06  # resistance until the own is known: cold plates have 0.03, heat sinks in air 0.08; chosen
_K_PER_W = (0.02, 1.0)  # least and most of it: good cold plates; a T4 at 70 W under 70 K, its data sheet
K_ERROR = 0.2  # share of the resistance that is not known; chosen
_PRIOR_W2 = 2500.0  # variance of the load, 50 W, that the resistance is worth; chosen
_LEAST = 4  # GPUs with data; fewer show little of a loop; chosen
_SETTLES = 900 // RHYTHM  # readings after which a cohort that moved has settled: smoothing and heat; chosen
_LIFT = 6.0 * 3600 / RHYTHM  # readings after which a cohort that moved has a new normal; chosen
_NUMBERS = (_SLOW, _USUAL_K_PER_W, _PRIOR_W2, *_K_PER_W, UNUSUAL_K, K_ERROR, _LIFT)


@dataclass
class Climate(State):
    """How warm cohorts of GPUs are for their load, compared with normal: a change of all is no instrument fault.

    shift: K that temperatures moved beyond what load explains; NaN where it is not known.
    load:  K of it that load explains.   calm: the cohort is as it usually is, and has been for a while.
    """

    moved: dict[str, LevelShift] = part(lambda: {name: LevelShift() for name in ("heat", "power")})
    heat: Floats = memory(np.nan)
    power: Floats = memory(np.nan)
    both: Floats = memory(0.0)
    square: Floats = memory(0.0)
    unusual: Floats = memory(0.0)
    since: Floats = memory(float(_SETTLES))
    shift: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    load: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    calm: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)

    def resistance(self, size: int) -> Floats:
        """Returns (N,) K per W by which the cohort gets warmer, as learnt."""
        low, high = _K_PER_W
        both, square = self.both[:size], self.square[:size]
        return np.clip((both + _PRIOR_W2 * _USUAL_K_PER_W) / (square + _PRIOR_W2), low, high)

    def step(self, heat: Floats, power: Floats) -> None:
        """Adds a reading: median temperature and power of each cohort."""
        size = len(heat)
        self.grow(size)
        frozen = (self.unusual[:size] > 0) & (self.unusual[:size] < _LIFT)
        moved = self.moved["heat"].step(heat, frozen), self.moved["power"].step(power, frozen)
        smooth = (self.moved["heat"].now[:size], self.moved["power"].now[:size])  # heat lags less
        self.load, self.shift = np.empty(size), np.empty(size)
        state = (self.heat, self.power, self.both, self.square, self.unusual, self.since)
        _follow_climate(smooth, moved, state, _NUMBERS, self.load, self.shift)
        self.calm = self.since[:size] >= _SETTLES


class LoopMeans:
    """Mean temperature and power of the GPUs of each loop."""

    def __init__(self) -> None:
        self._index = AncestorIndex("cdu")

    def means(self, frame: Frame, gpus: Frame | None) -> tuple[Floats, Floats]:
        """Returns (loops,) temperature and power; NaN where too few GPUs have data."""
        size = len(frame.entities)
        if gpus is None or not gpus.values:
            return np.full(size, np.nan), np.full(size, np.nan)
        heat, power, at = gpus["gpu.temperature"], gpus["gpu.power"], self._index.positions(gpus, frame)
        there = (at >= 0) & ~np.isnan(heat) & ~np.isnan(power)
        count = np.bincount(at[there], minlength=size)
        enough = np.where(count >= _LEAST, count, np.nan)
        heats = np.bincount(at[there], heat[there], size)
        powers = np.bincount(at[there], power[there], size)
        return np.asarray(heats / enough), np.asarray(powers / enough)


@dataclass(frozen=True, slots=True)
class InstrumentFault:
    """An instrument that is wrong now. mode: stuck, biased or noisy; since: us; effect: in `unit`."""

    entity: str
    signal: str
    mode: str
    since: int
    effect: float
    unit: str
    words: str
    evidence: Mapping[str, Any]


@compiled
def _count_same(
    values: Floats,
    state: tuple[Floats, Floats, Floats, Floats, Floats],
    moved: Bools,
    gain: float,
    most: float,
) -> None:
    """Counts how often each reading was the same in a row. Out: moved. most: runs that still teach.

    state: last, run, usual, seen, quantum.
    """
    last, run, usual, seen, quantum = state
    for i in range(len(values)):
        value = values[i]
        moved[i] = False
        if value != value:
            continue
        change = value != last[i]
        if change and last[i] == last[i]:
            by = abs(value - last[i])
            quantum[i] = by if not quantum[i] * (1.0 + gain) < by else quantum[i] * (1.0 + gain)
        seen[i] += 1.0
        if run[i] < most:
            usual[i] += max(1.0 / seen[i], gain) * ((1.0 if change else 0.0) - usual[i])
        run[i] = 0.0 if change else run[i] + 1.0
        last[i], moved[i] = value, change


@compiled
def _follow_range(values: Floats, other: Floats, moved: Bools, low: Floats, high: Floats, span: Floats) -> None:
    """Range of a witness since each reading moved last; an instrument without a reading changes nothing."""
    for i in range(len(values)):
        now = other[i]
        if values[i] == values[i]:
            low[i] = now if moved[i] or low[i] != low[i] or now < low[i] else low[i]
            high[i] = now if moved[i] or high[i] != high[i] or now > high[i] else high[i]
        wide = high[i] - low[i]
        span[i] = wide if wide == wide else 0.0


@compiled
def _count_suspected(
    values: Floats, suspected: Bools, calm: Bools, after: Floats, run: Floats, least: float, out: Bools
) -> None:
    """Out: instruments that have been suspected for more than `least` readings; those that are not calm start over."""
    for i in range(len(values)):
        there = values[i] == values[i]
        if there:
            after[i] = after[i] + 1.0 if suspected[i] else 0.0
        if not calm[i]:
            after[i] = run[i] = 0.0
        out[i] = there and after[i] > least


@compiled
def _follow_changes(
    values: Floats,
    state: tuple[Floats, ...],
    least: Floats,
    ratio: float,
    known: float,
    rates: tuple[float, float, float, float, float],
    times: Floats,
) -> None:
    """Mean change of each reading against its usual, less its trend: the middle of three changes.

    state: last, now, usual, seen, held, trend, one_ago, two_ago.
    rates: gain of the change of now, of the usual and of the trend; most that one change counts, in usual ones; times
           the usual above which a reading teaches nothing.
    """
    last, now, usual, seen, held, trend, one_ago, two_ago = state
    quick, slow, follow, clip, teaches = rates
    for i in range(len(values)):
        moved = values[i] - last[i]
        change = abs(moved - trend[i])
        if change == change:
            a, b = one_ago[i], two_ago[i]
            if a == a and b == b:
                trend[i] += follow * (max(min(moved, a), min(max(moved, a), b)) - trend[i])
            two_ago[i], one_ago[i] = a, moved
            seen[i] += 1.0
            floor = max(usual[i], least[i])
            clipped = min(change, clip * floor)
            now[i] += max(1.0 / seen[i], quick) * (clipped - now[i])
            share = now[i] / floor
            held[i] = held[i] + 1.0 if seen[i] > known and share >= ratio else 0.0
            if share < teaches or seen[i] <= known:
                usual[i] += max(1.0 / seen[i], slow) * (clipped - usual[i])
            times[i] = share
        else:
            times[i] = now[i] / max(usual[i], least[i])
        if values[i] == values[i]:
            last[i] = values[i]


@compiled
def _follow_level(
    values: Floats,
    frozen: Bools,
    now: Floats,
    usual: Floats,
    seen: Floats,
    known: float,
    quick: float,
    slow: float,
    shifted: Floats,
) -> None:
    """A mean of minutes less one of hours, which frozen readings do not teach; NaN until it is known."""
    for i in range(len(values)):
        value = values[i]
        if value == value:
            if now[i] != now[i]:
                now[i] = usual[i] = value
            seen[i] += 1.0
            now[i] += max(1.0 / seen[i], quick) * (value - now[i])
            if not frozen[i]:
                usual[i] += max(1.0 / seen[i], slow) * (value - usual[i])
        shifted[i] = now[i] - usual[i] if seen[i] > known else np.nan


@compiled
def _follow_climate(
    smooth: tuple[Floats, Floats],
    moved: tuple[Floats, Floats],
    state: tuple[Floats, ...],
    numbers: tuple[float, float, float, float, float, float, float, float],
    load: Floats,
    shifted: Floats,
) -> None:
    """How far the heat of a cohort is from what its load explains, and since when; pairs are (temperature, power).

    smooth:  means of minutes, from which the resistance is learnt.   moved: shifts, NaN where not known.
    state:   heat, power, both, square, unusual, since.
    numbers: gain; resistance until it is known and the variance of load that it is worth; least and most resistance;
             least shift that is unusual and its share of the load's; readings after which the new level is normal.
    """
    means, powers, both, square, unusual, since = state
    gain, prior, worth, low, high, least, error, lift = numbers
    heats, watts = smooth
    for i in range(len(load)):
        heat, power = heats[i], watts[i]
        if heat == heat and power == power:
            if means[i] != means[i]:
                means[i] = heat
            if powers[i] != powers[i]:
                powers[i] = power
            by_heat, by_power = heat - means[i], power - powers[i]
            g = 0.0 if 0 < unusual[i] < lift else gain
            both[i] += g * (by_heat * by_power - both[i])
            square[i] += g * (by_power * by_power - square[i])
            means[i] += g * by_heat
            powers[i] += g * by_power
        resistance = min(max((both[i] + worth * prior) / (square[i] + worth), low), high)
        load[i] = resistance * moved[1][i]
        shifted[i] = moved[0][i] - load[i]
        far = abs(shifted[i])
        if far == far:
            strange = far >= max(least, error * abs(load[i]))
            unusual[i] = unusual[i] + 1 if strange else 0.0
            since[i] = 0.0 if strange else since[i] + 1
