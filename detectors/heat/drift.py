"""Slow trends in bounded state: hourly means of two days, judged by Mann-Kendall, sized by Theil and Sen.

Sen (1968), J. Am. Stat. Assoc. 63, 1379-1389.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.statistics import row_trend_z
from detectors.base.streams import Bools, Floats
from pipeline.model.records import SECOND

HOURS = 48  # two days: the day's own swing is in it twice
SURE = 5.0  # z of Mann-Kendall: 3e-7 one-sided by chance, some 0.7 a year of hourly looks at 256 devices
_HOUR = 3600 * SECOND
_LEAST = 90  # samples of an hour from which its mean is one: a quarter of an hour at 10 s; chosen
_ANCHOR = 12  # hours whose mean is what the device was like at first: short against weeks of wear; chosen
_ABSURD = 8.0  # of a logarithm: a sample further off is no reading; chosen
_CELLS = ("anchor", "anchored", "sum", "samples")


def trend_in_words(devices: int) -> str:
    """What the trend costs in false alarms, by chance alone, as one line."""
    chance = math.erfc(SURE / math.sqrt(2)) / 2
    looks = 24_000 * devices
    return (
        f"Mann-Kendall's z above {SURE:g}, looked at once an hour: {chance:.1e} by chance; {devices} a node cost some"
        f" {chance * looks:.2g} per 1,000 node-days"
    )


@dataclass
class Drifts:
    """One slow metric of all devices; a part() of a detector. `take` each sample, `judge` when `take` says so."""

    hours: NDArray[np.float32] = field(default_factory=lambda: np.full((0, HOURS), np.nan, np.float32))
    cells: Floats = field(default_factory=lambda: np.zeros((len(_CELLS), 0)))
    hour: int = 0

    def take(self, values: Floats, time: int) -> bool:
        """One sample each, NaN = none; True once an hour, when the hour before is in."""
        self._grow(len(values))
        now, closed = time // _HOUR, False
        if now > self.hour:
            closed = self.hour > 0
            if closed:
                self._close()
        self.hour = now  # also where the clock went back, so that no frame far ahead silences it
        known = np.isfinite(values) & (np.abs(values) <= _ABSURD)
        total, samples = self.cells[2, : len(values)], self.cells[3, : len(values)]
        np.add(total, values, out=total, where=known)
        samples += known
        return closed

    def judge(self) -> tuple[Floats, Floats]:
        """(N,) z of the trend over the hours that are known, and the growth since the device was new to us."""
        x = self.hours.astype(np.float64)
        n = np.isfinite(x).sum(axis=1)
        z = np.where(n >= HOURS // 4, row_trend_z(x), 0.0)
        recent = x[:, -6:]
        told = np.isfinite(recent).sum(axis=1)
        newest = np.where(told > 0, np.nansum(recent, axis=1) / np.maximum(told, 1), np.nan)
        return z, np.where(self.cells[1] >= _ANCHOR, newest - self.cells[0], np.nan)

    def slope(self, i: int) -> float:
        """Growth per day of one device: the median of the slopes of all pairs of hours."""
        x = self.hours[i].astype(np.float64)
        a, b = np.triu_indices(HOURS, 1)
        slopes = (x[b] - x[a]) / (b - a)
        known = slopes[np.isfinite(slopes)]
        return float(np.median(known)) * 24 if len(known) else 0.0

    def reset(self, mask: Bools) -> None:
        self._grow(len(mask))
        at = np.flatnonzero(mask)
        self.hours[at], self.cells[:, at] = np.nan, 0.0

    def snapshot(self) -> dict[str, Any]:
        return {"hours": self.hours.copy(), "cells": self.cells.copy(), "hour": self.hour}

    def restore(self, state: dict[str, Any]) -> None:
        self.hours, self.cells, self.hour = state["hours"], state["cells"], state["hour"]

    def _close(self) -> None:
        anchor, anchored, total, samples = self.cells
        enough = samples >= _LEAST
        mean = np.where(enough, total / np.maximum(samples, 1), np.nan)
        self.hours[:, :-1] = self.hours[:, 1:]
        self.hours[:, -1] = mean
        young = enough & (anchored < _ANCHOR)
        anchored += young
        anchor += np.where(young, (mean - anchor) / np.maximum(anchored, 1), 0.0)
        total[:], samples[:] = 0.0, 0.0

    def _grow(self, size: int) -> None:
        have = len(self.hours)
        if size > have:
            self.hours = np.vstack([self.hours, np.full((size - have, HOURS), np.nan, np.float32)])
            self.cells = np.hstack([self.cells, np.zeros((len(_CELLS), size - have))])
