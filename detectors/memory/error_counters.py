"""Growth of error counters of all devices of a class, from readings of which some are implausible.

Not read: a register that is full, one with all bits set, one below 0. A counter that fell and is back at its third
reading did not fall; one that stays below until then was reset. A very large jump counts when the next
reading confirms it; a smaller one counts in the same reading.

Agents report the counters of GPU device memory (`gpu.dram_*`), many exporters only totals (`gpu.ecc_*`), and a site may
have both. A total is higher by the errors of caches and registers: growth is never computed between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import counter_increases, is_unreadable
from detectors.base.state import N, State, memory, notes, part, parts, piece_of
from detectors.base.streams import Bools, Floats
from pipeline.model.records import SECOND, Frame

_JUMP = 2.0**16
"""Errors in one reading above which a second reading must confirm them. Chosen: far above any real burst of
uncorrected errors, and the most that a 16-bit register can hold."""
_LOWER_READINGS = 3.0
"""Readings after which a lower count is accepted. Chosen: two of them may be one failed poll, seen twice."""
_NEAR_FULL = 0.9  # share of a full register: a counter that was there before has counted up to it; chosen, as for wraps
_DRAM = ("gpu.dram_corrected", "gpu.dram_uncorrected")
_TOTALS = ("gpu.ecc_corrected", "gpu.ecc_uncorrected")
_SRAM = "gpu.sram_uncorrected"
_BY_TOTAL, _BY_DRAM = 1, 2
_DRAM_GONE = 24 * 3600 * SECOND
"""us after which a GPU that reported its own counters, and now only totals, is read from the totals. Chosen: no poll
fails for that long while another poll of the same GPU does not."""
_LEVELS = ("gpu.sram_corrected", "gpu.rows_corrected", "gpu.rows_uncorrected")
_FLAGS = ("gpu.rows_pending", "gpu.rows_failed", "gpu.sram_threshold", "gpu.banks_none", "gpu.banks_low")


@dataclass
class Counter(State):
    """Last readings of one counter of all devices. A missing reading is bridged by the next one.

    peak:      value from which it fell, while that may be a dip.   below: readings since then.
    held:      a jump that is not confirmed yet.   uncertain: whether there is any peak or held value.
    """

    last: Floats = memory(np.nan)
    peak: Floats = memory(np.nan)
    below: Floats = memory(0.0)
    held: Floats = memory(np.nan)
    uncertain: bool = notes(bool)

    def read(self, now: Floats) -> tuple[Floats, Floats | None]:
        """Returns (N,) readings, NaN where not read or not confirmed, and (N,) growth; None if nothing grew."""
        size = len(now)
        self.grow(size)
        last, peak, below = self.last[:size], self.peak[:size], self.below[:size]
        if not self.uncertain and not ((now != last) & ~np.isnan(now)).any():
            return now, None
        counted_up = (last <= now) & (last >= _NEAR_FULL * now)
        # a counter at infinity was not read
        now = np.where(np.isfinite(now) & (counted_up | ~is_unreadable(now)), now, np.nan)
        now = self._believed(now)
        grew, peak[:] = counter_increases(last, now, peak, np.zeros(size, bool))
        below[:] = np.where(np.isnan(peak), 0.0, below + ~np.isnan(now))
        reset = below >= _LOWER_READINGS
        peak[reset], below[reset] = np.nan, 0.0
        np.copyto(last, now, where=~np.isnan(now))
        self.uncertain = not (np.isnan(self.peak).all() and np.isnan(self.held).all())
        rises = grew > 0
        return now, np.where(rises, grew, 0.0) if rises.any() else None

    def levels(self, now: Floats) -> Floats:
        """Returns (N,) the counts of these readings, NaN where not read: during a possible dip the count before it."""
        now = self.read(now)[0]
        return np.where(np.isnan(now), np.nan, np.fmax(self.last[: len(now)], self.peak[: len(now)]))

    def _believed(self, now: Floats) -> Floats:
        """Returns the readings without jumps that the reading before does not confirm. A first reading jumps from 0."""
        last, peak, held = (cells[: len(now)] for cells in (self.last, self.peak, self.held))
        known = np.where(now >= peak, peak, last)
        first = np.isnan(known)
        jumps = now - np.where(first, 0.0, known) > _JUMP
        confirmed = jumps & (now >= held) & (now - held <= _JUMP)
        np.copyto(last, held, where=confirmed & first)
        held[:] = np.where(np.isnan(now), held, np.where(jumps & ~confirmed, now, np.nan))
        return np.where(jumps & ~confirmed, np.nan, now)


@dataclass
class ErrorCounters(State):
    """Some counters of all devices of a class. lives: generation of each device; a new one restarts its counters."""

    counters: dict[str, Counter] = parts(Counter)
    lives: Floats = memory(np.nan)
    time: int = notes(int)

    def seconds_since(self, time: int) -> float:
        """Returns the seconds since the last call; 0 if time stepped back, or at the first call."""
        seconds = max(time - self.time, 0) / SECOND if self.time else 0.0
        self.time = time
        return seconds

    def read(self, readings: Mapping[str, Floats], lives: Floats) -> tuple[Floats | None, Bools | None]:
        """Returns (K, N) growth by counter, None if nothing grew; and (N,) devices with a new life, None if there are
        none. Growth is 0 where it cannot be computed."""
        reborn = self._restart_reborn(readings, lives)
        grown = [self._counter(name).read(now)[1] for name, now in readings.items()]
        if all(growth is None for growth in grown):
            return None, reborn
        return np.stack([np.zeros(len(lives)) if growth is None else growth for growth in grown]), reborn

    def levels(self, readings: Mapping[str, Floats], lives: Floats) -> dict[str, Floats]:
        """Returns the counts of these readings by counter; NaN where not read, or not confirmed yet."""
        self._restart_reborn(readings, lives)
        return {name: self._counter(name).levels(now) for name, now in readings.items()}

    def _counter(self, name: str) -> Counter:
        return piece_of(self.counters, name, Counter)

    def _restart_reborn(self, readings: Mapping[str, Floats], lives: Floats) -> Bools | None:
        """Resets the counters of devices with another generation than before; returns them, None if there are none."""
        self.grow(len(lives))
        known = self.lives[: len(lives)]
        moved = lives - known
        reborn = (moved > 0) | (moved < 0)  # False for NaN
        np.copyto(known, lives, where=np.isfinite(lives))
        if not reborn.any():
            return None
        for name in readings:
            self._counter(name).reset(reborn)
        return np.asarray(reborn)


@dataclass
class GpuErrors(State):
    """Corrected and uncorrected errors of device memory, and uncorrected ones of caches, of all GPUs.

    source:      (2, N) where each counter of device memory is read from; 0: nothing yet.
    total_since: (2, N) since when only the total is reported in place of the GPU's own counter; 0: not so.
    """

    errors: ErrorCounters = part(ErrorCounters)
    source: NDArray[np.int8] = memory(0, np.int8, shape=(2, N))
    total_since: NDArray[np.int64] = memory(0, np.int64, shape=(2, N))

    def update(self, frame: Frame) -> tuple[Floats | None, Bools | None, Floats]:
        """Returns the growth since the last frame, new lives, and the time that was watched.

        First (3, N) growth of corrected, uncorrected and cache errors, None if nothing grew; then (N,) GPUs with a new
        life, None if there are none; then (N,) seconds in which corrected errors of device memory would have been seen.
        """
        seconds = self.errors.seconds_since(frame.time)
        self.grow(len(frame.entities))
        now = np.stack([frame[signal] for signal in _DRAM])
        self._fill_from_totals(frame, now)
        readings = {_DRAM[0]: now[0], _DRAM[1]: now[1], _SRAM: frame[_SRAM]}
        grown, reborn = self.errors.read(readings, frame["gpu.generation"])
        return self._without_double(grown), reborn, np.where(np.isfinite(now[0]), seconds, 0.0)

    def _fill_from_totals(self, frame: Frame, now: Floats) -> None:
        """Puts totals into `now` where a GPU does not report its own counters."""
        reported = np.isfinite(now)
        size = now.shape[1]
        source, total_since = self.source[:, :size], self.total_since[:, :size]
        if reported.all() and (source == _BY_DRAM).all() and not total_since.any():
            return
        totals = np.stack([frame[signal] for signal in _TOTALS])
        begins = reported & (source != _BY_DRAM)
        begins[begins] = ~is_unreadable(now[begins])
        only_total = np.isfinite(totals) & ~reported
        ends = (source == _BY_DRAM) & self._is_gone(reported, only_total, frame.time)
        self._restart(ends | (begins & (source == _BY_TOTAL)))
        source[begins] = _BY_DRAM
        source[ends | ((source == 0) & np.isfinite(totals))] = _BY_TOTAL
        np.copyto(now, totals, where=source != _BY_DRAM)

    def _is_gone(self, reported: Bools, only_total: Bools, time: int) -> Bools:
        """Returns (2, N) own counters that have not been reported for long, while the totals are."""
        size = reported.shape[1]
        source, since = self.source[:, :size], self.total_since[:, :size]
        since[reported] = 0
        begins = only_total & (source == _BY_DRAM) & ((since == 0) | (since > time))
        since[begins] = time
        gone = only_total & (since > 0) & (time - since > _DRAM_GONE)
        since[gone] = 0
        return np.asarray(gone)

    def _without_double(self, grown: Floats | None) -> Floats | None:
        """Returns growth in which no error counts twice: a total includes errors of caches, which may be reported too.

        Growth of both in one reading was of caches. A total that grows alone counts in full: it may be device memory.
        """
        if grown is None:
            return None
        totals = self.source[1, : grown.shape[1]] == _BY_TOTAL
        if totals.any():
            grown[1] = np.where(totals, np.maximum(grown[1] - grown[2], 0.0), grown[1])
        return grown

    def _restart(self, which: Bools) -> None:
        """Resets the readings of counters of device memory; which: (2, N)."""
        for name, mask in zip(_DRAM, which, strict=True):
            if mask.any() and name in self.errors.counters:
                self.errors.counters[name].reset(mask)


@dataclass
class LevelFilter(State):
    """Readings of GPUs that are judged by their level, not by their growth."""

    counters: ErrorCounters = part(ErrorCounters)

    def clean(self, frame: Frame) -> Frame:
        """Returns the frame with NaN for unreadable values, and with the count before for a counter that may have
        dipped."""
        values = dict(frame.values)
        levels = self.counters.levels({name: frame[name] for name in _LEVELS}, frame["gpu.generation"])
        values.update((name, level) for name, level in levels.items() if name in values)
        for name in _FLAGS:
            if name in values and (unreadable := is_unreadable(values[name])).any():
                values[name] = np.where(unreadable, np.nan, values[name])
        return replace(frame, values=values)
