"""Names the cause of GPUs that lose heat worse than before: one GPU, a node or a rack, and the part to check.

One GPU: its plate, its paste or its sensor. Most GPUs of a node: what feeds the node. Most nodes of a rack: what feeds
the rack. Flow and pressure of a node or rack are not measured, so the part cannot be named. The loop itself is
`coolant`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Peers
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.streams import Bools, Step
from detectors.base.topology_index import per_topology
from detectors.heat.drift import SlowTrends
from detectors.heat.resistance import ResistanceSample
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level
from pipeline.model.topology import kind_of

_MOST = 0.6  # share of the judged members of a unit with one cause; half may be chance in a small unit; chosen
_FEWEST = {"node": 3, "rack": 2}  # members from which a unit is blamed; chosen
_MEMBER = 0.75  # share of delta from which another GPU of the unit counts as moved too; chosen
CLOSE_K = 3.0  # K below its limit at which a GPU is as good as throttled: three steps of NVML's rounding; chosen
_FORETOLD = 60.0  # minutes to a throttle beyond which none are reported: they are a guess; chosen
_ACUTE = 6 * 3600 * SECOND  # us; what grew for longer can wait for the morning; chosen
_LEAST_SLOPE = 0.1  # K a minute; less is rounding, and minutes computed from it mean nothing; chosen
_VERDICTS = {
    "gpu": "cold plate or thermal paste",
    "node": "what the node's GPUs share: manifold, quick disconnect, its branch (its own flow is not measured)",
    "rack": "what the rack's nodes share: its branch of the loop (its own flow and pressure are not measured)",
}


@dataclass(frozen=True, slots=True)
class GpuHeat:
    """State of the GPUs at an instant; (N,) each.

    left:  K to the temperature at which the GPU slows down.   since: when its condition began.
    witness: whether the memory beside the core agrees.   units: kind -> (number of each GPU's unit, names by number).
    """

    sample: ResistanceSample
    step: Step
    bad: Bools
    on: Bools
    wearing: Bools
    throttled: Bools
    left: NDArray[np.float64]
    witness: Bools
    since: NDArray[np.int64]
    units: Mapping[str, tuple[NDArray[np.int32], list[str]]]

    def unmeasured(self, frame: Frame) -> set[str]:
        """Returns the wearing GPUs without a sample now: a lost sample ends no wear."""
        return {frame.entities[i] for i in np.flatnonzero(self.wearing & ~self.step.judged).tolist()}


class NodesAndRacks:
    """The node and the rack of each GPU."""

    @per_topology
    def find(self, frame: Frame) -> Mapping[str, tuple[NDArray[np.int32], list[str]]]:
        """Returns kind -> (N,) number of each GPU's unit, -1 none, and the names by number."""
        return {kind: self._number(frame, kind) for kind in _FEWEST}

    def _number(self, frame: Frame, kind: str) -> tuple[NDArray[np.int32], list[str]]:
        numbers: dict[str, int] = {}
        groups = np.full(len(frame.entities), -1, np.int32)
        for i, entity in enumerate(frame.entities):
            if unit := frame.topology.ancestor_of_kind(entity, kind):
                groups[i] = numbers.setdefault(unit, len(numbers))
        return groups, list(numbers)


@dataclass(frozen=True, slots=True)
class BlameRules:
    """Settings of the detector `thermal`, its trends, and the peers that GPUs are compared with."""

    delta: float
    page_delta: float
    patience: float
    hold: float
    near: float
    trends: SlowTrends
    peers: Peers


@dataclass(frozen=True, slots=True)
class ThermalVerdict:
    """The verdict on one entity."""

    level: Level
    onset: int
    summary: str
    evidence: Mapping[str, Any]
    score: float


def find_blamed(frame: Frame, heat: GpuHeat, rules: BlameRules) -> dict[str, ThermalVerdict]:
    """Returns entity -> verdict; GPUs of a unit that is to blame are not named too."""
    ready = heat.on & heat.bad
    nodes = _find_moved_nodes(frame, np.flatnonzero(ready).tolist(), heat, rules)
    found: dict[str, ThermalVerdict] = {}
    explained: set[int] = set()
    racks: dict[str, list[str]] = {}
    for node in nodes:
        if rack := frame.topology.ancestor_of_kind(node, "rack"):
            racks.setdefault(rack, []).append(node)
    for rack, moved in racks.items():
        known = {frame.topology.ancestor_of_kind(frame.entities[i], "node") for i in _judged_gpus(rack, heat)}
        if len(moved) >= _FEWEST["rack"] and len(moved) >= _MOST * len(known):
            members = [i for node in moved for i in nodes.pop(node)]
            found[rack] = _judge_unit(frame, rack, members, heat, rules)
            explained |= set(members)
    for node, members in nodes.items():
        found[node] = _judge_unit(frame, node, members, heat, rules)
        explained |= set(members)
    for i in np.flatnonzero(heat.bad).tolist():
        if i not in explained:
            found[frame.entities[i]] = _judge_gpu(frame, i, heat, rules)
    return found


def report_verdicts(
    frame: Frame,
    found: Mapping[str, ThermalVerdict],
    holding: Collection[str],
    conditions: OpenConditions,
    detector: str,
) -> list[Finding]:
    """Returns the findings that are due now. holding: conditions that have not ended, though not found now."""
    close_ended(conditions, {*found, *holding})
    out = []
    for entity, verdict in sorted(found.items()):
        due = due_report(conditions, entity, frame.time, verdict.onset, verdict.level)
        if due is not None:
            signals = ("gpu.temperature", "gpu.power")
            reported = verdict.score, verdict.summary, verdict.evidence, signals
            out.append(Finding(frame.time, due[0], entity, detector, due[1], *reported))
    return out


def _judged_gpus(unit: str, heat: GpuHeat) -> list[int]:
    """Returns the numbers of the GPUs of a unit that can be judged now."""
    groups, names = heat.units[kind_of(unit)]
    found: list[int] = np.flatnonzero((groups == names.index(unit)) & heat.step.judged).tolist()
    return found


def _find_moved_nodes(frame: Frame, on: list[int], heat: GpuHeat, rules: BlameRules) -> dict[str, list[int]]:
    """Returns node -> its GPUs that moved, where most of them did."""
    found = {}
    for node in sorted({u for i in on if (u := frame.topology.ancestor_of_kind(frame.entities[i], "node"))}):
        known = _judged_gpus(node, heat)
        moved = [i for i in known if heat.step.effect[i] >= _MEMBER * rules.delta and not heat.step.moved[i]]
        if len(moved) >= max(_FEWEST["node"], _MOST * len(known)):
            found[node] = moved
    return found


def _judge_gpu(frame: Frame, i: int, heat: GpuHeat, rules: BlameRules) -> ThermalVerdict:
    """Returns the verdict on a single GPU: its plate, its paste, or its sensor where nothing else confirms it."""
    entity, step, time = frame.entities[i], heat.step, frame.time
    minutes = _minutes_to_throttle(i, heat)
    hot = bool(heat.throttled[i]) or heat.left[i] <= CLOSE_K
    up = float(np.exp(step.effect[i]) - 1)
    if heat.on[i]:
        level = _gpu_level(i, heat, rules, time, hot or (minutes is not None and minutes <= rules.near))
        onset = int(heat.since[i])
        how = f"cools {_percent(up)} worse"
    else:
        level, (onset, up) = "page" if hot else "ticket", _measure_wear(i, rules, time)
        how = f"cools {_percent(up)} worse than when new"
    more: dict[str, Any] = {"throttled": bool(heat.throttled[i]), "memory_agrees": bool(heat.witness[i])}
    more |= {"kelvin_left": round(float(heat.left[i]), 1), "minutes_to_throttle": minutes, "verdict": _VERDICTS["gpu"]}
    title = pager_title(entity, f"{how}{_describe_state(frame, i, heat, minutes)}")
    return ThermalVerdict(level, onset, title, _make_evidence(frame, i, up, heat, rules, more), float(step.score[i]))


def _gpu_level(i: int, heat: GpuHeat, rules: BlameRules, time: int, urgent: bool) -> Level:
    """Returns page where it throttles or soon will, or where a held rise grew within hours and a second sensor
    confirms it."""
    held, effect = int(heat.step.held[i]), float(heat.step.effect[i])
    if urgent and not heat.step.alone[i]:
        return "page"
    if bool(heat.throttled[i]):
        return "page"
    acute = time - int(heat.since[i]) <= _ACUTE
    large = effect >= np.log1p(rules.page_delta)
    if held >= rules.hold and large and acute and bool(heat.witness[i]) and not heat.step.alone[i]:
        return "page"
    return "ticket" if held >= rules.patience else "suspect"


def _measure_wear(i: int, rules: BlameRules, time: int) -> tuple[int, float]:
    """Returns (onset, share by which R grew) of a GPU that wears."""
    per_day = max(rules.trends.slope(i), 1e-4)
    _, grown = rules.trends.test()
    days = min(float(grown[i]) / per_day, 60.0)
    return time - int(days * 86_400 * SECOND), float(np.exp(grown[i]) - 1)


def _judge_unit(frame: Frame, unit: str, members: list[int], heat: GpuHeat, rules: BlameRules) -> ThermalVerdict:
    """Returns the verdict on a node or rack whose GPUs moved together: several sensors agree."""
    kind, time = kind_of(unit), frame.time
    effects = np.sort(heat.step.effect[members])
    middle = float(effects[len(effects) // 2])
    worst = max(members, key=lambda i: (heat.step.effect[i], frame.entities[i]))
    foretold = [m for i in members if (m := _minutes_to_throttle(i, heat)) is not None]
    minutes = min(foretold, default=None)
    hot = any(heat.throttled[i] or heat.left[i] <= CLOSE_K for i in members)
    soon = minutes is not None and minutes <= rules.near
    held = max(int(heat.step.held[i]) for i in members)
    large = middle >= np.log1p(rules.page_delta)
    level: Level = "suspect"
    if hot or soon or (large and held >= rules.hold / 4):  # several witnesses: a shorter hold is enough
        level = "page"
    elif held >= rules.patience:
        level = "ticket"
    onset = min([int(heat.since[i]) for i in members if heat.on[i]], default=time)
    up = float(np.exp(middle) - 1)
    size = len(_judged_gpus(unit, heat))
    more = {"gpus": [frame.entities[i] for i in members][:16], "judged": size, "verdict": _VERDICTS[kind]}
    more |= {"minutes_to_throttle": minutes, "throttled": bool(hot)}
    text = f"{len(members)} of {size} GPUs cool {_percent(up)} worse{_describe_state(frame, worst, heat, minutes)}"
    evidence = _make_evidence(frame, worst, up, heat, rules, more)
    return ThermalVerdict(level, onset, pager_title(unit, text), evidence, float(heat.step.score[worst]))


def _minutes_to_throttle(i: int, heat: GpuHeat) -> float | None:
    """Returns minutes until it slows down at the present slope; None if it does not warm, or is there already."""
    slope, left = float(heat.sample.slope[i]), float(heat.left[i])
    if not (np.isfinite(slope) and slope >= _LEAST_SLOPE and np.isfinite(left) and left > 0):
        return None
    return round(left / slope, 1)


def _describe_state(frame: Frame, i: int, heat: GpuHeat, minutes: float | None) -> str:
    """Returns how hot the (worst) GPU is, and what comes next."""
    warm = f", {frame['gpu.temperature'][i]:.0f} °C at {heat.sample.power[i]:.0f} W"
    if heat.throttled[i]:
        return f"{warm}, throttles"
    return f"{warm}, throttles in {minutes:.0f} min" if minutes is not None and minutes <= _FORETOLD else warm


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _make_evidence(
    frame: Frame, i: int, up: float, heat: GpuHeat, rules: BlameRules, more: Mapping[str, Any]
) -> Mapping[str, Any]:
    value = float(np.exp(heat.sample.ln_r[i]))
    compared = Comparison(
        value=value,
        expected=value / (1 + up),
        spread=float(value * heat.step.spread[i]),
        cohort="own past" if heat.step.alone[i] else rules.peers.cohort_name(frame, i),
        peers=0 if heat.step.alone[i] else max(int(heat.step.size[i]) - 1, 0),
        effect=up,
        unit="K/W",
    )
    clears = f"ends when the resistance is less than {rules.delta / 2:.0%} above its usual value under load"
    return make_evidence(clears, compared, supply=round(float(heat.sample.supply[i]), 1), **more)
