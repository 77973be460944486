"""The inner loops of the generic detector, compiled: how unusual every signal's newest move is, and of whom that is so.

Moves are told on two scales, each the difference of two exponentially weighted means (memories FAST and SLOW, in
samples), and each is measured by its own past: by the quantile KNOWN of its size and the mean excess above that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.method.kernel import compiled

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

LEARN = 20  # samples of a stream before anything is said of it: the replay contract
FAST = np.array([1.0, 3.0])  # samples; a jump, and what three samples agree on; chosen
SLOW = np.array([10.0, 30.0])  # ten times as much: what was usual; chosen
SCALES = len(FAST)
MOST = 15.0  # mean excesses that one signal counts at most; chosen: less than STRONGEST times the limit
RARE = 100.0  # samples for which a counter of harm stood still so that its next growth tells by itself; chosen
STRONGEST = 3  # signals of an entity whose mean counts; of many signals one alone proves nothing; chosen
KNOWN = 0.95  # quantile of the size of moves above which the tail is measured, as in SPOT
_CLIP = 10.0  # mean excesses beyond which a move teaches the tail no more; chosen
_PRIOR = 4.0  # excesses that the first guess of the tail is worth; chosen
_FIRST_MOVE = 0.05  # of the first move of a signal that stood still: its mean excess from then on; chosen
_FIRST_QUANTILE, _FIRST_EXCESS = 2.0, 0.8  # of the mean size of moves while it is young: a Laplace or normal tail
_TINY = 1e-9  # of the level: what is less is rounding

GAUGE, COUNTER, STATE = 0, 1, 2

COUNT, LAST, TIME, STILL, QUICK, NORMAL, SLOWEST, TAILS = range(8)
"""Cells of a stream: samples, last reading and its time, samples for which a counter has stood still, three means, then
quantile, excess and their count by scale."""
CELLS = TAILS + 3 * SCALES


@compiled
def _reading(cell: Floats, x: float, time: float, kind: int) -> float:
    """What is judged of a sample: a level, a counter's growth per second, or whether a state changed; NaN: nothing."""
    if kind == GAUGE:
        return x
    last, before = cell[LAST], cell[TIME]
    cell[LAST], cell[TIME] = x, time
    if before == 0.0:
        return np.nan
    if kind == STATE:
        return 1.0 if x != last else 0.0
    if x < last or time <= before:  # a reset, or time that went back: growth is unknown
        return np.nan
    return float((x - last) / (time - before) * 1e6)


@compiled
def _tail(cell: Floats, at: int, size: float, age: float, memory: float, tiny: float, floor: float) -> float:
    """Mean excesses by which the size of a move lies above its known quantile; learns it."""
    if age <= LEARN:
        cell[at + 2] += (size - cell[at + 2]) / age  # the mean size, in the place of the count
        cell[at], cell[at + 1] = _FIRST_QUANTILE * cell[at + 2], _FIRST_EXCESS * cell[at + 2]
        if age == LEARN:
            cell[at + 2] = _PRIOR
        return 0.0
    scale = max(cell[at + 1], tiny)
    beyond = (size - cell[at]) / max(scale, floor)
    if cell[at + 1] <= tiny and size > tiny:
        cell[at + 1] = _FIRST_MOVE * size  # a signal that stood still: what it does now is a move, and soon no more
        return float(size / max(scale, floor))
    told = min(size, cell[at] + _CLIP * scale)
    gain = 2.0 * _CLIP * scale * max(1.0 / age, 1.0 / memory)  # Robbins and Monro (1951), in units of the tail
    if told > cell[at]:
        cell[at + 2] += 1.0
        cell[at] += gain * KNOWN
        learnt = max(1.0 / cell[at + 2], 1.0 / (memory * (1.0 - KNOWN)))
        cell[at + 1] = cell[at + 1] + learnt * (max(told - cell[at], 0.0) - cell[at + 1])
    else:
        cell[at] = max(cell[at] - gain * (1.0 - KNOWN), 0.0)
    return float(max(beyond, 0.0))


@compiled
def _stirs(cell: Floats, x: float) -> bool:
    """Whether a counter that stood still for RARE samples grows, or did so in the sample before."""
    if x > 0.0:
        stirs = cell[STILL] >= RARE or cell[STILL] < 0.0
        cell[STILL] = -1.0 if cell[STILL] >= RARE else 0.0
        return bool(stirs)
    cell[STILL] += 1.0
    if cell[STILL] == 0.0:
        cell[STILL] = 1.0
        return True
    return False


