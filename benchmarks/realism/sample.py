"""Samples and the distances between two of them: closed forms over their distribution functions.

A sample is a set of values of equal weight. Where its values came in order of time, the series are kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PERCENTILES = np.array([1.0, *range(5, 100, 5), 99.0])
"""Where quantiles are compared; beyond 1 and 99 the smallest of the data sets say nothing."""
_EDGE = 1e-9  # relative: what floating point does to a quantile of equal values
_FINEST = 1e-3  # of the range from 1 to 99 %: values closer than this count as one, rounded twice; chosen
_FREQUENT = 2e-3  # share of the readings that a value must have to count as a step of the scale; chosen
_OFF_GRID, _ON_GRID = 0.05, 0.9
"""Share of a step that a distance may be off a multiple of it, and share of the distances that must be on; chosen:
of distances without steps a tenth would be."""


@dataclass(frozen=True)
class Sample:
    """Values in ascending order, and the series (NaN: not measured) that they came from, if they came in order."""

    values: Floats
    series: tuple[Floats, ...] = ()

    def above(self, limit: float) -> Sample:
        """Only what exceeds `limit`; a part of a distribution has no order of time."""
        return Sample(self.values[self.values > limit])

    def top(self, share: float) -> Sample:
        """The largest `share` of the values."""
        return Sample(self.values[len(self.values) - max(1, round(share * len(self.values))) :])

    def centred(self) -> Sample:
        """Returns the sample without its median: spread and shape."""
        middle = float(np.median(self.values))
        return Sample(self.values - middle, tuple(line - middle for line in self.series))

    def scaled(self, factor: float) -> Sample:
        return Sample(self.values * factor, tuple(line * factor for line in self.series))

    def share_above(self, limit: float) -> float:
        return float(np.mean(self.values > limit))


def sample(values: Iterable[float] | Floats) -> Sample:
    """Returns the sample of values; unmeasured ones are left out."""
    found = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, np.float64).ravel()
    return Sample(np.sort(found[np.isfinite(found)]))


def in_time(series: Sequence[Floats]) -> Sample:
    """Of series, each in order of time."""
    lines = tuple(np.asarray(line, np.float64) for line in series)
    return Sample(sample(np.concatenate(lines) if lines else np.empty(0)).values, lines)


def pooled(samples: Sequence[Sample]) -> Sample:
    """One sample, each of them with the same weight per value."""
    values = np.sort(np.concatenate([s.values for s in samples]))
    return Sample(values, tuple(line for s in samples for line in s.series))


def quantiles(found: Sample, percentiles: Floats = PERCENTILES) -> Floats:
    return np.asarray(np.percentile(found.values, percentiles))


def spread(found: Sample) -> float:
    """Interquartile range; that from 5 to 95 % where half of the values are equal; NaN where those are equal too."""
    return next((width for width in map(float, _widths(found)) if width > 0), float("nan"))


def spread_ratio(one: Sample, other: Sample) -> float:
    """Spread of `one` over that of `other`, both over the narrowest range in which neither is a single value."""
    pairs = zip(_widths(one), _widths(other), strict=True)
    return next((float(a / b) for a, b in pairs if a > 0 and b > 0), float("nan"))


def _widths(found: Sample) -> Floats:
    """Ranges from 25 to 75 % and from 5 to 95 %; 0 where all within is equal."""
    low, first, third, high = quantiles(found, np.array([5.0, 25.0, 75.0, 95.0]))
    widths = np.array([third - first, high - low])
    return np.where(widths > _EDGE * max(abs(low), abs(high)), widths, 0.0)


def _distribution(found: Sample, at: Floats) -> Floats:
    return np.asarray(np.searchsorted(found.values, at, side="right") / len(found.values))


def kolmogorov(one: Sample, other: Sample) -> float:
    """Largest distance between the two distribution functions (two-sample Kolmogorov-Smirnov statistic)."""
    at = np.concatenate([one.values, other.values])
    return float(np.max(np.abs(_distribution(one, at) - _distribution(other, at))))


def wasserstein(one: Sample, other: Sample) -> float:
    """Area between the two distribution functions: by how much a value must move on average (Wasserstein-1)."""
    at = np.sort(np.concatenate([one.values, other.values]))
    apart = np.abs(_distribution(one, at[:-1]) - _distribution(other, at[:-1]))
    return float(np.sum(apart * np.diff(at)))


def gaps(real: Sample, simulated: Sample) -> Floats:
    """Simulated minus real quantile over the real spread, per percentile of PERCENTILES."""
    return np.asarray((quantiles(simulated) - quantiles(real)) / spread(real))


def phi(line: Floats) -> float:
    """Lag-1 autocorrelation over the pairs that were both measured; NaN for a constant or a short line."""
    now, then = line[1:], line[:-1]
    both = np.isfinite(now) & np.isfinite(then)
    now, then = now[both], then[both]
    if len(now) < 3 or min(np.ptp(now), np.ptp(then)) <= _EDGE * max(1.0, float(np.max(np.abs(now)))):
        return float("nan")
    return float(np.corrcoef(now, then)[0, 1])


def median_phi(found: Sample) -> float:
    """Median lag-1 autocorrelation of the sample's series; NaN where there are none."""
    each = np.array([phi(line) for line in found.series])
    each = each[np.isfinite(each)]
    return float(np.median(each)) if len(each) else float("nan")


def kurtosis(values: Floats) -> float:
    """Excess kurtosis by moments: 0 for a normal distribution; NaN for constant values."""
    off = values - np.mean(values)
    variance = float(np.mean(off**2))
    return float(np.mean(off**4) / variance**2 - 3) if variance > 0 else float("nan")


def quantum(found: Sample) -> float:
    """The step that readings are multiples of; NaN where there is none, or where it is too fine to matter."""
    low, high = quantiles(found, np.array([1.0, 99.0]))
    values, counts = np.unique(found.values, return_counts=True)
    first = np.flatnonzero(np.concatenate([[True], np.diff(values) > _FINEST * (high - low)]))
    steps = values[first][np.add.reduceat(counts, first) >= _FREQUENT * len(found.values)]
    if len(steps) < 3:
        return float("nan")
    apart = np.diff(steps)
    least = float(np.median(apart[apart < 1.5 * apart.min()]))
    off = np.abs(apart / least - np.round(apart / least))
    return least if float(np.mean(off < _OFF_GRID)) >= _ON_GRID else float("nan")
