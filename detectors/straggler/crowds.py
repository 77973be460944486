"""Many GPUs that throttle at once are no stragglers: their coolant has failed or their power, and others tell that."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.method.cohorts import Cohorts
from detectors.method.streams import Bools
from pipeline.records import SECOND, Frame

_WARMER = 5.0  # K by which most GPUs of a loop are warmer than usual under load: five steps of NVML's rounding; chosen
_NODES, _SHARE = 3, 0.05  # nodes of a loop on which, and share of its GPUs at work that throttle at once; chosen
_SETTLES = 600 * SECOND  # how long after it GPUs are still unlike each other: the plates cool one by one; chosen
_GAIN = 3e-3  # of the usual temperature: about an hour at 10 s


class Crowds:
    """Watches temperatures and throttle bits loop by loop, without loops rack by rack. A part() of a detector."""

    def __init__(self) -> None:
        self.usual, self.looks = np.empty(0), np.empty(0, np.int64)
        self.until = np.empty(0, np.int64)
        self._units = Cohorts("loop", "cdu", "rack")

    def among(self, frame: Frame, node: NDArray[np.int32], busy: Bools, throttled: Bools) -> Bools:
        """(N,) GPUs that are in a crowd, or were lately. throttled: has a throttle bit that is no policy."""
        n = len(frame.entities)
        if (more := n - len(self.usual)) > 0:
            self.usual = np.append(self.usual, np.zeros(more))
            self.looks, self.until = (np.append(a, np.zeros(more, np.int64)) for a in (self.looks, self.until))
        warmer = frame["gpu.temperature"] - self.usual
        if (busy & throttled).any():
            self._mark(frame, node, busy, throttled, warmer)
        crowd = (self.until > 0) & (frame.time < self.until)
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
            many = wide and np.count_nonzero(struck) >= _SHARE * np.count_nonzero(mine)
            several = len(np.unique(node[mine])) >= _NODES
            if many or (several and known.any() and float(np.median(warmer[known])) >= _WARMER):
                self.until[units == unit] = frame.time + _SETTLES

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name).copy() for name in ("usual", "looks", "until")}

    def restore(self, state: dict[str, Any]) -> None:
        self.usual, self.looks, self.until = state["usual"], state["looks"], state["until"]