@compiled
def _move(cell: Floats, k: int, x: float, harm: int, settings: tuple[float, float]) -> float:
    """How unusual a sample is on one scale, with the sign of the move; learns what is usual."""
    memory, least = settings
    normal = cell[NORMAL + k]
    move = (x if k == 0 else cell[QUICK]) - normal
    size = abs(move) if harm == 0 else max(move * harm, 0.0)
    tiny = _TINY * (abs(x) + abs(normal)) + 1e-300
    beyond = min(_tail(cell, TAILS + 3 * k, size, cell[COUNT] - 1.0, memory, tiny, least * abs(normal)), MOST)
    cell[NORMAL + k] += max(1.0 / cell[COUNT], 1.0 / SLOW[k]) * (x - normal)
    return float(beyond if move >= 0 else -beyond)


@compiled
def advance(
    cells: Floats,
    sample: Floats,
    time: float,
    rules: NDArray[np.int8],
    settings: tuple[float, float],
    unusual: Floats,
    usual: Floats,
    now: Floats,
) -> None:
    """Takes one sample of every stream, and says how unusual each one's move is.

    cells: (S, N, CELLS), changed.  sample: (S, N), NaN = none.  rules: (S, 3): kind, direction of harm, whether a move
    alone is enough.  Out: unusual (SCALES, S, N) mean excesses with the sign of the move, NaN = not judged; usual
    (SCALES, S, N) what was expected; now (S, N) what was judged.
    """
    for s in range(sample.shape[0]):
        kind, harm, enough = rules[s, 0], rules[s, 1], rules[s, 2]
        for n in range(sample.shape[1]):
            cell = cells[s, n]
            unusual[:, s, n] = np.nan
            now[s, n] = np.nan
            if not np.isfinite(sample[s, n]):
                continue
            x = _reading(cell, sample[s, n], time, kind)
            now[s, n] = x
            if not np.isfinite(x):
                continue
            stirs = enough and _stirs(cell, x)
            cell[COUNT] += 1.0
            if cell[COUNT] == 1.0:
                cell[QUICK], cell[NORMAL], cell[SLOWEST] = x, x, x
                continue
            cell[QUICK] += max(1.0 / cell[COUNT], 1.0 / FAST[1]) * (x - cell[QUICK])
            for k in range(SCALES):
                usual[k, s, n] = cell[NORMAL + k]
                beyond = _move(cell, k, x, harm, settings)
                if cell[COUNT] - 1.0 > LEARN:
                    unusual[k, s, n] = MOST * STRONGEST if stirs else beyond


@compiled
def without_peers(unusual: Floats, order: Places, starts: Places, least: int, large: float) -> None:
    """Takes off every move what its peers have in common: their median, if it has the same sign.

    order: entities sorted by cohort; starts: where each cohort begins in it, and the end of the last.  least: members
    that make a cohort.  large: where no move is as large as that, nothing is reckoned.
    """
    buffer = np.empty(unusual.shape[2])
    for k in range(unusual.shape[0]):
        for s in range(unusual.shape[1]):
            line = unusual[k, s]
            for g in range(len(starts) - 1):
                size, largest = 0, 0.0
                for i in range(starts[g], starts[g + 1]):
                    value = line[order[i]]
                    if np.isfinite(value):
                        buffer[size] = value
                        size += 1
                        largest = max(largest, abs(value))
                if size < least or largest < large:
                    continue
                ordered = np.sort(buffer[:size])
                middle = 0.5 * (ordered[(size - 1) // 2] + ordered[size // 2])
                for i in range(starts[g], starts[g + 1]):
                    value = line[order[i]]
                    if value > 0.0 and middle > 0.0:
                        line[order[i]] = max(value - middle, 0.0)
                    elif value < 0.0 and middle < 0.0:
                        line[order[i]] = min(value - middle, 0.0)


@compiled
def fused(unusual: Floats, score: Floats, scale: Places, judged: Places) -> None:
    """Of every entity the mean of its strongest signals on the scale where that is largest; -1: nothing was judged."""
    top = np.empty(STRONGEST)
    for n in range(unusual.shape[2]):
        score[n], scale[n], judged[n] = -1.0, 0, 0
        for k in range(unusual.shape[0]):
            top[:] = 0.0
            known = 0
            for s in range(unusual.shape[1]):
                value = abs(unusual[k, s, n])
                if not np.isfinite(value):
                    continue
                known += 1
                for place in range(STRONGEST):
                    if value > top[place]:
                        top[place], value = value, top[place]
            judged[n] = max(judged[n], known)
            if known and top.sum() / min(known, STRONGEST) > score[n]:
                score[n], scale[n] = top.sum() / min(known, STRONGEST), k
