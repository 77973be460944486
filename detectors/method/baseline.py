"""Statistics over whole columns: what one sample is worth against its peers and against its own past.

The common kernel is a peer-conditioned, clipped CUSUM: residual against the cohort's median, minus the entity's own
slowly learnt offset, divided by a shrunk scale, summed as in Page (1954), Biometrika 41, 100-115.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import SECOND

Floats = NDArray[np.float64]
Cells = NDArray[Any]

CELL = np.dtype(
    [
        ("count", "<i8"),  # samples learnt from
        ("baseline", "<f8"),  # own offset from the cohort
        ("variance", "<f8"),  # own variance around it
        ("sum", "<f8"),  # CUSUM in the direction of harm
        ("effect", "<f8"),  # smoothed departure, in units of the residual
        ("since", "<i8"),  # when the sum last left zero: the onset
        ("above", "<i8"),  # since when the effect matters; 0 = it does not
        ("on", "?"),  # the condition holds
    ]
)
COUNTER = np.dtype(
    [
        ("last", "<f8"),  # last reading
        ("time", "<i8"),  # when that was; 0 = there was none
        ("sum", "<f8"),  # CUSUM of errors
        ("since", "<i8"),  # when it last left zero: the onset
        ("total", "<f8"),  # errors since then
        ("generation", "<f8"),  # which life of the counter the last reading belongs to; 0 = not known
    ]
)

LEARN = 20  # samples of a stream before anything is said of it; the replay contract
_ALPHA = 0.15  # of the smoothed effect; chosen: about 6 samples of memory
_FROZEN = 2.0  # a sum above it stops the learning, so that a fault does not become the baseline; chosen
_GAIN = 5e-4  # least learning rate: a memory of about 2,000 samples; chosen
_PRIOR = 16.0  # samples that the cohort's scale is worth against the own variance; chosen
_CLIP = 3.0  # a single sample counts at most as 3 scales; heavy tails need it
_SLACK = 0.5  # k of the CUSUM: half of the smallest shift looked for, in scales (Page 1954)
_DOUBT = 3.0  # standard errors of the baseline that count as no shift: it was learnt from few samples at first; chosen
_NORMAL = 1.4826  # MAD to standard deviation of a normal distribution
_COHORT_SCALE = 8  # cohorts below this say nothing about scale: the guilty one would be half of it


@dataclass(frozen=True)
class Pcc:
    """Settings of one peer-conditioned CUSUM.

    floor:     least scale, in units of the residual.
    delta:     least smoothed effect that matters; below it statistics alone mean nothing.
    threshold: of the sum; 21 gives over 1e10 samples between false alarms of heavy-tailed noise.
    phi:       autocorrelation of neighbouring samples; it widens the scale by (1+phi)/(1-phi).
    """

    floor: float
    delta: float
    threshold: float = 21.0
    phi: float = 0.3

    def step(self, cells: Cells, residual: Floats, groups: NDArray[np.int32], time: int) -> None:
        """Takes one sample per entity, positive = harm, NaN = none; changes `cells` in place."""
        known = np.isfinite(residual)
        departure = np.where(known, residual - cells["baseline"], 0.0)
        scale = self._scale(cells, np.where(known, departure, np.nan), groups)
        judged = known & (cells["count"] >= LEARN)
        z = np.clip(departure / (scale * np.sqrt((1 + self.phi) / (1 - self.phi))), -_CLIP, _CLIP)
        slack = _SLACK + _DOUBT / np.sqrt(np.maximum(cells["count"], 1))
        total = np.clip(cells["sum"] + z - slack, 0.0, 2 * self.threshold)
        cells["sum"] = np.where(judged, total, cells["sum"])
        cells["effect"] += np.where(judged, _ALPHA * (departure - cells["effect"]), 0.0)
        self._learn(cells, known, departure, scale)
        self._decide(cells, judged, time)

    def _scale(self, cells: Cells, departure: Floats, groups: NDArray[np.int32]) -> Floats:
        """Own variance shrunk towards the cohort's; wider where the median of few peers is itself uncertain."""
        spread, size = grouped_mad(departure, groups)
        spread = np.where((size >= _COHORT_SCALE) & np.isfinite(spread), _NORMAL * spread, self.floor)
        count = cells["count"]
        squared = (count * cells["variance"] + _PRIOR * spread**2) / (count + _PRIOR)
        # 1.57 = pi/2: the variance of a median of n normal samples is pi/2 times that of their mean
        return np.asarray(np.sqrt(np.maximum(squared, self.floor**2) * (1 + 1.57 / np.maximum(size, 1))))

    def _learn(self, cells: Cells, known: NDArray[np.bool_], departure: Floats, scale: Floats) -> None:
        """Moves baseline and variance where no fault is suspected; gain 1/n until its floor."""
        young = cells["count"] < LEARN
        bounded = np.where(young, departure, np.clip(departure, -_CLIP * scale, _CLIP * scale))
        take = known & (cells["sum"] <= _FROZEN)
        cells["count"] += take
        gain = np.where(take, np.maximum(1.0 / np.maximum(cells["count"], 1), _GAIN), 0.0)
        step = gain * bounded
        cells["baseline"] += step
        cells["variance"] += gain * (bounded * (bounded - step) - cells["variance"])

    def _decide(self, cells: Cells, judged: NDArray[np.bool_], time: int) -> None:
        """Begins a condition at the threshold, ends it when half of the least effect is left."""
        matters = cells["effect"] >= self.delta
        cells["since"] = np.where(judged & (cells["sum"] <= 0), time, cells["since"])
        started = np.where(cells["above"] == 0, time, cells["above"])
        cells["above"] = np.where(judged, np.where(matters, started, 0), cells["above"])
        begins = (cells["sum"] > self.threshold) & matters
        on = np.where(judged, np.where(cells["on"], cells["effect"] >= self.delta / 2, begins), cells["on"])
        over = cells["on"] & ~on
        cells["sum"] = np.where(over, 0.0, cells["sum"])
        cells["since"] = np.where(over, time, cells["since"])
        cells["on"] = on


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


