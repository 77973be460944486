"""Waits and congestion marks of each port by the minute and for the bytes it carried, against its node and its past.

Ports of one node serve the same ranks: their median takes out what the job does (its phase, its share of the line, its
pauses), and what is left belongs to the way that each port's traffic takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.statistics import grouped_median
from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

WAIT = ("nic.port_tx_wait",)
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
ERRORS = ("nic.symbol_errors", "nic.crc_errors")
_READ = (*WAIT, *MARKS, *ERRORS, "nic.tx_bytes")
MINUTE = 60.0  # s of one look
_LONGEST = 300.0  # s between two looks beyond which growth is an average of too much; chosen
_FLOORS = (1e4, 1.0)  # of a port that carries a tenth of 400 Gb/s: ticks a second, marks a second
"""Below these nothing waits: 1e4 ticks are below a percent of a second at every length of tick that is known; a mark a
second is a packet in a million. Both chosen."""
_USUAL_BYTES = 5e9  # a second: a tenth of a port of 400 Gb/s, to which the floors are scaled
_SIBLINGS = 4  # ports of a node, itself among them, from which their median takes out the job; chosen
LEARN = 20  # looks before a port is judged: the replay contract
_GAIN = 1 / 240  # least learning rate: a memory of four hours; chosen
_ARRAYS = ("last", "normal", "excess", "share", "errors", "beside")
_CELLS = ("wait", "marks", "count", "generation")


@dataclass
class LeafTraffic:
    """State of all ports: last readings and what is normal. A part() of a detector.

    excess: (2, N) of waits and marks, logarithm above the own normal, in this minute; NaN = not judged.
    share:  (N,) of the line that it sends.  errors: (N,) errors in this minute.
    beside: (N,) whether other ports of its node were there to take out what the job does.
    """

    last: Floats = field(default_factory=lambda: np.empty((len(_READ), 0)))
    normal: Floats = field(default_factory=lambda: np.empty((len(_CELLS), 0)))
    excess: Floats = field(default_factory=lambda: np.empty((2, 0)))
    share: Floats = field(default_factory=lambda: np.empty(0))
    errors: Floats = field(default_factory=lambda: np.empty(0))
    beside: Bools = field(default_factory=lambda: np.empty(0, np.bool_))
    time: int = 0

    def due(self, time: int) -> bool:
        seconds = (time - self.time) / SECOND
        return not 0 <= seconds < MINUTE - 0.5

    def look(self, frame: Frame, nodes: NDArray[np.int32], least: float, doubled: float) -> bool:
        """Takes all counters; False where nothing can be said yet. doubled: excess above which nothing is learnt."""
        n, seconds = len(frame.entities), (frame.time - self.time) / SECOND
        self._grow(n)
        now = np.stack([frame[name] for name in _READ])
        growth = self._growth(frame, now, n)
        first, self.time = not self.time, frame.time
        if first or not 0 < seconds <= _LONGEST:
            return False
        rate = growth / seconds
        speed = frame["nic.speed"] * 1e6 / 8
        self.share = rate[-1] / np.where(speed > 0, speed, np.nan)
        self.errors = np.nansum(growth[1 + len(MARKS) : 1 + len(MARKS) + len(ERRORS)], axis=0)
        carries = self.share >= least
        per = np.where(carries, rate[-1], np.nan) / _USUAL_BYTES
        marked = _row_sum(rate[1 : 1 + len(MARKS)])
        self.excess = np.full((2, n), np.nan)
        for row, (amount, floor) in enumerate(zip((rate[0], marked), _FLOORS, strict=True)):
            self._judge(row, np.log(np.maximum(amount, 0) / per + floor), nodes, doubled)
        self.normal[2, :n] += carries
        return True

    def _judge(self, row: int, levels: Floats, nodes: NDArray[np.int32], doubled: float) -> None:
        """Takes out what all ports of the node do, then the port's own normal; learns unless it is in excess."""
        n = len(levels)
        common, size = grouped_median(levels, nodes)
        self.beside = np.asarray(size >= _SIBLINGS)
        own = levels - np.where(self.beside, common, 0.0)
        count, normal = self.normal[2, :n], self.normal[row, :n]
        departure = own - normal
        known = np.isfinite(own)
        self.excess[row] = np.where(known & (count >= LEARN), departure, np.nan)
        young = count < LEARN
        gain = np.where(known & (young | (departure < doubled / 2)), np.maximum(1 / (count + 1), _GAIN), 0.0)
        normal += np.where(gain > 0, gain * np.where(known, departure, 0.0), 0.0)

    def _growth(self, frame: Frame, now: Floats, n: int) -> Floats:
        """(K, N) since the last look; NaN where a counter is missing, fell or began anew."""
        last, lives = self.last[:, :n], frame["nic.generation"]
        growth = np.where(np.isfinite(now) & (now >= last), now - last, np.nan)
        known = self.normal[3, :n]
        growth[:, np.isfinite(lives) & (known > 0) & (lives != known)] = np.nan
        self.normal[3, :n] = np.where(np.isfinite(lives), lives, known)
        self.last[:, :n] = np.where(np.isfinite(now), now, np.nan)
        return growth

    def _grow(self, size: int) -> None:
        more = size - self.last.shape[1]
        if more > 0:
            self.last = np.concatenate([self.last, np.full((len(_READ), more), np.nan)], axis=1)
            self.normal = np.concatenate([self.normal, np.zeros((len(_CELLS), more))], axis=1)

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _ARRAYS}
        return {**arrays, "time": self.time}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in _ARRAYS:
            setattr(self, name, np.array(state[name]))
        self.time = int(state["time"])


def _row_sum(values: Floats) -> Floats:
    """(N,) sum over what is known; NaN where nothing is."""
    return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)
