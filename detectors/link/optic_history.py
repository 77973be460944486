"""What each optical port did in the last two days: hourly medians of raw bit errors, module temperature and light.

Counters are read once in ten minutes: an hour's median needs no more, and it costs nothing in between.

Whether an hourly series rises steadily: steps are told from trends, Mann-Kendall and Theil-Sen judge what is left.

Theil (1950) and Sen (1968), J. Am. Stat. Assoc. 63, 1379-1389: the median of the slopes of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.statistics import trend_z
from pipeline.model.records import SECOND, Frame

_NORMAL = 1.4826  # MAD to standard deviation of a normal distribution
_STEP = 0.25  # from one hour to the next, in the series' unit (decades): six hours of the steepest trend; chosen
_STEPS = 6.0  # and so many times what neighbouring hours differ by: 1 in 1e9 of normal noise; chosen


@dataclass(frozen=True, slots=True)
class Trend:
    """A series since its last step.

    z:      Mann-Kendall's, positive when it rises.   slope: Theil-Sen's, per day.
    spread: robust standard deviation around the line. newest: the line at the last hour.
    hours:  values in it.                              begins: place of the first one in the series.
    """

    z: float
    slope: float
    spread: float
    newest: float
    hours: int
    begins: int


def row_median(values: NDArray[np.floating]) -> Floats:
    """(N,) median of each row's finite values; NaN where there is none."""
    ordered = np.sort(np.asarray(values, np.float64), axis=1)  # NaN comes last
    count = np.isfinite(ordered).sum(axis=1)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0)[:, None] // 2, axis=1)[:, 0]
    high = np.take_along_axis(ordered, np.maximum(np.minimum(count // 2, count - 1), 0)[:, None], axis=1)[:, 0]
    return np.where(count > 0, (low + high) / 2, np.nan)


def since_step(series: Floats) -> int:
    """Place from which a series has no step any more; NaN are hours without a value."""
    at = np.flatnonzero(np.isfinite(series))
    if len(at) < 3:
        return 0
    moves = np.diff(series[at])
    usual = _NORMAL * float(np.median(np.abs(moves - np.median(moves))))
    steps = np.flatnonzero(np.abs(moves) > max(_STEP, _STEPS * usual))
    return int(at[steps[-1] + 1]) if len(steps) else 0


def trend(series: Floats) -> Trend | None:
    """The trend of an hourly series since its last step; None where fewer than three values are left."""
    begins = since_step(series)
    at = np.flatnonzero(np.isfinite(series[begins:])) + begins
    n, y = len(at), series[at]
    if n < 3:
        return None
    first, second = np.triu_indices(n, 1)
    rises = y[second] - y[first]
    z = float(trend_z(np.sign(rises).sum(), np.asarray(n)))
    slope = float(np.median(rises / (at[second] - at[first])))
    level = float(np.median(y - slope * at))
    spread = _NORMAL * float(np.median(np.abs(y - slope * at - level)))
    return Trend(z, 24 * slope, spread, level + slope * float(at[-1]), n, int(at[0]))


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HOURS, SLOTS = 48, 6
HOUR = 3600 * SECOND
_SLOT = HOUR // SLOTS
_DARK = 0.001  # mW, -30 dBm: below it a receiver tells noise and the link is down (module data sheets tell no less)
_FULL = 6.55  # mW: 65535 steps of 0.1 uW, which a module that does not answer shows (CMIS)
_HOTTEST = 130.0  # degrees C that no module's thermometer tells while it works; chosen
_READ = ("bits", "mended", "generation", "samples")
_KINDS = ("ber", "heat", "light")


@dataclass
class OpticHistory:
    """State of all ports, bounded: 48 hours and 6 slots of three numbers. A part() of a detector.

    hours: (3, N, 48) hourly medians of log10 of the raw BER, of degrees C and of dBm, oldest first; NaN = none.
    read:  (4, N) last readings of both counters, their generation (0: none), and how many slots were measured.
    """

    hours: NDArray[np.float32] = field(default_factory=lambda: np.full((3, 0, HOURS), np.nan, np.float32))
    slots: NDArray[np.float32] = field(default_factory=lambda: np.full((3, 0, SLOTS), np.nan, np.float32))
    read: Floats = field(default_factory=lambda: np.zeros((len(_READ), 0)))
    slot: int = 0

    def take(self, frame: Frame, work: Callable[[], Bools]) -> bool | None:
        """None: nothing to do yet; True once an hour, when an hour is complete. work: (N,) who is worked on: untold.

        A clock that goes back by less than an hour is waited for; one that goes back further makes all begin anew.
        """
        slot = frame.time // _SLOT
        if slot == self.slot or self.slot - SLOTS <= slot < self.slot:
            return None
        if slot < self.slot:
            self.restore(OpticHistory().snapshot())
        self._grow(len(frame.entities))
        passed = slot // SLOTS - self.slot // SLOTS if self.slot else 0
        if passed:
            self._close(passed)
        self.slot = slot
        self._read(frame, slot % SLOTS)
        self.slots[:, np.flatnonzero(work()), slot % SLOTS] = np.nan
        return passed > 0

    def reset(self, mask: Bools) -> None:
        """What was, is of another module or fibre."""
        at = np.flatnonzero(mask)
        self.hours[:, at], self.slots[:, at], self.read[:, at] = np.nan, np.nan, 0.0

    def of(self, kind: str) -> NDArray[np.float32]:
        """(N, 48) hourly medians of `ber`, `heat` or `light`."""
        mine: NDArray[np.float32] = self.hours[_KINDS.index(kind)]
        return mine

    @property
    def samples(self) -> Floats:
        """(N,) slots in which a port's raw bit errors were told."""
        mine: Floats = self.read[3]
        return mine

    def _read(self, frame: Frame, place: int) -> None:
        n = len(frame.entities)
        self.slots[0, :n, place] = self._log_ber(frame, n)
        heat, light = frame["nic.module_temperature"], frame["nic.rx_power_min"]
        # -1/256 degrees and 6.5535 mW are what all bits set read as (CMIS): the module did not answer
        self.slots[1, :n, place] = np.where((heat > 0) & (heat < _HOTTEST), heat, np.nan)
        lit = (light > _DARK) & (light < _FULL)
        self.slots[2, :n, place] = np.where(lit, 10 * np.log10(np.where(lit, light, 1.0)), np.nan)

    def _log_ber(self, frame: Frame, n: int) -> Floats:
        """(N,) log10 of the bits corrected for each bit since the last reading; NaN where counters began anew."""
        bits, mended, lives = frame["nic.phy_bits"], frame["nic.phy_corrected_bits"], frame["nic.generation"]
        last_bits, last_mended, last_life, samples = self.read[:, :n]
        known = np.isfinite(bits) & np.isfinite(mended)
        carried, errors = bits - last_bits, mended - last_mended
        told = known & (last_bits > 0) & (carried > 0) & (errors >= 0) & (errors < carried)
        told &= ~((last_life > 0) & np.isfinite(lives) & (lives != last_life))
        # no error at all: fewer than one in the bits that passed
        ber = np.where(told, np.maximum(errors, 0.5), 1.0) / np.where(told, carried, 1.0)
        self.read[0, :n], self.read[1, :n] = np.where(known, bits, last_bits), np.where(known, mended, last_mended)
        self.read[2, :n] = np.where(known & np.isfinite(lives), lives, last_life)
        self.read[3, :n] = samples + told
        return np.where(told, np.log10(ber), np.nan)

    def _close(self, passed: int) -> None:
        """The hour's medians become history; hours in which nobody looked stay empty."""
        gone = min(passed, HOURS)
        for kind, slots in zip(self.hours, self.slots, strict=True):
            kind[:, :-gone] = kind[:, gone:].copy()
            kind[:, -gone:] = np.nan
            kind[:, -gone] = row_median(slots)
        self.slots[:] = np.nan

    def _grow(self, size: int) -> None:
        more = size - self.read.shape[1]
        if more > 0:
            self.hours = np.concatenate([self.hours, np.full((3, more, HOURS), np.nan, np.float32)], axis=1)
            self.slots = np.concatenate([self.slots, np.full((3, more, SLOTS), np.nan, np.float32)], axis=1)
            self.read = np.concatenate([self.read, np.zeros((len(_READ), more))], axis=1)

    def snapshot(self) -> dict[str, Any]:
        return {
            "hours": self.hours.copy(),
            "slots": self.slots.copy(),
            "read": self.read.copy(),
            "slot": self.slot,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.hours, self.slots = np.array(state["hours"]), np.array(state["slots"])
        self.read, self.slot = np.array(state["read"]), int(state["slot"])
