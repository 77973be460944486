"""Rate of corrected memory errors of each GPU against those like it: a CUSUM over counts that come in clumps.

Counts of an hour are negative binomial: variance = mean (1 + a mean). The sum adds how much likelier they are at
`ratio` times the usual rate (Page 1954; for negative binomial counts Hawkins and Olwell, Cumulative Sum Charts, 1998,
chapter 5), after every hour, and within it as soon as errors come.

Rows of a GPU's memory that were replaced: how many lately, and whether spare ones soon run out.

The rate is that of the last one to two weeks: a GPU that was well for a year and now loses rows every day is not saved
by its good year.

Memory of servers: corrected errors in a leaky bucket, as mcelog counts them, and any that nothing corrected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS
from detectors.base.streams import Bools, Floats
from detectors.memory.error_counters import Growth
from pipeline.model.records import SECOND, Frame

HOUR = 3600.0
GPU_CELL = np.dtype(
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
    cells: NDArray[Any] = field(default_factory=lambda: np.empty(0, GPU_CELL))
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
            self.cells = np.concatenate([self.cells, np.zeros(n - len(self.cells), GPU_CELL)])

    def snapshot(self) -> dict[str, Any]:
        return {"cells": self.cells, "usual": self.usual, "hour": self.hour}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells, self.usual, self.hour = state["cells"], state["usual"], state["hour"]


ROW_FIELDS = [
    ("rows", "<f8"),  # rows that were replaced one to two weeks ago, or when first seen, and when that was
    ("rows_at", "<i8"),
    ("newer_rows", "<f8"),  # the same of at most a week ago
    ("newer_at", "<i8"),
    ("spent_at", "<i8"),  # since when spare rows are used up, or will be soon; 0: they are not
]
DAY = 24 * 3600 * SECOND
LEAST_ROWS, LEAST_DAYS = 2.0, 1.0
"""Rows and days from which on a rate is one; chosen."""
SOON_DAYS = 30.0
"""Days for which spare rows must last, else the exchange is to be planned; chosen: what spare parts may take."""
_WEEK = 7 * DAY


def count_replaced_rows(frame: Frame) -> Floats:
    """(N,) rows that were replaced so far."""
    told = frame["gpu.rows_corrected"] + frame["gpu.rows_uncorrected"]
    return np.where(np.isfinite(told), told, np.nan)


def positive(count: Floats) -> NDArray[np.bool_]:
    """(N,) whether it is a number, and not none."""
    return np.asarray(np.isfinite(count) & (count > 0))


def update_row_history(cells: NDArray[Any], rows: Floats, time: int) -> None:
    """Takes the rows that are replaced now; a count that fell, or a time that stepped back, begins anew."""
    known = np.isfinite(rows)
    new = known & ((cells["newer_at"] == 0) | (rows < cells["rows"]) | (cells["newer_at"] > time))
    old = known & ~new & (time - cells["newer_at"] >= _WEEK)
    if new.any() or old.any():
        for before, newer, now in (("rows", "newer_rows", rows), ("rows_at", "newer_at", time)):
            cells[before] = np.where(new, now, np.where(old, cells[newer], cells[before]))
            cells[newer] = np.where(new | old, now, cells[newer])


def find_spent(cells: NDArray[Any], rows: Floats, time: int, limit: float) -> NDArray[np.bool_]:
    """(N,) whose spare rows are used up, or last less than SOON_DAYS; after that, less than twice that."""
    since, grown = cells["spent_at"], rows - cells["rows"]
    if not since.any() and not (grown >= LEAST_ROWS).any() and not (rows >= limit).any():
        return np.zeros(len(cells), bool)
    days = (time - cells["rows_at"]) / DAY
    soon = np.where(since > 0, 2 * SOON_DAYS, SOON_DAYS)
    fast = (grown >= LEAST_ROWS) & (days >= LEAST_DAYS) & ((limit - rows) * days < soon * grown)
    on = (rows >= limit) | fast
    if on.any() or since.any():
        since[on & (since == 0)] = time
        since[np.isfinite(rows) & ~on] = 0
    return np.asarray(since > 0)


_DAY = 24 * 3600 * SECOND
SERVER_CELL = np.dtype([("bucket", "<f8"), ("since", "<i8"), ("on", "?"), ("lost", "<f8"), ("lost_at", "<i8")])


@dataclass
class Host:
    """Counters of one class; a part() of the detector. limit: corrected errors a day that are too many.

    bucket: errors, of which `limit` a day leak out.   lost: uncorrected errors since lost_at; 0 = none.
    """

    device_class: str
    corrected: str
    uncorrected: str
    limit: float
    cells: NDArray[Any] = field(default_factory=lambda: np.empty(0, SERVER_CELL))
    growth: Growth = field(default_factory=Growth)

    def step(self, frame: Frame, gate: NDArray[np.bool_]) -> None:
        """Takes an instant; gate: False = people work on it, which counts for nothing."""
        n, signals = len(frame.entities), (self.corrected, self.uncorrected)
        if len(self.cells) < n:
            self.cells = np.concatenate([self.cells, np.zeros(n - len(self.cells), SERVER_CELL)])
        cells = self.cells[:n]
        grown, anew, seconds = self.growth.step(frame, signals, frame[f"{self.device_class}.generation"])
        if anew is not None:
            for name in ("bucket", "lost", "on"):
                cells[name][anew] = 0
        if grown is None and not cells["bucket"].any() and not cells["lost"].any():
            return
        more, lost = grown if grown is not None else np.zeros((2, n))
        which = np.flatnonzero((more > 0) | (lost > 0) | (cells["bucket"] > 0) | (cells["lost"] > 0))
        kept = cells[which]
        self._fill(kept, more[which], lost[which], gate[which], seconds, frame.time)
        cells[which] = kept

    def _fill(
        self, cells: NDArray[Any], more: Floats, lost: Floats, gate: NDArray[np.bool_], seconds: float, time: int
    ) -> None:
        """Adds errors of some devices, and lets old ones go."""
        cells["since"] = np.where((more > 0) & (cells["bucket"] <= 0), time, cells["since"])
        leak = seconds * self.limit * SECOND / _DAY
        cells["bucket"] = np.clip(cells["bucket"] + np.where(gate, more, 0.0) - leak, 0.0, 2 * self.limit)
        cells["on"] = cells["bucket"] > np.where(cells["on"], self.limit / 2, self.limit)
        struck = gate & (lost > 0)
        cells["lost_at"] = np.where(struck & (cells["lost"] <= 0), time, cells["lost_at"])
        kept = np.where(time - cells["lost_at"] > _DAY, 0.0, cells["lost"])
        cells["lost"] = np.where(struck, cells["lost"] + lost, kept)

    def bad_ones(self, frame: Frame) -> Iterator[tuple[int, Any]]:
        """Index and cell of all that have a condition."""
        cells = self.cells[: len(frame.entities)]
        for i in np.flatnonzero(cells["on"] | (cells["lost"] > 0)).tolist():
            yield i, cells[i]

    def snapshot(self) -> dict[str, Any]:
        return {"cells": self.cells, "growth": self.growth.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells = state["cells"]
        self.growth.restore(state["growth"])
