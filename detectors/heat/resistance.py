"""How well heat leaves each GPU: its thermal resistance R = (T - T_supply) / P, told only when it can be trusted.

A die follows its power within 10 to 20 s (its plate and water hold some 440 J/K at 0.03 K/W), so the power goes through
the same first-order filter before it divides. What the board says of its power is checked against its energy counter,
which does not leave out what lies between two readings (Yang et al., SC 2024, on NVML's part-time sensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.heat.resistance_kernel import ABOVE, BELOW, DRAWN, LN_R, MISREAD, RISE, ROWS, SLOPE, TIMES, measure
from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_SIGNALS = ("gpu.power", "gpu.temperature", "gpu.memory_temperature", "gpu.energy")
_BACK = 600 * SECOND  # by which the clock must go back to be followed; less is a frame out of order; chosen
_APART = 24  # cells between two rows: rows a power of two apart would push each other out of the cache; measured
_NAMES = ("ln_r", "above", "rise", "power", "supply", "slope", "misread")
_FOUND = dict(zip(_NAMES, (LN_R, ABOVE, RISE, DRAWN, BELOW, SLOPE, MISREAD), strict=True))


@dataclass(frozen=True, slots=True)
class Measured:
    """One instant: (N,) each; NaN where it is not known. usable: R may be judged.

    ln_r: of the core.   above: K of the core above the memory beside it.   slope: K per minute of the core
    by which R grows at the present power, NaN where it is not known.
    fresh: learn anew, since what is compared with has another source now.
    misread: ln by which the counter says more power than the readings, against what it usually does; 0 without one.
    """

    ln_r: Floats
    above: Floats
    rise: Floats
    power: Floats
    supply: Floats
    slope: Floats
    misread: Floats
    usable: Bools
    fresh: Bools


@dataclass
class Resistance:
    """The filters behind it; a part() of a detector. `supply`: what stands for a supply that nobody measures."""

    supply: float = 30.0
    rows: Floats = field(default_factory=lambda: np.full((len(ROWS), 0), np.nan))
    last: int = 0

    def take(self, frame: Frame, supply: Floats, off: Floats | float = 0.0) -> Measured:
        """`supply`: (N,) Cel of what cools each GPU, NaN = not told now; `off`: K by which it lies too low."""
        n = len(frame.entities)
        self._grow(n)
        back = self.last - frame.time >= _BACK
        if back:
            self.rows[TIMES] = np.minimum(self.rows[TIMES], frame.time / SECOND)
        seconds = (frame.time - self.last) / SECOND if self.last and not back else 10.0
        self.last = frame.time if back else max(self.last, frame.time)
        found, usable, fresh = np.full((len(_FOUND), n + _APART), np.nan), np.zeros(n, bool), np.zeros(n, bool)
        if seconds > 0:
            lies = off if isinstance(off, np.ndarray) else np.full(n, off)
            told, core, memory, counter = (frame[name] for name in _SIGNALS)
            else_supply, now = self.supply, frame.time / SECOND
            cools = (supply, lies, else_supply)
            measure(self.rows, told, core, memory, counter, *cools, now, seconds, found, usable, fresh)
        return Measured(**{name: found[row, :n] for name, row in _FOUND.items()}, usable=usable, fresh=fresh)

    def powers(self, n: int) -> tuple[Floats, Floats]:
        """(N,) power of each GPU as its die follows it, and the highest of late; NaN where none was told."""
        return self.rows[ROWS.index("power"), :n], self.rows[ROWS.index("peak"), :n]

    def snapshot(self) -> dict[str, Any]:
        return {"rows": self.rows.copy(), "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows, self.last = state["rows"], state["last"]

    def _grow(self, size: int) -> None:
        if size > self.rows.shape[1]:
            wider = np.full((len(ROWS), size + _APART), np.nan)
            wider[:, : self.rows.shape[1]] = self.rows
            self.rows = wider


class Supplies:
    """(N,) temperature of the coolant of the loop on which each GPU hangs; its map is renewed with the topology."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._at = np.empty(0, np.int64)

    def of(self, frame: Frame, coolant: Frame | None) -> Floats:
        if coolant is None:
            return np.full(len(frame.entities), np.nan)
        key = (id(frame.topology), frame.topology.version, len(frame.entities), len(coolant.entities))
        if key != self._key:
            place = {e: i for i, e in enumerate(coolant.entities)}
            above = frame.topology.above
            mine = (next((place[a] for a in above(e) if a in place), -1) for e in frame.entities)
            self._key, self._at = key, np.fromiter(mine, np.int64, len(frame.entities))
        return np.append(coolant["coolant.supply_temperature"], np.nan)[self._at]
