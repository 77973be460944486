"""What comparable loops lose together: the hall's water or its pumps, reported once on what the loops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison, make_evidence
from detectors.base.state import State, memory, part
from detectors.base.streams import Bools, Channel, Floats, Step, Streams
from detectors.base.topology_index import EVERYTHING
from detectors.heat.coolant_loops import DOUBTED, MOVED, SHARE, CoolantRules, LoopGpus, SupplyState, gpus_throttle
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level, to_json

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