def counter_delta(cells: Cells, now: Floats, time: int, generation: Floats | None = None) -> tuple[Floats, Floats]:
    """(N,) growth since the last reading and the seconds since then; NaN where it cannot be told.

    A missing reading is bridged by the next one. A counter that fell was reset, and its growth is unknown, unless it
    stood close below 2**32 and now stands close above zero: then it has wrapped.

    generation: which life of the counter a reading belongs to, as the agent says; NaN where it does not. Over the end
    of a life growth is unknown, too, however far the counter has come: what it shows may be older than the time at
    which the agent saw the reset, and has in it what belongs to the reset itself, such as a link that comes up.
    """
    known = np.isfinite(now)
    wide = 2.0**32
    wrapped = (cells["last"] >= 0.9 * wide) & (cells["last"] < wide) & (now < 0.1 * wide)
    growth = now - cells["last"] + np.where(wrapped, wide, 0.0)
    told = known & (cells["time"] > 0) & (growth >= 0)
    if generation is not None:
        said = known & np.isfinite(generation)  # a reading that is missing leaves its generation to the next one
        told &= ~(said & (cells["generation"] > 0) & (generation != cells["generation"]))
        cells["generation"] = np.where(said, generation, cells["generation"])
    delta = np.where(told, growth, np.nan)
    seconds = np.where(told, (time - cells["time"]) / SECOND, np.nan)
    cells["last"] = np.where(known, now, cells["last"])
    cells["time"] = np.where(known, time, cells["time"])
    return delta, seconds


def poisson_cusum(
    cells: Cells, count: Floats, seconds: Floats, healthy: float, faulty: float, limit: float, time: int
) -> None:
    """Adds the log-likelihood ratio of `count` errors in `seconds` under a faulty against a healthy rate (per s).

    Lucas (1985), Technometrics 27, 129-144. The sum stays within [0, 2 * limit].
    """
    told = np.isfinite(count)
    ratio = np.where(told, count * np.log(faulty / healthy) - (faulty - healthy) * seconds, 0.0)
    fresh = told & (cells["sum"] <= 0)
    cells["since"] = np.where(fresh, time, cells["since"])
    cells["sum"] = np.clip(cells["sum"] + ratio, 0.0, 2 * limit)
    cells["total"] = np.where(cells["sum"] <= 0, 0.0, cells["total"] + np.where(told, count, 0.0))
