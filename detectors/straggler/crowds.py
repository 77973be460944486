"""Many GPUs that throttle at once are no stragglers: their coolant has failed or their power, and others tell that.

Where so many do that the median is none any more, or their loop is warm, all of it is left to others; else only they.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Spans
from detectors.base.streams import Bools
from detectors.straggler.allowance import Allowance
from pipeline.records import SECOND, Frame

_WARMER = 5.0  # K by which most GPUs of a loop are warmer than usual under load: five steps of NVML's rounding; chosen
_NODES, _SHARE = 3, 0.05  # nodes of a loop on which, and share of its GPUs at work that throttle at once; chosen
_MOST = 0.3  # share that throttles from which the others have no median to go by (Huber, Robust Statistics, 1981)
_SETTLES = 600 * SECOND  # how long after it GPUs are still unlike each other: the plates cool one by one; chosen
_GAIN = 3e-3  # of the usual temperature: about an hour at 10 s


class Crowds:
    """Watches temperatures and throttle bits loop by loop, without loops rack by rack, else of all of the fleet.

    A part() of a detector. The rest of a fleet may be several halls: a few that throttle say nothing of each other
    there, and where it is warm only those that throttle are left to others."""

    def __init__(self) -> None:
        self.usual, self.looks = np.empty(0), np.empty(0, np.int64)
        self.until, self.some = np.empty(0, np.int64), np.empty(0, np.int64)  # of all of a loop; of who throttles
        self.allowance = Allowance()
        self._units = Spans("loop", "cdu", "rack", least=_NODES)

    def among(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools) -> Bools:
        """(N,) GPUs that are in a crowd, or were lately. throttled: has a throttle bit that is no policy."""
        n = len(frame.entities)
        if (more := n - len(self.usual)) > 0:
            self.usual = np.append(self.usual, np.zeros(more))
            none = np.zeros(more, np.int64)
            self.looks, self.until, self.some = (np.append(a, none) for a in (self.looks, self.until, self.some))
        warmer = frame["gpu.temperature"] - self.usual
        if (busy & throttled).any():
            self._mark(frame, node, busy, throttled, warmer)
        some = frame.time < self.some
        crowd = (frame.time < self.until) | (some & ~self.allowance.take(some, frame.time))
        known = busy & ~crowd & np.isfinite(warmer)
        self.looks[known] += 1
        self.usual[known] += np.maximum(1 / self.looks[known], _GAIN) * warmer[known]
        return crowd

    def _mark(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools, warmer: Any) -> None:
        units = self._units.of(frame)
        for unit in np.unique(units[busy & throttled]).tolist():
            mine = busy & (units == unit) & (unit >= 0)
            known = mine & np.isfinite(warmer) & (self.looks > 0)
            struck = mine & throttled
            wide = len(np.unique(node[struck])) >= _NODES
            share = int(np.count_nonzero(struck)) / max(int(np.count_nonzero(mine)), 1)
            apart = unit != self._units.rest
            several = len(np.unique(node[mine])) >= _NODES
            warm = several and known.any() and float(np.median(warmer[known])) >= _WARMER
            if (warm and apart) or (wide and share > _MOST):
                self.until[units == unit] = frame.time + _SETTLES
            elif warm or (wide and apart and share >= _SHARE):
                self.some[struck] = frame.time + _SETTLES

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in ("usual", "looks", "until", "some")}
        return {**arrays, "allowance": self.allowance.snapshot()}

    def restore(self, state: dict[str, Any]) -> None:
        self.usual, self.looks, self.until = state["usual"], state["looks"], state["until"]
        self.some = state["some"]
        self.allowance.restore(state["allowance"])
