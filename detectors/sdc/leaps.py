"""How rare it is that leaps of one rank cluster by chance, whatever the tails of its norms.

Leaps that come independently of one another fall into `steps` steps after one at least k - 1 times with a chance of at
most C(steps, k - 1) rate^(k - 1); clusters are sought by such scans since Naus (Journal of the American Statistical
Association 77, 1982). The rate is the highest of three: of the rank itself, of its stage and of all ranks.
"""

from __future__ import annotations

import math

from detectors.method.budget import DAY_S, GPUS
from detectors.method.streams import USUAL_STEP

SAMPLES = 1000 * GPUS * DAY_S / USUAL_STEP
"""Of ranks, in 1,000 node-days."""
_RATE = 1e-5  # leaps a step, believed like one leap, before any was seen: a rank leaps once in eleven days; chosen
_SHAPE = 0.5  # of the gamma law by which ranks and stages differ, as of memory errors of GPUs; chosen
Count = tuple[float, float]


def rate(own: Count, stage: Count, fleet: Count) -> float:
    """Leaps a step that are usual for a rank, from (leaps, steps) of its past, of those beside it and of all others."""
    base = (fleet[0] + 1.0) / (fleet[1] + 1.0 / _RATE)
    mine, beside = ((n + _SHAPE) / (steps + _SHAPE / base) for n, steps in (own, stage))
    return min(max(base, mine, beside), 1.0)


def by_chance(usual: float, leaps: int, steps: int) -> float:
    """Clusters of so many leaps, the others within `steps` after the first, in 1,000 node-days at most."""
    return SAMPLES * usual * math.comb(max(steps, leaps - 1), leaps - 1) * usual ** (leaps - 1)


def normal(deviations: float) -> float:
    """Chance that a normal sample is so far above its mean."""
    return math.erfc(deviations / math.sqrt(2)) / 2


def heavy(deviations: float) -> float:
    """The same of a sample of Student's t with 4 degrees of freedom, by its closed form."""
    t2 = 2 * deviations**2  # its variance is 2
    return (1 - math.sqrt(t2 / (4 + t2)) * (1 + 2 / (4 + t2))) / 2
