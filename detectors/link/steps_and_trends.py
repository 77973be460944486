"""Whether an hourly series rises steadily: steps are told from trends, Mann-Kendall and Theil-Sen judge what is left.

Theil (1950) and Sen (1968), J. Am. Stat. Assoc. 63, 1379-1389: the median of the slopes of all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.statistics import z_of

Floats = NDArray[np.float64]

_NORMAL = 1.4826  # MAD to standard deviation of a normal distribution
_STEP = 0.25  # from one hour to the next, in the series' unit (decades): six hours of the steepest trend; chosen
_STEPS = 6.0  # and so many times what neighbouring hours differ by: 1 in 1e9 of normal noise; chosen


@dataclass(frozen=True, slots=True)
class Trend:
    """A series since its last step.

    z:      Mann-Kendall's, positive when it rises.   slope: Theil-Sen's, per day.
    spread: robust standard deviation around the line. newest: the line at the last hour.
    hours:  values in it.                              begins: place of the first one in the series.
    """

    z: float
    slope: float
    spread: float
    newest: float
    hours: int
    begins: int


def row_median(values: NDArray[np.floating]) -> Floats:
    """(N,) median of each row's finite values; NaN where there is none."""
    ordered = np.sort(np.asarray(values, np.float64), axis=1)  # NaN comes last
    count = np.isfinite(ordered).sum(axis=1)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[:, None] // 2, axis=1)[:, 0]
    high = np.take_along_axis(ordered, np.maximum(np.minimum(count // 2, count - 1), 0)[:, None], axis=1)[:, 0]
    return np.where(count > 0, (low + high) / 2, np.nan)


def since_step(series: Floats) -> int:
    """Place from which a series has no step any more; NaN are hours without a value."""
    at = np.flatnonzero(np.isfinite(series))
    if len(at) < 3:
        return 0
    moves = np.diff(series[at])
    usual = _NORMAL * float(np.median(np.abs(moves - np.median(moves))))
    steps = np.flatnonzero(np.abs(moves) > max(_STEP, _STEPS * usual))
    return int(at[steps[-1] + 1]) if len(steps) else 0


def trend(series: Floats) -> Trend | None:
    """The trend of an hourly series since its last step; None where fewer than three values are left."""
    begins = since_step(series)
    at = np.flatnonzero(np.isfinite(series[begins:])) + begins
    n, y = len(at), series[at]
    if n < 3:
        return None
    first, second = np.triu_indices(n, 1)
    rises = y[second] - y[first]
    z = float(z_of(np.sign(rises).sum(), np.asarray(n)))
    slope = float(np.median(rises / (at[second] - at[first])))
    level = float(np.median(y - slope * at))
    spread = _NORMAL * float(np.median(np.abs(y - slope * at - level)))
    return Trend(z, 24 * slope, spread, level + slope * float(at[-1]), n, int(at[0]))
