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

from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LAG_S = 15.0  # of a die behind its power: 440 J/K * 0.035 K/W; between the published 10 and 20 s
_SUPPLY_LAG_S = 60.0  # coolant moves within minutes: more than that is noise of its sensor; chosen
_STEP = 0.25  # of the highest power; readings further than that from the filter are a step of the load; chosen
_SETTLES_S = 4 * LAG_S  # after it the die is within 2 % of where it goes
_LEAST_RISE = 10.0  # K; NVML rounds to 1 K, which is then at most 5 %: below it a GPU is idle or cannot be judged
_LEAST_LOAD = 0.4  # share of the highest power that a GPU has shown: the rest is idling; chosen
_FADES_S = 7 * 86_400.0  # in which a highest power that was a glitch is forgotten; chosen
_HIGHEST = 5000.0  # W; more is no reading of a board
_METERED_S = 120.0  # of readings and counter that are compared: long against a tick, whose time is not exact; chosen
_STUCK_K = 3.0  # K by which a temperature ought to have moved with its power: three steps of rounding; chosen
_STUCK_S = 300.0  # s for which no power of a board at work stays the same to the last digit; chosen
_METERED_MOST = 60  # samples from which is learnt what the two usually differ by; chosen
_ROW = (
    *("power", "peak", "supply", "fast", "slow", "stepped", "energy", "read", "counted", "usual", "samples"),
    *("core", "lowest", "highest", "said", "said_at", "shot"),
)
_FAST_S, _SLOW_S = 60.0, 600.0  # of the two means of ln R whose difference is its slope; chosen
_SWINGS_S = 3 * _SLOW_S  # after a step of the load: until then the means are of two loads, not of a trend; chosen
_SHOT = 0.08  # of ln R within a minute: R stepped, and a step foretells nothing; twice what 1 K of rounding is; chosen


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
    rows: Floats = field(default_factory=lambda: np.full((len(_ROW), 0), np.nan))
    last: int = 0

    def take(self, frame: Frame, supply: Floats, off: Floats | float = 0.0) -> Measured:
        """`supply`: (N,) Cel of what cools each GPU, NaN = not told now; `off`: K by which it lies too low."""
        self._grow(len(frame.entities))
        seconds = (frame.time - self.last) / SECOND if self.last else 10.0
        self.last = max(self.last, frame.time)
        if seconds <= 0:
            nothing = np.full(len(frame.entities), np.nan)
            unusable = np.zeros(len(nothing), bool)
            return Measured(nothing, nothing, nothing, nothing, nothing, nothing, nothing, unusable, unusable)
        power, peak, reference, fast, slow, stepped, *rest = self.rows[:, : len(frame.entities)]
        told = frame["gpu.power"]
        drawn = np.where((told > 0) & (told < _HIGHEST), told, np.nan)
        _filter(power, drawn, seconds, LAG_S)
        peak *= np.exp(-seconds / _FADES_S)
        np.fmax(peak, power, out=peak)
        fresh = np.isnan(reference) & np.isfinite(supply) & (power > 0)
        _filter(reference, supply, seconds, _SUPPLY_LAG_S)
        below = np.where(np.isnan(reference), self.supply, reference) + off
        core = frame["gpu.temperature"]
        rise, now = core - below, frame.time / SECOND
        stepped[np.abs(drawn - power) > _STEP * peak] = now
        steady = ~(now - stepped < _SETTLES_S)
        moving = ~_stuck(rest[5:10], core, drawn, power, rise, now)
        usable = steady & moving & (rise >= _LEAST_RISE) & (power >= _LEAST_LOAD * peak)
        ln_r = _ratio(rise, power)
        creeps = _slope((fast, slow, rest[10]), np.where(usable, ln_r, np.nan), now, seconds)
        return Measured(
            ln_r=ln_r,
            above=core - frame["gpu.memory_temperature"],
            rise=rise,
            power=power.copy(),
            supply=below,
            slope=np.where(now - stepped < _SWINGS_S, np.nan, creeps * rise),
            misread=_misread(rest[:5], frame["gpu.energy"], drawn, seconds),
            usable=usable,
            fresh=fresh,
        )

    def snapshot(self) -> dict[str, Any]:
        return {"rows": self.rows.copy(), "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows, self.last = state["rows"], state["last"]

    def _grow(self, size: int) -> None:
        if size > self.rows.shape[1]:
            wider = np.full((len(_ROW), size), np.nan)
            wider[:, : self.rows.shape[1]] = self.rows
            self.rows = wider


def _slope(rows: tuple[Floats, Floats, Floats], ln_r: Floats, now: float, seconds: float) -> Floats:
    """(N,) of ln R a minute; none for a while after R stepped."""
    fast, slow, shot = rows
    shot[np.abs(ln_r - fast) > _SHOT] = now
    _filter(fast, ln_r, seconds, _FAST_S)
    _filter(slow, ln_r, seconds, _SLOW_S)
    return np.asarray(np.where(now - shot < _SWINGS_S, np.nan, (fast - slow) * 60 / (_SLOW_S - _FAST_S)))


def _misread(metered: list[Floats], counter: Floats, drawn: Floats, seconds: float) -> Floats:
    """(N,) ln by which the energy counter says more than the readings do, less what it usually says."""
    energy, read, counted, usual, samples = metered
    with np.errstate(invalid="ignore"):
        joule = (counter - energy) / 1e3
        good = (joule >= 0) & (joule < _HIGHEST * seconds) & np.isfinite(drawn)
    lost = 1 - np.exp(-seconds / _METERED_S)
    for total, more in ((read, drawn * seconds), (counted, joule)):
        total[np.isnan(total)] = 0.0
        np.copyto(total, (1 - lost) * total + more, where=good)
    known = np.isfinite(counter)
    np.copyto(energy, counter, where=known)
    both = (read > 0) & (counted > 0)
    share = np.log(np.where(both, counted, 1.0) / np.where(both, read, 1.0))
    samples[np.isnan(samples)] = 0.0
    usual[np.isnan(usual)] = 0.0
    samples += good
    # the first minutes say what is usual; later it follows within a week, not within the length of a fault
    gain = np.where(good, np.where(samples <= _METERED_MOST, 1 / np.maximum(samples, 1), seconds / _FADES_S), 0.0)
    usual += gain * (share - usual)
    return np.asarray(np.where(samples > 0, share - usual, 0.0))


def _stuck(rows: list[Floats], core: Floats, drawn: Floats, power: Floats, rise: Floats, now: float) -> Bools:
    """(N,) whose temperature stands still while its power moves, or whose power stays the same to the last digit."""
    last, lowest, highest, said, said_at = rows
    moved = np.isfinite(core) & (core != last)
    np.copyto(last, core, where=moved)
    lowest[:] = np.where(moved, power, np.fmin(lowest, power))
    highest[:] = np.where(moved, power, np.fmax(highest, power))
    other = np.isfinite(drawn) & (drawn != said)
    np.copyto(said, drawn, where=other)
    said_at[other] = now
    with np.errstate(divide="ignore", invalid="ignore"):
        owed = (highest - lowest) * rise / power
    return (owed >= _STUCK_K) | (now - said_at >= _STUCK_S)


def _filter(state: Floats, now: Floats, seconds: float, lag: float) -> None:
    """One step of a first-order lag in place; a reading that is missing changes nothing, the first is the state."""
    known, share = np.isfinite(now), 1 - np.exp(-seconds / lag)
    if known.all() and np.isfinite(state).all():
        state += share * (now - state)
        return
    old = np.where(np.isnan(state), now, state)
    state[known] = (old + share * (now - old))[known]


def _ratio(rise: Floats, power: Floats) -> Floats:
    """ln(K / W); NaN where one of them is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(np.where((rise > 0) & (power > 0), rise / power, np.nan)))


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
