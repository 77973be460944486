"""Slow trends in bounded state: means of 48 equal times, tested by Mann-Kendall, sized by Theil and Sen.

Sen (1968), J. Am. Stat. Assoc. 63, 1379-1389.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import N, State, memory, notes
from detectors.base.statistics import row_trend_z, theil_sen
from detectors.base.streams import Floats
from pipeline.model.records import SECOND

HOURS = 48  # two days of hours, so that the daily swing is in it twice
SURE = 5.0  # z of Mann-Kendall: 3e-7 one-sided by chance, some 0.7 a year of hourly tests of 256 devices
_ENOUGH, _COUNTS_S = 0.25, 120.0  # share of a bin that must be measured, and s that a sample counts for at most; chosen
_ANCHOR = 12  # bins whose mean is the device's first level: short against weeks of wear; chosen
_ABSURD = 1e3  # K, a share or a logarithm: a sample further off is invalid; chosen
_ROWS = 4  # anchor, anchored, sum, seconds: rows of the cells
_SUM, _SECONDS = 2, 3


def trend_budget(devices: int) -> str:
    """Returns what the trend costs in false alarms, by chance alone, as one line. devices: per node."""
    chance = math.erfc(SURE / math.sqrt(2)) / 2
    tests = 24_000 * devices
    return (
        f"Mann-Kendall's z above {SURE:g}, tested once an hour: {chance:.1e} by chance; {devices} a node cost some"
        f" {chance * tests:.2g} per 1,000 node-days"
    )


@dataclass
class SlowTrends(State):
    """One slow metric of all devices. `add` each sample; `test` when `add` returns True. bin_s: s of one mean."""

    bin_s: int = 3600
    hours: NDArray[np.float32] = memory(np.nan, np.float32, shape=(N, HOURS))
    cells: Floats = memory(0.0, shape=(_ROWS, N))
    hour: int = notes(int)
    last: int = notes(int)

    def add(self, values: Floats, time: int) -> bool:
        """Adds one sample each, NaN = none; returns True once in a bin, when the one before is complete."""
        self.grow(len(values))
        now, closed = time // (self.bin_s * SECOND), False
        if now > self.hour:
            closed = self.hour > 0
            if closed:
                self._close_bin()
        self.hour = now  # also where the clock went back, so that no frame far ahead stops it
        seconds = min(max((time - self.last) / SECOND, 0.0), self.bin_s, _COUNTS_S) if self.last else 0.0
        self.last = time
        known = np.isfinite(values) & (np.abs(values) <= _ABSURD)
        total, covered = self.cells[_SUM, : len(values)], self.cells[_SECONDS, : len(values)]
        np.add(total, seconds * values, out=total, where=known)
        covered += seconds * known
        return closed

    def test(self) -> tuple[Floats, Floats]:
        """Returns (N,) z of the trend over the known bins, and the growth since the device was first seen."""
        x = self.hours.astype(np.float64)
        n = np.isfinite(x).sum(axis=1)
        z = np.where(n >= HOURS // 4, row_trend_z(x), 0.0)
        recent = x[:, -6:]
        known = np.isfinite(recent).sum(axis=1)
        newest = np.where(known > 0, np.nansum(recent, axis=1) / np.maximum(known, 1), np.nan)
        anchor, anchored = self.cells[0], self.cells[1]
        return z, np.where(anchored >= _ANCHOR, newest - anchor, np.nan)

    def slope(self, i: int, newest: int = HOURS) -> float:
        """Returns the growth per bin of one device: the median of the slopes of all pairs of its newest bins."""
        bins = self.hours[i, -newest:].astype(np.float64)
        known = np.flatnonzero(np.isfinite(bins))
        return theil_sen(known, bins[known]) if len(known) > 1 else 0.0

    def recent_z(self, i: int, newest: int) -> float:
        """Returns z of the trend over the newest bins of one device."""
        return float(row_trend_z(self.hours[i : i + 1, -newest:].astype(np.float64))[0])

    def _close_bin(self) -> None:
        anchor, anchored, total, covered = self.cells
        enough = covered >= _ENOUGH * self.bin_s
        mean = np.where(enough, total / np.maximum(covered, 1.0), np.nan)
        self.hours[:, :-1] = self.hours[:, 1:]
        self.hours[:, -1] = mean
        young = enough & (anchored < _ANCHOR)
        anchored += young
        anchor += np.where(young, (mean - anchor) / np.maximum(anchored, 1), 0.0)
        total[:], covered[:] = 0.0, 0.0
