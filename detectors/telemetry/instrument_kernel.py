"""The inner loops of what judges instruments, compiled: one pass over state and reading, no column in between."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@compiled
def still(
    values: Floats,
    last: Floats,
    run: Floats,
    usual: Floats,
    seen: Floats,
    moved: Bools,
    gain: float,
    most: float,
) -> None:
    """Counts how often each reading was the same in a row; `moved` is whom it moved. most: runs that still teach."""
    for i in range(len(values)):
        value = values[i]
        moved[i] = False
        if value != value:
            continue
        change = value != last[i]
        seen[i] += 1.0
        if run[i] < most:
            usual[i] += max(1.0 / seen[i], gain) * ((1.0 if change else 0.0) - usual[i])
        run[i] = 0.0 if change else run[i] + 1.0
        last[i], moved[i] = value, change


@compiled
def spans(values: Floats, other: Floats, moved: Bools, low: Floats, high: Floats, span: Floats) -> None:
    """Range of a witness since each reading moved last; who told nothing stood not still."""
    for i in range(len(values)):
        now = other[i]
        if values[i] == values[i]:
            low[i] = now if moved[i] or low[i] != low[i] or now < low[i] else low[i]
            high[i] = now if moved[i] or high[i] != high[i] or now > high[i] else high[i]
        wide = high[i] - low[i]
        span[i] = wide if wide == wide else 0.0


@compiled
def stay(values: Floats, odd: Bools, calm: Bools, after: Floats, run: Floats, least: float, out: Bools) -> None:
    """Who has been odd for more than `least` readings; who is not calm begins anew."""
    for i in range(len(values)):
        there = values[i] == values[i]
        if there:
            after[i] = after[i] + 1.0 if odd[i] else 0.0
        if not calm[i]:
            after[i] = run[i] = 0.0
        out[i] = there and after[i] > least


@compiled
def swing(
    values: Floats,
    state: tuple[Floats, ...],
    least: float,
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
            floor = max(usual[i], least)
            clipped = min(change, clip * floor)
            now[i] += max(1.0 / seen[i], quick) * (clipped - now[i])
            share = now[i] / floor
            held[i] = held[i] + 1.0 if seen[i] > known and share >= ratio else 0.0
            if share < teaches or seen[i] <= known:
                usual[i] += max(1.0 / seen[i], slow) * (clipped - usual[i])
            times[i] = share
        else:
            times[i] = now[i] / max(usual[i], least)
        if values[i] == values[i]:
            last[i] = values[i]


@compiled
def shift(
    values: Floats,
    odd: Bools,
    now: Floats,
    usual: Floats,
    seen: Floats,
    known: float,
    quick: float,
    slow: float,
    shifted: Floats,
) -> None:
    """A mean of minutes less one of hours, which what is odd does not teach; NaN until it is known."""
    for i in range(len(values)):
        value = values[i]
        if value == value:
            if now[i] != now[i]:
                now[i] = usual[i] = value
            seen[i] += 1.0
            now[i] += max(1.0 / seen[i], quick) * (value - now[i])
            if not odd[i]:
                usual[i] += max(1.0 / seen[i], slow) * (value - usual[i])
        shifted[i] = now[i] - usual[i] if seen[i] > known else np.nan


@compiled
def climate(
    smooth: tuple[Floats, Floats],
    moved: tuple[Floats, Floats],
    state: tuple[Floats, ...],
    numbers: tuple[float, float, float, float, float, float, float, float],
    load: Floats,
    shifted: Floats,
) -> None:
    """How far a cohort's heat is from what its load explains, and since when; pairs are (temperature, power).

    smooth:  means of minutes, of which how the one follows the other is learnt.   moved: shifts, NaN where not known.
    state:   heat, power, both, square, odd, since.
    numbers: gain; resistance until it is known and the variance of load that it is worth; least and most resistance;
             least shift that is odd and its share of the load's; readings after which it is as it is now.
    """
    means, powers, both, square, odd, since = state
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
            g = 0.0 if 0 < odd[i] < lift else gain
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
            odd[i] = odd[i] + 1 if strange else 0.0
            since[i] = 0.0 if strange else since[i] + 1


@compiled
def heard(
    values: Floats,
    time: int,
    long: int,
    seen: NDArray[np.int64],
    since: NDArray[np.int64],
    missed: NDArray[np.int32],
    count: NDArray[np.int32],
    holes: NDArray[np.int32],
    gaps: NDArray[np.int64],
) -> None:
    """Takes who had a sample at `time`; who was missed for more than `long` instants before speaks anew since then.

    holes, gaps: of who speaks now, the instants that he missed before, and us since his sample before; else 0.
    """
    for i in range(len(missed)):
        missed[i] += 1
        holes[i], gaps[i] = 0, 0
        if i < len(values) and values[i] == values[i]:
            holes[i], gaps[i] = missed[i] - 1, time - seen[i]
            if missed[i] > long:
                since[i] = time
            seen[i], missed[i] = time, 0
            count[i] += 1
