"""What each device's PCIe link once did and does now: lanes and speed, confirmed over some samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import one_length
from detectors.base.streams import LEARN
from detectors.link.loops import best_step
from pipeline.records import SECOND

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONFIRM = 3  # samples running that make a value one; chosen: one misread is none
SILENT = 600 * SECOND  # a device that told nothing for so long is not judged; chosen, the Desk's quiet
_TOP = 30_000


@dataclass
class Best:
    """The highest value that each device has held, and whether it is below that now. A part() of a detector."""

    best: Floats = field(default_factory=lambda: np.empty(0))
    newest: Floats = field(default_factory=lambda: np.empty(0))
    counts: NDArray[np.int32] = field(default_factory=lambda: np.empty((4, 0), np.int32))
    times: NDArray[np.int64] = field(default_factory=lambda: np.empty((3, 0), np.int64))

    def step(self, values: Floats, judged: Bools, time: int) -> None:
        """Takes one value each. judged: False = what is below the best says nothing (an idle link saves power)."""
        n = len(values)
        self._grow(n)
        counts, times = self.counts[:, :n], self.times[:, :n]
        best_step(values, judged, (self.best, self.newest), counts, times, time, (CONFIRM, _TOP))

    def below(self, time: int) -> Bools:
        """(N,) at less than it has held, for some samples running."""
        low = self.counts[1] >= CONFIRM
        return np.asarray(low & self.present(time) if low.any() else low)

    def present(self, time: int) -> Bools:
        """(N,) devices that have told something of late."""
        return np.asarray(time - self.times[1] <= SILENT)

    def learnt(self, n: int) -> Bools:
        """(N,) more values that counted than the first ones, of which nothing is said."""
        self._grow(n)
        return np.asarray(self.counts[2, :n] > LEARN)

    def judged(self, n: int) -> Bools:
        """(N,) as many that were no idle link's."""
        self._grow(n)
        return np.asarray(self.counts[3, :n] > LEARN)

    def since(self, i: int) -> int:
        """When its value fell below its best."""
        return int(self.times[0, i])

    def whole(self, i: int) -> int:
        """When it was last seen at its best."""
        return int(self.times[2, i])

    def _grow(self, size: int) -> None:
        more = size - len(self.best)
        if more > 0:
            self.best = np.concatenate([self.best, np.zeros(more)])
            self.newest = np.concatenate([self.newest, np.zeros(more)])
            self.counts = np.concatenate([self.counts, np.zeros((4, more), np.int32)], axis=1)
            self.times = np.concatenate([self.times, np.zeros((3, more), np.int64)], axis=1)

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name).copy() for name in ("best", "newest", "counts", "times")}

    def restore(self, state: Mapping[str, Any]) -> None:
        one_length(state)
        for name in ("best", "newest", "counts", "times"):
            setattr(self, name, np.array(state[name]))
