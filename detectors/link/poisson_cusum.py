"""Error counters of many devices, summed and judged by a Poisson CUSUM: a burst is a suspect, two windows alarm.

Lucas (1985), Technometrics 27, 129-144: each window adds the logarithm of how much likelier its errors are at the
faulty rate than at the healthy one. What one window can add is bounded, so that no single burst decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.counters import is_unreadable
from detectors.base.state import grown
from detectors.link.counters import Lives, Places, Readings
from pipeline.model.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

BURST = 0.6  # of the limit: the most that one window adds, so that one is above the half and two are above the whole
_ARRAYS = ("totals", "sums", "since", "seen")
_LONGEST = 600.0  # s that a window counts at most: after a gap the errors of a long time say little. Chosen


@dataclass
class Tallies:
    """State of some counters of all devices of a class. A part() of a detector; `step` each tick, it looks each window.

    signals:         counters that count as one.         window: s between two looks.
    healthy, faulty: errors an hour.                     limit:  of the sum; exp(limit) windows between false alarms.
    sums:   (N,) the CUSUM.   since: (N,) when it last left zero.   totals: (K, N) errors since then, by counter.
    """

    signals: Sequence[str]
    healthy: float
    faulty: float
    limit: float = 23.0
    window: float = 30.0
    readings: dict[str, Readings] = field(default_factory=dict)
    lives: Lives = field(default_factory=Lives)
    totals: Floats = field(default_factory=lambda: np.empty((0, 0)))
    sums: Floats = field(default_factory=lambda: np.empty(0))
    since: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    seen: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # last read, while that matters
    time: int = 0

    def step(self, frame: Frame, gate: Callable[[], Bools]) -> None:
        """Takes the counters, if a window is over. gate: False = errors there do not count; asked if there are any.

        Counters that fell, and those that the agent says began anew, have grown by nobody knows what.
        """
        seconds = (frame.time - self.time) / SECOND
        if self.time and 0 <= seconds < self.window - 0.5:
            return
        n, rows = len(frame.entities), [k for k, name in enumerate(self.signals) if name in frame.values]
        self._grow(n)
        if not rows:
            return
        grew = self._growth(frame)
        if not self.time or seconds <= 0:
            grew = []
        self.time = frame.time
        if grew or self.sums.any():
            growth = np.zeros((len(rows), n))
            for k, at, count in grew:
                growth[rows.index(k), at] = count
            away = ~gate()
            growth[:, away] = 0.0
            self.sums[:n][away] = 0.0
            columns = [frame[self.signals[k]] for k in rows]
            measured = np.any([np.isfinite(c) & ~is_unreadable(c) for c in columns], axis=0)
            self._judge(growth, rows, min(max(seconds, 0.0), _LONGEST), np.asarray(measured))

    def _growth(self, frame: Frame) -> list[tuple[int, Places, Floats]]:
        """(counter, devices, errors since the last look); a reading that is missing is bridged by the next one."""
        anew, _ = self.lives.changed(frame[f"{self.signals[0].split('.', 1)[0]}.generation"])
        found = []
        for k, name in enumerate(self.signals):
            if name in frame.values or len(anew):
                readings = self.readings.setdefault(name, Readings())
                at, growth, _ = readings.growth(frame[name], frame.time, anew)
                if len(at) and name in frame.values:
                    found.append((k, at, growth))
        return found

    def _judge(self, growth: Floats, rows: list[int], seconds: float, measured: Bools) -> None:
        n = growth.shape[1]
        sums, fresh = self.sums[:n], self.sums[:n] <= 0
        more = growth.sum(axis=0) * np.log(self.faulty / self.healthy)
        more -= (self.faulty - self.healthy) / 3600 * seconds
        sums[:] = np.where(measured, np.clip(sums + np.minimum(more, BURST * self.limit), 0, 2 * self.limit), sums)
        self.seen[:n] = np.where(measured | fresh, self.time, self.seen[:n])
        sums[self.time - self.seen[:n] > _LONGEST * SECOND] = 0.0  # who has vanished is not accused for ever
        self.since[:n] = np.where(fresh, self.time, self.since[:n])
        self.totals[:, :n] *= ~fresh
        self.totals[rows, :n] += growth
        self.totals[:, :n] *= sums > 0

    def suspect(self, n: int) -> Bools:
        """(N,) errors that one burst may have made."""
        return self.padded(n) > self.limit / 2

    def alarm(self, n: int) -> Bools:
        """(N,) errors that take two windows at least."""
        return self.padded(n) > self.limit

    def counted(self, i: int) -> dict[str, int]:
        """Errors of one device since its sum left zero, by counter; those without are left out."""
        if i >= self.totals.shape[1]:
            return {}
        return {name: int(t) for name, t in zip(self.signals, self.totals[:, i], strict=True) if t > 0}

    def padded(self, n: int) -> Floats:
        """(N,) sums; 0 of devices whose first window is not over."""
        mine = self.sums[:n]
        return np.concatenate([mine, np.zeros(n - len(mine))]) if len(mine) < n else mine

    def _grow(self, size: int) -> None:
        more = size - len(self.sums)
        if self.totals.shape[0] != len(self.signals):
            self.totals = np.empty((len(self.signals), 0))
        if more > 0:
            rows = len(self.signals)
            self.totals = np.concatenate([self.totals, np.zeros((rows, more))], axis=1)
            self.sums = grown(self.sums, size, 0)
            self.since, self.seen = grown(self.since, size, 0), grown(self.seen, size, 0)

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _ARRAYS}
        readings = {name: known.snapshot() for name, known in self.readings.items()}
        return {**arrays, "time": self.time, "readings": readings, "lives": self.lives.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in _ARRAYS:
            setattr(self, name, np.array(state[name]))
        self.time = int(state["time"])
        self.lives.restore(state["lives"])
        self.readings = {name: Readings() for name in state["readings"]}
        for name, known in self.readings.items():
            known.restore(state["readings"][name])
