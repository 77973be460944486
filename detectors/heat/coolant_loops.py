"""One coolant loop: how its flow and supply depart, whether that is real, and what it means.

Measured: compiled loops over all coolant loops, which are few, so that NumPy calls would cost more. Checked: the heat
balance shows whether the flow fell or its meter is wrong. Decided: lost flow or a broken meter, warm water or a new
set-point.

Heat balance: kW = L/min * K / 15.1 for 25 % propylene glycol. Where less flows, it warms by more and carries the same
heat; where only the meter shows less, the heat computed from it falls too. The share of the GPUs' power that a loop or
branch carries is its own (0.75 to 0.95 for cold plates, the rest is air), so it is compared with its own past. It is
unknown with idle GPUs, without the return temperature or without GPU power: then a fall is attributed to the meter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison, make_evidence
from detectors.base.kernel import compiled
from detectors.base.state import N, State, memory, notes
from detectors.base.streams import Bools, Floats, Step, Streams
from detectors.base.throttle import has_reason, read_reasons
from detectors.base.topology_index import TopologyIndex, per_topology
from detectors.heat.throttling import HEAT
from pipeline.model.entity_names import pager_title
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level, to_json

Ints = NDArray[np.int64]
PEERS = 4  # loops below which the median proves nothing, and a loop is judged by its own past alone; chosen
LEAST = 1e-3  # of a unit: the logarithm of a standstill; chosen
_LEAST_FLOW = 1.0  # L/min; a loop with less is idle; chosen
_BACK, _WELL = (
    0.02,
    5,
)  # share that a flow may lack, the error of meters, and samples for which, until it is back; chosen
_FAST_S, _SLOW_S = 30.0, 120.0  # s of the two means of the supply whose difference gives its slope; chosen
_RAPID = 0.5  # K/min; ASHRAE TC 9.9 allows 20 K/h, which is 0.33: half as much again, as two moves may meet; chosen
_JUMP_K, _JUMP_K_S = 1.5, 0.1  # K in one sample, and K/s: litres of coolant warm within minutes; chosen
_REMEMBERED = 6 * 3600 * SECOND  # us for which a rapid rise or a jump counts; chosen
MOVED = 0.05  # ln by which pressure or speed must move to confirm a flow; above the noise of both; chosen
SHARE = 0.3  # of the flow's departure: a valve that closes raises the head of a pump by a part of it; chosen
_CALM = 0.1  # ln; a pressure that swings by more proves nothing; chosen
PG25 = 15.1  # K L/min per kW: 25 % propylene glycol, 1.02 kg/L, 3.9 kJ/kg K
LEAST_DT = 5.0  # K; below it 0.3 K of two sensors and 2 % of the flow make the heat balance worthless
_NONE = np.empty(0, np.intp)
DOUBTED = "doubted"
"""Key of the evidence: the instrument rather than the loop, or a flow that follows the load; corroborates nothing."""


@dataclass(frozen=True, slots=True)
class CoolantRules:
    """Settings of the detector `coolant`."""

    flow_delta: float
    temperature_delta: float
    warm: float
    hot: float
    collapse: float
    hold: float


@dataclass(frozen=True, slots=True)
class LoopSteps:
    """An instant: frames, and the step of each stream. expected: -ln of the expected flow."""

    frame: Frame
    gpus: Frame | None
    flow: Step
    warmth: Step
    pressure: Step
    speed: Step
    expected: Floats


class LoopGpus:
    """The GPUs of each loop."""

    def __init__(self) -> None:
        self._index = TopologyIndex()

    def find(self, loop: str, gpus: Frame | None) -> NDArray[np.intp]:
        """Returns the numbers of a loop's GPUs."""
        if gpus is None:
            return _NONE
        self._index.update(gpus.entities, gpus.topology)
        return self._index.positions_below(loop)


# --- measurements ----------------------------------------------------------------------------------------------------


