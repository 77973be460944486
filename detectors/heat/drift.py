"""Slow trends in bounded state: hourly means of two days, tested by Mann-Kendall, sized by Theil and Sen.

Sen (1968), J. Am. Stat. Assoc. 63, 1379-1389.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import N, State, memory, notes
from detectors.base.statistics import row_trend_z
from detectors.base.streams import Floats
from pipeline.model.records import SECOND

HOURS = 48  # two days, so that the daily swing is in it twice
SURE = 5.0  # z of Mann-Kendall: 3e-7 one-sided by chance, some 0.7 a year of hourly tests of 256 devices
_HOUR = 3600 * SECOND
_LEAST = 90  # samples of an hour from which its mean counts: a quarter of an hour at 10 s; chosen
_ANCHOR = 12  # hours whose mean is the device's first level: short against weeks of wear; chosen
_ABSURD = 8.0  # of a logarithm: a sample further off is invalid; chosen
_ROWS = 4  # anchor, anchored, sum, samples: rows of the cells
_SUM, _SAMPLES = 2, 3


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
    """One slow metric of all devices. `add` each sample; `test` when `add` returns True."""

    hours: NDArray[np.float32] = memory(np.nan, np.float32, shape=(N, HOURS))
    cells: Floats = memory(0.0, shape=(_ROWS, N))
    hour: int = notes(int)

    def add(self, values: Floats, time: int) -> bool:
        """Adds one sample each, NaN = none; returns True once an hour, when the hour before is complete."""
        self.grow(len(values))
        now, closed = time // _HOUR, False
        if now > self.hour:
            closed = self.hour > 0
            if closed:
                self._close_hour()
        self.hour = now  # also where the clock went back, so that no frame far ahead stops it
        known = np.isfinite(values) & (np.abs(values) <= _ABSURD)
        total, samples = self.cells[_SUM, : len(values)], self.cells[_SAMPLES, : len(values)]
        np.add(total, values, out=total, where=known)
        samples += known
        return closed

    def test(self) -> tuple[Floats, Floats]:
        """Returns (N,) z of the trend over the known hours, and the growth since the device was first seen."""
        x = self.hours.astype(np.float64)
        n = np.isfinite(x).sum(axis=1)
        z = np.where(n >= HOURS // 4, row_trend_z(x), 0.0)
        recent = x[:, -6:]
        known = np.isfinite(recent).sum(axis=1)
        newest = np.where(known > 0, np.nansum(recent, axis=1) / np.maximum(known, 1), np.nan)
        anchor, anchored = self.cells[0], self.cells[1]
        return z, np.where(anchored >= _ANCHOR, newest - anchor, np.nan)

    def slope(self, i: int) -> float:
        """Returns the growth per day of one device: the median of the slopes of all pairs of hours."""
        x: Any = self.hours[i].astype(np.float64)
        a, b = np.triu_indices(HOURS, 1)
        slopes = (x[b] - x[a]) / (b - a)
        known = slopes[np.isfinite(slopes)]
        return float(np.median(known)) * 24 if len(known) else 0.0

    def _close_hour(self) -> None:
        anchor, anchored, total, samples = self.cells
        enough = samples >= _LEAST
        mean = np.where(enough, total / np.maximum(samples, 1), np.nan)
        self.hours[:, :-1] = self.hours[:, 1:]
        self.hours[:, -1] = mean
        young = enough & (anchored < _ANCHOR)
        anchored += young
        anchor += np.where(young, (mean - anchor) / np.maximum(anchored, 1), 0.0)
        total[:], samples[:] = 0.0, 0.0
