"""What error counters have grown by since the last instant, of all devices of a class at once.

A register that is full, one with all bits set and one below 0 were not read. What fell and is back at its third reading
had not fallen; what stays below until then began anew. A leap that is too high to be believed counts once the next
reading confirms it; anything less counts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import rise, says_nothing
from detectors.base.state import one_length
from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_LEAP = 2.0**16
"""Errors in one reading above which a second one must confirm them; chosen: far above any real burst of uncorrected
ones, and what a register of 16 bits can hold at most."""
_STAYS = 3.0
"""Readings after which a lower one is believed; chosen: two of them may be one failed poll, seen twice."""
_NEAR = 0.9  # of a full register: one that stood there before was counted full, not read amiss; chosen, as for wraps
_ARRAYS = ("last", "peak", "below", "held")


def _none() -> Floats:
    return np.empty((0, 0))


@dataclass
class Growth:
    """Last readings of some counters; a part(). A missing reading is bridged by the next one.

    Of a counter that fell, and of one that the agent says began anew, nobody knows what it has grown by.
    peak: from where it fell, while that may be a dip, and below: readings since.   held: a leap that is not believed.
    """

    last: Floats = field(default_factory=_none)
    peak: Floats = field(default_factory=_none)
    below: Floats = field(default_factory=_none)
    held: Floats = field(default_factory=_none)
    lives: Floats = field(default_factory=lambda: np.empty(0))
    time: int = 0
    odd: bool = False  # whether there is any peak or anything is held

    def step(self, frame: Frame, signals: Sequence[str], lives: Floats) -> tuple[Floats | None, Bools | None, float]:
        """(K, N) growth by signal, None if nothing grew; (N,) who began a new life, None if nobody; seconds since then.

        Growth is 0 where it cannot be told.
        """
        seconds = self.passed(frame.time)
        return *self._step(np.stack([frame[signal] for signal in signals]), lives)[1:], seconds

    def passed(self, time: int) -> float:
        """Seconds since the last instant; a time that steps back adds none."""
        seconds = max(time - self.time, 0) / SECOND if self.time else 0.0
        self.time = time
        return seconds

    def levels(self, frame: Frame, signals: Sequence[str], lives: Floats) -> Floats:
        """(K, N) where the counters stand; NaN where that was not read, or is not believed yet."""
        now = self._step(np.stack([frame[signal] for signal in signals]), lives)[0]
        return np.where(np.isnan(now), np.nan, np.fmax(self.last, self.peak))

    def _step(self, now: Floats, lives: Floats) -> tuple[Floats, Floats | None, Bools | None]:
        """Readings without those that say nothing, growth, and who began a new life."""
        self._fit(now.shape)
        begins = self._reborn(lives)
        if not self.odd and not ((now != self.last) & ~np.isnan(now)).any():
            return now, None, begins
        counted = (self.last <= now) & (self.last >= _NEAR * now)
        # no counter stands at infinity: it was not read
        now = np.where(np.isfinite(now) & (counted | ~says_nothing(now)), now, np.nan)
        now = self._believed(now)
        grew, self.peak = rise(self.last, now, self.peak, np.zeros(now.shape, bool))
        self.below = np.where(np.isnan(self.peak), 0.0, self.below + ~np.isnan(now))
        self.peak[self.below >= _STAYS] = np.nan
        np.copyto(self.last, now, where=~np.isnan(now))
        self.odd = not (np.isnan(self.peak).all() and np.isnan(self.held).all())
        rises = grew > 0
        return now, np.where(rises, grew, 0.0) if rises.any() else None, begins

    def _believed(self, now: Floats) -> Floats:
        """The readings without leaps that the one before did not show, too; of a first one the leap is from 0."""
        known = np.where(now >= self.peak, self.peak, self.last)
        first = np.isnan(known)
        leaps = now - np.where(first, 0.0, known) > _LEAP
        sure = leaps & (now >= self.held) & (now - self.held <= _LEAP)
        np.copyto(self.last, self.held, where=sure & first)
        self.held = np.where(np.isnan(now), self.held, np.where(leaps & ~sure, now, np.nan))
        return np.where(leaps & ~sure, np.nan, now)

    def _reborn(self, lives: Floats) -> Bools | None:
        """(N,) who began a new life, None if nobody; what their counters showed before is forgotten."""
        moved = lives - self.lives
        anew = (moved > 0) | (moved < 0)  # NaN is neither
        np.copyto(self.lives, lives, where=np.isfinite(lives))
        if not anew.any():
            return None
        for name in _ARRAYS:
            getattr(self, name)[:, anew] = 0.0 if name == "below" else np.nan
        return anew

    def _fit(self, shape: tuple[int, ...]) -> None:
        if self.last.shape == shape:
            return
        rows, columns = min(shape[0], self.last.shape[0]), min(shape[1], self.last.shape[1])
        for name in _ARRAYS:
            wide = np.full(shape, 0.0 if name == "below" else np.nan)
            wide[:rows, :columns] = getattr(self, name)[:rows, :columns]
            setattr(self, name, wide)
        lives = np.full(shape[1], np.nan)
        lives[:columns] = self.lives[:columns]
        self.lives = lives

    def snapshot(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in (*_ARRAYS, "lives")}, "time": self.time, "odd": self.odd}

    def restore(self, state: Mapping[str, Any]) -> None:
        one_length(state)
        for name in (*_ARRAYS, "lives", "time", "odd"):
            setattr(self, name, state[name])