@compiled
def find_common(departure: Floats, groups: NDArray[np.int32]) -> Floats:
    """Returns (K, N) median departure of the measured comparable loops, of K signals; NaN where fewer than PEERS."""
    shift, room = np.full(departure.shape, np.nan), np.empty(departure.shape[1])
    for k in range(departure.shape[0]):
        for group in range(groups.max() + 1 if len(groups) else 0):
            count = 0
            for i in range(len(groups)):
                if groups[i] == group and math.isfinite(departure[k, i]):
                    room[count] = departure[k, i]
                    count += 1
            if count >= PEERS:
                ranked = np.sort(room[:count])
                middle = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
                for i in range(len(groups)):
                    if groups[i] == group:
                        shift[k, i] = middle
    return shift


@compiled
def count_collapsed(
    flow: Floats, expected: Floats, gate: Bools, share: float, time: int, low: Ints, low_since: Ints
) -> None:
    """Counts samples in a row with less than `share` of the expected flow."""
    for i in range(len(flow)):
        usual = math.exp(-expected[i])
        if math.isfinite(flow[i]) and math.isfinite(usual) and (usual >= _LEAST_FLOW) and gate[i]:
            bad = flow[i] < share * usual
            if bad and ((low[i] == 0) or (low_since[i] > time)):
                low_since[i] = time
            low[i] = low[i] + 1 if bad else 0


@compiled
def follow_flow(
    lost: Floats, effect: NDArray[np.float32], delta: float, time: int, large: Ints, well: Ints, back: Bools
) -> None:
    """Follows since when the flow is low by `delta`, and whether it is back. lost: ln below the expected flow."""
    for i in range(len(lost)):
        if not effect[i] >= delta:
            large[i] = 0
        elif (large[i] == 0) or (large[i] > time):  # the clock may have been set back
            large[i] = time
        if math.isfinite(lost[i]):
            well[i] = well[i] + 1 if lost[i] < max(_BACK, effect[i] / 4) else 0
        back[i] = well[i] >= _WELL


@compiled
def follow_supply(
    supply: Floats, time: int, last: Floats, at: Ints, fast: Floats, slow: Floats, rapid_at: Ints, jumped_at: Ints
) -> None:
    """Records when the supply rose faster than a set-point does, or jumped within one sample."""
    for i in range(len(supply)):
        now = supply[i]
        if not math.isfinite(now):
            continue
        seconds = max((time - at[i]) / SECOND, 0.0)
        step = abs(now - last[i])
        if (at[i] > 0) and (step > _JUMP_K) and (step > _JUMP_K_S * seconds):
            jumped_at[i] = time
        for state, lag in ((fast, _FAST_S), (slow, _SLOW_S)):
            if math.isnan(state[i]):
                state[i] = now
            state[i] += (1 - math.exp(-seconds / lag)) * (now - state[i])
        if (fast[i] - slow[i]) * 60 / (_SLOW_S - _FAST_S) >= _RAPID:
            rapid_at[i] = time
        last[i], at[i] = now, time


@dataclass
class FlowState(State):
    """(N,) per loop. ready: its flow is learned.   back: a flow that was low is back; well: samples for which it is.

    low, low_since: samples in a row of a collapse, and since when.   large_since: since when `flow_delta` is missing.
    """

    ready: Bools = memory(False, np.bool_)
    back: Bools = memory(False, np.bool_)
    well: Ints = memory(0, np.int64)
    low: Ints = memory(0, np.int64)
    low_since: Ints = memory(0, np.int64)
    large_since: Ints = memory(0, np.int64)


@dataclass
class SupplyState(State):
    """(N,) per loop. last, last_at: newest supply temperature.   fast, slow: its means.

    rapid_at, jumped_at: when it last rose faster than a set-point does, or jumped.
    """

    last: Floats = memory(np.nan)
    last_at: Ints = memory(0, np.int64)
    fast: Floats = memory(np.nan)
    slow: Floats = memory(np.nan)
    rapid_at: Ints = memory(-_REMEMBERED, np.int64)
    jumped_at: Ints = memory(-_REMEMBERED, np.int64)

    def update(self, supply: Floats, time: int) -> None:
        """Adds an instant."""
        n = len(supply)
        last, means = (self.last[:n], self.last_at[:n]), (self.fast[:n], self.slow[:n])
        follow_supply(supply, time, *last, *means, self.rapid_at[:n], self.jumped_at[:n])

    def relearn(self, mask: Bools) -> None:
        """Resets rapid rises and jumps of some loops."""
        for at in (self.rapid_at, self.jumped_at):
            at[: len(mask)][mask] = -_REMEMBERED

    def is_jumped(self, i: int, time: int) -> bool:
        """Returns whether the supply's sensor jumped recently."""
        return 0 <= time - int(self.jumped_at[i]) < _REMEMBERED

    def is_rapid(self, i: int, time: int) -> bool:
        """Returns whether the supply recently rose faster than set-points do."""
        return 0 <= time - int(self.rapid_at[i]) < _REMEMBERED


