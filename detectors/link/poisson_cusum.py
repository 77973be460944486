"""A Poisson CUSUM over error counters of many devices: one burst is a suspect, two windows with errors are an alarm.

Lucas (1985), Technometrics 27, 129-144: each window adds the logarithm of how much likelier its errors are at the
faulty rate than at the healthy one. What one window can add is bounded, so that no single burst decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import is_unreadable
from detectors.base.state import State, memory, notes, part, parts
from detectors.link.counters import CounterGenerations, CounterReadings, Indices
from pipeline.model.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_STEP_SHARE = 0.6
"""Most that one window adds, as a share of the limit: one window is above half of it, two are above the whole."""
_MAX_WINDOW_S = 600.0  # s that a window counts at most: after a gap the errors of a long time show little. Chosen


@dataclass
class SignalErrors(State):
    """One error counter of all devices, and (N,) its errors since the sum left zero."""

    readings: CounterReadings = part(CounterReadings)
    total: Floats = memory(0.0)


@dataclass
class PoissonCusum(State):
    """The CUSUM of some error counters, which count as one, of all devices of a class; call `update` at every tick.

    signals:         names of the counters.              window: s between two updates of the sums.
    healthy, faulty: errors per hour.                    limit:  of the sum; exp(limit) windows between false alarms.
    sums:   (N,) the CUSUM.   since: (N,) when it last left zero.   seen: (N,) last reading, while that matters.
    """

    signals: Sequence[str]
    healthy: float
    faulty: float
    limit: float = 23.0
    window: float = 30.0
    errors: dict[str, SignalErrors] = parts(SignalErrors)
    generations: CounterGenerations = part(CounterGenerations)
    sums: Floats = memory(0.0)
    since: NDArray[np.int64] = memory(0, np.int64)
    seen: NDArray[np.int64] = memory(0, np.int64)
    time: int = notes(int)

    def __post_init__(self) -> None:
        for name in self.signals:
            self.errors[name] = SignalErrors()

    def update(self, frame: Frame, gate: Callable[[], Bools]) -> None:
        """Adds the counters of a window, if one is over. gate: called if there are errors; False: they do not count.

        The growth of counters that fell or started again is unknown and does not count.
        """
        seconds = (frame.time - self.time) / SECOND
        if self.time and 0 <= seconds < self.window - 0.5:
            return
        n, present = len(frame.entities), [name for name in self.signals if name in frame.values]
        self.grow(n)
        for counter in self.errors.values():
            counter.grow(n)
        if not present:
            return
        found = self._measure_growth(frame)
        if not self.time or seconds <= 0:
            found = []
        self.time = frame.time
        if found or self.sums.any():
            growth = {name: np.zeros(n) for name in present}
            for name, at, count in found:
                growth[name][at] = count
            away = ~gate()
            for one in growth.values():
                one[away] = 0.0
            self.sums[:n][away] = 0.0
            columns = [frame[name] for name in present]
            measured = np.any([np.isfinite(c) & ~is_unreadable(c) for c in columns], axis=0)
            self._update_sums(growth, min(max(seconds, 0.0), _MAX_WINDOW_S), np.asarray(measured))

    def _measure_growth(self, frame: Frame) -> list[tuple[str, Indices, Floats]]:
        """Returns (counter, devices, errors since the last window); the next reading bridges one that is missing."""
        restarted, _ = self.generations.find_restarted(frame[f"{self.signals[0].split('.', 1)[0]}.generation"])
        found = []
        for name in self.signals:
            if name in frame.values or len(restarted):
                at, growth, _ = self.errors[name].readings.measure_growth(frame[name], frame.time, restarted)
                if len(at) and name in frame.values:
                    found.append((name, at, growth))
        return found

    def _update_sums(self, growth: dict[str, Floats], seconds: float, measured: Bools) -> None:
        n = len(measured)
        sums, fresh = self.sums[:n], self.sums[:n] <= 0
        gain = np.sum(list(growth.values()), axis=0) * np.log(self.faulty / self.healthy)
        gain -= (self.faulty - self.healthy) / 3600 * seconds
        top = 2 * self.limit
        sums[:] = np.where(measured, np.clip(sums + np.minimum(gain, MAX_STEP_SHARE * self.limit), 0, top), sums)
        self.seen[:n] = np.where(measured | fresh, self.time, self.seen[:n])
        sums[self.time - self.seen[:n] > _MAX_WINDOW_S * SECOND] = 0.0  # the device has vanished
        self.since[:n] = np.where(fresh, self.time, self.since[:n])
        for name, counter in self.errors.items():
            total = counter.total[:n]
            total *= ~fresh
            total += growth.get(name, 0.0)
            total *= sums > 0

    def is_suspect(self, n: int) -> Bools:
        """Returns (N,) devices with errors that one burst may have caused."""
        return self.sums_of(n) > self.limit / 2

    def is_alarm(self, n: int) -> Bools:
        """Returns (N,) devices with errors in at least two windows."""
        return self.sums_of(n) > self.limit

    def errors_by_counter(self, i: int) -> dict[str, int]:
        """Returns the errors of one device since its sum left zero, by counter, where there are any."""
        totals = {name: c.total[i] for name, c in self.errors.items() if i < len(c.total)}
        return {name: int(total) for name, total in totals.items() if total > 0}

    def sums_of(self, n: int) -> Floats:
        """Returns (N,) sums; 0 for devices whose first window is not over."""
        mine = self.sums[:n]
        return np.concatenate([mine, np.zeros(n - len(mine))]) if len(mine) < n else mine
