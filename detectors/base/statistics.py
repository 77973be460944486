"""Group medians over whole columns, a test for a steady rise, and the slope of a rise.

The trend test is the z of Mann (1945), Econometrica 13, 245-259, with Kendall's variance: n(n-1)(2n+5)/18 without ties;
z counts one less than the sum of the signs, for continuity. Hourly means have hardly a tie; with ties the true
variance is smaller, so z is too small rather than too large. The slope is that of Theil (1950) and Sen (1968), JASA 63,
1379-1389: up to 29 % of the values may lie.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import group_medians, group_sums, sort_by_group

Floats = NDArray[np.float64]


def grouped_median(values: Floats, groups: NDArray[np.int32]) -> tuple[Floats, NDArray[np.int64]]:
    """Returns (N,) median of each entity's group and its number of values; NaN and 0 for group -1 or an empty group."""
    total = int(groups.max(initial=-1)) + 1
    median, size = np.full(total + 1, np.nan), np.zeros(total + 1, np.int64)  # the last cell serves group -1
    group_medians(np.asarray(values, np.float64), groups, median, size)
    return median[groups], size[groups]


def group_medians_of(values: Floats, groups: NDArray[np.integer], count: int) -> Floats:
    """Returns (count,) median of the finite values of each group; NaN for an empty one. groups: -1 none."""
    median = np.empty(count)
    group_medians(np.asarray(values, np.float64), groups.astype(np.int32), median, np.empty(count, np.int64))
    return median


def group_means(values: Floats, groups: NDArray[np.integer], count: int) -> Floats:
    """Returns (count,) mean of the finite values of each group; NaN for an empty one. groups: -1 none."""
    total, size = np.zeros(count), np.zeros(count)
    group_sums(np.asarray(values, np.float64), groups, total, size)
    return np.asarray(total / np.where(size > 0, size, np.nan))


def median_of(values: Floats) -> tuple[float, int]:
    """Returns the median of the finite values, NaN without one, and how many they are."""
    median, size = np.empty(1), np.empty(1, np.int64)
    group_medians(values, np.zeros(len(values), np.int32), median, size)
    return float(median[0]), int(size[0])


def group_quantiles(
    values: Floats | NDArray[np.float32], groups: NDArray[np.int32], count: int, share: float
) -> Floats:
    """Returns (count,) quantile of the finite values of each group, between the two nearest ranks (Hyndman and Fan
    1996, The American Statistician 50, definition 7); NaN for an empty one."""
    ordered, size = sort_by_group(np.asarray(values, np.float64), groups, count)
    full = np.flatnonzero(size)
    place = share * (size[full] - 1)
    low = place.astype(np.int64)
    first, part = (np.cumsum(size) - size)[full], place - low
    found = np.full(count, np.nan)
    upper = first + np.minimum(low + 1, size[full] - 1)
    found[full] = ordered[first + low] * (1 - part) + ordered[upper] * part
    return found


def grouped_mad(values: Floats, groups: NDArray[np.int32]) -> tuple[Floats, NDArray[np.int64]]:
    """Returns (N,) median absolute deviation from the group's median, and the group's size."""
    median, _ = grouped_median(values, groups)
    return grouped_median(np.abs(values - median), groups)


def trend_z(score: Floats, n: NDArray[np.int64]) -> Floats:
    """Returns z of sums of signs over all pairs of `n` values each; 0 where there are no pairs."""
    variance = n * (n - 1.0) * (2.0 * n + 5.0) / 18.0
    return np.asarray((score - np.sign(score)) / np.sqrt(np.maximum(variance, 1.0)))


def row_trend_z(series: Floats) -> Floats:
    """Returns (N,) z of each row of (N, T); NaN are instants without a value."""
    score = np.zeros(len(series))
    for lag in range(1, series.shape[1]):
        later, earlier = series[:, lag:], series[:, :-lag]  # a comparison with NaN is neither more nor less
        score += (later > earlier).sum(axis=1) - (later < earlier).sum(axis=1)
    return trend_z(score, np.isfinite(series).sum(axis=1))


def theil_sen(at: NDArray[np.intp], values: Floats) -> float:
    """Returns the median slope of all pairs of (N,) values at N different instants; NaN with fewer than two."""
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((values[second] - values[first]) / (at[second] - at[first]))) if len(first) else float("nan")


def count_near(began: NDArray[np.int64], units: NDArray[np.integer], within: int) -> NDArray[np.int64]:
    """Returns (N,) of how many units, its own included, the first member began within `within` of each member.

    began: (N,) time.   units: (N,) number of the unit of each, as its node.
    """
    order = np.argsort(began, kind="stable")
    first = np.sort(began[order][np.unique(units[order], return_index=True)[1]])
    return np.searchsorted(first, began + within, "right") - np.searchsorted(first, began - within, "left")
