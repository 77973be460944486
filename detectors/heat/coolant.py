"""Finds coolant loops that lose flow or deliver warm coolant, against their own past and the other loops.

If comparable loops lose flow or warm up together, the hall's water or its pumps are the cause: reported once, on what
the loops share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import DAY_S, rule_line
from detectors.base.calibration import arl0
from detectors.base.cohorts import comparable_attributes
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.state import State
from detectors.base.streams import ALONE, USUAL_STEP, Bools, Channel, Floats, Step, Streams
from detectors.base.topology_index import EVERYTHING, per_topology, pop_members_mask
from detectors.heat.coolant_loops import (
    DOUBTED,
    LEAST,
    MOVED,
    PEERS,
    SHARE,
    CoolantRules,
    FlowState,
    HeatBalance,
    LoopGpus,
    LoopJudge,
    LoopSteps,
    SupplyState,
    count_collapsed,
    find_common,
    follow_flow,
    gpus_throttle,
    make_loop_finding,
)
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level, to_json
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import kind_of

_FOLLOWS = 0.5
"""Share of the lost flow by which the GPUs' power fell too: valves and pumps then follow the load; chosen."""


@dataclass(frozen=True, slots=True)
class CommonDeparture:
    """An instant of what loops share: (N,) each, of the loop's group; NaN where they are too few.

    flow, supply, pressure, speed: departure, ln for all but K of the supply; + is less flow, pressure, speed, more K.
    """

    frame: Frame
    gpus: Frame | None
    groups: NDArray[np.int32]
    flow: Floats
    supply: Floats
    pressure: Floats
    speed: Floats


@dataclass
class SharedStreams(State):
    """CUSUM on the common departure, one stream per loop though those of a group are equal: loops come and go.

    low: samples in a row of a collapse.   large: since when the flow lacks what matters; 0 it does not.
    """

    flow: Streams = part(lambda: Streams(Channel(floor=0.004, delta=0.03, phi=0.6)))
    warmth: Streams = part(lambda: Streams(Channel(floor=0.3, delta=2.75, phi=0.9)))
    power: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.05, phi=0.6)), kept=True)
    low: NDArray[np.int64] = memory(0, np.int64)
    large: NDArray[np.int64] = memory(0, np.int64)

    def update(self, common: CommonDeparture, gate: Bools, rules: CoolantRules) -> tuple[Step, Step, float]:
        """Adds one instant; returns the steps of flow and supply, and ln by which the GPUs draw less than usual."""
        n, time = len(common.flow), common.frame.time
        self.grow(n)
        alone = np.full(n, -1, np.int32)
        flow = self.flow.step(common.flow, alone, time, gate)
        warmth = self.warmth.step(common.supply, alone, time, gate)
        known, low = np.isfinite(common.flow) & gate, self.low[:n]
        low[known] = np.where(common.flow > -np.log(rules.collapse), low + 1, 0)[known]
        big = (flow.effect >= rules.flow_delta) | (low >= 2)
        large = self.large[:n]
        large[big & ((large == 0) | (large > time))] = time  # the clock may have been set back
        large[~big] = 0
        return flow, warmth, self._power_drop(common.gpus, time)

    def _power_drop(self, gpus: Frame | None, time: int) -> float:
        power = gpus["gpu.power"] if gpus is not None else np.empty(0)
        known = power[power > 0]
        value = np.array([-np.log(known.mean()) if len(known) else np.nan])
        step = self.power.step(value, np.full(1, -1, np.int32), time)
        return float(step.effect[0])


@dataclass(frozen=True, slots=True)
class SharedVerdict:
    """What the loops share, and the finding on it."""

    entity: str
    level: Level
    onset: int
    finding: Finding


