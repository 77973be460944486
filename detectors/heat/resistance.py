"""How hot each GPU is for its power, against its own past at the same load: ln of R = (T - reference) / P.

The reference is the coolant that reaches the GPU, else the air at its node's inlet. Where neither is measured, it is
estimated from the GPUs that share coolant or air: the median of what each is warmer than it was at the same power.

R depends on the load, since fans follow it: the usual R of a GPU is learnt for each band of its power, on its own and
over the median of its peers, which inlet and fans move alike. On air it also depends on the other GPUs of the node,
which heat its intake and drive its fans: there a GPU is judged only while all GPUs of its node have a similar load.

A die follows its power within 5 to 60 s (heat capacity times R), so the power goes through a first-order filter, and a
sample counts only once the power has been steady. The reported power is checked against the board's energy counter,
which also counts between two readings (Yang et al., SC 2024, on NVML's part-time sensors).

One compiled loop over all GPUs computes it: NumPy array operations would take ten times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.state import N, State, memory, notes
from detectors.base.statistics import grouped_median
from detectors.base.streams import Bools, Floats, Singles
from detectors.base.topology_index import per_device_topology
from pipeline.model.compiling import compiled, inlined
from pipeline.model.records import SECOND, Frame

HIGHEST = 5000.0  # W; more is not a reading of a board
_LAG_S, _LOAD_S = 30.0, 120.0
"""s of the two means of the power: as a die follows it (lags of 5 to 60 s are published), and long against that."""
_CALM, _CALM_S = 0.1, 60.0
"""Share of the highest power by which the two may differ, and s for which they have not: a die of the longest lag is
then within 3 % of its heat. The two also meet for some seconds while a load dips. Chosen."""
_GROWN = 1.15  # times the highest load so far: more begins another life, a spare or a new power limit; chosen
_EIGHTHS, _BANDS = 8, 10
"""Bands of the power: eighths of the highest one, which is the middle of its band. Chosen: in an eighth
R moves by less than 4 % where fans move it by 30 % from idle to full load."""
_ALIKE = 0.15  # standard deviation of the loads of a node over their mean, up to which they are similar; chosen
_KNOWN, _LEARNT_S = 20, 3600.0
"""Samples from which a band is used, and s at its load after which it no longer changes: what follows is wear. Chosen:
an hour, however often the GPUs are read, since wear of three percent a day must not be learnt."""
_REACH = 1  # bands on either side whose R still counts on air, where fans move it by 4 % a band; chosen
_OUTLIERS = (0.3, 10.0)  # of ln R, and K of the memory, by which a sample is off at most while it is learnt; chosen
_SHIFTED = 0.3
"""ln of R by which the median of peers may be off: a reference wrong by a third of the rise makes peers that lie 22 %
apart (Sinha et al., SC 2022) differ by 8 % more. Beyond that none of them is judged by the others."""
_WORKS = 0.3  # of the way from its lowest load to the highest of its peers; below it is idle; chosen
_BUSY = 0.4  # share of that highest load from which it works if it has never been idle; idle GPUs draw 0.1 to 0.4
LEAST_RISE = 10.0
"""K; NVML rounds to 1 K, which is then at most 5 %: at a load that usually warms it by less, a GPU cannot be judged.
Usually, and not now: of readings around the limit only the warm ones would be judged."""
_DAY_S = 86_400.0  # s of the mean that a reference is compared with: its daily swing is in it
_COOLANT_S = 60.0  # s; coolant and air move within minutes: faster changes are sensor noise; chosen
_LOWEST_C = 15.0  # Cel; below any supply (ASHRAE W17, A1): where no reference is measured, its departure is estimated
_METERED_S, _METERED_MOST, _FADES_S = 120.0, 60.0, 7 * 86_400.0
"""s over which readings and counter are compared (long against a tick of inexact time), samples until their usual
difference is known, and s in which that follows later. Chosen."""
_STUCK_K = 3.0  # K that a temperature must have moved with its power: three steps of rounding; chosen
_STUCK_S = 300.0  # s; no working board reports the same power to the last digit for that long; chosen

_ROWS = 18
_POWER, _LOAD, _PEAK, _IDLE, _REFERENCE, _CLIMATE, _ENERGY, _READ, _COUNTED, _USUAL, _SAMPLES = range(11)
_CORE, _LOWEST, _LARGEST, _REPORTED, _REPORTED_AT, _MOVED_AT, _MEAN_FLUID = range(11, 18)
"""Rows of the state, one cell per GPU each; NaN where not known yet."""
_VALUE, _ABOVE, _RISE, _WATTS, _FLUID, _POWER_ERROR, _KELVIN, _LASTING, _OWN, _LN_R = range(10)
"""Rows of the result."""


@inlined
def _low_pass(state: float, now: float, share: float) -> float:
    """Returns the next state of a first-order lag; a missing reading changes nothing, the first one is the state."""
    if not math.isfinite(now):
        return state
    return now if math.isnan(state) else state + share * (now - state)


@inlined
def _power_error(rows: Floats, i: int, counter: float, power_now: float, seconds: float) -> float:
    """Returns ln of the energy counter over the power readings, less its usual value."""
    joule, lost = (counter - rows[_ENERGY, i]) / 1e3, 1 - math.exp(-seconds / _METERED_S)
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
        gain = 1 / samples if samples <= _METERED_MOST else seconds / _FADES_S
        rows[_USUAL, i] += gain * (share - rows[_USUAL, i])
    return share - rows[_USUAL, i] if samples > 0 else 0.0


@inlined
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


@inlined
def _departure(level: Singles, count: NDArray[np.int16], cell: int, value: float, most: float, learnt: float) -> float:
    """Returns how far a value is from the usual one of a band, NaN until that is known, and learns it. learnt: samples
    after which it no longer changes, 0 while nothing is learnt."""
    usual, n = level[cell], count[cell]
    if (n < learnt) and math.isfinite(value):
        off = value - usual if n < 3 else min(max(value - usual, -most), most)
        count[cell] = n + 1
        level[cell] = usual + off / (n + 1)
    return value - usual if n >= _KNOWN else np.nan


@inlined
def _nearest(levels: Singles, cell: int, reach: int) -> float:
    """Returns the known level of the nearest band, of two the lower one's; NaN if none is within reach."""
    nearest, least = math.nan, reach + 1
    for band in range(max(cell - reach, 0), min(cell + reach + 1, len(levels))):
        away = abs(band - cell)
        if (away < least) and not math.isnan(levels[band]):
            nearest, least = float(levels[band]), away
    return nearest


