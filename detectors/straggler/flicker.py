"""Power cap bits that come and go under full load, which is how a GPU at its own limit works and no news.

A policy adds to the share of time under a cap. Of a GPU whose bit flickered while it learnt that share is followed; of
all others a bit means a cap at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import grown
from detectors.base.streams import Bools

_YOUNG = 100  # samples after which it is known whether a bit flickers; chosen: two caps in them change it four times
_FLICKERS = 0.05
"""Changes per sample above which a bit flickers: that of a share from 3 to 97 %. Chosen: with less, hardly ever do
several of a cohort change for two samples at once, which `caps` takes for a cap.
"""
_SMOOTH = 0.05
"""Of the share. 0.08 is its standard deviation at one half, and a cap from there to always is seen after 14 samples,
before a hold of 10 min is over. Chosen."""
_MORE = 0.25
"""Of the time more than usual is a cap that came, and half of it is still one: three standard deviations, which of
several GPUs of a cohort is policy. Chosen."""
_GAIN = 5e-4  # as the kernel learns baselines, once it is less than a mean's
_CELLS = ("was", "share", "usual_share", "usual_changes", "learnt", "flickers", "more")


class Flicker:
    """Arrays by slot. share: of the time under a cap, smoothed; usual_share, usual_changes: that, and samples that
    change the bit, as learnt; flickers: who is judged by its share.
    """

    def __init__(self) -> None:
        self.was, self.flickers, self.more = np.empty(0, bool), np.empty(0, bool), np.empty(0, bool)
        self.share, self.usual_share, self.usual_changes = np.empty(0), np.empty(0), np.empty(0)
        self.learnt = np.empty(0, np.int64)

    def take(self, capped: Bools, there: Bools, learns: Bools) -> tuple[Bools, Bools]:
        """(S,) who is under a cap, those that flicker only if far more often than usual; (S,) who flickers since now,
        or no longer.

        capped: the bit as told.   there: of whom it is told.   learns: whose usual this is.
        """
        size = len(capped)
        self._grow(size)
        share, usual = self.share[:size], self.usual_share[:size]
        changed = there & (capped != self.was[:size])
        share[there] += _SMOOTH * (capped[there] - share[there])
        self.was[:size][there] = capped[there]
        self._learn(capped, changed, np.flatnonzero(learns & there))
        flickers = (self.learnt[:size] >= _YOUNG) & (self.usual_changes[:size] > _FLICKERS)
        turned = flickers != self.flickers[:size]
        self.flickers[:size] = flickers
        more = self.more[:size]
        more[:] = share - usual >= np.where(more, _MORE / 2, _MORE)
        return np.where(flickers, more, capped), turned

    def young(self, size: int) -> Bools:
        """(S,) who has not learnt enough yet to tell."""
        self._grow(size)
        return self.learnt[:size] < _YOUNG

    def _learn(self, capped: Bools, changed: Bools, mine: NDArray[np.intp]) -> None:
        self.learnt[mine] += 1
        gain = np.maximum(1 / self.learnt[mine], _GAIN)
        self.usual_share[mine] += gain * (capped[mine] - self.usual_share[mine])
        self.usual_changes[mine] += gain * (changed[mine] - self.usual_changes[mine])

    def forget(self, slots: Sequence[int]) -> None:
        """Another rank, another GPU or other software than before."""
        mine = [slot for slot in slots if slot < len(self.learnt)]
        for name in _CELLS:
            getattr(self, name)[mine] = 0

    def _grow(self, size: int) -> None:
        if size > len(self.learnt):
            for name in _CELLS:
                setattr(self, name, grown(getattr(self, name), size, 0))

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _CELLS}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
