"""Thermal resistance of each GPU: R = (T - T_supply) / P, given only when it can be trusted.

A die follows its power within 10 to 20 s (its plate and water hold some 440 J/K at 0.03 K/W), so the power goes through
the same first-order filter before it divides. The reported power is checked against the board's energy counter, which
also counts between two readings (Yang et al., SC 2024, on NVML's part-time sensors).

One compiled loop over all GPUs computes it: NumPy array operations would take ten times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled
from detectors.base.state import N, State, memory, notes
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import per_topology
from pipeline.model.records import SECOND, Frame

LAG_S = 15.0  # s of a die behind its power: 440 J/K * 0.035 K/W; between the published 10 and 20 s
HIGHEST = 5000.0  # W; more is not a reading of a board
FADES_S = 7 * 86_400.0  # s in which a glitch in the highest power decays; chosen
_SUPPLY_LAG_S = 60.0  # s; coolant moves within minutes: faster changes are sensor noise; chosen
_STEP = 0.25  # share of the highest power; a reading further than that from the filter is a load step; chosen
_SETTLES_S = 4 * LAG_S  # s after a load step until the die is within 2 % of its new temperature
_LEAST_RISE = 10.0  # K; NVML rounds to 1 K, which is then at most 5 %: below it a GPU is idle or cannot be judged
_LEAST_LOAD = 0.4  # share of the highest power that a GPU has shown: the rest is idling; chosen
_METERED_S = 120.0  # s over which readings and counter are compared: long against a tick of inexact time; chosen
_METERED_MOST = 60.0  # samples from which the usual difference of the two is learned; chosen
_STUCK_K = 3.0  # K that a temperature must have moved with its power: three steps of rounding; chosen
_STUCK_S = 300.0  # s; no working board reports the same power to the last digit for that long; chosen
_FAST_S, _SLOW_S = 60.0, 600.0  # s of the two means of ln R whose difference gives its slope; chosen
_SWINGS_S = 3 * _SLOW_S  # s after a load step, during which the means mix two loads; chosen
_JUMP = 0.08  # ln R within a minute: a jump predicts nothing; twice 1 K of rounding; chosen

ROWS = (
    *("power", "peak", "supply", "fast", "slow", "stepped", "energy", "read", "counted", "usual", "samples"),
    *("core", "lowest", "largest", "reported", "reported_at", "jumped_at"),
)
"""Rows of the state, one cell per GPU each; NaN where not known yet."""
_POWER, _PEAK, _SUPPLY, _FAST, _SLOW, _STEPPED, _ENERGY, _READ, _COUNTED, _USUAL, _SAMPLES = range(11)
_CORE, _LOWEST, _LARGEST, _REPORTED, _REPORTED_AT, _JUMPED_AT = range(11, 17)
TIMES = [_STEPPED, _REPORTED_AT, _JUMPED_AT]
"""Rows with a time, in s."""
LN_R, ABOVE, RISE, POWER, SUPPLY, SLOPE, POWER_ERROR = range(7)
"""Rows of the result."""


@compiled
def _low_pass(state: float, now: float, share: float) -> float:
    """Returns the next state of a first-order lag; a missing reading changes nothing, the first one is the state."""
    if not math.isfinite(now):
        return state
    return now if math.isnan(state) else state + share * (now - state)


@compiled
def _power_error(rows: Floats, i: int, counter: float, power_now: float, seconds: float, lost: float) -> float:
    """Returns ln of the energy counter over the power readings, less its usual value."""
    joule = (counter - rows[_ENERGY, i]) / 1e3
    good = (seconds <= _METERED_S) and (joule >= 0) and (joule < HIGHEST * seconds) and math.isfinite(power_now)
    for row in (_READ, _COUNTED, _USUAL, _SAMPLES):
        if math.isnan(rows[row, i]):
            rows[row, i] = 0.0
    if good:
        rows[_READ, i] = (1 - lost) * rows[_READ, i] + power_now * seconds
        rows[_COUNTED, i] = (1 - lost) * rows[_COUNTED, i] + joule
        rows[_SAMPLES, i] += 1
    if math.isfinite(counter):
        rows[_ENERGY, i] = counter
    read, counted, samples = rows[_READ, i], rows[_COUNTED, i], rows[_SAMPLES, i]
    share = math.log(counted / read) if (read > 0) and (counted > 0) else 0.0
    if good:
        # the usual value is learned in the first minutes; later it follows within a week, not within a fault
        gain = 1 / samples if samples <= _METERED_MOST else seconds / FADES_S
        rows[_USUAL, i] += gain * (share - rows[_USUAL, i])
    return share - rows[_USUAL, i] if samples > 0 else 0.0


@compiled
def _is_stuck(rows: Floats, i: int, core: float, power_now: float, rise: float, now: float) -> bool:
    """Returns whether the temperature is constant while the power moves, or the power is constant to the last digit."""
    power = rows[_POWER, i]
    if math.isfinite(core) and (core != rows[_CORE, i]):
        rows[_CORE, i], rows[_LOWEST, i], rows[_LARGEST, i] = core, power, power
    elif not math.isnan(power):
        if not rows[_LOWEST, i] <= power:
            rows[_LOWEST, i] = power
        if not rows[_LARGEST, i] >= power:
            rows[_LARGEST, i] = power
    if math.isfinite(power_now) and (power_now != rows[_REPORTED, i]):
        rows[_REPORTED, i], rows[_REPORTED_AT, i] = power_now, now
    expected = (rows[_LARGEST, i] - rows[_LOWEST, i]) * rise / power
    constant: bool = now - rows[_REPORTED_AT, i] >= _STUCK_S
    return constant or (expected >= _STUCK_K)


@compiled
def _slope(rows: Floats, i: int, ln_r: float, since: float, now: float, quick: float, slow: float) -> float:
    """Returns the slope of ln R per minute; NaN for a while after R jumped or, `since` s ago, the load stepped."""
    if abs(ln_r - rows[_FAST, i]) > _JUMP:
        rows[_JUMPED_AT, i] = now
    rows[_FAST, i] = _low_pass(rows[_FAST, i], ln_r, quick)
    rows[_SLOW, i] = _low_pass(rows[_SLOW, i], ln_r, slow)
    slope: float = (rows[_FAST, i] - rows[_SLOW, i]) * 60 / (_SLOW_S - _FAST_S)
    return np.nan if (since < _SWINGS_S) or (now - rows[_JUMPED_AT, i] < _SWINGS_S) else slope


@compiled
def _follow_power(rows: Floats, i: int, power_now: float, share: float, fades: float) -> tuple[float, float]:
    """Updates the power as the die follows it, and the highest recent one; returns both."""
    power: float = _low_pass(rows[_POWER, i], power_now, share)
    peak: float = rows[_PEAK, i] * fades
    if not peak >= power and not math.isnan(power):
        peak = power
    rows[_POWER, i], rows[_PEAK, i] = power, peak
    return power, peak


@compiled
def measure_all(
    rows: Floats,
    reported: Floats,
    core: Floats,
    memory: Floats,
    counter: Floats,
    supply: Floats,
    off: Floats,
    default_supply: float,
    now: float,
    seconds: float,
    out: Floats,
    usable: Bools,
    fresh: Bools,
) -> None:
    """Adds one sample of every GPU to `rows`; fills `out` (7, N), `usable` and `fresh`. now, seconds: in s."""
    die, fluid = 1 - math.exp(-seconds / LAG_S), 1 - math.exp(-seconds / _SUPPLY_LAG_S)
    quick, slow = 1 - math.exp(-seconds / _FAST_S), 1 - math.exp(-seconds / _SLOW_S)
    fades, lost = math.exp(-seconds / FADES_S), 1 - math.exp(-seconds / _METERED_S)
    for i in range(len(reported)):
        power_now = reported[i] if (reported[i] > 0) and (reported[i] < HIGHEST) else np.nan
        power, peak = _follow_power(rows, i, power_now, die, fades)
        fresh[i] = math.isnan(rows[_SUPPLY, i]) and math.isfinite(supply[i]) and (power > 0)
        reference = _low_pass(rows[_SUPPLY, i], supply[i], fluid)
        rows[_SUPPLY, i] = reference
        below = (default_supply if math.isnan(reference) else reference) + off[i]
        rise = core[i] - below
        if abs(power_now - power) > _STEP * peak:
            rows[_STEPPED, i] = now
        since = now - rows[_STEPPED, i]
        moving = not _is_stuck(rows, i, core[i], power_now, rise, now)
        usable[i] = not since < _SETTLES_S and moving and (rise >= _LEAST_RISE) and (power >= _LEAST_LOAD * peak)
        ln_r = math.log(rise / power) if (rise > 0) and (power > 0) else np.nan
        judged = ln_r if usable[i] else np.nan
        slope = _slope(rows, i, judged, since, now, quick, slow)
        out[LN_R, i], out[ABOVE, i], out[RISE, i] = ln_r, core[i] - memory[i], rise
        out[POWER, i], out[SUPPLY, i] = power, below
        out[SLOPE, i] = slope * rise
        out[POWER_ERROR, i] = _power_error(rows, i, counter[i], power_now, seconds, lost)


_SIGNALS = ("gpu.power", "gpu.temperature", "gpu.memory_temperature", "gpu.energy")
_SET_BACK = 600 * SECOND  # us by which the clock must go back to be followed; less is a frame out of order; chosen
_SPARE = 24  # cells between two rows: rows a power of two apart evict each other from the cache; measured
_RESULTS = {
    "ln_r": LN_R,
    "above": ABOVE,
    "rise": RISE,
    "power": POWER,
    "supply": SUPPLY,
    "slope": SLOPE,
    "power_error": POWER_ERROR,
}


@dataclass(frozen=True, slots=True)
class ResistanceSample:
    """One instant: (N,) each; NaN where not known.

    ln_r:   ln of R of the core, K/W.    above: K of the core above the memory beside it.    rise: K above the supply.
    power:  W, as the die follows it.    supply: Cel of the coolant.    slope: K per minute by which R heats the core.
    power_error: ln of the energy counter over the power readings, against its usual value; 0 without a counter.
    usable: whether R may be judged.    fresh: learn again, since the supply temperature has another source now.
    """

    ln_r: Floats
    above: Floats
    rise: Floats
    power: Floats
    supply: Floats
    slope: Floats
    power_error: Floats
    usable: Bools
    fresh: Bools


@dataclass
class ThermalResistance(State):
    """The filters behind it. default_supply: Cel where the supply temperature is not measured."""

    default_supply: float = 30.0
    rows: Floats = memory(np.nan, shape=(len(ROWS), N))
    last: int = notes(int)

    def measure(self, frame: Frame, supply: Floats, supply_error: Floats | float = 0.0) -> ResistanceSample:
        """Adds a frame and returns its resistances.

        supply: (N,) Cel of what cools each GPU, NaN = not measured now.   supply_error: K that it reads too low.
        """
        n = len(frame.entities)
        if n > self.rows.shape[1]:
            self.grow(n + _SPARE)
        back = self.last - frame.time >= _SET_BACK
        if back:
            self.rows[TIMES] = np.minimum(self.rows[TIMES], frame.time / SECOND)
        seconds = (frame.time - self.last) / SECOND if self.last and not back else 10.0
        self.last = frame.time if back else max(self.last, frame.time)
        found, usable, fresh = np.full((len(_RESULTS), n + _SPARE), np.nan), np.zeros(n, bool), np.zeros(n, bool)
        if seconds > 0:
            error = supply_error if isinstance(supply_error, np.ndarray) else np.full(n, supply_error)
            power, core, memory_temperature, counter = (frame[name] for name in _SIGNALS)
            cooling = (supply, error, self.default_supply)
            now = frame.time / SECOND
            measure_all(
                self.rows, power, core, memory_temperature, counter, *cooling, now, seconds, found, usable, fresh
            )
        return ResistanceSample(**{name: found[row, :n] for name, row in _RESULTS.items()}, usable=usable, fresh=fresh)

    def powers(self, n: int) -> tuple[Floats, Floats]:
        """Returns (N,) the power of each GPU as its die follows it, and the highest recent one; NaN where unknown."""
        return self.rows[ROWS.index("power"), :n], self.rows[ROWS.index("peak"), :n]


class SupplyTemperatures:
    """Temperature of the coolant of each GPU's loop."""

    def read(self, frame: Frame, coolant: Frame | None) -> Floats:
        """Returns (N,) Cel; NaN where it is not measured."""
        if coolant is None:
            return np.full(len(frame.entities), np.nan)
        column = self._find_columns(frame, coolant)
        return np.asarray(np.append(coolant["coolant.supply_temperature"], np.nan)[column])

    @per_topology
    def _find_columns(self, frame: Frame, coolant: Frame) -> NDArray[np.int64]:
        place = {e: i for i, e in enumerate(coolant.entities)}
        above = frame.topology.ancestors
        nearest = (next((place[a] for a in above(e) if a in place), -1) for e in frame.entities)
        return np.fromiter(nearest, np.int64, len(frame.entities))
