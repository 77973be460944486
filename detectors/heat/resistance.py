"""How well heat leaves each GPU: its thermal resistance R = (T - T_supply) / P, told only when it can be trusted.

A die follows its power within 10 to 20 s (its plate and water hold some 440 J/K at 0.03 K/W), so the power goes through
the same first-order filter before it divides. What the board says of its power is checked against its energy counter,
which does not leave out what lies between two readings (Yang et al., SC 2024, on NVML's part-time sensors).

The compiled loop of resistance.py: one pass over all GPUs, where array after array would be ten times slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detectors.base.kernel import compiled
from detectors.base.streams import Bools, Floats
from pipeline.model.records import SECOND, Frame

LAG_S = 15.0  # of a die behind its power: 440 J/K * 0.035 K/W; between the published 10 and 20 s
HIGHEST = 5000.0  # W; more is no reading of a board
FADES_S = 7 * 86_400.0  # in which a highest power that was a glitch is forgotten; chosen
_SUPPLY_LAG_S = 60.0  # coolant moves within minutes: more than that is noise of its sensor; chosen
_STEP = 0.25  # of the highest power; readings further than that from the filter are a step of the load; chosen
_SETTLES_S = 4 * LAG_S  # after it the die is within 2 % of where it goes
_LEAST_RISE = 10.0  # K; NVML rounds to 1 K, which is then at most 5 %: below it a GPU is idle or cannot be judged
_LEAST_LOAD = 0.4  # share of the highest power that a GPU has shown: the rest is idling; chosen
_METERED_S = 120.0  # of readings and counter that are compared: long against a tick, whose time is not exact; chosen
_METERED_MOST = 60.0  # samples from which is learnt what the two usually differ by; chosen
_STUCK_K = 3.0  # K by which a temperature ought to have moved with its power: three steps of rounding; chosen
_STUCK_S = 300.0  # s for which no power of a board at work stays the same to the last digit; chosen
_FAST_S, _SLOW_S = 60.0, 600.0  # of the two means of ln R whose difference is its slope; chosen
_SWINGS_S = 3 * _SLOW_S  # after a step of the load: until then the means are of two loads, not of a trend; chosen
_SHOT = 0.08  # of ln R within a minute: R stepped, and a step foretells nothing; twice what 1 K of rounding is; chosen

ROWS = (
    *("power", "peak", "supply", "fast", "slow", "stepped", "energy", "read", "counted", "usual", "samples"),
    *("core", "lowest", "highest", "said", "said_at", "shot"),
)
"""Of the state, one cell per GPU each; NaN where nothing is known yet."""
_POWER, _PEAK, _SUPPLY, _FAST, _SLOW, _STEPPED, _ENERGY, _READ, _COUNTED, _USUAL, _SAMPLES = range(11)
_CORE, _LOWEST, _LARGEST, _SAID, _SAID_AT, _SHOT_AT = range(11, 17)
TIMES = [_STEPPED, _SAID_AT, _SHOT_AT]
"""Rows that hold a time, in s."""
LN_R, ABOVE, RISE, DRAWN, BELOW, SLOPE, MISREAD = range(7)
"""Of what is measured."""


@compiled
def _filtered(state: float, now: float, share: float) -> float:
    """One step of a first-order lag; a reading that is missing changes nothing, the first is the state."""
    if not math.isfinite(now):
        return state
    return now if math.isnan(state) else state + share * (now - state)


@compiled
def _misread(rows: Floats, i: int, counter: float, drawn: float, seconds: float, lost: float) -> float:
    """ln by which the energy counter says more than the readings do, less what it usually says."""
    joule = (counter - rows[_ENERGY, i]) / 1e3
    good = (seconds <= _METERED_S) and (joule >= 0) and (joule < HIGHEST * seconds) and math.isfinite(drawn)
    for row in (_READ, _COUNTED, _USUAL, _SAMPLES):
        if math.isnan(rows[row, i]):
            rows[row, i] = 0.0
    if good:
        rows[_READ, i] = (1 - lost) * rows[_READ, i] + drawn * seconds
        rows[_COUNTED, i] = (1 - lost) * rows[_COUNTED, i] + joule
        rows[_SAMPLES, i] += 1
    if math.isfinite(counter):
        rows[_ENERGY, i] = counter
    read, counted, samples = rows[_READ, i], rows[_COUNTED, i], rows[_SAMPLES, i]
    share = math.log(counted / read) if (read > 0) and (counted > 0) else 0.0
    if good:
        # the first minutes say what is usual; later it follows within a week, not within the length of a fault
        gain = 1 / samples if samples <= _METERED_MOST else seconds / FADES_S
        rows[_USUAL, i] += gain * (share - rows[_USUAL, i])
    return share - rows[_USUAL, i] if samples > 0 else 0.0


@compiled
def _stuck(rows: Floats, i: int, core: float, drawn: float, rise: float, now: float) -> bool:
    """Whether the temperature stands still while the power moves, or the power stays the same to the last digit."""
    power = rows[_POWER, i]
    if math.isfinite(core) and (core != rows[_CORE, i]):
        rows[_CORE, i], rows[_LOWEST, i], rows[_LARGEST, i] = core, power, power
    elif not math.isnan(power):
        if not rows[_LOWEST, i] <= power:
            rows[_LOWEST, i] = power
        if not rows[_LARGEST, i] >= power:
            rows[_LARGEST, i] = power
    if math.isfinite(drawn) and (drawn != rows[_SAID, i]):
        rows[_SAID, i], rows[_SAID_AT, i] = drawn, now
    owed = (rows[_LARGEST, i] - rows[_LOWEST, i]) * rise / power
    stands: bool = now - rows[_SAID_AT, i] >= _STUCK_S
    return stands or (owed >= _STUCK_K)


@compiled
def _slope(rows: Floats, i: int, ln_r: float, since: float, now: float, quick: float, slow: float) -> float:
    """Of ln R a minute; NaN for a while after R or, `since` s ago, the load stepped."""
    if abs(ln_r - rows[_FAST, i]) > _SHOT:
        rows[_SHOT_AT, i] = now
    rows[_FAST, i] = _filtered(rows[_FAST, i], ln_r, quick)
    rows[_SLOW, i] = _filtered(rows[_SLOW, i], ln_r, slow)
    creeps: float = (rows[_FAST, i] - rows[_SLOW, i]) * 60 / (_SLOW_S - _FAST_S)
    return np.nan if (since < _SWINGS_S) or (now - rows[_SHOT_AT, i] < _SWINGS_S) else creeps


@compiled
def _powers(rows: Floats, i: int, drawn: float, share: float, fades: float) -> tuple[float, float]:
    """Power as the die follows it, and the highest of late."""
    power: float = _filtered(rows[_POWER, i], drawn, share)
    peak: float = rows[_PEAK, i] * fades
    if not peak >= power and not math.isnan(power):
        peak = power
    rows[_POWER, i], rows[_PEAK, i] = power, peak
    return power, peak


@compiled
def measure(
    rows: Floats,
    told: Floats,
    core: Floats,
    memory: Floats,
    counter: Floats,
    supply: Floats,
    off: Floats,
    else_supply: float,
    now: float,
    seconds: float,
    out: Floats,
    usable: Bools,
    fresh: Bools,
) -> None:
    """One sample of every GPU into `rows`, `out` (7, N), `usable` and `fresh`; `now` and `seconds` in s."""
    die, fluid = 1 - math.exp(-seconds / LAG_S), 1 - math.exp(-seconds / _SUPPLY_LAG_S)
    quick, slow = 1 - math.exp(-seconds / _FAST_S), 1 - math.exp(-seconds / _SLOW_S)
    fades, lost = math.exp(-seconds / FADES_S), 1 - math.exp(-seconds / _METERED_S)
    for i in range(len(told)):
        drawn = told[i] if (told[i] > 0) and (told[i] < HIGHEST) else np.nan
        power, peak = _powers(rows, i, drawn, die, fades)
        fresh[i] = math.isnan(rows[_SUPPLY, i]) and math.isfinite(supply[i]) and (power > 0)
        reference = _filtered(rows[_SUPPLY, i], supply[i], fluid)
        rows[_SUPPLY, i] = reference
        below = (else_supply if math.isnan(reference) else reference) + off[i]
        rise = core[i] - below
        if abs(drawn - power) > _STEP * peak:
            rows[_STEPPED, i] = now
        since = now - rows[_STEPPED, i]
        moving = not _stuck(rows, i, core[i], drawn, rise, now)
        usable[i] = not since < _SETTLES_S and moving and (rise >= _LEAST_RISE) and (power >= _LEAST_LOAD * peak)
        ln_r = math.log(rise / power) if (rise > 0) and (power > 0) else np.nan
        judged = ln_r if usable[i] else np.nan
        creeps = _slope(rows, i, judged, since, now, quick, slow)
        out[LN_R, i], out[ABOVE, i], out[RISE, i] = ln_r, core[i] - memory[i], rise
        out[DRAWN, i], out[BELOW, i] = power, below
        out[SLOPE, i] = creeps * rise
        out[MISREAD, i] = _misread(rows, i, counter[i], drawn, seconds, lost)


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
            above = frame.topology.ancestors
            mine = (next((place[a] for a in above(e) if a in place), -1) for e in frame.entities)
            self._key, self._at = key, np.fromiter(mine, np.int64, len(frame.entities))
        return np.append(coolant["coolant.supply_temperature"], np.nan)[self._at]
