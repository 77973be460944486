"""Confidence intervals of counts and shares, exact or nearly so, with the standard library alone."""

from __future__ import annotations

import math

_Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
_STEPS = 100  # bisections: far beyond the precision of a float
_LEAST = 1e-18  # a term of that share of the sum changes no float


def wilson(hits: int, of: int, z: float = _Z95) -> tuple[float, float] | None:
    """95 % interval of a share; Wilson (1927), J. Am. Stat. Assoc. 22, 209-212. None without trials."""
    if not of:
        return None
    share, square = hits / of, z * z
    middle = (share + square / (2 * of)) / (1 + square / of)
    half = z * math.sqrt(share * (1 - share) / of + square / (4 * of * of)) / (1 + square / of)
    return 0.0 if hits == 0 else middle - half, 1.0 if hits == of else middle + half


def poisson(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of the mean of a Poisson count; Garwood (1936), Biometrika 28, 437-442."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _mean(count - 1, 1 - tail, count)
    return low, _mean(count, tail, count)


def _mean(most: int, chance: float, around: int) -> float:
    """The mean at which P(X <= most) is `chance`; sought within 10 standard deviations of `around`."""
    width = 10.0 + 10.0 * math.sqrt(around + 1)
    low, high = max(0.0, around - width), around + width
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(most, middle) > chance else (low, middle)
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """P(X <= count) of a Poisson variable, summed outwards from the largest term until nothing is added."""
    if mean <= 0:
        return 1.0
    if count < mean:
        return _tail(count, mean, -1)
    return 1 - _tail(count + 1, mean, 1)


def _tail(first: int, mean: float, step: int) -> float:
    """P(first) + P(first + step) + ..., where each term is smaller than the one before."""
    total, k = 0.0, first
    term = math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
    while k >= 0 and term > _LEAST * total:
        total += term
        term *= k / mean if step < 0 else mean / (k + 1)
        k += step
    return total