@inlined
def _band(rows: Floats, i: int) -> int:
    """Returns the band of the power that the die follows."""
    return min(int(_EIGHTHS * rows[_POWER, i] / rows[_PEAK, i] + 0.5), _BANDS - 1)


@inlined
def _follow_load(rows: Floats, i: int, power_now: float, lag: float, slow: float) -> bool:
    """Updates means and extremes of the power; returns whether it is higher than ever, so that R is learnt again."""
    rows[_POWER, i] = _low_pass(rows[_POWER, i], power_now, lag)
    load = rows[_LOAD, i] = _low_pass(rows[_LOAD, i], power_now, slow)
    if not rows[_IDLE, i] <= load:
        rows[_IDLE, i] = load
    grown: bool = load > _GROWN * rows[_PEAK, i]
    if grown or math.isnan(rows[_PEAK, i]):
        rows[_PEAK, i] = load
    return grown


@inlined
def _follow_reference(
    rows: Floats, counts: NDArray[np.int16], i: int, fluid: float, mixed: float, grown: bool
) -> tuple[float, bool]:
    """Updates the reference; returns it, and whether R is learnt again: it is measured now, or the load is higher."""
    before = math.isfinite(rows[_REFERENCE, i])
    now = rows[_REFERENCE, i] = _low_pass(rows[_REFERENCE, i], fluid, mixed)
    measured = math.isfinite(now)
    fresh = grown or ((measured != before) and (counts[0, i].max() > 0))
    if fresh:
        counts[:, i] = 0
    return now if measured else _LOWEST_C + (0.0 if math.isnan(rows[_CLIMATE, i]) else rows[_CLIMATE, i]), fresh


