"""The compiled loop of resistance.py: one pass over all GPUs, where array after array would be ten times slower."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

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
