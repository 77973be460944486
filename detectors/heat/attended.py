"""Cohorts of which enough are at work to be compared: the few that hang on when a job waits are odd."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled

Bools = NDArray[np.bool_]
_FEWEST, _SHARE = 4, 0.2  # members of a cohort, and share of it, that must be at work; chosen


def attended(gate: Bools, groups: NDArray[np.int32], whole: NDArray[np.int64]) -> None:
    """Closes the gate for cohorts of which too few are at work; `whole`: members of each."""
    _closed(gate, groups, whole, _FEWEST, _SHARE)


@compiled
def _closed(gate: Bools, groups: NDArray[np.int32], whole: NDArray[np.int64], fewest: int, share: float) -> None:
    count = np.zeros(len(whole))
    for i in range(len(gate)):
        if gate[i] and groups[i] >= 0:
            count[groups[i]] += 1
    for i in range(len(gate)):
        if groups[i] >= 0 and count[groups[i]] < max(fewest, share * whole[groups[i]]):
            gate[i] = False
