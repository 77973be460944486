"""How rare it is that leaps of one rank cluster by chance, whatever the tails of its norms.

Leaps that come independently of one another fall into `steps` steps after one at least k - 1 times with a chance of at
most C(steps, k - 1) rate^(k - 1); clusters are sought by such scans since Naus (Journal of the American Statistical
Association 77, 1982). The rate is the highest of three: of the rank itself, of its stage and of all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import DAY_S, GPUS
from detectors.base.streams import USUAL_STEP
from pipeline.records import SECOND

SAMPLES = 1000 * GPUS * DAY_S / USUAL_STEP
"""Of ranks, in 1,000 node-days."""
_RATE = 1e-5  # leaps a step, believed like one leap, before any was seen: a rank leaps once in eleven days; chosen
_SHAPE = 0.5  # of the gamma law by which ranks and stages differ, as of memory errors of GPUs; chosen
Count = tuple[float, float]
FORGOTTEN = 86_400.0
"""Seconds without a leap after which a GPU's earlier ones are forgotten; chosen: one leap a day is a chance."""
_KEPT = 1000  # GPUs of which leaps are remembered; chosen
_FAR = 10.0  # times as often as each other rank of its stage a GPU that is to be tested leaps; chosen
_SERIES = 3  # leaps of which a series consists at least; chosen: two that are far apart are a chance
_PAUSES = 3.0  # usual pauses of a series that end it: of independent leaps one pause of 20 is longer; chosen


def rate(own: Count, stage: Count, fleet: Count) -> float:
    """Leaps a step that are usual for a rank, from (leaps, steps) of its past, of those beside it and of all others."""
    base = (fleet[0] + 1.0) / (fleet[1] + 1.0 / _RATE)
    mine, beside = ((n + _SHAPE) / (steps + _SHAPE / base) for n, steps in (own, stage))
    return min(max(base, mine, beside), 1.0)


def by_chance(usual: float, leaps: int, steps: int) -> float:
    """Clusters of so many leaps, the others within `steps` after the first, in 1,000 node-days at most."""
    more, n = leaps - 1, max(steps, leaps - 1)
    ways = math.lgamma(n + 1) - math.lgamma(more + 1) - math.lgamma(n - more + 1)
    return SAMPLES * math.exp(min(ways + leaps * math.log(usual), 700.0))


def remember(gpus: dict[str, dict[str, Any]], gpu: str, rank: tuple[int, float], time: int) -> dict[str, Any]:
    """Counts a leap of a GPU, and gives all of its series: the job may show them on one rank now and on another then.

    rank: which one is on it, and that rank's step.
    leaps, steps: how many, and steps from the first to the newest one.   by: rank -> how many of them it showed.
    """
    (i, at), known = rank, gpus.pop(gpu, None)
    if known is None or time - known["last"] > FORGOTTEN * SECOND:
        known = {"leaps": 0, "steps": 0, "first": time, "by": {}}
    elif known["of"] == i:
        known["steps"] += max(int(at - known["at"]), 1)
    else:  # steps of a rank elsewhere are none of this GPU's: no more than the time allows
        known["steps"] += max(round((time - known["last"]) / SECOND / USUAL_STEP), 1)
    known["by"][str(i)] = known["by"].get(str(i), 0) + 1
    known |= {"leaps": known["leaps"] + 1, "of": i, "at": at, "last": time, "first": min(known["first"], time)}
    gpus[gpu] = known  # the newest stands last
    for old in list(gpus)[:-_KEPT]:
        del gpus[old]
    return known


def in_series(
    known: dict[str, Any], leaps: NDArray[np.float64], seen: NDArray[np.float64], stage: NDArray[np.bool_], most: float
) -> bool:
    """Whether a GPU leaps again and again, however far apart, and far more often than any rank of its stage elsewhere.

    What it showed itself raises no rate by which it is judged; leaps that its rank showed on other GPUs do: they are
    its data's. Each number of leaps may cost half the chance of the one before, so that all together cost `most`.
    """
    count, steps = int(known["leaps"]), int(known["steps"])
    if count < _SERIES:
        return False
    elsewhere = leaps.copy()
    for i, n in known["by"].items():
        elsewhere[int(i)] = max(elsewhere[int(i)] - n, 0.0)
    others = np.max((elsewhere[stage] - 1) / np.maximum(seen[stage], 1), initial=0.0)  # one leap each is a chance
    if _FAR * others > (count - 1) / max(steps, 1):
        return False
    beside = (float(elsewhere[stage].sum()), float(seen[stage].sum()))
    usual = rate(beside, beside, (float(elsewhere.sum()), float(seen.sum())))
    return by_chance(usual, count, steps) <= most / 2.0 ** min(count - _SERIES + 1, 1000)


def lasts(known: dict[str, Any]) -> float:
    """Seconds without another leap that end a series."""
    pause: float = (known["last"] - known["first"]) / SECOND / (known["leaps"] - 1)
    return min(_PAUSES * pause, FORGOTTEN)


def normal(deviations: float) -> float:
    """Chance that a normal sample is so far above its mean."""
    return math.erfc(deviations / math.sqrt(2)) / 2


def heavy(deviations: float) -> float:
    """The same of a sample of Student's t with 4 degrees of freedom, by its closed form."""
    t2 = 2 * deviations**2  # its variance is 2
    return (1 - math.sqrt(t2 / (4 + t2)) * (1 + 2 / (4 + t2))) / 2
