"""Rate of corrected memory errors of each GPU against those like it: a CUSUM over counts that come in clumps.

Counts of an hour are negative binomial: variance = mean (1 + a mean). The sum adds how much likelier they are at
`ratio` times the usual rate (Page 1954; for negative binomial counts Hawkins and Olwell, Cumulative Sum Charts, 1998,
chapter 5), after every hour, and within it as soon as errors come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS
from pipeline.records import SECOND

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HOUR = 3600.0
CELL = np.dtype(
    [
        ("count", "<f8"),  # errors of the hour so far, clumps cut
        ("seconds", "<f8"),  # of the hour that were watched
        ("sum", "<f8"),  # CUSUM over the hours before
        ("since", "<i8"),  # first error that it holds: the onset
        ("newest", "<i8"),  # last error
        ("total", "<f8"),  # errors since the onset
        ("errors", "<f8"),  # learnt from: errors and hours of its own past
        ("hours", "<f8"),
        ("on", "?"),
    ]
)
_FROZEN = 0.5  # of the limit: a sum above it teaches nothing, so that a burst does not become usual; lone errors do
_CLUMP = 2.0  # errors that one instant counts for at most: one row that is read again and again is one weak row; chosen
_PRIOR_RATE, _PRIOR_HOURS = 0.01, 100.0  # errors an hour of a GPU before a fleet was watched, and its weight; chosen
_QUIET = 24 * 3600 * SECOND  # without an error a burst is over; chosen: as long as mcelog looks back


@dataclass
class Rates:
    """State of all GPUs; a part(). a: overdispersion; ratio: of the rate looked for to the usual; limit: of the sum."""

    a: float = 2.0
    ratio: float = 10.0
    limit: float = 12.0
    cells: NDArray[Any] = field(default_factory=lambda: np.empty(0, CELL))
    usual: Floats = field(default_factory=lambda: np.empty(0))
    hour: int = -1

    def step(self, grown: Floats | None, watched: Floats, groups: NDArray[np.int32], time: int) -> Bools:
        """(N,) whose rate is too high. grown: new errors, None = none.   watched: seconds in which they would tell."""
        n = len(watched)
        self._grow(n)
        cells = self.cells[:n]
        if time // int(HOUR * SECOND) != self.hour or len(self.usual) < n:
            self._close(cells, groups)
            self.end(n, (cells["total"] > 0) & (time - cells["newest"] > _QUIET))
            self.hour = time // int(HOUR * SECOND)
        cells["seconds"] += watched
        erred = (grown > 0) & (watched > 0) if grown is not None else np.zeros(n, bool)
        if grown is not None and erred.any():
            begins = erred & (cells["total"] == 0)
            cells["since"][begins] = time
            cells["newest"][erred] = time
            cells["total"][erred] += grown[erred]
            cells["count"][erred] += np.minimum(grown[erred], _CLUMP)
            cells["on"] |= erred & (self.score(n) > self.limit)
        return np.asarray(cells["on"])

    def budget(self) -> str:
        """What the limit costs: a likelihood ratio's mean time to a false alarm is at least e**limit samples (Lorden
        1971)."""
        hours = math.exp(self.limit)
        tickets = 1000 * GPUS * 24 / hours
        cost = f"limit {self.limit:g} is passed by a sound GPU once in {hours:,.0f} GPU-hours at least"
        return f"{cost}, which is at most {tickets:.2g} tickets per 1,000 node-days"

    def score(self, n: int) -> Floats:
        """(N,) the sum, this hour included."""
        cells = self.cells[:n]
        return np.asarray(np.maximum(cells["sum"] + self._worth(cells), 0.0))

    def _worth(self, cells: NDArray[Any]) -> Floats:
        """Logarithm of how much likelier the hour's errors are at the higher rate."""
        usual = self.usual[: len(cells)] * cells["seconds"] / HOUR
        high = self.ratio * usual
        narrow, wide = 1 + self.a * usual, 1 + self.a * high
        return np.asarray(cells["count"] * np.log(self.ratio * narrow / wide) - np.log(wide / narrow) / self.a)

    def _close(self, cells: NDArray[Any], groups: NDArray[np.int32]) -> None:
        """Ends the hour: sums, what quiet ends, and what is usual for each GPU from its own past and its cohort's."""
        if len(self.usual):
            known = cells[: len(self.usual)]
            known["sum"] = np.clip(known["sum"] + self._worth(known), 0.0, 2 * self.limit)
        learn = (cells["sum"] <= _FROZEN * self.limit) & ~cells["on"]
        cells["errors"] += np.where(learn, cells["count"], 0.0)
        cells["hours"] += np.where(learn, cells["seconds"] / HOUR, 0.0)
        cells["count"] = cells["seconds"] = 0.0
        cells["total"][(cells["sum"] <= 0) & ~cells["on"]] = 0.0
        wide = int(groups.max(initial=-1)) + 2
        errors, hours = (np.bincount(groups + 1, cells[name], wide) for name in ("errors", "hours"))
        rate = ((errors + _PRIOR_RATE * _PRIOR_HOURS) / (hours + _PRIOR_HOURS))[groups + 1]
        # a device's own rate is gamma about its cohort's, of shape 1/a: it shows more where it always did
        self.usual = (1 / self.a + cells["errors"]) / (1 / (self.a * rate) + cells["hours"])

    def end(self, n: int, over: Bools) -> None:
        """Ends bursts, of GPUs that were reset for instance."""
        cells = self.cells[:n]
        for name in ("sum", "total", "count", "on"):
            cells[name][over] = 0

    def _grow(self, n: int) -> None:
        if len(self.cells) < n:
            self.cells = np.concatenate([self.cells, np.zeros(n - len(self.cells), CELL)])

    def snapshot(self) -> dict[str, Any]:
        return {"cells": self.cells, "usual": self.usual, "hour": self.hour}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells, self.usual, self.hour = state["cells"], state["usual"], state["hour"]
