"""How fast coolant leaves each loop: slopes of the reservoir's level over minutes, hours and days, in bounded state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.heat.drift import SURE, Drifts, trend_in_words
from pipeline.records import SECOND

Floats = NDArray[np.float64]
_BIN_S = 120  # of which a mean is kept: a float on moving water is noisy from second to second; chosen
_BINS = 60  # two hours
_WINDOWS = (8, 20, 60)  # bins over which a line is fitted: a burst hose, a coupling, a weeping seal; chosen
_SIGMAS = 8.0  # standard errors of the slope; chosen: three windows are looked at all the time
_LINEAR = 0.9  # share of the variance that the line must explain: a refill or a jump of the float is no leak; chosen
_FALLEN = 0.03  # share of the reservoir; 10 K of warming change water and glycol by half a percent; chosen


def in_words() -> str:
    """What the level costs in false alarms, by chance alone, as one line."""
    chance, looks = math.erfc(_SIGMAS / math.sqrt(2)) / 2, len(_WINDOWS) * 86_400 // _BIN_S
    return (
        f"a slope beyond {_SIGMAS:g} standard errors in one of {len(_WINDOWS)} windows, {looks} looks a day and loop:"
        f" {chance * looks:.1e} false alarms a day by chance, and {_FALLEN:.0%} of the reservoir must be gone;"
        f" {trend_in_words(1)}"
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """A loop that loses coolant: level now, share that is gone, share an hour, and how long the trend was looked at."""

    level: float
    fallen: float
    per_hour: float
    seconds: float

    @property
    def hours_left(self) -> float:
        return self.level / self.per_hour


@dataclass
class Reservoirs:
    """Levels of all loops; a part() of a detector."""

    bins: Floats = field(default_factory=lambda: np.full((0, _BINS), np.nan))
    sums: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    number: int = 0
    days: Drifts = field(default_factory=Drifts)

    def take(self, level: Floats, time: int) -> dict[int, Loss] | None:
        """One sample each, NaN = none; every two minutes who loses coolant by place, else None."""
        self._grow(len(level))
        now, due = time // (_BIN_S * SECOND), False
        if now > self.number:
            due = self.number > 0
            if due:
                self._close(int(min(now - self.number, _BINS)))
        self.number = now  # also where the clock went back, so that no frame far ahead silences it
        known = np.isfinite(level)
        self.sums[0, : len(level)][known] += level[known]
        self.sums[1, : len(level)] += known
        self.days.take(-level, time)
        return self._losses() if due else None

    def forget(self, place: int) -> None:
        """Somebody worked on it: what the level did before says nothing."""
        if place < len(self.bins):
            self.bins[place] = np.nan
            self.days.forget(np.arange(len(self.bins)) == place)

    def snapshot(self) -> dict[str, Any]:
        return {
            "bins": self.bins.copy(),
            "sums": self.sums.copy(),
            "number": self.number,
            "days": self.days.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bins, self.sums, self.number = state["bins"], state["sums"], state["number"]
        self.days.restore(state["days"])

    def _close(self, passed: int) -> None:
        """A bin is full; those in which nothing was measured stay empty."""
        self.bins[:, :-passed] = self.bins[:, passed:]
        self.bins[:, -passed:] = np.nan
        total, count = self.sums
        self.bins[:, -passed] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        self.sums[:] = 0.0

    def _losses(self) -> dict[int, Loss]:
        found: dict[int, Loss] = {}
        z, grown = self.days.judge()
        for i, row in enumerate(self.bins):
            fits = [loss for window in _WINDOWS if (loss := _fitted(row[-window:])) is not None]
            if fits:
                found[i] = max(fits, key=lambda loss: loss.per_hour)
            elif z[i] > SURE and grown[i] >= _FALLEN and (slope := self.days.slope(i)) > 0 and np.isfinite(row[-1]):
                found[i] = Loss(float(row[-1]), float(grown[i]), slope / 24, float(grown[i]) / slope * 86_400)
        return found

    def _grow(self, size: int) -> None:
        have = len(self.bins)
        if size > have:
            self.bins = np.vstack([self.bins, np.full((size - have, _BINS), np.nan)])
            self.sums = np.hstack([self.sums, np.zeros((2, size - have))])


def _fitted(row: Floats) -> Loss | None:
    """The loss that a straight line through the bins shows, if it is one."""
    at = np.flatnonzero(np.isfinite(row))
    if len(at) < max(4, len(row) // 2):
        return None
    y = row[at]
    x = at - at.mean()
    slope = float((x * y).sum() / (x * x).sum())
    rest = y - y.mean() - slope * x
    whole = float(((y - y.mean()) ** 2).sum())
    error = float(np.sqrt((rest * rest).sum() / (len(at) - 2) / (x * x).sum()))
    fallen = -slope * (at[-1] - at[0])
    if slope >= 0 or fallen < _FALLEN or -slope < _SIGMAS * error or (rest * rest).sum() > (1 - _LINEAR) * whole:
        return None
    per_hour = -slope * 3600 / _BIN_S
    return Loss(float(y[-1]), float(fallen), per_hour, float((at[-1] - at[0]) * _BIN_S))
