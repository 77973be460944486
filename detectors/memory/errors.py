"""Errors of a GPU's memories: those of device memory by its own counters, or by totals where it tells only those.

Agents tell `gpu.dram_*`, many exporters `gpu.ecc_*` alone, and a site may have both. A total stands higher, by the
errors of caches and registers: what one of the two shows is never compared with what the other showed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import says_nothing
from detectors.memory.growth import Bools, Floats, Growth
from pipeline.records import SECOND, Frame

_OWN = ("gpu.dram_corrected", "gpu.dram_uncorrected")
_TOTALS = ("gpu.ecc_corrected", "gpu.ecc_uncorrected")
_CHIP = "gpu.sram_uncorrected"
_BY_TOTAL, _BY_OWN = 1, 2
_GONE = 24 * 3600 * SECOND
"""Of a GPU that told its own counters and only totals for so long, something else reads it now; chosen: no poll fails
for that long while another one of the same GPU does not."""


@dataclass
class Errors(Growth):
    """Corrected and uncorrected errors of device memory, and uncorrected ones of caches, of all GPUs; a part().

    by:       (2, N) what each counter of device memory is read from; 0: nothing yet, or a snapshot did not tell.
    alone_at: since when only the total is told in place of its own; 0: it is not so.
    """

    by: NDArray[np.int8] = field(default_factory=lambda: np.empty((2, 0), np.int8))
    alone_at: NDArray[np.int64] = field(default_factory=lambda: np.empty((2, 0), np.int64))

    def look(self, frame: Frame) -> tuple[Floats | None, Bools | None, Floats]:
        """(3, N) growth, None if nothing grew; (N,) who began a new life, None if nobody; (N,) seconds in which
        corrected errors of device memory would have been told."""
        seconds = self.passed(frame.time)
        now = np.stack([frame[signal] for signal in (*_OWN, _CHIP)])
        self._fit(now.shape)
        self._choose(frame, now[:2])
        _, grown, anew = self._step(now, frame["gpu.generation"])
        return self._once(grown), anew, np.where(np.isfinite(now[0]), seconds, 0.0)

    def _choose(self, frame: Frame, now: Floats) -> None:
        """Puts totals into `now` where a GPU does not tell its own counters."""
        told = np.isfinite(now)
        if told.all() and (self.by == _BY_OWN).all() and not self.alone_at.any():
            return
        totals = np.stack([frame[signal] for signal in _TOTALS])
        begins = told & (self.by != _BY_OWN)
        begins[begins] = ~says_nothing(now[begins])
        alone = np.isfinite(totals) & ~told
        ends = (self.by == _BY_OWN) & self._gone(told, alone, frame.time)
        self._forget(ends | (begins & (self.by == _BY_TOTAL)))
        self.by[begins] = _BY_OWN
        self.by[ends | ((self.by == 0) & np.isfinite(totals))] = _BY_TOTAL
        np.copyto(now, totals, where=self.by != _BY_OWN)

    def _gone(self, told: Bools, alone: Bools, time: int) -> Bools:
        """(2, N) whose own counters have not been told for long, while the totals are."""
        self.alone_at[told] = 0
        begins = alone & (self.by == _BY_OWN) & ((self.alone_at == 0) | (self.alone_at > time))
        self.alone_at[begins] = time
        gone = alone & (self.alone_at > 0) & (time - self.alone_at > _GONE)
        self.alone_at[gone] = 0
        return gone

    def _once(self, grown: Floats | None) -> Floats | None:
        """Growth in which no error is counted twice: a total holds those of caches, which may be told apart as well.

        What both grew by in one reading was of caches; a total that comes without them counts whole, as it may be of
        device memory.
        """
        if grown is None or not (totals := self.by[1] == _BY_TOTAL).any():
            return grown
        grown[1] = np.where(totals, np.maximum(grown[1] - grown[2], 0.0), grown[1])
        return grown

    def _forget(self, anew: Bools) -> None:
        """What counters of device memory showed before; (2, N)."""
        if anew.any():
            for name in ("last", "peak", "held"):
                getattr(self, name)[:2][anew] = np.nan
            self.below[:2][anew] = 0.0

    def _fit(self, shape: tuple[int, ...]) -> None:
        super()._fit(shape)
        for name in ("by", "alone_at"):
            if (before := getattr(self, name)).shape != (2, shape[1]):
                wide = np.zeros((2, shape[1]), before.dtype)
                wide[:, : before.shape[1]] = before[:, : shape[1]]
                setattr(self, name, wide)

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "by": self.by, "alone_at": self.alone_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        none = np.zeros((2, len(self.lives)), np.int64)
        self.by, self.alone_at = state.get("by", none.astype(np.int8)), state.get("alone_at", none)
