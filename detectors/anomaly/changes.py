"""What the generic detector knows of the streams of one device class, and which of its entities changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.anomaly import change_kernel as kernel
from pipeline.records import Frame
from pipeline.signals import Signal

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Order = tuple[NDArray[np.int64], NDArray[np.int64]]

HOLD = 2  # samples in a row that must be unusual; chosen
LASTS = int(kernel.SLOW[-1])  # samples after which a changed level is the new normal, and its condition over
PEERS = 8  # entities of a kind and of like attributes from which what they have in common is no departure; chosen
_KINDS = {"gauge": kernel.GAUGE, "counter": kernel.COUNTER, "state": kernel.STATE}
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
        return self.score > kernel.MOST

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
        self._cells = np.zeros((len(self.signals), 0, kernel.CELLS))
        self._marks = np.zeros((3, 0), np.int64)
        rules = [(_kind(s), _harm(s), s.kind == "counter" and s.harm == "up") for s in self.signals]
        self._rules = np.array(rules, np.int8).reshape(-1, 3)
        self.score, self.judged = np.empty(0), np.empty(0, np.int64)
        self._scale = np.empty(0, np.int64)
        self._unusual = self._usual = np.empty((kernel.SCALES, 0, 0))
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
        kernel.advance(self._cells, sample, float(frame.time), self._rules, shares, *out)
        if len(cohorts[1]) > 1:
            kernel.without_peers(self._unusual, *cohorts, PEERS, limit / 2)
        kernel.fused(self._unusual, self.score, self._scale, self.judged)
        return self._decide(frame.time, limit, quiet)

    def _grow(self, n: int) -> None:
        have = self._cells.shape[1]
        if have < n:
            width = len(self.signals)
            self._cells = np.concatenate([self._cells, np.zeros((width, n - have, kernel.CELLS))], axis=1)
            self._marks = np.concatenate([self._marks, np.zeros((3, n - have), np.int64)], axis=1)
        if len(self.score) != n:
            width = len(self.signals)
            self.score, self.judged, self._scale = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64)
            self._unusual, self._usual = np.empty((kernel.SCALES, width, n)), np.empty((kernel.SCALES, width, n))
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
        for k in range(kernel.SCALES):
            self._cells[:, i, kernel.NORMAL + k] = self._cells[:, i, kernel.QUICK]
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
    return kernel.GAUGE if signal.kind == "state" and signal.normal else _KINDS[signal.kind]


def _harm(signal: Signal) -> int:
    return 1 if signal.kind == "state" else _HARM[signal.harm]


def _oriented(column: Floats, signal: Signal) -> Floats:
    """A state with a declared normal counts as 0 while normal, else as 1; all else as it is."""
    if signal.kind != "state" or not signal.normal:
        return column
    normal = [i for i, name in enumerate(signal.states) if name in signal.normal]
    return np.where(np.isfinite(column), np.where(np.isin(column, normal), 0.0, 1.0), np.nan)
