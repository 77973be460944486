"""Cohorts of ranks many of whose GPUs throttle at once: their coolant or power has failed, and others tell of that.

Their median is no normal any more (it breaks down at a half, Huber, Robust Statistics, 1981): who is well would learn
that it is quicker than its peers, and be found slow once they are well again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.method.streams import MOST, Bools
from detectors.straggler.places import Places
from pipeline.records import SECOND

_NODES = 3  # on which they throttle: two nodes coincide, or share a fault of their own; chosen, as Crowds has it
_FRESH = 60 * SECOND  # how long a throttle bit counts; as a cause of slowness
_SETTLES = 600 * SECOND  # how long after it they are still unlike each other: the plates cool one by one; as Crowds


class Struck:
    """Array by slot: until when its cohort is not compared."""

    def __init__(self) -> None:
        self.until = np.empty(0, np.int64)

    def take(self, throttled: NDArray[np.int64], places: Places, time: int) -> tuple[Bools, list[int]]:
        """(S,) who is not compared now, and the slots for whom that is over. throttled: when each last was."""
        size = len(places)
        if (more := size - len(self.until)) > 0:
            self.until = np.append(self.until, np.zeros(more, np.int64))
        now = (throttled[:size] > time - _FRESH) & (throttled[:size] <= time)
        if now.any():
            self._mark(now, places, time)
        if not self.until.any():
            return np.zeros(size, bool), []
        over = np.flatnonzero((self.until > 0) & (self.until <= time))
        self.until[over] = 0
        return self.until[:size] > 0, over.tolist()

    def _mark(self, now: Bools, places: Places, time: int) -> None:
        groups, nodes, there = places.groups, places.of["node"], places.at >= 0
        for group in np.unique(groups[now & (groups >= 0)]).tolist():
            mine = (groups == group) & there
            many = np.count_nonzero(mine & now) > MOST * np.count_nonzero(mine)
            if many and len(np.unique(nodes[mine & now])) >= _NODES:
                self.until[: len(mine)][mine] = time + _SETTLES

    def snapshot(self) -> dict[str, Any]:
        return {"until": self.until.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.until = np.array(state["until"])
