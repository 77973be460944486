"""A Poisson CUSUM over error counters of many devices: one burst is a suspect, two windows with errors are an alarm.

Lucas (1985), Technometrics 27, 129-144: each window adds the logarithm of how much likelier its errors are at the
faulty rate than at the healthy one. What one window can add is bounded, so that no single burst decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, part, parts
from detectors.link.counters import CounterGenerations, CounterReadings, UsualErrors
from pipeline.model.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_STEP_SHARE = 0.6
"""Most that one window adds, as a share of the limit: one window is above half of it, two are above the whole."""
MIN_RATIO = 10.0
"""Times the usual rate of a site from which a device is faulty: a decade, as for bit error rates. Chosen."""
_MAX_WINDOW_S = 600.0  # s that a window counts at most: after a gap the errors of a long time show little. Chosen


@dataclass
class SignalErrors(State):
    """One error counter of all devices: (N,) its errors in the present window, and since the sum left zero."""

    readings: CounterReadings = part(CounterReadings)
    pending: Floats = memory(0.0)
    total: Floats = memory(0.0)


@dataclass
class PoissonCusum(State):
    """The CUSUM of some error counters, which count as one, of all devices of a class; call `update` at every tick.

    signals:         names of the counters.              window: s between two updates of the sums.
    healthy, faulty: errors per hour, at least.           limit:  of the sum; exp(limit) windows between false alarms.
    usual:  errors of the devices here: where most have more than `healthy`, that is normal.
    sums:   (N,) the CUSUM.   since: (N,) when it last left zero.   seen: (N,) last reading, while that matters.
    """

    signals: Sequence[str]
    healthy: float
    faulty: float
    limit: float = 23.0
    window: float = 30.0
    errors: dict[str, SignalErrors] = parts(SignalErrors)
    generations: CounterGenerations = part(CounterGenerations)
    usual: UsualErrors = part(UsualErrors)
    sums: Floats = memory(0.0)
    since: NDArray[np.int64] = memory(0, np.int64)
    seen: NDArray[np.int64] = memory(0, np.int64)
    time: int = notes(int)

    def __post_init__(self) -> None:
        for name in self.signals:
            self.errors[name] = SignalErrors()

    def update(self, frame: Frame, gate: Callable[[], Bools]) -> None:
        """Adds the counters of an instant, and updates the sums if a window is over.

        gate: called if there are errors; False: they do not count. The growth of counters that fell or started again is
        unknown and does not count. Devices may be read at any time within a window.
        """
        n = len(frame.entities)
        self.grow(n)
        seconds = (frame.time - self.time) / SECOND
        self._measure_growth(frame)
        if (self.time and 0 <= seconds < self.window - 0.5) or not any(name in frame.values for name in self.signals):
            return
        measured = np.any([c.readings.read_since(self.time, n) for c in self.errors.values()], axis=0)
        growth = np.stack([counter.pending[:n] for counter in self.errors.values()])
        if not self.time or seconds <= 0:
            growth[:] = 0.0
        self.time = frame.time
        seconds = min(max(seconds, 0.0), _MAX_WINDOW_S)
        if growth.any() or self.sums.any():
            away = ~gate()
            growth[:, away] = 0.0
            self.sums[:n][away] = 0.0
            self._update_sums(growth, seconds, measured)
        at = np.flatnonzero(growth.any(axis=0))
        self.usual.add(at, np.ones(len(at)), np.where(measured, seconds / 3600, 0.0), frame.time)  # a burst is one
        for counter in self.errors.values():
            counter.pending[:n] = 0.0

    def _measure_growth(self, frame: Frame) -> None:
        restarted, _ = self.generations.find_restarted(frame[f"{self.signals[0].split('.', 1)[0]}.generation"])
        for name, counter in self.errors.items():
            counter.grow(len(frame.entities))
            if name in frame.values or len(restarted):
                at, growth, _ = counter.readings.measure_growth(frame[name], frame.time, restarted)
                counter.pending[at] += growth

    def _update_sums(self, growth: Floats, seconds: float, measured: Bools) -> None:
        n = len(measured)
        healthy = max(self.healthy, self.usual.highest_usual())
        faulty = max(self.faulty, MIN_RATIO * healthy)
        sums, fresh = self.sums[:n], self.sums[:n] <= 0
        gain = growth.sum(axis=0) * np.log(faulty / healthy) - (faulty - healthy) / 3600 * seconds
        top = 2 * self.limit
        sums[:] = np.where(measured, np.clip(sums + np.minimum(gain, MAX_STEP_SHARE * self.limit), 0, top), sums)
        self.seen[:n] = np.where(measured | fresh, self.time, self.seen[:n])
        sums[self.time - self.seen[:n] > _MAX_WINDOW_S * SECOND] = 0.0  # the device has vanished
        self.since[:n] = np.where(fresh, self.time, self.since[:n])
        for row, name in enumerate(self.signals):
            total = self.errors[name].total[:n]
            total *= ~fresh
            total += growth[row]
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
