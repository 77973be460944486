"""What each optical port did in the last two days: hourly medians of raw bit errors, module temperature and light.

Counters are read once in ten minutes: an hour's median needs no more, and it costs nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.link.steps_and_trends import row_median
from pipeline.records import SECOND, Frame

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

    def forget(self, mask: Bools) -> None:
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
