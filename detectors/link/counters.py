"""Growth of the counters of many devices, read sparsely: a tick in which few of them change costs a few comparisons.

Not growth: a counter that starts again (the agent reports a new generation, or the counter fell), that stands at the
top of its register, or that is read as all bits set. A counter that passes 2**32 has wrapped and continues. A counter
that fell and then exceeds its former value, as if two sources reported it in turn, grew by the difference only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import TOPS, counter_increases, is_unreadable
from detectors.base.state import State, memory, notes, part, parts, piece_of
from pipeline.model.compiling import compiled
from pipeline.model.records import SECOND, Frame

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

    def read_since(self, time: int, n: int) -> NDArray[np.bool_]:
        """Returns (N,) devices with a reading after `time`."""
        self.grow(n)
        missing = self.missing_since[:n]
        return np.asarray(np.isfinite(self.last[:n]) & ((missing == 0) | (missing > time)))

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


_LEAST_DEVICES = 8  # devices from which their median counts: the bad one would be half of a smaller cohort
_DAY = 86_400 * SECOND
_SPAN = 600 * SECOND  # us of errors that become part of the usual ones, or do not, together; chosen
_FIRST_SPAN = 300 * SECOND  # us of the first one: known in the first ten minutes of readings of 10 s
_EVENT = 3600 * SECOND  # us for which far more errors than usual are an event: it is reported in minutes. Chosen
_TIMES, _MORE = 3.0, 0.05  # times the usual errors, and as many more of each device, that are still usual; chosen
_CUT = 0.05  # share of the devices, and two at least, whose errors are cut to those of the next: they may be faulty
_TAIL = 3.5
"""Standard deviations of the logarithm of a rate that are still usual: one in 4,000 healthy devices. Rates of healthy
links are about lognormal; where the highest are cut, their spread comes out a quarter too small."""
_WIDEST = 30.0  # times the mean that are still usual at most; chosen: a decade and a half
_FEW_ERRORS = 5.0  # errors of a site below which its rate is not known; chosen


@dataclass
class UsualErrors(State):
    """The error rates of the devices of a site over the last days, so that a site with more errors has its own normal.

    errors, exposure: (N,) errors of each device in the present span, and for how long (in any unit) it could have some.
    past, whole:      (N,) those of the spans before, halved daily. Left out are spans with far more than the usual
                      errors, until that has lasted for an hour.
    """

    errors: Floats = memory(0.0)
    exposure: Floats = memory(0.0)
    past: Floats = memory(0.0)
    whole: Floats = memory(0.0)
    began: int = notes(int)
    halved: int = notes(int)
    unusual: int = notes(int)  # when the first of the spans left out began; 0: the last one was usual

    def add(self, at: Indices, errors: Floats, exposure: Floats, time: int) -> bool:
        """Adds the errors of some devices, and (N,) the exposure of all since the last call; returns whether the usual
        rate may have changed."""
        n = len(exposure)
        self.grow(n)
        self.errors[at] += errors
        if not self.exposure.any():
            self.began = time
        self.exposure[:n] += exposure
        if 0 <= time - self.began < (_SPAN if self.whole.any() else _FIRST_SPAN):
            return False
        self._close_span(time)
        self.errors[:], self.exposure[:] = 0.0, 0.0
        return True

    def _close_span(self, time: int) -> None:
        known = self.exposure > 0
        if not known.any():
            return
        if not 0 <= time - self.halved < _DAY:
            self.halved = time
            self.past *= 0.5
            self.whole *= 0.5
        errors, exposure = self.errors[known], self.exposure[known]
        usual = cut_highest(self.past, self.whole).sum() / max(float(self.whole.sum()), 1e-300) * exposure.sum()
        many = float(cut_highest(errors, exposure).sum()) > _TIMES * usual + _MORE * len(errors) + _FEW_ERRORS
        self.unusual = (self.unusual or time) if many and self.whole.any() else 0
        if not self.unusual or time - self.unusual >= _EVENT:
            self.past += self.errors
            self.whole += self.exposure

    def highest_usual(self, among: NDArray[np.bool_] | None = None) -> float:
        """Returns the rate that hardly any healthy device exceeds, from the mean and the spread of some devices; 0
        where they are few, or have hardly any errors. In the first span, which has no past, from the span itself."""
        past, whole = (self.past, self.whole) if self.whole.any() else (self.errors, self.exposure)
        known = whole > 0
        if among is not None:
            known[: len(among)] &= among
        exposure = whole[known]
        errors = cut_highest(past[known], exposure)
        if len(errors) < _LEAST_DEVICES or errors.sum() < _FEW_ERRORS:
            return 0.0
        mean = float(errors.sum() / exposure.sum())
        expected = mean * exposure
        # what the counts vary by beyond Poisson's variance is the variance of the rates
        excess = float(((errors - expected) ** 2 - expected).sum() / (expected**2).sum())
        spread = float(np.sqrt(np.log1p(max(excess, 0.0))))
        return mean * min(float(np.exp(_TAIL * spread - spread**2 / 2)), _WIDEST)


def cut_highest(errors: Floats, exposure: Floats) -> Floats:
    """Returns the errors (N,), 0 or more, of some devices; those with the highest rates have no more than the next."""
    cut = max(2, int(_CUT * len(errors)))
    if len(errors) <= cut:
        return np.zeros(len(errors))
    rates = errors / np.where(exposure > 0, exposure, 1.0)
    some = rates[rates > 0]  # of healthy links most have none, and selecting among equal values takes ten times as long
    limit = np.partition(some, -cut - 1)[-cut - 1] if len(some) > cut else 0.0
    return np.asarray(np.minimum(errors, limit * exposure))


@dataclass
class ReadingCells(State):
    """The cells of one signal of `NewestReadings`."""

    newest: Floats = memory(np.nan)
    fresh: NDArray[np.bool_] = memory(False, np.bool_)
    last: Floats = memory(np.nan)


@dataclass
class NewestReadings(State):
    """The newest readings of some signals, whichever frame they came in, for tests that judge less often than frames.

    Devices are read at different times and intervals; a test that read the frame of one instant alone would never see
    those that are always read between.

    cells:     signal -> newest reading of each device, whether it came since `measure_growth` was last called, and the
               reading at that call (NaN where there was none).
    read:      (N,) when a device was last read.   judged: (N,) the same at that call.
    restarted: (N,) the counters have started again since.
    """

    cells: dict[str, ReadingCells] = parts(ReadingCells)
    read: Indices = memory(0, np.int64)
    judged: Indices = memory(0, np.int64)
    restarted: NDArray[np.bool_] = memory(False, np.bool_)
    generations: CounterGenerations = part(CounterGenerations)

    def update(self, frame: Frame, names: Iterable[str]) -> None:
        """Adds the readings of an instant."""
        n = len(frame.entities)
        self.grow(n)
        seen = np.zeros(n, np.bool_)
        for name in names:
            if name in frame.values:
                now = frame.values[name]
                known = np.isfinite(now)
                cells = piece_of(self.cells, name, ReadingCells)
                cells.grow(n)
                np.copyto(cells.newest[:n], now, where=known)
                cells.fresh[:n] |= known
                seen |= known
        self.read[:n][seen] = frame.time
        restarted, _ = self.generations.find_restarted(frame[f"{frame.device_class}.generation"])
        self.restarted[restarted] = True

    def fresh_values(self, name: str, n: int) -> Floats:
        """Returns (N,) newest readings; NaN where none came since `measure_growth` was last called."""
        if name not in self.cells:
            return np.full(n, np.nan)
        cells = self.cells[name]
        cells.grow(n)
        return np.where(cells.fresh[:n], cells.newest[:n], np.nan)

    def measure_growth(self, names: Iterable[str], n: int, longest: float = np.inf) -> tuple[dict[str, Floats], Floats]:
        """Returns (growth of each counter, seconds) since the last call, (N,) each, and begins again.

        NaN where a counter was not read now or then, fell or started again, or after more than `longest` s.
        """
        seconds = np.where(self.judged[:n] > 0, (self.read[:n] - self.judged[:n]) / SECOND, np.nan)
        valid = (seconds > 0) & (seconds <= longest) & ~self.restarted[:n]
        found = {}
        for name in names:
            now = self.fresh_values(name, n)
            now[is_unreadable(now)] = np.nan
            if name in self.cells:
                cells = self.cells[name]
                growth = now - cells.last[:n]
                found[name] = np.where(valid & (growth >= 0), growth, np.nan)
                cells.last[:n], cells.fresh[:n] = now, False
            else:
                found[name] = now
        self.judged[:n] = np.where(self.read[:n] > 0, self.read[:n], self.judged[:n])
        self.restarted[:n] = False
        return found, np.where(valid, seconds, np.nan)


def pair_numbers(first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns (N,) a number for each pair of groups; -1 where either is -1."""
    pairs = first.astype(np.int64) * (int(second.max(initial=0)) + 1) + second
    _, numbers = np.unique(pairs, return_inverse=True)
    return np.where((first < 0) | (second < 0), -1, numbers).astype(np.int32)
