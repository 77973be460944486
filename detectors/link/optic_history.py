"""The last two days of each optical port: hourly medians of raw bit errors, module temperature and light, and trends.

Of each ten minutes the newest readings count, which is enough for an hourly median. Trends: steps are removed first,
then Mann-Kendall tests and Theil-Sen measures the rest. Theil (1950) and Sen (1968), J. Am. Stat. Assoc. 63,
1379-1389: the median of the slopes of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import N, State, memory, notes, part
from detectors.base.statistics import row_trend_z, theil_sen
from detectors.link.counters import NewestReadings
from pipeline.model.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HOURS, SLOTS = 48, 6
HOUR = 3600 * SECOND
_SLOT = HOUR // SLOTS
_NO_LIGHT_MW = 0.001  # -30 dBm: below it a receiver reports noise and the link is down (module data sheets)
_NO_ANSWER_MW = 6.55  # 65535 steps of 0.1 uW, read from a module that does not answer (CMIS)
_MAX_CEL = 130.0  # that no module reports while it works; chosen
_BITS, _CORRECTED, _HEAT, _LIGHT = _READ = (
    *("nic.phy_bits", "nic.phy_corrected_bits", "nic.module_temperature", "nic.rx_power_min"),
)
_KINDS = ("ber", "heat", "light")
_NORMAL = 1.4826  # median absolute deviation to standard deviation of a normal distribution
_MIN_STEP = 0.25  # decades from one hour to the next that are a step: six hours of the steepest trend; chosen
_STEP_RATIO = 6.0  # and so many times what neighbouring hours differ by: 1 in 1e9 of normal noise; chosen


@dataclass
class OpticHistory(State):
    """History of all ports, bounded: 48 hours and 6 slots of three numbers.

    hours: (3, N, 48) hourly medians of log10 of the raw BER, of degrees C and of dBm, oldest first; NaN = none.
    samples: (N,) slots in which the raw bit errors of a port were measured.
    """

    hours: NDArray[np.float32] = memory(np.nan, np.float32, shape=(3, N, HOURS))
    slots: NDArray[np.float32] = memory(np.nan, np.float32, shape=(3, N, SLOTS))
    readings: NewestReadings = part(NewestReadings)
    samples: Floats = memory(0.0)
    slot: int = notes(int)

    def add_frame(self, frame: Frame, maintenance: Callable[[], Bools]) -> bool | None:
        """Adds readings, and a slot if one is due; returns True when an hour is complete, None if nothing was due.

        maintenance: returns (N,) ports in maintenance, which are left out. A clock that goes back by less than an
        hour is waited for; after one that goes back further the history starts again.
        """
        self.readings.update(frame, _READ)
        slot = frame.time // _SLOT
        if slot == self.slot or self.slot - SLOTS <= slot < self.slot:
            return None
        if slot < self.slot:
            self.restore(OpticHistory().snapshot())
            self.readings.update(frame, _READ)
        self.grow(len(frame.entities))
        passed = slot // SLOTS - self.slot // SLOTS if self.slot else 0
        if passed:
            self._close_hour(passed)
        self.slot = slot
        self._add_slot(frame, slot % SLOTS)
        self.slots[:, np.flatnonzero(maintenance()), slot % SLOTS] = np.nan
        return passed > 0

    def hourly_medians(self, kind: str) -> NDArray[np.float32]:
        """Returns (N, 48) hourly medians of `ber`, `heat` or `light`."""
        medians: NDArray[np.float32] = self.hours[_KINDS.index(kind)]
        return medians

    def _add_slot(self, frame: Frame, column: int) -> None:
        n = len(frame.entities)
        heat, light = (self.readings.fresh_values(name, n) for name in (_HEAT, _LIGHT))
        self.slots[0, :n, column] = self._log_ber(n)
        # all bits set are read as -1/256 degrees and 6.5535 mW (CMIS): the module did not answer
        self.slots[1, :n, column] = np.where((heat > 0) & (heat < _MAX_CEL), heat, np.nan)
        lit = (light > _NO_LIGHT_MW) & (light < _NO_ANSWER_MW)
        self.slots[2, :n, column] = np.where(lit, 10 * np.log10(np.where(lit, light, 1.0)), np.nan)

    def _log_ber(self, n: int) -> Floats:
        """Returns (N,) log10 of corrected bits per bit since the last slot; NaN where counters started again."""
        growth, _ = self.readings.measure_growth(_READ, n)
        carried, errors = growth[_BITS], growth[_CORRECTED]
        valid = (carried > 0) & (errors < carried)  # false for NaN
        # no error at all: fewer than one in the bits that passed
        ber = np.where(valid, np.maximum(errors, 0.5), 1.0) / np.where(valid, carried, 1.0)
        self.samples[:n] += valid
        return np.where(valid, np.log10(ber), np.nan)

    def _close_hour(self, passed: int) -> None:
        """Adds the medians of the hour to the history; hours without a reading stay empty."""
        gone = min(passed, HOURS)
        for kind, slots in zip(self.hours, self.slots, strict=True):
            kind[:, :-gone] = kind[:, gone:].copy()
            kind[:, -gone:] = np.nan
            kind[:, -gone] = row_median(slots)
        self.slots[:] = np.nan


@dataclass(frozen=True, slots=True)
class Trend:
    """An hourly series since its last step.

    z:      Mann-Kendall's, positive when it rises.   slope: Theil-Sen's, per day.
    spread: robust standard deviation around the line. newest: the line at the last hour.
    hours:  values in it.                              begins: index of the first one in the series.
    """

    z: float
    slope: float
    spread: float
    newest: float
    hours: int
    begins: int


def row_median(values: NDArray[np.floating]) -> Floats:
    """Returns (N,) the median of each row's finite values; NaN where there is none."""
    ordered = np.sort(np.asarray(values, np.float64), axis=1)  # NaN comes last
    count = np.isfinite(ordered).sum(axis=1)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[:, None] // 2, axis=1)[:, 0]
    high = np.take_along_axis(ordered, np.maximum(np.minimum(count // 2, count - 1), 0)[:, None], axis=1)[:, 0]
    return np.where(count > 0, (low + high) / 2, np.nan)


def find_last_step(series: Floats) -> int:
    """Returns the index from which a series has no step; NaN are hours without a value."""
    at = np.flatnonzero(np.isfinite(series))
    if len(at) < 3:
        return 0
    moves = np.diff(series[at])
    usual = _NORMAL * float(np.median(np.abs(moves - np.median(moves))))
    steps = np.flatnonzero(np.abs(moves) > max(_MIN_STEP, _STEP_RATIO * usual))
    return int(at[steps[-1] + 1]) if len(steps) else 0


def fit_trend(series: Floats) -> Trend | None:
    """Returns the trend of an hourly series since its last step; None where fewer than three values are left."""
    begins = find_last_step(series)
    at = np.flatnonzero(np.isfinite(series[begins:])) + begins
    n, y = len(at), series[at]
    if n < 3:
        return None
    z, slope = float(row_trend_z(y[None])[0]), theil_sen(at, y)
    level = float(np.median(y - slope * at))
    spread = _NORMAL * float(np.median(np.abs(y - slope * at - level)))
    return Trend(z, 24 * slope, spread, level + slope * float(at[-1]), n, int(at[0]))
