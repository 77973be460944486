"""Ports that were trained to less than they ran at: lanes or a step of speed were lost at a retrain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detectors.base.gates import Gates
from detectors.link.pcie_lanes import Best
from pipeline.records import Frame

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
        for i in [i for i in found if gates.in_work(frame.entities[i], frame.topology, frame.time)]:
            self.best[i] = self.newest[i]
            self.counts[1, i] = 0
            found.remove(i)
        return found
