"""What error counters have grown by since the last instant, of all devices of a class at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass
class Growth:
    """Last readings of some counters; a part(). A missing reading is bridged by the next one.

    Of a counter that fell, and of one that the agent says began anew, nobody knows what it has grown by.
    """

    last: Floats = field(default_factory=lambda: np.empty((0, 0)))
    lives: Floats = field(default_factory=lambda: np.empty(0))
    time: int = 0

    def step(self, frame: Frame, signals: Sequence[str], lives: Floats) -> tuple[Floats | None, Bools | None, float]:
        """(K, N) growth by signal, None if nothing grew; (N,) who began a new life, None if nobody; seconds since then.

        Growth is 0 where it cannot be told.
        """
        now = np.stack([frame[signal] for signal in signals])
        now = np.where(np.isfinite(now), now, np.nan)  # no counter stands at infinity: it was not read
        self._fit(now.shape)
        seconds = max(frame.time - self.time, 0) / SECOND if self.time else 0.0  # a time that steps back adds none
        self.time = frame.time
        moved = lives - self.lives
        anew = (moved > 0) | (moved < 0)  # NaN is neither
        np.copyto(self.lives, lives, where=np.isfinite(lives))
        grown = now - self.last
        rises = grown > 0
        np.copyto(self.last, now, where=~np.isnan(now))
        begins = anew if anew.any() else None
        if not rises.any():
            return None, begins, seconds
        return np.where(rises & ~anew, grown, 0.0), begins, seconds

    def _fit(self, shape: tuple[int, ...]) -> None:
        if self.last.shape != shape:
            wide = np.full(shape, np.nan)
            rows = min(shape[0], self.last.shape[0])
            columns = min(shape[1], self.last.shape[1])
            wide[:rows, :columns] = self.last[:rows, :columns]
            lives = np.full(shape[1], np.nan)
            lives[:columns] = self.lives[:columns]
            self.last, self.lives = wide, lives

    def snapshot(self) -> dict[str, Any]:
        return {"last": self.last, "lives": self.lives, "time": self.time}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.last, self.lives, self.time = state["last"], state["lives"], state["time"]
