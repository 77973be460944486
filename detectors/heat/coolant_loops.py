"""One coolant loop: how its flow and supply depart, whether that is real, and what it means.

Loops are few, so that compiled code costs less than NumPy calls. The heat balance shows whether the flow fell or its
meter is wrong; decided is lost flow, a broken meter or less load; warm water, a new set-point or weather.

Heat balance: kW = L/min * K / 15.1 for 25 % propylene glycol. Where less flows, it warms by more and carries the same
heat; where only the meter shows less, the heat computed from it falls too. The share of the GPUs' power that a loop or
branch carries is its own (0.75 to 0.95 for cold plates, the rest is air), so it is compared with its own past. It is
unknown with idle GPUs, without the return temperature or without GPU power: then a fall is attributed to the meter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import N, State, memory, notes
from detectors.base.streams import Bools, Floats, Step, Streams
from detectors.base.throttle import has_reason, read_reasons
from detectors.base.topology_index import TopologyIndex, per_device_topology
from detectors.heat.throttling import HEAT
from pipeline.model.compiling import compiled
from pipeline.model.records import LEVELS, SECOND, Frame, Level

Ints = NDArray[np.int64]
LEAST = 1e-3  # of a unit: the logarithm of a standstill; chosen
_LEAST_FLOW = 1.0  # L/min; a loop with less is idle; chosen
_BACK, _WELL = 0.02, 5  # share that a flow may lack, the error of meters, and samples until it is back; chosen
_FAST_S, _SLOW_S, _HOUR_S = 30.0, 120.0, 3600.0  # s of means of the supply, whose differences give its slope; chosen
_RAPID = 0.5  # K/min; ASHRAE TC 9.9 allows 20 K/h, which is 0.33: half as much again, as two moves may meet; chosen
_NOISE = (
    4.0  # standard deviations of a loop's own slope that a rapid rise must exceed; its noise is seldom white; chosen
)
_BRISK_K = 3.5  # K above the mean of an hour: weather moves water by 3 K an hour at most; chosen
_JUMP_K, _JUMP_K_S = 1.5, 0.1  # K in one sample, and K/s: litres of coolant warm within minutes; chosen
_BEFORE = 600 * SECOND  # us before a condition in which a rapid rise belongs to it: the statistics need time; chosen
_LIMIT_C = 80.0  # Cel of a GPU that reports no limit: NVML gives 83 to 92 for data-center GPUs; less 3 K of rounding
_FIRST_S = 600.0  # s after which a loop's noise is known; chosen: as many samples as the statistics learn from
_QUIET_K = 0.2  # K by which the means of a calm loop differ: the resolution of its sensor; chosen
_SETTLES = 3600 * SECOND  # us after which a jump that nothing confirms is the sensor's new normal; chosen
_FOLLOWED = 0.5  # share of a jump by which the return must have moved too, minutes later; chosen
_SAME = 0.5  # share of the lost flow by which the GPUs' power fell too: valves and pumps follow the load; chosen
_NODES = 3  # nodes of a loop whose GPUs show what it does: two coincide, or have a fault of their own; chosen
_OTHERS = 3  # comparable loops that show what the weather does; chosen
MOVED = 0.05  # ln by which pressure or speed must move to confirm a flow; above the noise of both; chosen
SHARE = 0.3  # of the flow's departure: a valve that closes raises the head of a pump by a part of it; chosen
_STROKE = 60  # s; of a fast actuator of a control valve, 60 to 120 s in data sheets: a shorter loss is regulation
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
    hold: float


@dataclass(frozen=True, slots=True)
class LoopSteps:
    """An instant: frames, and the step of each stream. expected: -ln of the usual flow."""

    frame: Frame
    gpus: Frame | None
    flow: Step
    warmth: Step
    pressure: Step
    speed: Step
    load: Step
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

    @per_device_topology
    def find_nodes(self, gpus: Frame) -> NDArray[np.int32]:
        """Returns (N,) number of each GPU's node; without a node each is one itself."""
        nodes = gpus.topology.group_numbers(gpus.entities, "node")
        return np.where(nodes < 0, -1 - np.arange(len(nodes), dtype=np.int32), nodes)

    def sum_power(self, frame: Frame, gpus: Frame | None) -> Floats:
        """Returns (N,) W that the GPUs of each loop draw, or all of the site where a loop has none that is known."""
        if gpus is None or "gpu.power" not in gpus.values:
            return np.full(len(frame.entities), np.nan)
        row, gpu = self._find_pairs(frame, gpus)
        power = gpus["gpu.power"][gpu]
        total = np.bincount(row, np.where(power > 0, power, 0.0), minlength=len(frame.entities))
        every = float(np.sum(gpus["gpu.power"], where=gpus["gpu.power"] > 0))
        return np.where(total > 0, total, every if every > 0 else np.nan)

    @per_device_topology
    def _find_pairs(self, frame: Frame, gpus: Frame) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Returns pairs of loop and GPU as two arrays."""
        found = [self.find(e, gpus) for e in frame.entities]
        row = np.repeat(np.arange(len(found)), [len(part) for part in found])
        return row, np.concatenate(found) if found else _NONE


# --- measurements ----------------------------------------------------------------------------------------------------


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
    """(N,) per loop. last, at: newest supply that counts.   apart: a reading far from it, until the next one.

    quick_at: since when it is `least` K above the mean of an hour after a rapid rise, 0 not: plain fact, no statistics.

    fast, slow, hour: means.   noise: variance of fast less slow.   watched: s.
    rapid_at, brisk_at: when it last rose faster than a set-point, or than weather.
    jump, jumped_at: K by which it jumped within one sample since its condition began, and when.   back: slow mean of
    the return, from before a jump.
    """

    last: Floats = memory(np.nan)
    at: Ints = memory(0, np.int64)
    apart: Floats = memory(np.nan)
    fast: Floats = memory(np.nan)
    slow: Floats = memory(np.nan)
    hour: Floats = memory(np.nan)
    noise: Floats = memory(0.0)
    watched: Floats = memory(0.0)
    quick_at: Ints = memory(0, np.int64)
    rapid_at: Ints = memory(0, np.int64)
    brisk_at: Ints = memory(0, np.int64)
    jump: Floats = memory(0.0)
    jumped_at: Ints = memory(0, np.int64)
    back: Floats = memory(np.nan)

    def update(self, supply: Floats, returned: Floats, least: float, time: int) -> Floats:
        """Adds an instant; returns the supplies that count: a reading that jumps waits for a second one."""
        found = supply.copy()
        for i, now in enumerate(supply.tolist()):
            if not math.isfinite(now):
                continue
            seconds = max((time - int(self.at[i])) / SECOND, 0.0)
            most = max(_JUMP_K, _JUMP_K_S * seconds)
            if self.at[i] > 0 and abs(now - self.last[i]) > most:
                if not abs(now - self.apart[i]) <= most:
                    self.apart[i], found[i] = now, np.nan
                    continue
                self.jump[i], self.jumped_at[i] = self.jump[i] + now - self.last[i], time
                for mean in (self.fast, self.slow, self.hour):
                    mean[i] = now
            self.apart[i] = np.nan
            self._follow(i, now, float(returned[i]), seconds, time)
            above, began = self.fast[i] - self.hour[i], int(self.quick_at[i])
            starts = above >= least and 0 <= time - self.rapid_at[i] <= _BEFORE
            self.quick_at[i] = (min(began, time) or time) if starts or (began and above >= least / 2) else 0
        return found

    def find_rising(self, n: int, least: float, time: int) -> Bools:
        """Returns (N,) loops that rise rapidly, by half of what counts at least."""
        lately = (self.rapid_at[:n] > 0) & (np.abs(time - self.rapid_at[:n]) <= _BEFORE)
        return np.asarray(lately & (self.fast[:n] - self.hour[:n] >= least / 2))

    def risen(self, i: int) -> float:
        """Returns K above the mean of an hour, if it rose rapidly; else 0."""
        return float(self.fast[i] - self.hour[i]) if self.quick_at[i] else 0.0

    def settle(self, warmth: Step, time: int) -> Bools:
        """Ends jumps that are over or that the return confirms; returns (N,) loops whose new level is the usual one."""
        n = len(warmth.on)
        settled = np.zeros(n, bool)
        for i in np.flatnonzero(self.jump[:n] != 0).tolist():
            self.jumped_at[i] = min(self.jumped_at[i], time)  # the clock may have been set back
            since = time - int(self.jumped_at[i])
            over = since > _BEFORE and not warmth.on[i] and abs(warmth.effect[i]) < abs(self.jump[i]) / 2
            if over or abs(self.jump[i]) < _JUMP_K / 2:
                self.jump[i] = 0.0
            elif since > _SETTLES:
                settled[i], self.jump[i] = True, 0.0
        return settled

    def unexplained(self, i: int, rise: float, returned: float) -> float:
        """Returns K of a rise that no jump of the sensor explains; the return moves with a supply that is warm."""
        jump = float(self.jump[i])
        real = jump and (returned - self.back[i]) / jump >= _FOLLOWED
        return rise if real else rise - max(jump, 0.0)

    def _follow(self, i: int, now: float, returned: float, seconds: float, time: int) -> None:
        """Adds a reading to the means of a loop."""
        for mean, lag in ((self.fast, _FAST_S), (self.slow, _SLOW_S), (self.hour, _HOUR_S)):
            if math.isnan(mean[i]):
                mean[i] = now
            mean[i] += (1 - math.exp(-seconds / lag)) * (now - mean[i])
        if math.isfinite(returned) and self.jump[i] == 0:
            before = returned if math.isnan(self.back[i]) else float(self.back[i])
            self.back[i] = before + (1 - math.exp(-seconds / _SLOW_S)) * (returned - before)
        slope, noise = float(self.fast[i] - self.slow[i]), math.sqrt(self.noise[i])
        if slope * 60 / (_SLOW_S - _FAST_S) >= _RAPID and slope >= _NOISE * noise and self.watched[i] >= _FIRST_S:
            self.rapid_at[i] = time
        # a rise of minutes is not noise
        usual = min(slope * slope, max(2 * noise, _QUIET_K) ** 2)
        self.watched[i] += seconds if self.at[i] else 0.0
        gain = min(max(seconds / max(self.watched[i], _SLOW_S), 1 - math.exp(-seconds / _HOUR_S)), 1.0)
        self.noise[i] += gain * (usual - self.noise[i])
        if self.fast[i] - self.hour[i] >= _BRISK_K:
            self.brisk_at[i] = time
        self.last[i], self.at[i] = now, time


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

    def update(self, frame: Frame, power: Floats, calm: Bools, fallen: Floats) -> None:
        """Adds one instant. power: (N,) -ln of the GPUs' W; calm: flow usual and no maintenance; fallen: ln of the
        fall, 0 where there is none."""
        if 0 <= frame.time - self.last < _EVERY:
            return
        self.last, n = frame.time, len(frame.entities)
        self.grow(n)
        self.cells[_FALL_ROWS, np.flatnonzero(fallen == 0)] = 0.0
        usual, samples, lost, fell, mean_power = self.cells[:, :n]
        power = -power
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


# --- what it means ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """level and onset; others: what else moved.   low, warm: flow or supply is reported.   rise: K of the supply.

    meter, follows, sensor: the flow's meter, the load or the supply's sensor explains it.
    """

    level: Level
    onset: int
    score: float
    rise: float
    others: tuple[str, ...] = ()
    low: bool = False
    warm: bool = False
    meter: bool = False
    follows: bool = False
    sensor: bool = False

    @property
    def doubted(self) -> bool:
        """Whether an instrument or the load explains all of it."""
        return (not self.low or self.meter or self.follows) and (not self.warm or self.sensor)

    @property
    def signals(self) -> tuple[str, ...]:
        """Signals that show it."""
        flow = ("coolant.flow", *self.others) if self.low else ()
        return (*flow, "coolant.supply_temperature") if self.warm else flow

    def describe(self, steps: LoopSteps, i: int) -> list[str]:
        """Returns what a title says of flow and supply."""
        parts = list[str]()
        if self.low:
            flow, usual = float(steps.frame["coolant.flow"][i]), float(np.exp(-steps.expected[i]))
            why = "; likely its meter" if self.meter else ", as its load" if self.follows else ""
            now = (
                f"flow {flow:.3g} L/min, usual {usual:.3g}"
                if np.isfinite(flow)
                else f"flow low, usual {usual:.3g} L/min"
            )
            parts.append(now + why)
        if self.warm:
            supply = float(steps.frame["coolant.supply_temperature"][i])
            warm = f" {supply:.0f} °C," if np.isfinite(supply) else ""  # not read at this instant
            parts.append(f"supply{warm} {self.rise:.1f} K above usual{'; likely its sensor' * self.sensor}")
        return parts


@dataclass(frozen=True, slots=True)
class LoopJudge:
    """Decides what the departure of one loop means, by the detector's settings and state. groups: comparable loops."""

    rules: CoolantRules
    flows: FlowState
    supplies: SupplyState
    pressure: Streams
    speed: Streams
    balance: HeatBalance
    gpus: LoopGpus
    groups: NDArray[np.int32]

    def decide(self, steps: LoopSteps, i: int) -> LoopVerdict:
        """Returns the worse of flow and supply."""
        time, flows = steps.frame.time, self.flows
        hot = gpus_throttle(steps.gpus, steps.frame.entities[i], self.gpus)
        score = float(max(steps.flow.score[i], steps.warmth.score[i]))
        began, levels = list[int](), list[Level]()
        low, warm = bool(steps.flow.on[i] or flows.low[i] >= 2), bool(steps.warmth.on[i] or self.supplies.quick_at[i])
        rise = float(np.fmax(steps.warmth.effect[i], self.supplies.risen(i)))
        low = low and not (flows.back[i] or flows.well[i])
        others, meter, follows, sensor = tuple[str, ...](), False, False, False
        if low:
            level, others, meter, follows = self._judge_flow(steps, i, hot)
            levels.append(level)
            began.append(time - int(steps.flow.held[i]) * SECOND if steps.flow.on[i] else time)
            began.append(int(flows.low_since[i]) if flows.low[i] >= 2 else time)
        if warm:
            held = int(steps.warmth.held[i]) * SECOND if steps.warmth.on[i] else 0
            held = max(held, time - int(self.supplies.quick_at[i] or time))
            level, sensor = self._judge_supply(steps, i, hot, rise, held)
            levels.append(level)
            began.append(time - held)
        worst: Level = max(levels, key=LEVELS.index, default="suspect")
        return LoopVerdict(worst, min(began, default=time), score, rise, others, low, warm, meter, follows, sensor)

    def _judge_supply(self, steps: LoopSteps, i: int, hot: bool, rise: float, held: int) -> tuple[Level, bool]:
        """Returns the level of a warm supply, and whether its sensor explains it. held: us."""
        rules, time = self.rules, steps.frame.time
        real = self.supplies.unexplained(i, rise, float(steps.frame["coolant.return_temperature"][i]))
        since = time - held - _BEFORE
        rapid, brisk = (int(at[i]) > max(since, 0) for at in (self.supplies.rapid_at, self.supplies.brisk_at))
        swings = 3 * _NOISE * math.sqrt(self.supplies.noise[i])  # of the level: thrice those of the slope
        sudden = rapid and real >= max(rules.temperature_delta, swings)
        far = not hot and self._is_far(steps, i, rise)
        if hot or (sudden and not far):
            return "page", False
        like = self.groups == self.groups[i]  # also those that are not read at this instant
        like[i] = False
        shared = float(np.median(steps.warmth.effect[like])) if like.sum() >= _OTHERS else 0.0
        large = real - max(shared, 0.0) >= rules.warm or (min(real, shared) >= (1 + far) * rules.warm and brisk)
        warm = held >= rules.hold * SECOND and (sudden or large)
        return "ticket" if warm else "suspect", real < rules.temperature_delta / 2

    def _is_far(self, steps: LoopSteps, i: int, rise: float) -> bool:
        """Returns whether as large a rise again would slow none of the loop's GPUs; False where nothing is known."""
        gpus, mine = steps.gpus, self.gpus.find(steps.frame.entities[i], steps.gpus)
        if gpus is None or not len(mine):
            return False
        limits = np.fmax(gpus["gpu.slowdown_margin"], gpus["gpu.operating_max_margin"])[mine]
        left = gpus["gpu.thermal_margin"][mine] - np.nan_to_num(limits)
        left = np.where(np.isfinite(left), left, _LIMIT_C - gpus["gpu.temperature"][mine])
        known, nodes = np.isfinite(left), self.gpus.find_nodes(gpus)[mine]
        if 2 * np.count_nonzero(known) < len(mine):
            return False
        near = np.unique(nodes[known & (left <= rise)])
        return len(near) < min(_NODES, len(np.unique(nodes)))

    def _judge_flow(self, steps: LoopSteps, i: int, hot: bool) -> tuple[Level, tuple[str, ...], bool, bool]:
        """Returns the level of low flow, what else moved, and whether its meter or the load explains it."""
        flows, rules, time = self.flows, self.rules, steps.frame.time
        low, large = bool(flows.low[i] >= 2), bool(flows.large_since[i])
        lost = _departure(steps, i)
        need = max(MOVED, SHARE * lost)
        frame = steps.frame
        moved = {
            "coolant.pressure": _has_moved(steps.pressure, self.pressure, frame["coolant.pressure"], i, need, low),
            "pump.speed": _has_moved(steps.speed, self.speed, frame["pump.speed"], i, need, low),
        }
        others = tuple(name for name, answer in moved.items() if answer)
        held = large and time - int(flows.large_since[i]) >= rules.hold * SECOND
        against = not others and any(answer is False for answer in moved.values())
        if hot and (low or large):
            return "page", others, False, False
        if steps.load.measured[i] and steps.load.effect[i] >= _SAME * lost:
            return "suspect", others, False, True
        if against:
            real = held and self.balance.confirms_fall(i, float(steps.flow.effect[i]))
            level: Level = ("page" if low else "ticket") if real else "suspect"
            return level, ("coolant.return_temperature",) if real else (), not real, False
        if low:
            return "page", others, False, False
        lasts = int(steps.flow.held[i]) >= _STROKE and not moved["pump.speed"]
        return "ticket" if lasts or (large and (others or held)) else "suspect", others, False, False


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
    """Returns whether heat throttles GPUs of the loop, on several of its nodes: those of one node have a cause of their
    own, such as a coupling that is half open."""
    below = loops.find(loop, gpus)
    if gpus is None or not len(below):
        return False
    bits, _ = read_reasons(gpus["gpu.throttle_reasons"][below])
    hot, nodes = has_reason(bits, int(HEAT)), loops.find_nodes(gpus)[below]
    return len(np.unique(nodes[hot])) >= min(_NODES, len(np.unique(nodes)))