@compiled
def _measure_all(
    rows: Floats,
    levels: Singles,
    counts: NDArray[np.int16],
    before: Singles,
    reported: Floats,
    core: Floats,
    counter: Floats,
    fluid: Floats,
    alike: Bools,
    highest: Floats,
    now: float,
    seconds: float,
    out: Floats,
    works: Bools,
    fresh: Bools,
) -> None:
    """Adds one sample of every GPU to the state; fills most rows of `out`, `works` and `fresh`. now, seconds: in s."""
    lag, slow = 1 - math.exp(-seconds / _LAG_S), 1 - math.exp(-seconds / _LOAD_S)
    mixed, daily = 1 - math.exp(-seconds / _COOLANT_S), 1 - math.exp(-seconds / _DAY_S)
    for i in range(len(reported)):
        power_now = reported[i] if (reported[i] > 0) and (reported[i] < HIGHEST) else np.nan
        grown = _follow_load(rows, i, power_now, lag, slow)
        out[_FLUID, i], fresh[i] = _follow_reference(rows, counts, i, fluid[i], mixed, grown)
        if fresh[i]:
            before[i] = math.nan
        rows[_MEAN_FLUID, i] = _low_pass(rows[_MEAN_FLUID, i], out[_FLUID, i], daily)
        rise, power = core[i] - out[_FLUID, i], rows[_POWER, i]
        out[_RISE, i], out[_WATTS, i] = rise, power
        out[_POWER_ERROR, i] = _power_error(rows, i, counter[i], power_now, seconds)
        stuck = _is_stuck(rows, i, core[i], power_now, rise, now)
        if not abs(power - rows[_LOAD, i]) <= _CALM * rows[_PEAK, i]:
            rows[_MOVED_AT, i] = now
        calm = not (now - rows[_MOVED_AT, i] < _CALM_S) and math.isfinite(power_now) and not stuck
        if calm and alike[i] and (rise > 0):
            idle, top = rows[_IDLE, i], max(rows[_PEAK, i], highest[i])
            least = idle + _WORKS * (top - idle) if 2 * idle <= top else _BUSY * top
            cell = _band(rows, i)
            usual = math.exp(levels[0, i, cell]) * power if counts[0, i, cell] >= _KNOWN else rise
            works[i] = (rows[_LOAD, i] >= least) and (usual >= LEAST_RISE)
            out[_LN_R, i] = math.log(rise / power)


@compiled
def _compare_all(
    rows: Floats,
    levels: Singles,
    counts: NDArray[np.int16],
    before: Singles,
    above: Floats,
    peers: Floats,
    alone: Bools,
    plates: Bools,
    works: Bools,
    learns: Bools,
    learnt: float,
    out: Floats,
) -> None:
    """Fills in how core and memory depart from their usual values at this load. peers: (N,) median of ln R of the
    peers, NaN without; alone: compared with the own past only; learnt: samples that are learnt in a band."""
    for i in range(len(above)):
        ln_r, power, climate = out[_LN_R, i], rows[_POWER, i], rows[_CLIMATE, i]
        if not math.isfinite(ln_r):
            continue
        cell = _band(rows, i)
        if counts[0, i, cell] >= _KNOWN:
            warmer = out[_RISE, i] - math.exp(levels[0, i, cell]) * power
            out[_KELVIN, i] = warmer if math.isnan(climate) else warmer + climate
        own = _departure(levels[0, i], counts[0, i], cell, ln_r, _OUTLIERS[0], learnt * (learns[0, i] and learns[2, i]))
        out[_ABOVE, i] = _departure(levels[1, i], counts[1, i], cell, above[i], _OUTLIERS[1], learnt * learns[1, i])
        beside = _departure(levels[2, i], counts[2, i], cell, ln_r - peers[i], _OUTLIERS[0], learnt * learns[0, i])
        if works[i]:
            usual = _nearest(before[i], cell, _BANDS if plates[i] else _REACH)
            out[_LASTING, i] = own if math.isnan(usual) else ln_r - usual
            both = min(beside, max(own, 0.0)) if plates[i] and (beside > 0) and not math.isnan(own) else beside
            out[_OWN, i], out[_VALUE, i] = own, own if alone[i] else both


