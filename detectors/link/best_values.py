"""What each device's PCIe link once did and does now: lanes and speed, confirmed over some samples.

Ports that were trained to less than they ran at: lanes or a step of speed were lost at a retrain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.kernel import compiled
from detectors.base.state import check_one_length
from detectors.base.streams import LEARN
from pipeline.model.records import SECOND, Frame

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
        check_one_length(state)
        for name in ("best", "newest", "counts", "times"):
            setattr(self, name, np.array(state[name]))


_FASTEST = 10_000_000.0
"""Mbit/s that no port has: what a driver tells that does not know (all bits set) is above it."""


@dataclass
class Speeds(Best):
    """The speed of each port while it is up, and the highest that it has held. A part() of a detector."""

    def take(self, frame: Frame) -> None:
        """Takes one instant; a port that is down tells the speed that it trains at, which says nothing."""
        speed = frame["nic.speed"]
        told = (speed > 0) & (speed < _FASTEST) & (frame["nic.state"] >= 1)
        self.step(np.where(told, speed, np.nan), told, frame.time)

    def slow(self, frame: Frame, gates: Gates) -> list[int]:
        """Ports that are slower than they were; what they are set to by people at work is what is wanted."""
        low = self.below(frame.time)
        if not low.any():
            return []
        found = np.flatnonzero(low & self.learnt(len(low))).tolist()
        for i in [i for i in found if gates.in_maintenance(frame.entities[i], frame.topology, frame.time)]:
            self.best[i] = self.newest[i]
            self.counts[1, i] = 0
            found.remove(i)
        return found


@compiled
def best_step(
    values: Floats,
    judged: Bools,
    levels: tuple[Floats, Floats],
    counts: NDArray[np.int32],
    times: NDArray[np.int64],
    time: int,
    limits: tuple[int, int],
) -> None:
    """One sample of each device's link. levels: best, newest. limits: samples that confirm, and the top of counts."""
    (best, newest), (confirm, top) = levels, limits
    for i in range(len(values)):
        value = values[i]
        if not np.isfinite(value):
            continue
        times[1, i] = time
        if not (judged[i] or value >= best[i]):
            continue
        counts[0, i] = min(counts[0, i] + 1, top) if value == newest[i] else 1
        newest[i] = value
        if value > best[i] and counts[0, i] >= confirm:
            best[i] = value
        if value < best[i]:
            if counts[1, i] == 0:
                times[0, i] = time
            counts[1, i] = min(counts[1, i] + 1, top)
        else:
            counts[1, i] = 0
            times[2, i] = time
        counts[2, i] = min(counts[2, i] + 1, top)
        if judged[i]:
            counts[3, i] = min(counts[3, i] + 1, top)
