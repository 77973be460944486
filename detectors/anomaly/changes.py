"""Change statistics of all streams of one device class, for the generic detector.

A move is the difference of two exponentially weighted means, on two scales (memories FAST and SLOW, in samples). Each
is measured against its own past: the quantile KNOWN of its size and the mean excess above that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled
from pipeline.model.records import Frame
from pipeline.model.signals import Signal

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


Bools = NDArray[np.bool_]
Order = tuple[NDArray[np.int64], NDArray[np.int64]]

HOLD = 2  # samples in a row that must be unusual; chosen
LASTS = int(SLOW[-1])  # samples after which a changed level is the new normal, and its condition over
PEERS = 8  # entities of a kind and of like attributes from which what they have in common is no departure; chosen
_KINDS = {"gauge": GAUGE, "counter": COUNTER, "state": STATE}
_HARM = {"up": 1, "down": -1, "both": 0}
_HOT, _ON, _ONSET = range(3)


@dataclass(frozen=True, slots=True)
class Told:
    """What one signal of an entity shows: what it is, what was expected, and how unusual the move is."""

    signal: Signal
    value: float
    expected: float
    score: float

    @property
    def unit(self) -> str:
        """That of what is judged: a counter's growth per second; UCUM's 1 goes without saying."""
        unit = "" if self.signal.unit == "1" else self.signal.unit
        return f"{unit or '1'}/s" if self.signal.kind == "counter" else unit

    @property
    def stirs(self) -> bool:
        """Whether it is a counter of harm that grows after standing still."""
        return self.score > MOST

    @property
    def words(self) -> str:
        name = self.signal.name
        if self.stirs:
            return f"{name} grew after standing still"
        if self.signal.kind == "state":
            return f"{name} is not normal" if self.signal.normal else f"{name} changes"
        value, expected = f"{self.value:.4g} {self.unit}".strip(), f"{self.expected:.4g}"
        return f"{name} {value} after {expected}"


class Changes:
    """State of S signals x N entities of one class; N grows.

    A condition begins when the strongest moves of an entity have been unusual for HOLD samples, and ends when they are
    half as unusual as that, or after LASTS samples: then the new level is taken for normal.
    """

    def __init__(self, signals: Sequence[Signal]) -> None:
        self.signals = tuple(signals)
        self._cells = np.zeros((len(self.signals), 0, CELLS))
        self._marks = np.zeros((3, 0), np.int64)
        rules = [(_kind(s), _harm(s), s.kind == "counter" and s.harm == "up") for s in self.signals]
        self._rules = np.array(rules, np.int8).reshape(-1, 3)
        self.score, self.judged = np.empty(0), np.empty(0, np.int64)
        self._scale = np.empty(0, np.int64)
        self._unusual = self._usual = np.empty((SCALES, 0, 0))
        self._now = np.empty((0, 0))

    def step(self, frame: Frame, cohorts: Order, quiet: Bools, settings: tuple[float, float, float]) -> Bools:
        """Takes one sample; (N,) whether a condition holds.

        cohorts: see kernel.without_peers.  quiet: entities of which nothing is told now.  settings: limit, memory and
        the least change, as Anomaly has them.
        """
        limit, memory, least = settings
        n = len(frame.entities)
        self._grow(n)
        sample = np.empty((len(self.signals), n))
        for row, signal in enumerate(self.signals):
            sample[row] = _oriented(frame[signal.name], signal)
        shares = (memory, least / limit)
        out = (self._unusual, self._usual, self._now)
        advance(self._cells, sample, float(frame.time), self._rules, shares, *out)
        if len(cohorts[1]) > 1:
            without_peers(self._unusual, *cohorts, PEERS, limit / 2)
        fused(self._unusual, self.score, self._scale, self.judged)
        return self._decide(frame.time, limit, quiet)

    def _grow(self, n: int) -> None:
        have = self._cells.shape[1]
        if have < n:
            width = len(self.signals)
            self._cells = np.concatenate([self._cells, np.zeros((width, n - have, CELLS))], axis=1)
            self._marks = np.concatenate([self._marks, np.zeros((3, n - have), np.int64)], axis=1)
        if len(self.score) != n:
            width = len(self.signals)
            self.score, self.judged, self._scale = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64)
            self._unusual, self._usual = np.empty((SCALES, width, n)), np.empty((SCALES, width, n))
            self._now = np.empty((width, n))

    def _decide(self, time: int, limit: float, quiet: Bools) -> Bools:
        hot, on, onset = self._marks[:, : len(self.score)]
        known = self.score >= 0
        above = known & (self.score >= limit) & ~quiet
        calm = known & (self.score < limit / 2)
        hot[known] = np.where(above & (hot >= 0), hot + 1, np.where(calm | (hot >= 0), 0, hot))[known]
        onset[(hot == 1) & (on == 0)] = time
        over = (on > 0) & known & (calm | (on >= LASTS) | quiet)
        for i in np.flatnonzero(over & (on >= LASTS)).tolist():
            self.settle(i)
        begins = (on == 0) & (hot >= HOLD)
        on[:] = np.where(over, 0, np.where(known & ((on > 0) | begins), on + 1, on))
        hot[over] = np.where(calm, 0, -1)[over]  # it must be calm before it can begin anew
        return np.asarray(on > 0)

    def settle(self, i: int) -> None:
        """Takes the present level of an entity for normal and ends its condition; one never judged has none."""
        if i >= self._cells.shape[1]:
            return
        for k in range(SCALES):
            self._cells[:, i, NORMAL + k] = self._cells[:, i, QUICK]
        self._marks[_ON, i], self._marks[_HOT, i] = 0, -1

    def onset(self, i: int) -> int:
        """When the condition of an entity began (us)."""
        return int(self._marks[_ONSET, i])

    def lasted(self, i: int) -> int:
        """Samples for which its condition has held."""
        return int(self._marks[_ON, i])

    def told(self, i: int) -> list[Told]:
        """The signals of an entity that moved, the guiltiest first."""
        k = int(self._scale[i])
        scores = np.nan_to_num(self._unusual[k, :, i])
        order = [int(s) for s in np.argsort(-np.abs(scores), kind="stable") if abs(scores[s]) > 0]
        found = (
            (self.signals[s], float(self._now[s, i]), float(self._usual[k, s, i]), float(scores[s])) for s in order
        )
        return [Told(*values) for values in found]

    def snapshot(self) -> dict[str, Any]:
        names = [s.name for s in self.signals]
        return {"signals": names, "cells": self._cells.copy(), "marks": self._marks.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a snapshot; of a snapshot with other signals nothing is kept."""
        if state["signals"] == [s.name for s in self.signals]:
            self._cells, self._marks = state["cells"].copy(), state["marks"].copy()


def _kind(signal: Signal) -> int:
    return GAUGE if signal.kind == "state" and signal.normal else _KINDS[signal.kind]


def _harm(signal: Signal) -> int:
    return 1 if signal.kind == "state" else _HARM[signal.harm]


def _oriented(column: Floats, signal: Signal) -> Floats:
    """A state with a declared normal counts as 0 while normal, else as 1; all else as it is."""
    if signal.kind != "state" or not signal.normal:
        return column
    normal = [i for i, name in enumerate(signal.states) if name in signal.normal]
    return np.where(np.isfinite(column), np.where(np.isin(column, normal), 0.0, 1.0), np.nan)