_SPARE = 24  # cells between two rows: rows a power of two apart evict each other from the cache; measured
_SET_BACK = 600 * SECOND  # us by which the clock must go back to be followed; less is a frame out of order; chosen


@dataclass(frozen=True, slots=True)
class ResistanceSample:
    """One instant: (N,) each; NaN where not known.

    value:  ln of R over that of its peers, or over its own where it has none, less the usual one at this load; on a
    plate no more than its own past shows: peers at another load, or a few of them, move the other.
    lasting: ln of R over its own usual one, before the last work on the GPU if there was any.
    above:  K of the memory above the core, less the usual ones.   rise: K above the reference.   power: W, as the die
    follows it.   reference: Cel of coolant or air.
    power_error: ln of the energy counter over the power readings, against its usual value; 0 without a counter.
    usable: whether R may be judged.   fresh: learns again, since its load or its reference is another one.
    shifted: its peers moved so much that what each is over the others is another one.
    """

    value: Floats
    lasting: Floats
    above: Floats
    rise: Floats
    power: Floats
    reference: Floats
    power_error: Floats
    usable: Bools
    fresh: Bools
    shifted: Bools


@dataclass
class ThermalResistance(State):
    """The filters behind it, and the usual values by GPU and band: levels and samples of core, memory, and core over
    its peers. On air all GPUs of a node have one inlet and one fan speed, which move R by more than a fault does.

    liquid: (N,) its coolant has been measured, so that its node's air is not its reference.   before: (N, bands) usual
    ln R of its core before the last work on it.
    """

    rows: Floats = memory(np.nan, shape=(_ROWS, N), kept=True)
    liquid: Bools = memory(False, np.bool_, kept=True)
    levels: Singles = memory(0.0, np.float32, shape=(3, N, _BANDS))
    counts: NDArray[np.int16] = memory(0, np.int16, shape=(3, N, _BANDS))
    before: Singles = memory(np.nan, np.float32, shape=(N, _BANDS), kept=True)
    last: int = notes(int)
    _climates: Peers = field(
        default_factory=lambda: Peers(("loop",), ("cdu",), ("node",), ("rack",), ("@sku",), least=4),
        init=False,
        repr=False,
    )

    def measure(
        self, frame: Frame, supply: Floats, inlet: Floats, learns: Bools, groups: NDArray[np.int32]
    ) -> ResistanceSample:
        """Adds a frame and returns its resistances.

        supply, inlet: (N,) Cel of coolant and air, NaN = not measured now.   learns: (2, N) core and memory of each GPU
        are not suspected.   groups: (N,) its peers, -1 none.
        """
        n, time = len(frame.entities), frame.time
        if n > self.rows.shape[1]:
            self.grow(n + _SPARE)
        back = self.last - time >= _SET_BACK
        if back:
            times = [_REPORTED_AT, _MOVED_AT]
            self.rows[times] = np.minimum(self.rows[times], time / SECOND)
        liquid = self.liquid[:n]
        self.rows[_REFERENCE, :n][np.isfinite(supply) & ~liquid] = np.nan
        liquid |= np.isfinite(supply)
        fluid = np.where(liquid, supply, inlet)
        seconds = (time - self.last) / SECOND if self.last and not back else 10.0
        self.last = time if back else max(self.last, time)
        found, works, fresh = np.full((_LN_R + 1, n), np.nan), np.zeros(n, bool), np.zeros(n, bool)
        usable, shifted = np.zeros((2, n), bool)
        if seconds > 0:
            power, core, counter = frame["gpu.power"], frame["gpu.temperature"], frame["gpu.energy"]
            alike, plates, highest = self._compare_loads(frame)
            state, clock = (self.rows, self.levels, self.counts, self.before), (time / SECOND, seconds)
            _measure_all(*state, power, core, counter, fluid, alike, highest, *clock, found, works, fresh)
            peers, _ = grouped_median(np.where(works, found[_LN_R], np.nan), groups)
            above = frame["gpu.memory_temperature"] - core
            usual = self.rows, self.levels, self.counts, self.before
            learnt = max(_LEARNT_S / seconds, _KNOWN)
            _compare_all(*usual, above, peers, groups < 0, plates, works, learns, learnt, found)
            usable = np.isfinite(found[_VALUE]) & self._follow_climate(frame, found[_KELVIN], seconds)
            moved, count = grouped_median(found[_OWN], groups)
            shifted = (np.abs(moved) > _SHIFTED) & (count > 1)
        value, memories, rise, watts, reference, error, _, lasting, _, _ = found
        usable &= ~shifted
        return ResistanceSample(value, lasting, memories, rise, watts, reference, error, usable, fresh, shifted)

    def learn_again(self, mask: Bools, learns: Bools) -> None:
        """Learns the usual values of GPUs again, since work on them may have changed them, and keeps the former ones:
        of a node whose GPUs all cool worse since, it is the work that did it. learns: (N,) GPUs whose node is not
        suspected; those of others are learnt before it was, and kept where there are none yet."""
        kept = self.before[: len(mask)]
        known = mask[:, None] & (self.counts[0, : len(mask)] >= _KNOWN) & (learns[:, None] | np.isnan(kept))
        kept[known] = self.levels[0, : len(mask)][known]
        self.reset(mask)

    def forget(self, mask: Bools) -> None:
        """Learns the usual values of GPUs again without the former ones, after feedback "no fault"."""
        known = mask[: len(self.before)]
        self.before[: len(known)][known] = np.nan
        self.reset(mask)

    def warmer_references(self, reference: Floats) -> Floats:
        """Returns (N,) K by which the references are above their means of a day."""
        return np.asarray(reference - self.rows[_MEAN_FLUID, : len(reference)])

    def powers(self, n: int) -> tuple[Floats, Floats]:
        """Returns (N,) the power of each GPU as its die follows it, and its highest load so far; NaN where unknown."""
        return self.rows[_POWER, :n], self.rows[_PEAK, :n]

    def _compare_loads(self, frame: Frame) -> tuple[Bools, Bools, Floats]:
        """Returns (N,) GPUs that may be judged, since their cooling does not depend on others or their node has one
        load; GPUs on cold plates; and the highest load of the node."""
        n, node = len(frame.entities), self._nodes(frame)
        load, peak = self.rows[_LOAD, :n], self.rows[_PEAK, :n]
        known, size = np.isfinite(load) & (node >= 0), int(node.max(initial=-1)) + 2
        count = np.maximum(np.bincount(node[known], minlength=size), 1)
        mean = np.bincount(node[known], load[known], minlength=size) / count
        square = np.bincount(node[known], load[known] ** 2, minlength=size) / count
        highest = np.zeros(size)
        np.maximum.at(highest, node[known], peak[known])
        uneven = square - mean * mean > (_ALIKE * mean) ** 2
        plates = self._on_coolant(frame) | self.liquid[:n]
        return plates | ~uneven[node], plates, np.where(node >= 0, highest[node], 0.0)

    @per_device_topology
    def _nodes(self, frame: Frame) -> NDArray[np.int32]:
        return frame.topology.group_numbers(frame.entities, "node")

    @per_device_topology
    def _on_coolant(self, frame: Frame) -> Bools:
        """Returns (N,) GPUs below a coolant loop."""
        above = frame.topology.ancestor_of_kind
        return np.array([bool(above(e, "loop") or above(e, "cdu")) for e in frame.entities], bool)

    def _follow_climate(self, frame: Frame, kelvin: Floats, seconds: float) -> Bools:
        """Updates the estimated references; returns (N,) GPUs that have one, measured or estimated."""
        n = len(kelvin)
        measured = np.isfinite(self.rows[_REFERENCE, :n])
        if measured.all():
            return measured
        groups, climate = self._climates.groups(frame), self.rows[_CLIMATE, :n]
        middle, _ = grouped_median(np.where(measured, np.nan, kelvin), groups)
        step = -np.expm1(-seconds / _COOLANT_S) * (middle - climate)
        climate[:] = np.where(np.isnan(middle), climate, np.where(np.isnan(climate), middle, climate + step))
        return np.asarray(measured | (groups >= 0))
