"""Counters of ports, read sparsely: a tick in which few of them move costs a few comparisons of whole columns.

What a counter does that is not growth is no growth here: it began a new life (the agent says so, or it fell), it
stands at the top of its register, or it answers with all bits set. One that passes 2**32 has wrapped, and goes on.
One that fell and then leaps back over where it had been, as where two sources tell of it in turn, grew by the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import TOPS, counter_increases, is_unreadable
from detectors.base.kernel import compiled
from detectors.base.state import check_one_length, grown
from pipeline.model.records import SECOND

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
_WIDE = 2.0**32
_NOBODY, _NOTHING = np.empty(0, np.int64), np.empty(0)
_Arrays = dict[str, NDArray[Any]]


class Lives:
    """Which life of its counters each port is in, as agents tell it (signal CLASS.generation)."""

    def __init__(self) -> None:
        self._of = np.empty(0)

    def changed(self, lives: Floats) -> tuple[Places, Floats]:
        """Ports whose counters began anew since the last reading, and the (N,) newest known lives (UTC s; NaN)."""
        self._of = grown(self._of, len(lives), np.nan)
        new = np.flatnonzero(lives != self._of[: len(lives)])
        new = new[np.isfinite(lives[new])]
        anew = new[np.isfinite(self._of[new])]
        self._of[new] = lives[new]
        return anew, self._of

    def snapshot(self) -> _Arrays:
        return {"of": self._of.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._of = state["of"]


class Readings:
    """The last readings of one signal on all ports."""

    def __init__(self) -> None:
        self.last = np.empty(0)  # NaN: never read
        self.gone = np.empty(0, np.int64)  # when it was last read, if not in the newest frame; 0: it was
        self.peak = np.empty(0)  # highest before it last fell; NaN: it has not fallen since it was there, or began anew
        self.anew = np.empty(0, np.bool_)  # a new life has begun: growth until the next reading is unknown
        self.born = False  # whether any of these is waited for
        self.before = 0  # time of the newest frame

    def moved(self, now: Floats, time: int) -> tuple[Places, Floats, Floats]:
        """(ports, readings before, seconds since) of those that read otherwise than last time; NaN at the first."""
        self._lengthen(len(now))
        if self.before and unmoved(now, self.last, self.gone):
            self.before = time
            return _NOBODY, _NOTHING, _NOTHING
        other = np.flatnonzero(now != self.last[: len(now)])  # NaN, now or before, is other, too
        read = now[other] == now[other]
        at, missing = other[read], other[~read]
        since = np.where(self.gone[at] != 0, self.gone[at], self.before)
        last = self.last[at]
        self.last[at] = now[at]
        back = np.flatnonzero(self.gone[: len(now)])
        self.gone[back[now[back] == now[back]]] = 0
        self.gone[missing[self.gone[missing] == 0]] = self.before or time
        self.before = time
        return at, last, (time - since) / SECOND

    def growth(self, now: Floats, time: int, anew: Places) -> tuple[Places, Floats, Floats]:
        """(ports, growth, seconds) of a counter where it grew and that is known; `anew`: ports in a new life."""
        self._lengthen(len(now))
        if not self.born and not len(anew) and self.before and unmoved(now, self.last, self.gone):
            self.before = time
            return _NOBODY, _NOTHING, _NOTHING
        other = np.flatnonzero(now != self.last[: len(now)])
        if len(other) and (odd := other[is_unreadable(now[other])]).size:
            now = now.copy()
            now[odd] = np.nan
        if len(anew):
            self.anew[anew], self.born = True, True
        at, last, seconds = self.moved(now, time)
        wrapped = (last >= 0.9 * _WIDE) & (last < _WIDE) & (now[at] < 0.1 * _WIDE)
        grew, self.peak[at] = counter_increases(last, now[at], self.peak[at], wrapped | self.anew[at])
        grew += np.where(wrapped, _WIDE, 0.0)
        told = (grew > 0) & (seconds > 0) & ~self.anew[at]  # NaN compares as false: a first reading tells nothing
        if self.born:
            self.anew[: len(now)] &= ~np.isfinite(now)
            self.born = bool(self.anew.any())
        return at[told], grew[told], seconds[told]

    def told(self, n: int) -> NDArray[np.bool_]:
        """(N,) who told a number in the newest frame."""
        return np.asarray(np.isfinite(self.last[:n]) & (self.gone[:n] == 0))

    def full(self, port: int, now: Floats) -> bool:
        """Whether the counter of a port stands at the top of its register, so that it counts no more."""
        return port < len(now) and now[port] in TOPS

    def _lengthen(self, size: int) -> None:
        if len(self.last) >= size:
            return
        self.last = grown(self.last, size, np.nan)
        self.peak = grown(self.peak, size, np.nan)
        self.gone, self.anew = grown(self.gone, size, 0), grown(self.anew, size, False)

    def snapshot(self) -> dict[str, Any]:
        arrays = {"last": self.last, "gone": self.gone, "anew": self.anew, "peak": self.peak}
        return {**{name: a.copy() for name, a in arrays.items()}, "before": self.before}

    def restore(self, state: Mapping[str, Any]) -> None:
        check_one_length(state)
        self.last, self.gone, self.anew = state["last"], state["gone"], state["anew"]
        self.peak, self.born = state["peak"], bool(self.anew.any())
        self.before = int(state["before"])


@compiled
def unmoved(now: Floats, last: Floats, gone: NDArray[np.int64]) -> bool:
    """Whether each reads as it did, and what was missing still is."""
    for i in range(len(now)):
        if now[i] == last[i]:
            if gone[i] != 0:
                return False
        elif now[i] == now[i] or gone[i] == 0:
            return False
    return True
