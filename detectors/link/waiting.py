"""Data that wait for ports which move nothing: the far end has no credits, or is held back with pause frames.

IBTA specification 16.1.4, PortXmitWait: ticks in which a port had data and sent none for lack of credits. Where the
receiver takes no byte for as long, it is the receiver that gives no credits. On Ethernet it says so itself, by pausing
its switch (IEEE 802.1Qbb). A job that ended or hangs by its software leaves no data waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.link.counters import grown
from pipeline.records import Frame

Floats = NDArray[np.float64]
FAR, OWN = "nic.port_tx_wait", "nic.tx_pause"
WAITS = (FAR, OWN)


@dataclass
class Waiting:
    """What grew since a port began to stand still. A part() of a detector.

    last: (2, N) newest of the far end's waits and of its own pauses; NaN: it moves, or they were not told yet.
    readings: (N,) in which one of them grew.
    """

    last: Floats = field(default_factory=lambda: np.empty((2, 0)))
    readings: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def look(self, frame: Frame, stands: NDArray[np.bool_], far: NDArray[np.int64]) -> None:
        """Takes an instant. stands: (N,) who moved nothing. far: (N,) place of the far end; -1: not known."""
        n = len(stands)
        self.readings = grown(self.readings, n, 0)
        if self.last.shape[1] < n:
            self.last = np.stack([grown(row, n, np.nan) for row in self.last])
        self.last[:, :n][:, ~stands] = np.nan
        self.readings[:n][~stands] = 0
        at = np.flatnonzero(stands)
        if not len(at) or not any(signal in frame.values for signal in WAITS):
            return
        theirs = np.where(far[at] >= 0, frame[FAR][far[at]], np.nan)
        grew = np.zeros(len(at), np.bool_)
        for row, now in enumerate((theirs, frame[OWN][at])):
            grew |= now > self.last[row, at]  # NaN, and a counter that fell: no
            self.last[row, at] = np.where(np.isfinite(now), now, self.last[row, at])
        self.readings[at] += grew

    def snapshot(self) -> dict[str, Any]:
        return {"last": self.last.copy(), "readings": self.readings.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.last, self.readings = np.array(state["last"]), np.array(state["readings"])
