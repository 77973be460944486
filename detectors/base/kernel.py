"""The inner loops of the common kernel, compiled: cohort medians and the clipped CUSUM over contiguous state.

State is one float32 array (6, N), 24 bytes a stream: baseline, variance, sum up, sum down, smoothed effect, and a word
of bits: seconds for which the effect has mattered (18), samples learnt from (11), and whether a condition holds and
which way (2). No loop has a branch that depends on a sample, so that the compiler can vectorize it.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.model.compiling import compiled

Numbers: TypeAlias = NDArray[np.floating[Any]]
F4: TypeAlias = NDArray[np.float32]
U4: TypeAlias = NDArray[np.uint32]

BASELINE, VARIANCE, UP, DOWN, EFFECT, WORD = range(6)
HELD_BITS = np.uint32(0x3FFFF)  # 72 h
COUNT_SHIFT, COUNT_BITS = np.uint32(18), np.uint32(0x7FF)
ON_UP, ON_DOWN = np.uint32(1 << 30), np.uint32(1 << 31)

_SMALL = 32  # values up to which counting is faster than selecting: 2x at 8 and at 32, no difference at 64; measured
_SAMPLED, _PROBES, _AROUND = 128, 64, 10
"""Values from which a sample shows where the median is, its size, and ranks around its middle: 2.5 standard errors."""
_NORMAL = np.float32(1.4826)  # median absolute deviation -> standard deviation of a normal distribution
_ONE, _ZERO, _HALF, _FEW, _YOUNG = np.float32(1), np.float32(0), np.float32(0.5), np.float32(3), np.float32(20)
_TIGHT, _WIDE, _LOOSE = np.float32(3), np.float32(8), np.float32(64)
"""Scales by which one sample moves what a stream has learnt: at most 3; while it is young, 64 for its level and 8 for
its variance, since devices of one kind lie up to 22 % apart (Sinha et al., SC 2022) where the least scale is 1 %."""
_FULL, _HUGE, _TINY = np.float32(30), np.float32(1e9), np.float32(1e-12)
_NEVER = np.float32(1e8)  # above any sum: learning never stops (for the ablation)
_SURE = 8  # members from which a cohort gives the scale: in fewer, a faulty one is too large a part


@compiled
def _sorted_in_place(a: Numbers, n: int) -> None:
    for i in range(1, n):
        value, j = a[i], i - 1
        while j >= 0 and a[j] > value:
            a[j + 1] = a[j]
            j -= 1
        a[j + 1] = value


@compiled
def _median_of_few(a: Numbers, n: int) -> Any:
    """Median of a[:n]: the value with half of the others below it, by comparing all with all, without a branch."""
    lower, upper = (n - 1) >> 1, n >> 1
    low = high = a[0]
    for i in range(n):
        value, below, up_to = a[i], np.int32(0), np.int32(0)
        for j in range(n):
            below += np.int32(a[j] < value)
            up_to += np.int32(a[j] <= value)
        low = value if (below <= lower) & (lower < up_to) else low
        high = value if (below <= upper) & (upper < up_to) else high
    return (low + high) * _HALF


@compiled
def _select(a: Numbers, n: int, k: int) -> Any:
    """The k-th smallest of a[:n], which it rearranges: Hoare (1961), Communications of the ACM 4, algorithm 65."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) >> 1
        pivot = max(min(a[low], a[high]), min(max(a[low], a[high]), a[middle]))
        i, j = low, high
        while i <= j:
            while a[i] < pivot:
                i += 1
            while a[j] > pivot:
                j -= 1
            if i <= j:
                a[i], a[j] = a[j], a[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return a[k]


@compiled
def _median(a: Numbers, n: int) -> Any:
    """Median of a[:n], which it rearranges."""
    if n <= _SMALL:
        return _median_of_few(a, n)
    upper, middle = n >> 1, a
    if n >= _SAMPLED:
        middle, size, below = _values_near_median(a, n)
        if below <= (n - 1) >> 1 and upper < below + size:
            n, upper, odd = size, upper - below, n & 1
        else:
            middle, odd = a, n & 1
    else:
        odd = n & 1
    high = _select(middle, n, upper)
    if odd:
        return high
    low = middle[0]  # what lies below the middle is at most the upper one: its maximum is the lower of the two
    for i in range(1, upper):
        low = max(low, middle[i])
    return (low + high) * _HALF


@compiled
def _values_near_median(a: Numbers, n: int) -> tuple[Numbers, int, int]:
    """Returns the values of a[:n] between two order statistics of a sample, how many they are, and how many are below.

    The sample's median errs by sqrt(_PROBES) / 2 of its ranks: Floyd and Rivest (1975), Communications of the ACM 18,
    algorithm 489. One pass without a branch that depends on a value.
    """
    probes, near = np.empty(_PROBES, a.dtype), np.empty(n, a.dtype)
    for i in range(_PROBES):
        probes[i] = a[i * n // _PROBES]
    _sorted_in_place(probes, _PROBES)
    least, most = probes[_PROBES // 2 - _AROUND], probes[_PROBES // 2 + _AROUND]
    size = below = 0
    for i in range(n):
        value = a[i]
        near[size] = value
        size += (value >= least) & (value <= most)
        below += value < least
    return near, size, below


@compiled
def row_medians(rows: NDArray[np.float64], at: NDArray[np.intp]) -> NDArray[np.float64]:
    """Returns (M,) the median of each of some rows of (N, T) without NaN. at: (M,) their numbers."""
    found, row = np.empty(len(at), np.float64), np.empty(rows.shape[1], np.float64)
    for i in range(len(at)):
        row[:] = rows[at[i]]
        found[i] = _median(row, len(row))
    return found


@compiled
def split_by_group(
    values: NDArray[np.float64], groups: NDArray[np.int32], total: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the finite values of each group one after another, and (total,) how many each has. groups: -1 none."""
    size = np.zeros(total, np.int64)
    for i in range(len(values)):
        if groups[i] >= 0 and math.isfinite(values[i]):
            size[groups[i]] += 1
    end = np.cumsum(size)
    members = np.empty(size.sum(), np.float64)
    for i in range(len(values)):
        if groups[i] >= 0 and math.isfinite(values[i]):
            end[groups[i]] -= 1
            members[end[groups[i]]] = values[i]
    return members, size


@compiled
def group_medians(
    values: NDArray[np.float64], groups: NDArray[np.int32], median: NDArray[np.float64], size: NDArray[np.int64]
) -> None:
    """Computes the median and the number of the finite values of each group; NaN and 0 without one. groups: -1 none."""
    members, count = split_by_group(values, groups, len(size))
    size[:] = count
    first = 0
    for g in range(len(size)):
        median[g] = _median(members[first : first + size[g]], size[g]) if size[g] else np.nan
        first += size[g]


@compiled
def group_sums(
    values: NDArray[np.float64], groups: NDArray[np.integer[Any]], total: NDArray[np.float64], size: NDArray[np.float64]
) -> None:
    """Adds the finite values of each group to its total, and their number to its size. groups: -1 none."""
    for i in range(len(values)):
        if groups[i] >= 0 and math.isfinite(values[i]):
            total[groups[i]] += values[i]
            size[groups[i]] += 1.0


@compiled
def sort_by_group(
    values: NDArray[np.float64], groups: NDArray[np.int32], total: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the finite values of each group one after another, each sorted, and (total,) how many each has."""
    members, size = split_by_group(values, groups, total)
    first = 0
    for g in range(total):
        members[first : first + size[g]].sort()
        first += size[g]
    return members, size


@compiled
def cohorts(
    values: NDArray[np.float32],
    baseline: NDArray[np.float32],
    order: NDArray[np.int32],
    first: NDArray[np.int64],
    scratch: NDArray[np.float32],
    median: NDArray[np.float32],
    spread: NDArray[np.float32],
    size: NDArray[np.int32],
) -> None:
    """Computes the median of each cohort, and 1.4826 times the median absolute departure of its members from normal.

    values:   (N,) NaN = none.   baseline: (N,) each one's usual offset from the median.
    order:    entities cohort by cohort, those of none not in it; cohort g is order[first[g]:first[g + 1]].
    median, spread, size: (G,) results; NaN where there is no value.
    """
    for g in range(len(first) - 1):
        n = 0
        for p in range(first[g], first[g + 1]):
            value = values[order[p]]
            if value == value:
                scratch[n] = value
                n += 1
        size[g] = n
        if n == 0:
            median[g] = spread[g] = np.nan
            continue
        middle = _median(scratch, n)
        n = 0
        for p in range(first[g], first[g + 1]):
            i = order[p]
            value = values[i]
            if value == value:
                scratch[n] = abs(value - middle - baseline[i])
                n += 1
        median[g], spread[g] = middle, _NORMAL * _median(scratch, n)


@compiled
def read_samples(values: NDArray[np.float64], gate: NDArray[np.bool_] | None, absurd: float, sample: F4) -> None:
    """Fills in the samples (N,): NaN for missing ones, those as large as `absurd`, or not let through by the gate."""
    for i in range(len(sample)):
        value = values[i]
        counts = abs(value) < absurd  # False for NaN too
        if gate is not None:
            counts &= gate[i]
        sample[i] = value if counts else np.nan


@compiled
def find_sides(words: U4, effects: F4, least: F4, off: NDArray[np.int8]) -> bool:
    """Fills in on which side each stream is off, by a condition or its effect: 1 more, -1 less; returns whether any."""
    any_off = False
    for i in range(len(words)):
        up, down = (words[i] & ON_UP) != 0, (words[i] & ON_DOWN) != 0
        more, less = up | (effects[i] >= least[i]), (down & (not up)) | (effects[i] <= -least[i])
        off[i] = np.int8(more) - np.int8(less)
        any_off |= off[i] != 0
    return any_off


@compiled
def residuals(
    values: NDArray[np.float32],
    groups: NDArray[np.int32],
    median: NDArray[np.float32],
    spread: NDArray[np.float32],
    size: NDArray[np.int32],
    floor: np.float32,
    residual: NDArray[np.float32],
    scale: NDArray[np.float32],
    widening: NDArray[np.float32],
) -> None:
    """Computes each value less the median of its cohort, the scale of the cohort, and how much its median widens it.

    Without a cohort the value itself, with the least scale; NaN where a cohort has a single value, without peers.
    widening: 1 + 1.57 / n; 1.57 = pi / 2, the variance of the median of n normal samples over that of their mean.
    """
    for i in range(len(values)):
        g = groups[i]
        if g < 0:
            residual[i], scale[i], widening[i] = values[i], floor, _ONE
            continue
        n = size[g]
        residual[i] = values[i] - median[g] if n > 1 else np.float32(np.nan)
        scale[i] = max(spread[g], floor) if n >= _SURE else floor
        widening[i] = _ONE + np.float32(1.57) / np.float32(max(n, 1))


@compiled
def _learnt(
    b: np.float32, v: np.float32, n: np.float32, d: np.float32, s: np.float32, take: bool, gain: np.float32
) -> tuple[np.float32, np.float32, np.float32]:
    """Returns baseline, variance and count after a departure `d` of a stream of scale `s`: gain 1/n until its floor.

    A young stream has no reliable scale yet, so it is bounded loosely; where its first samples lie far apart, it
    starts over with the newer one: the older one may be an outlier.
    """
    far = _LOOSE * s
    restarts = take & ((n < _HALF) | ((n < _FEW) & (abs(d) > far)))
    most = far if n < _YOUNG else _TIGHT * s
    bounded, spread = min(max(d, -most), most), min(max(d, -_WIDE * s), _WIDE * s)
    spread = spread if n < _YOUNG else bounded
    more = (_ONE if restarts else min(n + _ONE, np.float32(COUNT_BITS))) if take else n
    g = max(_ONE / max(more, _ONE), gain) if take else _ZERO
    step = d if restarts else g * bounded
    return b + step, _ZERO if restarts else v + g * (spread * spread * (_ONE - g) - v), more


@compiled
def _decided(
    word: np.uint32, up: np.float32, down: np.float32, e: np.float32, h: np.float32, delta: np.float32, both: bool
) -> tuple[np.bool[bool], np.bool[bool]]:
    """Returns whether a condition of more, and of less, holds: from the limit on until half of delta is left."""
    more = (e >= delta * _HALF) if (word & ON_UP) != 0 else ((up > h) & (e >= delta))
    less = (e <= -delta * _HALF) if (word & ON_DOWN) != 0 else ((down > h) & (e <= -delta) & both)
    return more, less


@compiled
def advance_streams(
    cells: F4,
    words: U4,
    residual: F4,
    scale: F4,
    widening: F4,
    limit: F4,
    least: F4,
    settings: F4,
    seconds: np.uint32,
) -> None:
    """Adds one sample of every stream to the state, in place: `settings` is Channel.settings(); NaN = no sample.

    limit, least: (N,) threshold of the sum and least effect.   nominal: shipped threshold.   peak: (N,) is raised to
    the margin by which sum and effect are near a condition with the shipped ones, 1 = there; a sum above `_FULL`, the
    highest threshold, is enough for any.
    Learning stops while a fault is suspected, and while a stream is better than normal by as much as matters: the
    others may be the faulty ones, and recover later. Stores are at the end of an iteration: between the loads they
    would prevent vector code.
    """
    floor, shrink, both = settings[0], settings[2], settings[3] > 0
    learn, slack, doubt, clip = settings[4], settings[5], settings[6], settings[7]
    frozen, alpha, gain, prior, most = settings[8], settings[9], settings[10], settings[11], settings[12] * settings[1]
    base, variance, ups, downs, effects = cells[0], cells[1], cells[2], cells[3], cells[4]
    for i in range(residual.shape[0]):
        r, word, up, down, e, h = residual[i], words[i], ups[i], downs[i], effects[i], limit[i]
        b, v, matters = base[i], variance[i], least[i]
        known, n = r == r, np.float32((word >> COUNT_SHIFT) & COUNT_BITS)
        judged, d = known & (n >= learn), r - b if known else _ZERO
        squared = (n * v + prior * scale[i] * scale[i]) / (n + prior)
        s = np.sqrt(max(squared, floor * floor) * widening[i])
        z, k = min(max(d * shrink / s, -clip), clip), slack + doubt / np.sqrt(max(n, _ONE))
        up = min(max(up + z - k, _ZERO), h + h) if judged else up
        down = min(max(down - z - k, _ZERO), h + h) if judged else down
        before = e
        e = e + alpha * (min(max(d, -most), most) - e) if judged else e
        take = known & (up <= frozen) & (down <= frozen if both else (e > -matters) | (frozen > _NEVER))
        b, v, more = _learnt(b, v, n, d, s, take, gain)
        was_up, was_down = (word & ON_UP) != 0, (word & ON_DOWN) != 0
        on_up, on_down = _decided(word, up, down, e, h, matters, both)
        on_up, on_down = on_up if judged else was_up, on_down if judged else was_down
        lasted = word & HELD_BITS if (e > _ZERO) == (before > _ZERO) else np.uint32(0)
        held = min(lasted + seconds, HELD_BITS) if abs(e) >= matters else np.uint32(0)
        bits = (ON_UP if on_up else np.uint32(0)) | (ON_DOWN if on_down else np.uint32(0))
        words[i] = (held if judged else word & HELD_BITS) | (np.uint32(more) << COUNT_SHIFT) | bits
        ups[i] = _ZERO if was_up & (not on_up) else up
        downs[i] = _ZERO if was_down & (not on_down) else down
        base[i], variance[i], effects[i] = b, v, e


@compiled
def raise_peaks(cells: F4, words: U4, residual: F4, nominal: np.float32, settings: F4, peak: F4) -> None:
    """Raises the peak (N,) of each judged stream to its margin: how near sum and effect are to a condition, 1 = there.

    nominal: shipped threshold.   A sum above `_FULL`, the highest threshold, is enough for any.
    """
    per_sum, per_effect, learn = _ONE / nominal, _ONE / max(settings[1], _TINY), settings[4]
    side = _ONE if settings[3] > 0 else _ZERO
    ups, downs, effects = cells[2], cells[3], cells[4]
    for i in range(residual.shape[0]):
        r, e = residual[i], effects[i] * per_effect
        up, down = ups[i], downs[i]
        more = min(e, up * per_sum if up < _FULL else _HUGE)
        less = min(-e, down * per_sum if down < _FULL else _HUGE) * side
        margin = max(max(more, less), _ZERO)
        judged = (r == r) & (np.float32((words[i] >> COUNT_SHIFT) & COUNT_BITS) >= learn)
        peak[i] = max(peak[i], margin if judged else -_ONE)