def judge_shared(
    common: CommonDeparture,
    steps: tuple[Step, Step, float],
    shared: SharedStreams,
    rules: CoolantRules,
    supplies: SupplyState,
    loops: LoopGpus,
    gate: Bools,
) -> SharedVerdict | None:
    """Returns one verdict for all loops that lose flow or warm together; None if none do."""
    flow, warmth, less_power = steps
    n = len(common.flow)
    weak = ((flow.on & (flow.effect > 0)) | (shared.low[:n] >= 2)) & gate & np.isfinite(common.flow)
    warm = warmth.on & gate & np.isfinite(common.supply)
    if not (weak | warm).any():
        return None
    members = np.flatnonzero(weak | warm)
    feeding = [e for i in members.tolist() if len(loops.find(e := common.frame.entities[i], common.gpus))]
    hot = bool(feeding) and 2 * sum(gpus_throttle(common.gpus, e, loops) for e in feeding) >= len(feeding)
    level, text, signals, meters = (
        _judge_flow(common, flow, weak, shared, rules, hot, less_power) if weak.any() else _NOTHING
    )
    other, more, sensor = (
        _judge_supply(common, warmth, warm, rules, supplies, hot) if warm.any() else ("suspect", "", True)
    )
    if other == "page":
        level = "page"
    signals = (*signals, *(("coolant.supply_temperature",) if warm.any() else ()))
    text = ", ".join(part for part in (text, more) if part)
    doubted = level == "suspect" and meters and sensor
    return _make_verdict(
        common, members, level, text, signals, (flow, warmth), {"gpus_throttle": hot, DOUBTED: doubted}
    )


_NOTHING: tuple[Level, str, tuple[str, ...], bool] = ("suspect", "", (), True)


def _judge_flow(
    common: CommonDeparture,
    flow: Step,
    weak: Bools,
    shared: SharedStreams,
    rules: CoolantRules,
    hot: bool,
    less_power: float,
) -> tuple[Level, str, tuple[str, ...], bool]:
    """Pages where pressure, pump or the GPUs confirm it; meters that fall while those are constant are a doubted
    suspect."""
    i = int(np.flatnonzero(weak)[np.argmax(flow.effect[weak])])
    lost = max(float(common.flow[i]), float(flow.effect[i]))
    moved = {"coolant.pressure": common.pressure[i], "pump.speed": common.speed[i]}
    others = tuple(name for name, by in moved.items() if abs(by) >= max(MOVED, SHARE * lost))
    against = not others and any(np.isfinite(by) for by in moved.values())
    follows_load = less_power >= _FOLLOWS * lost
    collapsed, large = bool(shared.low[i] >= 2), int(shared.large[i])
    level: Level = "suspect"
    if hot and (collapsed or large):
        level = "page"
    elif against or follows_load:
        level = "suspect"
    elif collapsed or (large and others):
        level = "page"
    elif large and common.frame.time - large >= rules.hold * SECOND:
        level = "ticket"
    note = " (likely the meters)" if against else ""
    note = note or (" (follows the load)" if follows_load and not hot else "")
    return level, f"flow {100 * -np.expm1(-lost):.0f} % below usual{note}", ("coolant.flow", *others), bool(note)


def _judge_supply(
    common: CommonDeparture, warmth: Step, warm: Bools, rules: CoolantRules, supplies: SupplyState, hot: bool
) -> tuple[Level, str, bool]:
    """Pages where it rose faster or further than set-points are moved, or GPUs throttle."""
    members, time = np.flatnonzero(warm).tolist(), common.frame.time
    i = max(members, key=lambda at: (float(warmth.effect[at]), -at))
    up, held = float(warmth.effect[i]), int(warmth.held[i])
    sensor = sum(supplies.is_jumped(at, time) for at in members) * 2 > len(members)
    rapid = sum(supplies.is_rapid(at, time) for at in members) * 2 >= len(members) and up >= rules.temperature_delta
    sure = not sensor and (rapid or (up >= rules.warm and held >= rules.hold))
    text = f"supply {up:.1f} K above usual" + (" (likely the sensors)" if sensor else "")
    return ("page" if sure or hot else "suspect"), text, sensor


def _make_verdict(
    common: CommonDeparture,
    members: NDArray[np.int64],
    level: Level,
    text: str,
    signals: tuple[str, ...],
    steps: tuple[Step, Step],
    more: dict[str, Any],
) -> SharedVerdict:
    frame, (flow, warmth) = common.frame, steps
    entity = find_common_ancestor(frame, members)
    is_flow = "coolant.flow" in signals
    first = flow if is_flow else warmth
    held = max((int(step.held[i]) for step in steps for i in members.tolist() if step.on[i]), default=0)
    onset = frame.time - max(held, 10) * SECOND
    values = frame[signals[0]][members]
    value = float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")
    worst = float(np.max(first.effect[members]))
    expected, unit = (value / np.exp(-worst), "L/min") if is_flow else (value - worst, "K")
    effect = float(-np.expm1(-worst)) if is_flow else worst
    evidence = make_evidence(
        "ends when flow and supply of the loops are back at their usual values",
        Comparison(value, float(expected), None, "own past", 0, effect, unit),
        loops=[frame.entities[i] for i in members[:16].tolist()],
        judged=len(members),
        **to_json({**more, "supply_rise": float(np.max(warmth.effect[members]))}),
    )
    title = pager_title(entity, f"{len(members)} loops: {text}")
    score = float(np.max(first.score[members]))
    finding = Finding(frame.time, onset, entity, "coolant", level, score, title, evidence, signals)
    return SharedVerdict(entity, level, onset, finding)


