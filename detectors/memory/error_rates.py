"""How fast memory errors and replaced rows come: corrected errors of GPUs, replaced rows of GPUs, errors of servers.

Corrected errors of GPUs: a CUSUM over counts that come in bursts. Counts of an hour are negative binomial: variance =
mean (1 + a mean). The sum adds how much likelier they are at `ratio` times the usual rate (Page 1954; for negative
binomial counts Hawkins and Olwell, Cumulative Sum Charts, 1998, chapter 5), after every hour, and within it as soon as
errors come.

Replaced rows: the rate of the last one to two weeks, so that a long quiet time does not hide a recent increase.

Servers and modules: a leaky bucket of corrected errors, as mcelog counts them, and any uncorrected error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS
from detectors.base.state import State, memory, notes, part
from detectors.base.streams import Bools, Floats
from detectors.memory.error_counters import ErrorCounters
from pipeline.model.records import SECOND, Frame

HOUR = 3600.0
DAY = 24 * 3600 * SECOND
GPU_CELL = np.dtype(
    [
        ("count", "<f8"),  # errors of the hour so far, bursts capped
        ("seconds", "<f8"),  # watched seconds of the hour
        ("sum", "<f8"),  # CUSUM over the hours before
        ("since", "<i8"),  # first error in the sum: the onset
        ("newest", "<i8"),  # last error
        ("total", "<f8"),  # errors since the onset
        ("errors", "<f8"),  # learned from: errors and hours of the same GPU's past
        ("hours", "<f8"),
        ("past_errors", "<f8"),  # the same at the onset
        ("past_hours", "<f8"),
        ("more", "<f8"),  # errors after the first one of the sum, bursts capped
        ("on", "?"),
        ("risen", "?"),  # its own past had fewer
    ]
)
_FROZEN = 0.5  # share of the limit above which a sum teaches nothing, so that a burst does not become usual
_CLUMP = 2.0  # errors that one reading counts for at most: one row that is read again and again is one weak row; chosen
_PRIOR_RATE, _PRIOR_HOURS = 0.01, 100.0  # errors an hour of a GPU before a fleet was watched, and its weight; chosen
_OWN_HOURS = 24.0  # watched hours from which a GPU's own past outweighs its cohort; chosen: a day of its load
_CHANCE = 0.01  # that a steady rate seems to rise; chosen: few GPUs err at all
_QUIET = DAY  # us without an error that end a burst; chosen: as long as mcelog looks back


@dataclass
class GpuErrorRates(State):
    """Rates of corrected errors of all GPUs. a: overdispersion; ratio: of the rate looked for to the usual; limit: of
    the sum. usual: errors an hour."""

    a: float = 2.0
    ratio: float = 10.0
    limit: float = 12.0
    cells: NDArray[Any] = memory(0, GPU_CELL)
    usual: Floats = notes(lambda: np.empty(0))
    hour: int = notes(lambda: -1)

    def update(self, grown: Floats | None, watched: Floats, groups: NDArray[np.int32], time: int) -> Bools:
        """Returns (N,) GPUs with too high a rate. grown: new errors, None = none; watched: seconds with readings."""
        n = len(watched)
        self.grow(n)
        cells = self.cells[:n]
        if time // int(HOUR * SECOND) != self.hour or len(self.usual) < n:
            self._close_hour(cells, groups)
            self.end_bursts((cells["total"] > 0) & (time - cells["newest"] > _QUIET))
            self.hour = time // int(HOUR * SECOND)
        cells["seconds"] += watched
        erred = (grown > 0) & (watched > 0) if grown is not None else np.zeros(n, bool)
        if grown is not None and erred.any():
            begins = erred & (cells["total"] == 0)
            cells["since"][begins] = time
            cells["past_errors"][begins] = cells["errors"][begins]
            cells["past_hours"][begins] = (cells["hours"] + cells["seconds"] / HOUR)[begins]
            cells["more"][erred] += np.minimum(grown[erred], _CLUMP) - begins[erred]
            cells["newest"][erred] = time
            cells["total"][erred] += grown[erred]
            cells["count"][erred] += np.minimum(grown[erred], _CLUMP)
            cells["on"] |= erred & (self.scores(n) > self.limit)
            for i in np.flatnonzero(erred & cells["on"] & ~cells["risen"]).tolist():
                cells["risen"][i] = _has_risen(cells[i], time)
        return np.asarray(cells["on"])

    def budget(self) -> str:
        """Returns what the limit costs in false alarms.

        A likelihood ratio's mean time to a false alarm is at least e**limit samples (Lorden 1971).
        """
        hours = math.exp(self.limit)
        tickets = 1000 * GPUS * 24 / hours
        cost = f"limit {self.limit:g}: at most one false alarm per {hours:,.0f} hours and GPU"
        return f"{cost}, at most {tickets:.2g} tickets per 1,000 node-days"

    def scores(self, n: int) -> Floats:
        """Returns (N,) the sums, this hour included."""
        cells = self.cells[:n]
        return np.asarray(np.maximum(cells["sum"] + self._likelihood_gain(cells), 0.0))

    def end_bursts(self, which: Bools) -> None:
        """Ends the bursts of some GPUs, such as those that were reset."""
        cells = self.cells[: len(which)]
        for name in ("sum", "total", "count", "more", "on", "risen"):
            cells[name][which] = 0

    def _likelihood_gain(self, cells: NDArray[Any]) -> Floats:
        """Returns the logarithm of how much likelier the hour's errors are at the higher rate."""
        usual = self.usual[: len(cells)] * cells["seconds"] / HOUR
        high = self.ratio * usual
        narrow, wide = 1 + self.a * usual, 1 + self.a * high
        return np.asarray(cells["count"] * np.log(self.ratio * narrow / wide) - np.log(wide / narrow) / self.a)

    def _close_hour(self, cells: NDArray[Any], groups: NDArray[np.int32]) -> None:
        """Ends the hour: adds it to the sums, and learns each GPU's usual rate from its own past and its cohort."""
        if len(self.usual):
            known = cells[: len(self.usual)]
            known["sum"] = np.clip(known["sum"] + self._likelihood_gain(known), 0.0, 2 * self.limit)
        self.end_bursts(cells["on"] & ~cells["risen"] & (cells["sum"] <= 0))
        learns = np.where(cells["on"], ~cells["risen"], cells["sum"] <= _FROZEN * self.limit)
        cells["errors"] += np.where(learns, cells["count"], 0.0)
        cells["hours"] += np.where(learns, cells["seconds"] / HOUR, 0.0)
        cells["count"] = cells["seconds"] = 0.0
        over = (cells["sum"] <= 0) & ~cells["on"]
        cells["total"][over] = cells["more"][over] = 0.0
        wide = int(groups.max(initial=-1)) + 2
        errors, hours = (np.bincount(groups + 1, cells[name], wide) for name in ("errors", "hours"))
        rate = ((errors + _PRIOR_RATE * _PRIOR_HOURS) / (hours + _PRIOR_HOURS))[groups + 1]
        # a device's own rate is gamma distributed about its cohort's, with shape 1/a or less: its own past counts too
        weight = np.minimum(1 / (self.a * rate), _OWN_HOURS)
        self.usual = (weight * rate + cells["errors"]) / (weight + cells["hours"])


