"""The newest steps of each rank, compiled: which of them a rank has taken now, and who is far behind of late."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled

Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
RING = 10  # samples whose median tells: one ratio of a single step is noise
RECENT = np.dtype([("stage", "<f8", (RING,)), ("own", "<f8", (RING,))])


@compiled
def take(
    times: Doubles,
    gate: NDArray[np.bool_],
    expected: Doubles,
    stage: Doubles,
    limit: float,
    learn: int,
    newest: Doubles,
    usual: Doubles,
    by_stage: Doubles,
    by_own: Doubles,
    count: Ints,
    behind: Ints,
    near: NDArray[np.bool_],
) -> int:
    """Keeps what each rank took, beside its stage and beside its own normal; how many are `near` the limit.

    by_stage, by_own: (S, RING) the newest departures.   behind: since when each is far behind, 0 not.
    """
    found = 0
    for i in range(len(times)):
        near[i] = False
        if not (gate[i] and np.isfinite(times[i])):
            continue
        newest[i], usual[i] = times[i], expected[i]
        at = count[i] % RING
        residual = times[i] - stage[i]
        by_stage[i, at], by_own[i, at] = residual, times[i] - expected[i]
        count[i] += 1
        if count[i] > learn and (residual > limit / 2 or behind[i] > 0):
            near[i] = True
            found += 1
    return found
