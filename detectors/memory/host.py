"""Memory of servers: corrected errors in a leaky bucket, as mcelog counts them, and any that nothing corrected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.memory.growth import Growth
from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]

DAY = 24 * 3600 * SECOND
CELL = np.dtype([("bucket", "<f8"), ("since", "<i8"), ("on", "?"), ("lost", "<f8"), ("lost_at", "<i8")])


@dataclass
class Host:
    """Counters of one class; a part() of the detector. limit: corrected errors a day that are too many.

    bucket: errors, of which `limit` a day leak out.   lost: uncorrected errors since lost_at; 0 = none.
    """

    device_class: str
    corrected: str
    uncorrected: str
    limit: float
    cells: NDArray[Any] = field(default_factory=lambda: np.empty(0, CELL))
    growth: Growth = field(default_factory=Growth)

    def step(self, frame: Frame, gate: NDArray[np.bool_]) -> None:
        """Takes an instant; gate: False = people work on it, which counts for nothing."""
        n, signals = len(frame.entities), (self.corrected, self.uncorrected)
        if len(self.cells) < n:
            self.cells = np.concatenate([self.cells, np.zeros(n - len(self.cells), CELL)])
        cells = self.cells[:n]
        grown, anew, seconds = self.growth.step(frame, signals, frame[f"{self.device_class}.generation"])
        if anew is not None:
            for name in ("bucket", "lost", "on"):
                cells[name][anew] = 0
        if grown is None and not cells["bucket"].any() and not cells["lost"].any():
            return
        more, lost = grown if grown is not None else np.zeros((2, n))
        which = np.flatnonzero((more > 0) | (lost > 0) | (cells["bucket"] > 0) | (cells["lost"] > 0))
        kept = cells[which]
        self._fill(kept, more[which], lost[which], gate[which], seconds, frame.time)
        cells[which] = kept

    def _fill(
        self, cells: NDArray[Any], more: Floats, lost: Floats, gate: NDArray[np.bool_], seconds: float, time: int
    ) -> None:
        """Adds errors of some devices, and lets old ones go."""
        cells["since"] = np.where((more > 0) & (cells["bucket"] <= 0), time, cells["since"])
        leak = seconds * self.limit * SECOND / DAY
        cells["bucket"] = np.clip(cells["bucket"] + np.where(gate, more, 0.0) - leak, 0.0, 2 * self.limit)
        cells["on"] = cells["bucket"] > np.where(cells["on"], self.limit / 2, self.limit)
        struck = gate & (lost > 0)
        cells["lost_at"] = np.where(struck & (cells["lost"] <= 0), time, cells["lost_at"])
        kept = np.where(time - cells["lost_at"] > DAY, 0.0, cells["lost"])
        cells["lost"] = np.where(struck, cells["lost"] + lost, kept)

    def bad_ones(self, frame: Frame) -> Iterator[tuple[int, Any]]:
        """Index and cell of all that have a condition."""
        cells = self.cells[: len(frame.entities)]
        for i in np.flatnonzero(cells["on"] | (cells["lost"] > 0)).tolist():
            yield i, cells[i]

    def snapshot(self) -> dict[str, Any]:
        return {"cells": self.cells, "growth": self.growth.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells = state["cells"]
        self.growth.restore(state["growth"])