def _has_risen(cell: Any, time: int) -> bool:
    """Returns whether the rate since the onset is higher than the same GPU's past explains."""
    hours, past = max((time - int(cell["since"])) / SECOND / HOUR, 1 / 60), float(cell["past_hours"])
    before, after = round(float(cell["past_errors"])), round(float(cell["more"]))
    if past <= 0:
        return False
    share = past / (past + hours)
    total = before + after
    choose = (math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(before + 1))
    chances = (c + k * math.log(share) + (total - k) * math.log(1 - share) for k, c in enumerate(choose))
    return sum(map(math.exp, chances)) < _CHANCE


ROW_FIELDS = [
    ("rows", "<f8"),  # replaced rows one to two weeks ago, or when first seen, and when that was
    ("rows_at", "<i8"),
    ("newer_rows", "<f8"),  # the same of at most a week ago
    ("newer_at", "<i8"),
    ("spent_at", "<i8"),  # since when spare rows are used up, or will be soon; 0: no
]
LEAST_ROWS, LEAST_DAYS = 2.0, 1.0
"""Rows and days from which a rate is computed; chosen."""
SOON_DAYS = 30.0
"""Days that spare rows must last, else an exchange is to be planned; chosen: what spare parts may take."""
_WEEK = 7 * DAY


