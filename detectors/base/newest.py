"""Newest readings: nodes are read at different moments, so that an instant holds some of the devices only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory
from pipeline.model.records import SECOND, Frame

Floats = NDArray[np.float64]
OLD = 300 * SECOND
"""us after which a reading is missing: five times the longest usual interval, a minute. Chosen."""


@dataclass
class Newest(State):
    """Newest reading of a signal by column of its frames. value, at: it, and when it was taken (us), 0 never."""

    signal: str
    value: Floats = memory(np.nan)
    at: NDArray[np.int64] = memory(0, np.int64)

    def update(self, frame: Frame) -> None:
        """Adds the readings of an instant."""
        if (now := frame.values.get(self.signal)) is not None:
            self.grow(len(now))
            known = np.isfinite(now)
            np.copyto(self.value[: len(now)], now, where=known)
            self.at[: len(now)][known] = frame.time

    def read(self, size: int, time: int, longest: float = OLD) -> Floats:
        """Returns (size,) readings that are at most `longest` us old; NaN without."""
        self.grow(size)
        return np.where(time - self.at[:size] <= longest, self.value[:size], np.nan)
