"""Which device is far below all of its cohort for as long as it is in it: its own past shows no change.

Members of a cohort do the same, and where they do not by design, several differ. So one that is alone far below does
less, or waits for something that the others do not wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.statistics import grouped_median
from detectors.base.streams import Bools, Floats
from pipeline.model.records import SECOND

_MEMORY = 600.0
"""s of the mean, and of its age before it counts: several steps of the largest models, and longer than most of their
evaluations. Chosen."""
_EVERY = 60 * SECOND  # us between two comparisons of means, which change slowly; chosen
_LEAST = 8  # members that a cohort needs: half a standard deviation is the error of a median of seven
_SPREADS, _NORMAL = 8.0, 1.4826
"""Robust standard deviations of its cohort by which it must be below, since members may have unlike work (experts,
embeddings); and median absolute departure -> standard deviation of a normal distribution. Chosen."""
_FEW = 0.05  # share of a cohort that may be below by half as much: more are so by design; one may in any. Chosen


@dataclass
class Laggards(State):
    """(N,) by device. least: ln by which one must be below.

    mean: smoothed value, NaN before its first sample.   age: s that are in it.   below: ln by which it was below its
    cohort when they were compared last; usual: the part of it that a person accepted as normal.   far: ln by which it
    was far below, 0 if it was not.   compared_at: when that was (us).
    """

    least: float
    mean: Floats = memory(np.nan)
    age: Floats = memory(0.0)
    below: Floats = memory(0.0)
    usual: Floats = memory(0.0)
    far: Floats = memory(0.0)
    last: int = notes(int)
    compared_at: int = notes(int)

    def step(self, value: Floats, groups: NDArray[np.int32], time: int, gate: Bools) -> Floats:
        """Adds a sample of each; returns (N,) ln by which it is below its cohort, 0 where that is usual there.

        value: positive, NaN without one.   groups: cohort, -1 none.   gate: works, and may be judged.
        """
        n, passed = len(value), min(max((time - self.last) / SECOND, 0.0), _MEMORY) if self.last else 0.0
        self.grow(n)
        self.last = time
        mean, age = self.mean[:n], self.age[:n]
        known = gate & np.isfinite(value) & (groups >= 0)
        age += np.where(known, passed, 0.0)
        gain = np.maximum(1 - np.exp(-passed / _MEMORY), passed / np.maximum(age, 1.0))
        mean[:] = np.where(known, np.where(np.isfinite(mean), mean + gain * (value - mean), value), mean)
        if not 0 <= time - self.compared_at < _EVERY:
            self.compared_at = time
            self._compare(np.where(known & (age >= _MEMORY), np.log(mean), np.nan), groups)
        return np.where(known, self.far[:n], 0.0)

    def _compare(self, level: Floats, groups: NDArray[np.int32]) -> None:
        """Compares all with their cohorts. level: ln of their means, NaN unknown."""
        n, below = len(level), grouped_median(level, groups)[0] - level
        np.copyto(self.below[:n], below, where=np.isfinite(below))
        self.far[:n] = _find_few(below - self.usual[:n], groups, self.least, self.far[:n] > 0)

    def accept(self, mask: Bools) -> None:
        """Takes the present value of some devices as normal, until they are reset."""
        self.usual[: len(mask)][mask] = np.maximum(self.below[: len(mask)][mask], 0.0)
        self.far[: len(mask)][mask] = 0.0


def _find_few(below: Floats, groups: NDArray[np.int32], least: float, before: Bools) -> Floats:
    """Returns (N,) ln by which a member is far below its cohort, 0 of all others.

    below: ln, NaN unknown.   before: was far below; so it stays until it is less than half as far as is needed.
    """
    spread, members = grouped_median(np.abs(below), groups)
    limit = np.fmax(least, _SPREADS * _NORMAL * spread)
    near = np.bincount(groups[below >= limit / 2], minlength=int(groups.max(initial=-1)) + 2)[groups]
    few = (members >= _LEAST) & (near <= np.maximum(1, _FEW * members))
    return np.where((below >= np.where(before, limit / 2, limit)) & few, below, 0.0)
