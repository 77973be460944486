"""Errors of a GPU's memories: those of device memory by its own counters, or by totals where it tells only those.

Agents tell `gpu.dram_*`, many exporters `gpu.ecc_*` alone, and a site may have both. A total stands higher, by the
errors of caches and registers: what one of the two shows is never compared with what the other showed.

What error counters have grown by since the last instant, of all devices of a class at once.

A register that is full, one with all bits set and one below 0 were not read. What fell and is back at its third reading
had not fallen; what stays below until then began anew. A leap that is too high to be believed counts once the next
reading confirms it; anything less counts at once.

Where a GPU's counters stand, and its flags, as far as a reading of them can be believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import counter_increases, is_unreadable
from detectors.base.state import check_one_length
from detectors.base.streams import Bools, Floats
from pipeline.model.records import SECOND, Frame

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
        now = np.where(np.isfinite(now) & (counted | ~is_unreadable(now)), now, np.nan)
        now = self._believed(now)
        grew, self.peak = counter_increases(self.last, now, self.peak, np.zeros(now.shape, bool))
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
        check_one_length(state)
        for name in (*_ARRAYS, "lives", "time", "odd"):
            setattr(self, name, state[name])


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
        begins[begins] = ~is_unreadable(now[begins])
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


_COUNTERS = ("gpu.sram_corrected", "gpu.rows_corrected", "gpu.rows_uncorrected")
_FLAGS = ("gpu.rows_pending", "gpu.rows_failed", "gpu.sram_threshold", "gpu.banks_none", "gpu.banks_low")


@dataclass
class Standing:
    """Readings that are judged by where they stand, not by their growth; a part()."""

    growth: Growth = field(default_factory=Growth)

    def read(self, frame: Frame) -> Frame:
        """The frame, with NaN for readings that say nothing and the level before for a counter that may have dipped."""
        values = dict(frame.values)
        levels = self.growth.levels(frame, _COUNTERS, frame["gpu.generation"])
        values.update((name, level) for name, level in zip(_COUNTERS, levels, strict=True) if name in values)
        for name in _FLAGS:
            if name in values and (odd := is_unreadable(values[name])).any():
                values[name] = np.where(odd, np.nan, values[name])
        return replace(frame, values=values)

    def snapshot(self) -> dict[str, Any]:
        return {"growth": self.growth.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.growth.restore(state["growth"])
