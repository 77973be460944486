"""Medians of groups over whole columns, for detectors that compare without the common kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def grouped_median(values: Floats, groups: NDArray[np.int32]) -> tuple[Floats, NDArray[np.int64]]:
    """(N,) median of each entity's group and the number of values in it; NaN and 0 for group -1 or an empty group."""
    member = np.flatnonzero(np.isfinite(values) & (groups >= 0))
    total = int(groups.max(initial=-1)) + 1
    # one sort of the values, then a stable one of small integers, which NumPy does by radix: no pair comparisons
    member = member[np.argsort(values[member])]
    small = groups[member].astype(np.int16) if total < 2**15 else groups[member]
    ordered = values[member[np.argsort(small, kind="stable")]]
    size = np.bincount(groups[member], minlength=total)
    first = np.cumsum(size) - size
    median = np.full(total + 1, np.nan)  # the last cell serves group -1
    full = np.flatnonzero(size)
    low, high = first[full] + (size[full] - 1) // 2, first[full] + size[full] // 2
    median[full] = (ordered[low] + ordered[high]) / 2
    return median[groups], np.append(size, 0)[groups]


def grouped_mad(values: Floats, groups: NDArray[np.int32]) -> tuple[Floats, NDArray[np.int64]]:
    """(N,) median absolute deviation from the group's median, and the group's size."""
    median, _ = grouped_median(values, groups)
    return grouped_median(np.abs(values - median), groups)
