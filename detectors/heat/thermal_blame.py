"""Who is to blame for GPUs that lose their heat worse: one GPU, a node or a rack, and what that points to.

One GPU: its plate, its paste or its sensor. Most GPUs of a node: what feeds the node. Most nodes of a rack: what feeds
the rack. Flow and pressure of a node or rack are not read, so what of it is to blame is not told. The loop itself is
`coolant`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.streams import Bools, Step
from detectors.heat.resistance import Measured
from pipeline.model.records import SECOND, Finding, Frame, Level
from pipeline.model.topology import kind_of

_MOST = 0.6  # share of the judged members of a unit that have one reason; half may be chance of a small unit; chosen
_FEWEST = {"node": 3, "rack": 2}  # members below which a unit is not blamed; chosen
_MEMBER = 0.75  # share of delta from which another GPU of the unit counts as moved too; chosen
CLOSE_K = 3.0  # K below its limit at which a GPU is as good as throttled: three steps of NVML's rounding; chosen
_FORETOLD = 60.0  # minutes beyond which nobody is told when it throttles: a guess; chosen
_ACUTE = 6 * 3600 * SECOND  # what grew for longer can wait for the morning; chosen
_LEAST_SLOPE = 0.1  # K a minute; less than that is rounding, and minutes told from it mean nothing; chosen


@dataclass(frozen=True, slots=True)
class Heat:
    """What is known of the GPUs at an instant; (N,) each.

    left:  K to where the GPU slows down.   since: when its condition began.
    units: kind of unit -> (number of each GPU's, the names by number).
    """

    seen: Measured
    step: Step
    bad: Bools
    on: Bools
    wearing: Bools
    throttled: Bools
    left: NDArray[np.float64]
    witness: Bools
    since: NDArray[np.int64]
    units: Mapping[str, tuple[NDArray[np.int32], list[str]]]

    def unheard(self, frame: Frame) -> set[str]:
        """GPUs that wear and were not measured now: a lost sample ends no wear."""
        return {frame.entities[i] for i in np.flatnonzero(self.wearing & ~self.step.judged).tolist()}


class Units:
    """Which node and which rack each GPU belongs to; renewed when topology or fleet change."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._found: dict[str, tuple[NDArray[np.int32], list[str]]] = {}

    def of(self, frame: Frame) -> Mapping[str, tuple[NDArray[np.int32], list[str]]]:
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key != self._key:
            self._key, self._found = key, {kind: self._numbered(frame, kind) for kind in _FEWEST}
        return self._found

    def _numbered(self, frame: Frame, kind: str) -> tuple[NDArray[np.int32], list[str]]:
        numbers: dict[str, int] = {}
        groups = np.full(len(frame.entities), -1, np.int32)
        for i, entity in enumerate(frame.entities):
            if unit := frame.topology.ancestor_of_kind(entity, kind):
                groups[i] = numbers.setdefault(unit, len(numbers))
        return groups, list(numbers)


class Settings(Protocol):
    """Of the detector."""

    delta: float
    page_delta: float
    patience: float
    hold: float
    near: float

    @property
    def drifts(self) -> Any: ...

    @property
    def _peers(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Blamed:
    """One entity to blame."""

    level: Level
    onset: int
    summary: str
    evidence: Mapping[str, Any]
    score: float

    def finding(self, time: int, due: tuple[int, Level], entity: str, detector: str) -> Finding:
        signals = ("gpu.temperature", "gpu.power")
        return Finding(time, due[0], entity, detector, due[1], self.score, self.summary, self.evidence, signals)


def blamed(frame: Frame, heat: Heat, settings: Settings) -> dict[str, Blamed]:
    """Entity -> why; GPUs of a unit that is to blame are not named beside it."""
    ready = heat.on & heat.bad
    nodes = _units(frame, np.flatnonzero(ready).tolist(), "node", heat, settings)
    found: dict[str, Blamed] = {}
    explained: set[int] = set()
    racks: dict[str, list[str]] = {}
    for node in nodes:
        if rack := frame.topology.ancestor_of_kind(node, "rack"):
            racks.setdefault(rack, []).append(node)
    for rack, mine in racks.items():
        known = {frame.topology.ancestor_of_kind(frame.entities[i], "node") for i in _judged(frame, rack, heat)}
        if len(mine) >= _FEWEST["rack"] and len(mine) >= _MOST * len(known):
            members = [i for node in mine for i in nodes.pop(node)]
            found[rack] = _unit(frame, rack, members, heat, settings)
            explained |= set(members)
    for node, members in nodes.items():
        found[node] = _unit(frame, node, members, heat, settings)
        explained |= set(members)
    for i in np.flatnonzero(heat.bad).tolist():
        if i not in explained:
            found[frame.entities[i]] = _one(frame, i, heat, settings)
    return found


def _judged(frame: Frame, unit: str, heat: Heat) -> list[int]:
    """Numbers of the GPUs of a unit that can be judged now."""
    groups, names = heat.units[kind_of(unit)]
    mine = (groups == names.index(unit)) & heat.step.judged
    found: list[int] = np.flatnonzero(mine).tolist()
    return found


def _units(frame: Frame, on: list[int], kind: str, heat: Heat, settings: Settings) -> dict[str, list[int]]:
    """Unit -> its GPUs that moved, where most of them did."""
    found = {}
    for unit in sorted({u for i in on if (u := frame.topology.ancestor_of_kind(frame.entities[i], kind))}):
        known = _judged(frame, unit, heat)
        moved = [i for i in known if heat.step.effect[i] >= _MEMBER * settings.delta and not heat.step.moved[i]]
        if len(moved) >= max(_FEWEST[kind], _MOST * len(known)):
            found[unit] = moved
    return found


def _one(frame: Frame, i: int, heat: Heat, settings: Settings) -> Blamed:
    """A single GPU: its plate, its paste, or its sensor where nothing else bears it out."""
    entity, step, time = frame.entities[i], heat.step, frame.time
    minutes = _minutes(i, heat)
    hot = bool(heat.throttled[i]) or heat.left[i] <= CLOSE_K
    up = float(np.exp(step.effect[i]) - 1)
    if heat.on[i]:
        level = _level(i, heat, settings, time, hot or (minutes is not None and minutes <= settings.near))
        onset = int(heat.since[i])
        how = f"thermal resistance {up:.0%} above usual"
    else:
        level, (onset, up, per_day) = "page" if hot else "ticket", _worn(i, settings, time)
        how = f"thermal resistance {up:.0%} above that of its first day, {per_day:.1%} more each day"
    more: dict[str, Any] = {"throttled": bool(heat.throttled[i]), "memory_agrees": bool(heat.witness[i])}
    more |= {"kelvin_left": round(float(heat.left[i]), 1), "minutes_to_throttle": minutes, "verdict": _VERDICTS["gpu"]}
    summary = f"{entity}: {how}{_state(frame, i, heat, minutes)}; compared with {_peers(frame, i, heat, settings)}"
    return Blamed(level, onset, summary, _shown(frame, i, up, heat, settings, more), float(step.score[i]))


def _level(i: int, heat: Heat, settings: Settings, time: int, urgent: bool) -> Level:
    """Page where it throttles or is about to; or what holds, grew within hours and a second sensor bears out."""
    held, effect = int(heat.step.held[i]), float(heat.step.effect[i])
    if urgent and not heat.step.alone[i]:
        return "page"
    if bool(heat.throttled[i]):
        return "page"
    acute = time - int(heat.since[i]) <= _ACUTE
    large = effect >= np.log1p(settings.page_delta)
    if held >= settings.hold and large and acute and bool(heat.witness[i]) and not heat.step.alone[i]:
        return "page"
    return "ticket" if held >= settings.patience else "suspect"


def _worn(i: int, settings: Settings, time: int) -> tuple[int, float, float]:
    """(onset, share by which R grew, share of it a day) of a GPU that wears."""
    per_day = max(settings.drifts.slope(i), 1e-4)
    _, grown = settings.drifts.judge()
    days = min(float(grown[i]) / per_day, 60.0)
    return time - int(days * 86_400 * SECOND), float(np.exp(grown[i]) - 1), per_day


def _unit(frame: Frame, unit: str, members: list[int], heat: Heat, settings: Settings) -> Blamed:
    """A node or rack whose GPUs moved together: several sensors say the same."""
    kind, time = kind_of(unit), frame.time
    effects = np.sort(heat.step.effect[members])
    middle = float(effects[len(effects) // 2])
    worst = max(members, key=lambda i: (heat.step.effect[i], frame.entities[i]))
    told = [m for i in members if (m := _minutes(i, heat)) is not None]
    minutes = min(told, default=None)
    hot = any(heat.throttled[i] or heat.left[i] <= CLOSE_K for i in members)
    soon = minutes is not None and minutes <= settings.near
    held = max(int(heat.step.held[i]) for i in members)
    large = middle >= np.log1p(settings.page_delta)
    level: Level = "suspect"
    if hot or soon or (large and held >= settings.hold / 4):  # as many witnesses: no need to wait for long
        level = "page"
    elif held >= settings.patience:
        level = "ticket"
    onset = min([int(heat.since[i]) for i in members if heat.on[i]], default=time)
    up = float(np.exp(middle) - 1)
    size = len(_judged(frame, unit, heat))
    more = {"gpus": [frame.entities[i] for i in members][:16], "judged": size, "verdict": _VERDICTS[kind]}
    more |= {"minutes_to_throttle": minutes, "throttled": bool(hot)}
    summary = (
        f"{unit}: thermal resistance of {len(members)} of its {size} GPUs is {up:.0%} above usual, which points to "
        f"{_VERDICTS[kind]}{_state(frame, worst, heat, minutes)}; compared with {_peers(frame, worst, heat, settings)}"
    )
    score = float(heat.step.score[worst])
    return Blamed(level, onset, summary, _shown(frame, worst, up, heat, settings, more), score)


def told(
    frame: Frame, found: Mapping[str, Blamed], holding: Collection[str], conditions: OpenConditions, detector: str
) -> list[Finding]:
    """What is due of it now. holding: what has not ended, although it is not found in this instant."""
    close_ended(conditions, {*found, *holding})
    out = []
    for entity, one in sorted(found.items()):
        due = due_report(conditions, entity, frame.time, one.onset, one.level)
        if due is not None:
            out.append(one.finding(frame.time, due, entity, detector))
    return out


_VERDICTS = {
    "gpu": "cold plate or thermal paste",
    "node": "what the node's GPUs share: manifold, quick disconnect, its branch (its own flow is not read)",
    "rack": "what the rack's nodes share: its branch of the loop (its own flow and pressure are not read)",
}


def _minutes(i: int, heat: Heat) -> float | None:
    """Minutes until it slows down at the present slope; None if it does not rise, or is there already."""
    slope, left = float(heat.seen.slope[i]), float(heat.left[i])
    if not (np.isfinite(slope) and slope >= _LEAST_SLOPE and np.isfinite(left) and left > 0):
        return None
    return round(left / slope, 1)


def _state(frame: Frame, i: int, heat: Heat, minutes: float | None) -> str:
    """How hot the (worst) GPU is, and what comes next."""
    warm = f": {frame['gpu.temperature'][i]:.0f} Cel at {heat.seen.power[i]:.0f} W"
    if heat.throttled[i]:
        return f"{warm}, and it throttles"
    return f"{warm}, some {minutes:.0f} min from throttling" if minutes is not None and minutes <= _FORETOLD else warm


def _peers(frame: Frame, i: int, heat: Heat, settings: Settings) -> str:
    if heat.step.alone[i]:
        return "its own past"
    return f"{max(int(heat.step.size[i]) - 1, 0)} GPUs of {settings._peers.cohort_name(frame, i)}"


def _shown(
    frame: Frame, i: int, up: float, heat: Heat, settings: Settings, more: Mapping[str, Any]
) -> Mapping[str, Any]:
    value = float(np.exp(heat.seen.ln_r[i]))
    compared = Comparison(
        value=value,
        expected=value / (1 + up),
        spread=float(value * heat.step.spread[i]),
        cohort="own past" if heat.step.alone[i] else settings._peers.cohort_name(frame, i),
        peers=0 if heat.step.alone[i] else max(int(heat.step.size[i]) - 1, 0),
        effect=up,
        unit="K/W",
    )
    clears = f"ends when the resistance is less than {settings.delta / 2:.0%} above its usual value under load"
    return make_evidence(clears, compared, supply=round(float(heat.seen.supply[i]), 1), **more)
