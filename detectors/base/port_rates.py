"""Bytes per second that ports send, from counters that are read at different moments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.newest import OLD, Newest
from detectors.base.state import State, memory, part
from detectors.base.streams import Floats
from pipeline.model.records import SECOND

SENT = "nic.tx_bytes"


@dataclass
class PortRates(State):
    """Bytes/s that each port of the frame sends. newest: counters as read.   last, last_at: those of the last update,
    and when they were read (us).   rate: since then; NaN where none of the last five minutes is known.
    """

    newest: Newest = part(lambda: Newest(SENT))
    last: Floats = memory(np.nan)
    last_at: NDArray[np.int64] = memory(0, np.int64)
    rate: Floats = memory(np.nan)

    def update(self, n: int, time: int) -> Floats:
        """Returns (n,) bytes/s."""
        self.grow(n)
        now, at, last = self.newest.read(n, time), self.newest.at[:n], self.last[:n]
        fresh, seconds = at > self.last_at[:n], (at - self.last_at[:n]) / SECOND
        known = fresh & (seconds <= OLD / SECOND) & (now >= last)
        growth = np.where(known, now - last, np.nan) / np.where(known, seconds, 1.0)
        np.copyto(self.rate[:n], growth, where=fresh | (time - at > OLD))
        np.copyto(last, now, where=fresh)
        self.last_at[:n][fresh] = at[fresh]
        return self.rate[:n]
