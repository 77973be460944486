"""Data that wait for ports which move nothing: the far end has no credits, or is held back with pause frames.

IBTA specification 16.1.4, PortXmitWait: ticks in which a port had data and sent none for lack of credits. Where the
receiver takes no byte for as long, it is the receiver that gives no credits. On Ethernet it says so itself, by pausing
its switch (IEEE 802.1Qbb). A job that ended or hangs by its software leaves no data waiting.
What counts as growth is told by `Readings`: two sources that tell of a counter in turn make none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import grown
from detectors.link.counters import Places, Readings
from pipeline.records import Frame

FAR, OWN = "nic.port_tx_wait", "nic.tx_pause"
WAITS = (FAR, OWN)


@dataclass
class Waiting:
    """What grew since a port began to stand still. A part() of a detector.

    stood:    (N,) whether it stood still at the last look: what grew before that may be of when it moved.
    readings: (N,) in which the far end's waits, or its own pauses, grew while it stood.
    counters: by signal.
    """

    stood: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    readings: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    counters: dict[str, Readings] = field(default_factory=lambda: {signal: Readings() for signal in WAITS})

    def look(self, frame: Frame, stands: NDArray[np.bool_], far: NDArray[np.int64], anew: Places) -> None:
        """Takes an instant. stands: (N,) who moved nothing. far: (N,) place of the far end; -1: not known.

        anew: ports whose counters began a new life.
        """
        n = len(stands)
        self.readings, self.stood = grown(self.readings, n, 0), grown(self.stood, n, False)
        grew = np.zeros(n, np.bool_)
        if theirs := self._grew(FAR, frame, anew):
            waits = np.zeros(n + 1, np.bool_)  # the last cell stands for a far end that is not known
            waits[theirs] = True
            grew |= waits[far]
        grew[self._grew(OWN, frame, anew)] = True
        self.readings[:n] += grew & self.stood[:n] & stands
        self.readings[:n][~stands] = 0
        self.stood[:n] = stands

    def _grew(self, signal: str, frame: Frame, anew: Places) -> list[int]:
        if signal not in frame.values and not len(anew):
            return []
        at, _, _ = self.counters[signal].growth(frame[signal], frame.time, anew)
        return at.tolist() if signal in frame.values else []

    def snapshot(self) -> dict[str, Any]:
        counters = {signal: readings.snapshot() for signal, readings in self.counters.items()}
        return {"stood": self.stood.copy(), "readings": self.readings.copy(), "counters": counters}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.readings = np.array(state["readings"])
        self.stood = np.array(state.get("stood", np.zeros(len(self.readings), np.bool_)))
        for signal, saved in state.get("counters", {}).items():
            self.counters[signal].restore(saved)
