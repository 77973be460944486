"""Readings of counters: invalid readings of saturated registers, and growth across a temporary fall."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.model.compiling import compiled

Floats = NDArray[np.float64]
TOPS = (2.0**8 - 1, 2.0**16 - 1, 2.0**31 - 1, 2.0**32 - 1, 2.0**63, 2.0**64)
"""Readings without meaning: 8 to 32 bits full (classic IBTA counters stop there), or all bits set, as of a device that
does not respond; 2**64 is 2**64 - 1 as a float. A counter that passes through one of them is read a tick later."""


def is_unreadable(values: Floats) -> NDArray[np.bool_]:
    """Returns (N,) readings that are not a value of a counter."""
    found = np.empty(np.shape(values), bool)
    _mark_unreadable(np.ravel(values), found.ravel())
    return found


@compiled
def _mark_unreadable(values: Floats, found: NDArray[np.bool_]) -> None:
    for i in range(len(values)):
        value = values[i]
        found[i] = (value < 0) or (value > TOPS[-1])
        for top in TOPS:
            found[i] |= value == top


def counter_increases(last: Floats, now: Floats, peak: Floats, fresh: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Returns the growth of counters since `last`, below 0 where they fell, and the new peaks; each cell is a counter.

    peak: value from which a counter fell; NaN: it did not, or has passed it again. A counter that rises above its peak
    grew by the difference only. fresh: counters that wrapped or restarted, and have never been higher.
    """
    peak = np.where(fresh, np.nan, np.where(now < last, np.fmax(peak, last), peak))
    back = now >= peak
    return np.where(back, now - peak, now - last), np.where(back, np.nan, peak)