# --- whether a fall of the flow is real ------------------------------------------------------------------------------

_EVERY = 30 * SECOND  # us between two balances: the water of a loop takes minutes to warm; chosen
_ALIKE = 0.5  # share of the flow's fall up to which the heat may fall too, and the fall is real; chosen
_SEEN = 0.8  # share of the fall that samples with a known heat must show: five minutes of them at least; chosen
_LEARN = 20  # samples before it is used: the replay contract
_FOLLOWS = 1 / 240  # gain of a sample: two hours, in which a usual share changes; chosen
_SMOOTH = 0.15  # gain of a sample: three minutes; chosen
_STEADY = 0.1  # ln by which the power may be off its mean: water warms minutes after the GPUs; chosen
_POWER_GAIN = 0.25  # gain of a sample: the two minutes of a loop's water; chosen
_ROWS = 5  # usual, samples, lost, fallen, power: rows of the cells
_FALL_ROWS = slice(2, 4)


@dataclass
class HeatBalance(State):
    """(N,) per loop or branch. It learns only while the flow is usual.

    Rows of the cells: usual -ln of the share of power that the coolant carries, and samples; ln by which heat (lost)
    and flow (fallen) are below usual, smoothed over the same samples since the flow fell, without earlier
    samples; ln of the recent power.
    """

    cells: Floats = memory(0.0, shape=(_ROWS, N))
    last: int = notes(int)

    def update(self, frame: Frame, gpus: Frame | None, loops: LoopGpus, calm: Bools, fallen: Floats) -> None:
        """Adds one instant. calm: (N,) flow usual and no maintenance; fallen: ln of the fall, 0 where there is none."""
        if 0 <= frame.time - self.last < _EVERY:
            return
        self.last, n = frame.time, len(frame.entities)
        self.grow(n)
        self.cells[_FALL_ROWS, np.flatnonzero(fallen == 0)] = 0.0
        if gpus is None:
            return
        usual, samples, lost, fell, mean_power = self.cells[:, :n]
        power = np.log(self._sum_power(frame, gpus, loops))
        off = np.where(mean_power == 0, 0.0, power - mean_power)
        mean_power += np.where(np.isfinite(power), np.where(mean_power == 0, power, _POWER_GAIN * off), 0.0)
        warmed = frame["coolant.return_temperature"] - frame["coolant.supply_temperature"]
        heat = frame["coolant.flow"] * np.where(warmed >= LEAST_DT, warmed, np.nan) / PG25
        value = power - np.log(1000 * np.where(heat > 0, heat, np.nan))
        known = np.isfinite(value) & (np.abs(off) <= _STEADY)
        learns = known & calm
        samples += learns
        usual += np.where(learns, np.maximum(1 / np.maximum(samples, 1), _FOLLOWS) * (value - usual), 0.0)
        counts = known & (samples >= _LEARN) & (fallen != 0) & np.isfinite(fallen)
        lost += np.where(counts, _SMOOTH * (value - usual - lost), 0.0)
        fell += np.where(counts, _SMOOTH * (fallen - fell), 0.0)

    def confirms_fall(self, i: int, fallen: float) -> bool:
        """Returns whether a fall of the flow by `fallen` (ln) is real: the heat is known since and did not fall."""
        if i >= self.cells.shape[1]:
            return False
        lost, fell = self.cells[_FALL_ROWS, i]
        return bool(fell >= _SEEN * fallen and abs(lost) <= _ALIKE * fell)

    def _sum_power(self, frame: Frame, gpus: Frame, loops: LoopGpus) -> Floats:
        """Returns (N,) W that the GPUs of each draw; NaN where there are none."""
        row, gpu = self._find_gpus(frame, gpus, loops)
        power = gpus["gpu.power"][gpu]
        total = np.bincount(row, np.where(power > 0, power, 0.0), minlength=len(frame.entities))
        return np.where(total > 0, total, np.nan)

    @per_topology
    def _find_gpus(self, frame: Frame, gpus: Frame, loops: LoopGpus) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Returns pairs of loop and GPU as two arrays."""
        found = [loops.find(e, gpus) for e in frame.entities]
        row = np.repeat(np.arange(len(found)), [len(part) for part in found])
        return row, np.concatenate(found) if found else _NONE


# --- what it means ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """level, what else moved, and whether the flow meter or the supply's sensor is to blame."""

    level: Level
    others: tuple[str, ...] = ()
    meter: bool = False
    sensor: bool = False


