"""Growth of the counters of many devices, read sparsely: a tick in which few of them change costs a few comparisons.

Not growth: a counter that starts again (the agent reports a new generation, or the counter fell), that stands at the
top of its register, or that is read as all bits set. A counter that passes 2**32 has wrapped and continues. A counter
that fell and then exceeds its former value, as if two sources reported it in turn, grew by the difference only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import TOPS, counter_increases, is_unreadable
from detectors.base.kernel import compiled
from detectors.base.state import State, memory, notes
from pipeline.model.records import SECOND

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_WIDE = 2.0**32
_NO_DEVICES, _NO_VALUES = np.empty(0, np.int64), np.empty(0)


@dataclass
class CounterGenerations(State):
    """The generation of each device's counters, as agents report it (signal CLASS.generation)."""

    newest: Floats = memory(np.nan)  # UTC s at which the counters started; NaN: not reported

    def find_restarted(self, generations: Floats) -> tuple[Indices, Floats]:
        """Returns the devices whose counters started again since the last reading, and (N,) newest generations."""
        self.grow(len(generations))
        changed = np.flatnonzero(generations != self.newest[: len(generations)])
        changed = changed[np.isfinite(generations[changed])]
        restarted = changed[np.isfinite(self.newest[changed])]
        self.newest[changed] = generations[changed]
        return restarted, self.newest


@dataclass
class CounterReadings(State):
    """The last readings of one counter on all devices."""

    last: Floats = memory(np.nan)  # NaN: never read
    missing_since: NDArray[np.int64] = memory(0, np.int64)  # time of the last reading; 0: it is in the newest frame
    peak: Floats = memory(np.nan)  # value before it fell, until it is reached again; NaN: it has not fallen
    restarted: NDArray[np.bool_] = memory(False, np.bool_)  # growth is unknown until the next reading
    any_restarted: bool = notes(bool)
    before: int = notes(int)  # time of the newest frame

    def find_changed(self, now: Floats, time: int) -> tuple[Indices, Floats, Floats]:
        """Returns (devices, readings before, seconds since) where the reading changed; NaN before the first one."""
        self.grow(len(now))
        if self.before and all_unchanged(now, self.last, self.missing_since):
            self.before = time
            return _NO_DEVICES, _NO_VALUES, _NO_VALUES
        changed = np.flatnonzero(now != self.last[: len(now)])  # true for NaN, now or before
        read = now[changed] == now[changed]
        at, missing = changed[read], changed[~read]
        since = np.where(self.missing_since[at] != 0, self.missing_since[at], self.before)
        last = self.last[at]
        self.last[at] = now[at]
        back = np.flatnonzero(self.missing_since[: len(now)])
        self.missing_since[back[now[back] == now[back]]] = 0
        self.missing_since[missing[self.missing_since[missing] == 0]] = self.before or time
        self.before = time
        return at, last, (time - since) / SECOND

    def measure_growth(self, now: Floats, time: int, restarted: Indices) -> tuple[Indices, Floats, Floats]:
        """Returns (devices, growth, seconds) where the counter grew. restarted: devices in a new generation."""
        self.grow(len(now))
        quiet = not self.any_restarted and not len(restarted)
        if quiet and self.before and all_unchanged(now, self.last, self.missing_since):
            self.before = time
            return _NO_DEVICES, _NO_VALUES, _NO_VALUES
        changed = np.flatnonzero(now != self.last[: len(now)])
        if len(changed) and (unreadable := changed[is_unreadable(now[changed])]).size:
            now = now.copy()
            now[unreadable] = np.nan
        if len(restarted):
            self.restarted[restarted], self.any_restarted = True, True
        at, last, seconds = self.find_changed(now, time)
        wrapped = (last >= 0.9 * _WIDE) & (last < _WIDE) & (now[at] < 0.1 * _WIDE)
        growth, self.peak[at] = counter_increases(last, now[at], self.peak[at], wrapped | self.restarted[at])
        growth += np.where(wrapped, _WIDE, 0.0)
        grew = (growth > 0) & (seconds > 0) & ~self.restarted[at]  # false for NaN: a first reading has no growth
        if self.any_restarted:
            self.restarted[: len(now)] &= ~np.isfinite(now)
            self.any_restarted = bool(self.restarted.any())
        return at[grew], growth[grew], seconds[grew]

    def reported(self, n: int) -> NDArray[np.bool_]:
        """Returns (N,) devices with a reading in the newest frame."""
        return np.asarray(np.isfinite(self.last[:n]) & (self.missing_since[:n] == 0))


def is_saturated(device: int, now: Floats) -> bool:
    """Returns whether the counter of a device stands at the top of its register and no longer counts."""
    return device < len(now) and now[device] in TOPS


@compiled
def all_unchanged(now: Floats, last: Floats, missing_since: NDArray[np.int64]) -> bool:
    """Returns whether every reading is the same as before, and every missing one is still missing."""
    for i in range(len(now)):
        if now[i] == last[i]:
            if missing_since[i] != 0:
                return False
        elif now[i] == now[i] or missing_since[i] == 0:
            return False
    return True