def count_replaced_rows(frame: Frame) -> Floats:
    """Returns (N,) rows that were replaced so far."""
    rows = frame["gpu.rows_corrected"] + frame["gpu.rows_uncorrected"]
    return np.where(np.isfinite(rows), rows, np.nan)


def is_positive(count: Floats) -> NDArray[np.bool_]:
    """Returns (N,) counts that are finite and above 0."""
    return np.asarray(np.isfinite(count) & (count > 0))


def update_row_history(cells: NDArray[Any], rows: Floats, time: int) -> None:
    """Records the replaced rows; a count that fell, or a time that stepped back, starts again."""
    known = np.isfinite(rows)
    new = known & ((cells["newer_at"] == 0) | (rows < cells["rows"]) | (cells["newer_at"] > time))
    old = known & ~new & (time - cells["newer_at"] >= _WEEK)
    if new.any() or old.any():
        for before, newer, now in (("rows", "newer_rows", rows), ("rows_at", "newer_at", time)):
            cells[before] = np.where(new, now, np.where(old, cells[newer], cells[before]))
            cells[newer] = np.where(new | old, now, cells[newer])


def find_spent_rows(cells: NDArray[Any], rows: Floats, time: int, limit: float) -> NDArray[np.bool_]:
    """Returns (N,) GPUs whose spare rows are used up or last less than SOON_DAYS; once found, less than twice that."""
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


SERVER_CELL = np.dtype([("bucket", "<f8"), ("since", "<i8"), ("on", "?"), ("lost", "<f8"), ("lost_at", "<i8")])
"""bucket: corrected errors, of which `limit` a day leak out.   lost: uncorrected errors since lost_at; 0: none."""


@dataclass
class ServerErrors(State):
    """Memory errors of servers or of their modules. limit: corrected errors a day that are too many."""

    device_class: str
    corrected: str
    uncorrected: str
    limit: float
    cells: NDArray[Any] = memory(0, SERVER_CELL)
    counters: ErrorCounters = part(ErrorCounters)

    def update(self, frame: Frame, gate: NDArray[np.bool_]) -> None:
        """Adds the errors of an instant; gate: False: under maintenance, errors do not count."""
        n = len(frame.entities)
        self.grow(n)
        cells = self.cells[:n]
        seconds = self.counters.seconds_since(frame.time)
        readings = {signal: frame[signal] for signal in (self.corrected, self.uncorrected)}
        grown, reborn = self.counters.read(readings, frame[f"{self.device_class}.generation"])
        if reborn is not None:
            for name in ("bucket", "lost", "on"):
                cells[name][reborn] = 0
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
        """Adds errors of some devices, and lets old ones leak out."""
        cells["since"] = np.where((more > 0) & (cells["bucket"] <= 0), time, cells["since"])
        leak = seconds * self.limit * SECOND / DAY
        cells["bucket"] = np.clip(cells["bucket"] + np.where(gate, more, 0.0) - leak, 0.0, 2 * self.limit)
        cells["on"] = cells["bucket"] > np.where(cells["on"], self.limit / 2, self.limit)
        new = gate & (lost > 0)
        cells["lost_at"] = np.where(new & (cells["lost"] <= 0), time, cells["lost_at"])
        kept = np.where(time - cells["lost_at"] > DAY, 0.0, cells["lost"])
        cells["lost"] = np.where(new, cells["lost"] + lost, kept)

    def find_bad(self, frame: Frame) -> Iterator[tuple[int, Any]]:
        """Yields index and cell of all devices with a condition."""
        cells = self.cells[: len(frame.entities)]
        for i in np.flatnonzero(cells["on"] | (cells["lost"] > 0)).tolist():
            yield i, cells[i]
