"""What a reading of a counter says, and what it does not: registers that are full, and falls it comes back from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TOPS = (2.0**8 - 1, 2.0**16 - 1, 2.0**31 - 1, 2.0**32 - 1, 2.0**63, 2.0**64)
"""Readings that say nothing: 8 to 32 bits full (classic IBTA counters stop there), or all bits set, as a device that
does not answer reads; 2**64 is 2**64 - 1 as a float. On its way through one of them a counter is read a tick later."""


def is_unreadable(values: Floats) -> NDArray[np.bool_]:
    """Readings that no counter stands at."""
    return np.isin(values, TOPS) | (values < 0) | (values > TOPS[-1])


def counter_increases(last: Floats, now: Floats, peak: Floats, fresh: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """What counters grew by since `last`, below 0 where they fell, and the new peaks; each cell is one counter.

    peak: from where one fell; NaN: it did not, or is back. One that leaps back over it grew by the rest only. `fresh`
    ones wrapped or live anew, and have never been higher.
    """
    peak = np.where(fresh, np.nan, np.where(now < last, np.fmax(peak, last), peak))
    back = now >= peak
    return np.where(back, now - peak, now - last), np.where(back, np.nan, peak)
