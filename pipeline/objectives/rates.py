"""Failure rates from counts: intervals, frailty of single nodes, and spares; no store, no dependency.

Failures of a fleet are counted over an exposure (node-hours). Their number is Poisson; single nodes differ by a gamma
frailty of mean 1, so that counts over nodes are negative binomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SHAPE = 0.2
"""Shape of the gamma frailty of nodes. Source: at this shape the worst 5 % of nodes have 44 % of the events; published
fleets report 44 to 64 % (docs/objectives.md)."""
BAD = 3.0
"""A node that fails this many times as often as the average is a lemon. Chosen."""
SURE = 0.95
"""Probability from which a node is suggested for retirement. Chosen."""
LEAST_FAILURES = 3
"""Fewest failures of a node that is suggested. Chosen: two in a row may be one bad repair."""


def poisson_below(count: int, mean: float) -> float:
    """Returns P(X <= count) for X ~ Poisson(mean)."""
    if count < 0:
        return 0.0
    if mean <= 0:
        return 1.0
    return 1.0 - gamma_below(count + 1.0, mean)


def gamma_below(shape: float, x: float) -> float:
    """Returns P(X <= x) for X ~ Gamma(shape, rate 1): the regularized lower incomplete gamma function.

    Series below shape + 1, Lentz' continued fraction above it (Press et al., Numerical Recipes, 3rd ed., 6.2).
    """
    if x <= 0:
        return 0.0
    front = math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        step = shape
        while abs(term) > abs(total) * 1e-15:
            step += 1
            term *= x / step
            total += term
        return min(1.0, front * total)
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        a = -i * (i - shape)
        b += 2
        d = 1 / (a * d + b or 1e-300)
        c = b + a / c or 1e-300
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return max(0.0, 1 - front * h)


def poisson_interval(count: int, level: float = 0.9) -> tuple[float, float]:
    """Returns the exact interval of a Poisson mean (Garwood 1936), found by bisection."""
    tail = (1 - level) / 2
    low = 0.0 if count == 0 else _solve(lambda mean: 1 - poisson_below(count - 1, mean) >= tail, count + 1.0)
    high = _solve(lambda mean: poisson_below(count, mean) <= tail, count + 10.0 * math.sqrt(count + 1.0) + 10.0)
    return low, high


def _solve(holds: Callable[[float], bool], high: float) -> float:
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class Frailty:
    """How often a node fails beside the average node: posterior mean, and the probability that it is at least BAD."""

    mean: float
    bad: float

    def suggests_retirement(self, failures: int) -> bool:
        """Returns whether to suggest that the node is retired."""
        return failures >= LEAST_FAILURES and self.bad >= SURE


def judge_frailty(failures: int, expected: float) -> Frailty:
    """Returns the frailty of a node after so many failures, where the average node would have `expected`.

    Gamma prior of mean 1 and shape SHAPE, Poisson counts: the posterior is Gamma(SHAPE + failures, SHAPE + expected).
    """
    shape, rate = SHAPE + failures, SHAPE + expected
    return Frailty(shape / rate, 1 - gamma_below(shape, BAD * rate))


def plan_spares(failures: int, exposure: float, ahead: float, level: float) -> tuple[float, int, int]:
    """Returns (expected failures, spares by the plug-in Poisson quantile, spares by the predictive quantile) for an
    exposure `ahead`, such as the node-hours of the time until a replaced part arrives.

    The rate itself is uncertain: with Jeffreys' prior its posterior is Gamma(failures + 1/2, exposure), and the count
    ahead is negative binomial (Gelman et al., Bayesian Data Analysis, 3rd ed., 2.6). Few failures so far need more
    spares than the plug-in says.
    """
    if exposure <= 0 or ahead <= 0:
        return 0.0, 0, 0
    expected = failures / exposure * ahead
    plugin = 0
    while poisson_below(plugin, expected) < level:
        plugin += 1
    size, success = failures + 0.5, exposure / (exposure + ahead)
    chance = size * math.log(success)
    total, count = math.exp(chance), 0
    while total < level and count < 1_000_000:
        count += 1
        chance += math.log((count - 1 + size) / count) + math.log1p(-success)
        total += math.exp(chance)
    return expected, plugin, count
