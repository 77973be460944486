"""Rows of a GPU's memory that were replaced: how many lately, and whether spare ones soon run out.

The rate is that of the last one to two weeks: a GPU that was well for a year and now loses rows every day is not saved
by its good year.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
FIELDS = [
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


def replaced(frame: Frame) -> Floats:
    """(N,) rows that were replaced so far."""
    told = frame["gpu.rows_corrected"] + frame["gpu.rows_uncorrected"]
    return np.where(np.isfinite(told), told, np.nan)


def some(count: Floats) -> NDArray[np.bool_]:
    """(N,) whether it is a number, and not none."""
    return np.asarray(np.isfinite(count) & (count > 0))


def note(cells: NDArray[Any], rows: Floats, time: int) -> None:
    """Takes the rows that are replaced now; a count that fell, or a time that stepped back, begins anew."""
    known = np.isfinite(rows)
    new = known & ((cells["newer_at"] == 0) | (rows < cells["rows"]) | (cells["newer_at"] > time))
    old = known & ~new & (time - cells["newer_at"] >= _WEEK)
    if new.any() or old.any():
        for before, newer, now in (("rows", "newer_rows", rows), ("rows_at", "newer_at", time)):
            cells[before] = np.where(new, now, np.where(old, cells[newer], cells[before]))
            cells[newer] = np.where(new | old, now, cells[newer])


def spent(cells: NDArray[Any], rows: Floats, time: int, limit: float) -> NDArray[np.bool_]:
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
