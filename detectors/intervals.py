"""Confidence intervals of counts and shares, exact or nearly so, with the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Callable

_Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
_STEPS = 200  # bisections: far beyond the precision of a float


def wilson(hits: int, of: int, z: float = _Z95) -> tuple[float, float] | None:
    """95 % interval of a share; Wilson (1927), J. Am. Stat. Assoc. 22, 209-212. None without trials."""
    if not of:
        return None
    share, square = hits / of, z * z
    middle = (share + square / (2 * of)) / (1 + square / of)
    half = z * math.sqrt(share * (1 - share) / of + square / (4 * of * of)) / (1 + square / of)
    return max(0.0, middle - half), min(1.0, middle + half)


def poisson(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of the mean of a Poisson count; Garwood (1936), Biometrika 28, 437-442."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _solve(lambda mean: 1 - _at_most(count - 1, mean), tail, count)
    return low, _solve(lambda mean: 1 - _at_most(count, mean), 1 - tail, count)


def _at_most(count: int, mean: float) -> float:
    """P(X <= count) of a Poisson variable, summed from its logarithms so that no factor overflows."""
    if mean <= 0:
        return 1.0
    return min(1.0, math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1)))


def _solve(rising: Callable[[float], float], wanted: float, count: int) -> float:
    """Where a rising function of the mean takes a value."""
    low, high = 0.0, count + 10.0 + 10.0 * math.sqrt(count + 1)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