@dataclass(frozen=True, slots=True)
class LoopJudge:
    """Decides what the departure of one loop means, from the detector's settings and state."""

    rules: CoolantRules
    flows: FlowState
    supplies: SupplyState
    pressure: Streams
    speed: Streams
    balance: HeatBalance
    gpus: LoopGpus

    def decide(self, steps: LoopSteps, i: int, comparable: bool) -> LoopVerdict:
        """Returns the worse of flow and supply. comparable: among enough loops of its kind."""
        rules, time = self.rules, steps.frame.time
        flow = self._judge_flow(steps, i, comparable)
        if flow.level == "page" or not steps.warmth.on[i]:
            return flow
        sensor = self.supplies.is_jumped(i, time)
        level: Level = "suspect"
        effect, held = float(steps.warmth.effect[i]), int(steps.warmth.held[i]) >= rules.hold
        rapid = self.supplies.is_rapid(i, time) and effect >= rules.temperature_delta
        hot = effect >= rules.hot and held
        if not sensor and (rapid or hot or gpus_throttle(steps.gpus, steps.frame.entities[i], self.gpus)):
            level = "page"
        elif not sensor and effect >= rules.warm and held:
            level = "ticket"
        level = max(level, flow.level, key=LEVELS.index)
        return LoopVerdict(level, flow.others, flow.meter, sensor)

    def _judge_flow(self, steps: LoopSteps, i: int, comparable: bool) -> LoopVerdict:
        """Pages low flow that pressure or pump confirm, or, after a hold, that they can neither confirm nor exclude."""
        flows, rules = self.flows, self.rules
        low = bool(flows.low[i] >= 2)
        if flows.back[i] or not (low or steps.flow.on[i]):
            return LoopVerdict("suspect")
        need = max(MOVED, SHARE * _departure(steps, i))
        frame = steps.frame
        moved = {
            "coolant.pressure": _has_moved(steps.pressure, self.pressure, frame["coolant.pressure"], i, need, low),
            "pump.speed": _has_moved(steps.speed, self.speed, frame["pump.speed"], i, need, low),
        }
        others = tuple(name for name, answer in moved.items() if answer)
        against = not others and any(answer is False for answer in moved.values())
        large = bool(flows.large_since[i])
        held = (frame.time - int(flows.large_since[i])) / SECOND if large else 0.0
        real = against and large and held >= rules.hold
        if real and self.balance.confirms_fall(i, float(steps.flow.effect[i])):
            return LoopVerdict("page" if comparable else "ticket", ("coolant.return_temperature",))
        if against:
            return LoopVerdict("suspect", (), meter=True)
        if low or (large and others):
            return LoopVerdict("page", others)
        if large and held >= rules.hold:
            return LoopVerdict("page" if comparable else "ticket", others)
        return LoopVerdict("suspect", others)


def _departure(steps: LoopSteps, i: int) -> float:
    """Returns ln by which the flow is below the expected one, now or smoothed."""
    flow, expected = float(steps.frame["coolant.flow"][i]), float(steps.expected[i])
    now = -np.log(max(flow, 1e-3)) - expected if np.isfinite(flow) and np.isfinite(expected) else 0.0
    return max(float(now), float(steps.flow.effect[i]))