def find_common_ancestor(frame: Frame, members: NDArray[np.int64]) -> str:
    """Returns the nearest entity above all of these loops."""
    above = frame.topology.ancestors
    first, *others = [above(frame.entities[i]) for i in members.tolist()]
    shared = set(first).intersection(*others)
    return next((e for e in first if e in shared), EVERYTHING)


_SIGNALS = ("coolant.flow", "coolant.supply_temperature", "coolant.pressure", "pump.speed")
_VALID = np.array([CATALOGUE[signal].valid for signal in _SIGNALS])[:, :, None]
_LOGARITHMS = (0, 2, 3)  # rows judged as -ln: a fall is harm


@dataclass
class Coolant(Detector):
    """Peer-conditioned CUSUM on ln(flow) downwards and supply temperature upwards; pressure and pump speed confirm.

    Flow: suspect from `flow_notice`. Page: two samples in a row below `collapse` of the expected flow, or `flow_delta`
    less with pressure or pump speed moved too; where neither is measured after `hold` s, with fewer than 4 comparable
    loops a ticket instead. Flow that falls alone, while pressure and pump are constant, is the meter: a suspect. But
    where the coolant carries as much heat as before it is a restricted branch (a connector, a rack's manifold) at a
    pressure that its unit holds: page after `hold` s, with fewer than 4 comparable ones a ticket.

    Supply: suspect from `temperature_delta` K; ticket once it is `warm` K above usual for `hold` s; page if it rose
    faster than any change of a set-point, or is `hot` K above for `hold` s, or the GPUs throttle. A supply that jumps
    within one sample is the sensor.

    A common change of four or more comparable loops is subtracted from each and judged separately by the same rules:
    one finding on what the loops share (hall, facility, else site:all).

    Source: heat balance dT = 15.1 * kW / (L/min) for 25 % propylene glycol: a lost pump spends a GPU's margin in
    about 12 s, so flow under 70 % of the loop's own past pages without waiting for statistics; CUSUM of Page (1954);
    pressure goes with the square of the flow, speed with it (affinity laws of pumps).
    """

    name: ClassVar[str] = "coolant"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "coolant"
    needs: ClassVar[tuple[str, ...]] = ("coolant.flow",)
    wants: ClassVar[tuple[str, ...]] = (
        *("coolant.supply_temperature", "coolant.return_temperature", "coolant.pressure", "pump.speed"),
        *("gpu.power", "gpu.throttle_reasons", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A single node's cold plate; fouling over weeks; whether water, valve or heat exchanger warms the supply; and "
        "the minutes until a loop's GPUs throttle."
    )

    threshold: float = 18.5
    flow_notice: float = 0.03
    """ln; half as much again as the error of a flow meter, 2 %: shown, never a notification; chosen."""
    flow_delta: float = 0.1
    temperature_delta: float = 2.75
    """K; three less half a step of noise, so that 3 K are found; chosen."""
    warm: float = 4.0
    """K; more than a set-point is moved by in one step, 1 to 3 K; chosen."""
    hot: float = 6.0
    """K; two such moves of a loop stay below it, and GPUs have some 25 K to their limit; chosen."""
    collapse: float = 0.7
    hold: float = 600.0

    flow: Streams = part(lambda: Streams(Channel(floor=0.004, delta=0.02, phi=0.6)))
    warmth: Streams = part(lambda: Streams(Channel(floor=0.3, delta=2.75, phi=0.9)))
    pressure: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.05, phi=0.6, both=True)))
    speed: Streams = part(lambda: Streams(Channel(floor=0.01, delta=0.05, phi=0.6, both=True)))
    shared: SharedStreams = part(SharedStreams)
    balance: HeatBalance = part(HeatBalance)
    gates: Gates = part(Gates)
    flows: FlowState = part(FlowState)
    supplies: SupplyState = part(SupplyState)
    accepted: list[str] = notes(list)
    conditions: OpenConditions = notes()
    _gpus: LoopGpus = field(default_factory=LoopGpus, init=False, repr=False)
    _alone: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)

    def __post_init__(self) -> None:
        self.flow.channel = Channel(0.004, self.flow_notice, 0.6, self.threshold)
        self.warmth.channel = Channel(0.3, self.temperature_delta, 0.9, self.threshold)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on loops with less flow or warmer supply than their peers and past."""
        self.gates.update(frames)
        frame = frames.get("coolant")
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.flows.grow(n)
        self.supplies.grow(n)
        self._reset_accepted(frame)
        gate = ~self.gates.maintenance_mask(frame)
        values = _read_values(frame)
        baseline = self._find_baselines(n)
        # the common departure of comparable loops is subtracted: a loop that is measured alone has only its own past
        groups = self._find_comparable(frame)
        common = find_common(values - baseline, groups)
        shift = np.where(np.isnan(common), 0.0, common)
        pieces = (self.flow, self.warmth, self.pressure, self.speed)
        alone = self._no_cohort(n)
        steps = [piece.step(row, alone, frame.time, gate) for piece, row in zip(pieces, values - shift, strict=True)]
        expected = baseline[0] + shift[0]
        flow = steps[0]
        self.flows.ready[:n] |= flow.judged
        self._update_loops(frame, values, expected, flow.effect, gate)
        calm = gate & ~flow.on & (flow.effect < self.flow_notice) & (self.flows.low[:n] == 0)
        fallen = np.where(flow.effect >= self.flow_notice, values[0] - expected, 0.0)
        gpus = frames.get("gpu")
        self.balance.update(frame, gpus, self._gpus, calm, fallen)
        _, warmth, pressure, speed = steps
        loop_steps = LoopSteps(frame, gpus, flow, warmth, pressure, speed, expected)
        return self._report(loop_steps, CommonDeparture(frame, gpus, groups, *common), gate)

    def _update_loops(
        self, frame: Frame, values: Floats, expected: Floats, effect: NDArray[np.float32], gate: Bools
    ) -> None:
        """Follows collapses, flows that are back, and supplies that rise or jump."""
        n, time, flows = len(gate), frame.time, self.flows
        count_collapsed(frame["coolant.flow"], expected, gate, self.collapse, time, flows.low[:n], flows.low_since[:n])
        state = flows.large_since[:n], flows.well[:n], flows.back[:n]
        follow_flow(values[0] - expected, effect, self.flow_delta, time, *state)
        self.supplies.update(values[1], time)

    def _report(self, steps: LoopSteps, common: CommonDeparture, gate: Bools) -> list[Finding]:
        """Returns findings on loops that stand out, and on what they share where all move."""
        frame, n, rules = steps.frame, len(gate), self._rules()
        shared_steps = self.shared.update(common, gate, rules)
        every = judge_shared(common, shared_steps, self.shared, rules, self.supplies, self._gpus, gate)
        low = (steps.flow.on | (self.flows.low[:n] >= 2)) & ~self.flows.back[:n]
        bad = low | steps.warmth.on
        holding = {frame.entities[i] for i in np.flatnonzero(bad).tolist()}
        close_ended(self.conditions, holding | ({every.entity} if every else set()))
        found = list[Finding | None]()
        if every and (due := due_report(self.conditions, every.entity, frame.time, every.onset, every.level)):
            found.append(replace(every.finding, onset=due[0], level=due[1]))
        if bad.any():
            state = self.flows, self.supplies, self.pressure, self.speed, self.balance
            judge = LoopJudge(rules, *state, self._gpus)
            measured = np.isfinite(frame["coolant.flow"]) | np.isfinite(frame["coolant.supply_temperature"])
            groups = common.groups
            found += [
                self._loop_finding(steps, i, judge, groups) for i in np.flatnonzero(bad & measured & gate).tolist()
            ]
        return [one for one in found if one is not None]

    def _loop_finding(self, steps: LoopSteps, i: int, judge: LoopJudge, groups: NDArray[np.int32]) -> Finding | None:
        if self.flows.well[i] and not steps.warmth.on[i]:
            return None  # its flow is back, though not yet for long enough to end the condition
        frame, time = steps.frame, steps.frame.time
        alike = int(np.count_nonzero(groups == groups[i]))
        verdict = judge.decide(steps, i, alike >= PEERS)
        began = [time - int(steps.flow.held[i]) * SECOND] * int(steps.flow.on[i] and not self.flows.back[i])
        began += [time - int(steps.warmth.held[i]) * SECOND] * int(steps.warmth.on[i])
        began += [int(self.flows.low_since[i])] * int(self.flows.low[i] >= 2)
        due = due_report(self.conditions, frame.entities[i], time, min(began), verdict.level)
        return None if due is None else make_loop_finding(steps, i, due, verdict, judge, alike)

    def _rules(self) -> CoolantRules:
        return CoolantRules(self.flow_delta, self.temperature_delta, self.warm, self.hot, self.collapse, self.hold)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of flow and warmth, of one loop and of loops together."""
        own = {"flow": self.flow, "warmth": self.warmth}
        together = {"flow together": self.shared.flow, "warmth together": self.shared.warmth}
        return [
            *(f"{name}: {loop_budget_line(streams.channel)}" for name, streams in (own | together).items()),
            f"witnesses: {rule_line('pressure, pump speed and power, which report nothing by themselves')}",
            f"collapse: {rule_line(f'two samples in a row under {self.collapse:.0%} of the usual flow')}",
        ]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns a loop, or all below what loops share, again from the next frame of loops on."""
        self.accepted.append(entity)

    def _reset_accepted(self, frame: Frame) -> None:
        mask = pop_members_mask(self.accepted, frame)
        if mask is None:
            return
        for piece in (self.flow, self.warmth, self.pressure, self.speed, self.shared, self.balance):
            piece.reset(mask)
        flows = self.flows
        for cells in (flows.ready, flows.low, flows.large_since, flows.back, flows.well):
            cells[: len(mask)][mask] = 0
        self.supplies.relearn(mask)

    def _find_baselines(self, n: int) -> Floats:
        """Returns (4, N) the usual value of each signal; NaN for loops that are not learned yet."""
        found = np.full((len(_SIGNALS), n), np.nan)
        for row, streams in zip(found, (self.flow, self.warmth, self.pressure, self.speed), strict=True):
            known = min(streams.cells.shape[1], n)
            row[:known] = streams.cells[0, :known]
        found[:, ~self.flows.ready[:n]] = np.nan
        return found

    def _no_cohort(self, n: int) -> NDArray[np.int32]:
        """Returns (N,) -1; the same array as long as the number of loops does not change."""
        if len(self._alone) != n:
            self._alone = np.full(n, -1, np.int32)
        return self._alone

    @per_topology
    def _find_comparable(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) group number of each loop; loops of one kind with the same attributes have the same."""
        numbers: dict[str, int] = {}
        kinds = [f"{kind_of(e)} {comparable_attributes(frame.topology.attributes.get(e, {}))}" for e in frame.entities]
        return np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], np.int32)


def loop_budget_line(channel: Channel) -> str:
    """Returns what the stream of a loop, such as that of one CDU, costs in false alarms, as one line.

    Each loop is judged by its own past, at a higher threshold.
    """
    threshold, sides = channel.limit(USUAL_STEP) + ALONE, 1 + channel.both
    run = arl0(threshold) / sides
    days = run * USUAL_STEP / DAY_S
    return (
        f"threshold {threshold:g} at {USUAL_STEP:g} s ({channel.threshold:g}, and {ALONE:g} more without peers):"
        f" 1 false alarm per {run:.2g} ticks and loop ({days / 365.25:,.0f} years), at most {1000 / days:.2g} suspects"
        " per 1,000 loop-days, before hold and corroboration"
    )


def _read_values(frame: Frame) -> Floats:
    """Returns (4, N) valid readings as they are judged: -ln of at least LEAST; the supply in Cel."""
    values = np.array([frame[signal] for signal in _SIGNALS])
    values[~((values >= _VALID[:, 0]) & (values <= _VALID[:, 1]))] = np.nan
    for row in _LOGARITHMS:
        values[row] = -np.log(np.maximum(values[row], LEAST))
    return values