def _has_moved(step: Step, streams: Streams, values: Floats, i: int, need: float, sudden: bool) -> bool | None:
    """Returns whether another sensor of the loop moved, either way; None if it cannot decide.

    sudden: one sample is enough.
    """
    value = float(values[i])
    if not step.judged[i] or not value > 0 or float(streams.cells[1, i]) > _CALM**2:
        return None
    now = abs(-np.log(value) - float(streams.cells[0, i]))
    return bool(max(now if sudden else 0.0, abs(float(step.effect[i]))) >= need)


def gpus_throttle(gpus: Frame | None, loop: str, loops: LoopGpus) -> bool:
    """Returns whether at least two GPUs of the loop throttle by heat."""
    below = loops.find(loop, gpus)
    if gpus is None or not len(below):
        return False
    bits, _ = read_reasons(gpus["gpu.throttle_reasons"][below])
    return int(np.count_nonzero(has_reason(bits, int(HEAT)))) >= 2


def make_loop_finding(
    steps: LoopSteps, i: int, due: tuple[int, Level], verdict: LoopVerdict, judge: LoopJudge, alike: int
) -> Finding:
    """Returns the finding of a loop. alike: comparable loops, itself among them."""
    frame, parts = steps.frame, list[str]()
    peers = alike - 1 if alike >= PEERS else 0
    cohort = f"own past, less the common departure of {peers} comparable loops" if peers else "own past"
    entity, flow = frame.entities[i], float(frame["coolant.flow"][i])
    usual, supply = float(np.exp(-steps.expected[i])), float(frame["coolant.supply_temperature"][i])
    more: dict[str, Any] = {"corroborated_by": list(verdict.others)}
    signals: list[str] = []
    doubts: list[bool] = []
    if (steps.flow.on[i] or judge.flows.low[i] >= 2) and not judge.flows.well[i]:
        parts.append(f"flow {flow:.3g} L/min, usual {usual:.3g}{'; likely its meter' if verdict.meter else ''}")
        signals = ["coolant.flow", *verdict.others]
        doubts.append(verdict.meter)
        clears = "ends when the flow is back at its usual value"
        compared = Comparison(flow, usual, None, cohort, peers, 1 - flow / usual, "L/min")
    if steps.warmth.on[i]:
        rise = float(steps.warmth.effect[i])
        sensor = "; likely its sensor" if verdict.sensor else ""
        parts.append(f"supply {supply:.0f} °C, {rise:.1f} K above usual{sensor}")
        more |= {"supply_temperature": to_json(supply), "supply_rise": round(rise, 2)}
        if not signals:
            clears = "ends when the supply is back within half of that"
            compared = Comparison(supply, supply - rise, None, cohort, peers, rise, "K")
        signals.append("coolant.supply_temperature")
        doubts.append(verdict.sensor)
    more[DOUBTED] = due[1] == "suspect" and all(doubts)
    score = float(max(steps.flow.score[i], steps.warmth.score[i]))
    evidence = make_evidence(clears, compared, **more, **_measure_heat(steps, i, judge.gpus))
    count = len(judge.gpus.find(entity, steps.gpus))
    affected = f", cools {count} GPUs" if count and len(parts) == 1 else ""
    title = pager_title(entity, "; ".join(parts) + affected)
    return Finding(frame.time, due[0], entity, "coolant", due[1], score, title, evidence, tuple(signals))


def _measure_heat(steps: LoopSteps, i: int, loops: LoopGpus) -> dict[str, float | None]:
    """Returns the heat that the coolant carries, and its share of the GPUs' power: evidence, no level depends on it."""
    frame = steps.frame
    warmed = float(frame["coolant.return_temperature"][i] - frame["coolant.supply_temperature"][i])
    flow = float(frame["coolant.flow"][i])
    if not (warmed >= LEAST_DT and flow > 0):
        return {}
    carried = flow * warmed / PG25
    below = loops.find(frame.entities[i], steps.gpus)
    power = float(np.nansum(steps.gpus["gpu.power"][below])) / 1000 if steps.gpus is not None and len(below) else 0.0
    return {"heat_kw": round(carried, 1), "heat_share": round(carried / power, 2) if power > 1 else None}
