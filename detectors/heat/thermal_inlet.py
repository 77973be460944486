"""Finds racks and rows that breathe warm air: inlets warmer than those elsewhere, and fans that run up against it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import topology_index
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import Bools, Channel, Step, Streams
from pipeline.model.records import SECOND, Finding, Frame, Level
from pipeline.model.topology import Topology

_INLET = re.compile(r"inlet|intake|ambient|\bfront\b", re.IGNORECASE)  # as makers of servers name it
_FEWEST = 3  # inlets of a rack, or racks, from which a median is one; chosen
_MOST = 0.6  # share of a rack's inlets, and of a row's racks, that share one reason; chosen
_ELSEWHERE = 24  # inlets in all from which the others say what the weather is; chosen


class Places:
    """Which column is an inlet, and in which rack and row every sensor is; renewed with topology and fleet."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self.inlets: Bools = np.zeros(0, bool)
        self.groups = self.racks = self.nodes = np.empty(0, np.int32)
        self.names: list[str] = []

    def look(self, frame: Frame) -> None:
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key == self._key:
            return
        self._key, numbers = key, dict[str, int]()
        racks = [frame.topology.ancestor_of_kind(e, "rack") for e in frame.entities]
        self.racks = np.array([numbers.setdefault(r, len(numbers)) if r else -1 for r in racks], np.int32)
        self.names, self.nodes = list(numbers), frame.topology.group_numbers(frame.entities, "node")
        inlets = [bool(_INLET.search(_said(e, frame.topology))) for e in frame.entities]
        self.inlets = np.array(inlets, bool) & (self.racks >= 0)
        enough = self.inlets.sum() >= _ELSEWHERE and len(self.names) >= _FEWEST
        self.groups = np.where(self.inlets & enough, 0, -1).astype(np.int32)


def _said(entity: str, topology: Topology) -> str:
    """What a sensor calls itself."""
    facts = topology.attributes.get(entity, {})
    return " ".join([entity.rpartition(".")[2], *(str(facts.get(k, "")) for k in ("label", "context", "name"))])


@dataclass
class ThermalInlet(Detector):
    """PCC on the inlets against all others and their own past; a rack of which most are `delta` K warmer is told.

    Ticket after `hold` s if its fans run `fans` faster than usual, if the air is `calm` K warmer, or, where the fans of
    less than half of its nodes are measured, `alone` K. Fans that run up by less tell that two warm afternoons have
    met, or that they can no more: then `alone` K are a ticket after `lasts` s. One inlet that is warm alone is a
    sensor, and nothing here. A row whose racks are warm is told as the row.

    Source: 3 K are what ASHRAE's classes leave between recommended (27 Cel) and usual supply air (24); delta leaves
    half a step of a BMC's rounding. A fan that runs 0.7 faster takes 4.9 times the power (fan laws): it is in need.
    """

    name: ClassVar[str] = "thermal_inlet"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "sensor"
    needs: ClassVar[tuple[str, ...]] = ("sensor.temperature",)
    wants: ClassVar[tuple[str, ...]] = ("sensor.fan_speed", "event:maintenance_start", "event:maintenance_end")
    cannot_see: ClassVar[str] = (
        "Inlets that no sensor calls inlet, intake or ambient, air that warms in the whole hall, and which panel or "
        "air handler is to blame."
    )

    delta: float = 2.75
    alone: float = 3.5
    calm: float = 6.0
    """K; two warm afternoons of 3 K each; chosen."""
    fans: float = 0.7
    hold: float = 600.0
    lasts: float = 4 * 3600.0
    """s; an afternoon; chosen."""

    warmth: Streams = part(lambda: Streams(Channel(floor=0.5, delta=2.75, phi=0.9)))
    speeds: Streams = part(lambda: Streams(Channel(floor=0.05, delta=0.2, phi=0.9)))
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    onsets: dict[str, int] = notes()
    forgiven: list[str] = notes(list)
    _places: Places = field(default_factory=Places, init=False, repr=False)

    def __post_init__(self) -> None:
        self.warmth.channel = Channel(floor=0.5, delta=self.delta, phi=0.9)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("sensor")
        if frame is None or not len(frame.entities):
            return []
        self._places.look(frame)
        if (mask := topology_index.pop_members_mask(self.forgiven, frame)) is not None:
            self.warmth.reset(mask)
            self.speeds.reset(mask)
        inlets, groups = self._places.inlets, self._places.groups
        idle = ~self.gates.maintenance_mask(frame)
        step = self.warmth.step(frame["sensor.temperature"], groups, frame.time, inlets & idle)
        speed = frame["sensor.fan_speed"]
        turning = np.where(speed > 0, speed, np.nan)
        fans = self.speeds.step(np.log(turning), np.full(len(speed), -1, np.int32), frame.time, idle)
        warm = step.on & inlets
        racks = self._racks(step, fans) if warm.any() else {}
        self.onsets = {rack: at for rack, at in self.onsets.items() if rack in racks}
        return self._told(frame, step, fans, racks)

    def budget(self) -> list[str]:
        most = f"{_FEWEST} inlets and {_MOST:.0%} of a rack"
        return [
            *super().budget(),
            f"rack: a rule on how many are warm together: {most}, so that no single stream tells",
        ]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """All sensors of a rack or row are learnt anew from the next frame of sensors on."""
        self.forgiven.append(entity)

    def _racks(self, step: Step, fans: Step) -> dict[str, NDArray[np.int64]]:
        """Rack -> its warm inlets, where most of them are warm."""
        places, found = self._places, {}
        judged = places.inlets & step.judged
        for rack in np.unique(places.racks[step.on & places.inlets]).tolist():
            mine = judged & (places.racks == rack)
            warm = mine & (step.effect >= self.delta / 2)
            if warm.sum() >= max(_FEWEST, _MOST * mine.sum()) and np.median(step.effect[mine]) >= self.delta / 2:
                found[places.names[rack]] = np.flatnonzero(warm)
        return found

    def _told(self, frame: Frame, step: Step, fans: Step, racks: Mapping[str, NDArray[np.int64]]) -> list[Finding]:
        blamed = _rows(frame, racks, self._places.names)
        close_ended(self.conditions, set(blamed))
        out = []
        for entity, mine in sorted(blamed.items()):
            places = np.unique(self._places.racks[mine])
            here = np.isin(self._places.racks, places)
            blowers = here & ~self._places.inlets & fans.judged
            nodes = self._places.nodes
            enough = 2 * len(np.unique(nodes[blowers])) >= len(np.unique(nodes[here & self._places.inlets]))
            faster = float(np.expm1(np.median(fans.effect[blowers]))) if enough and blowers.any() else float("nan")
            up, held = float(np.median(step.effect[mine])), int(np.median(step.held[mine]))
            least = self.alone if np.isnan(faster) else self.calm
            sure = up >= least or (up >= self.delta and faster >= self.fans)
            due = held >= self.hold if sure else (up >= self.alone and held >= self.lasts)
            level: Level = "ticket" if due else "suspect"
            onset = self.onsets.setdefault(entity, frame.time - held * SECOND)
            if told := due_report(self.conditions, entity, frame.time, onset, level):
                out.append(self._finding(frame, entity, told, step, mine, up, faster))
        return out

    def _finding(
        self,
        frame: Frame,
        entity: str,
        due: tuple[int, Level],
        step: Step,
        mine: NDArray[np.int64],
        up: float,
        faster: float,
    ) -> Finding:
        value = float(np.nanmedian(frame["sensor.temperature"][mine])) if len(mine) else float("nan")
        alone = bool(step.alone[mine[0]])
        others = 0 if alone else int(step.size[mine[0]]) - len(mine)
        who = "their own past" if alone else f"{others} inlets elsewhere"
        blown = "" if np.isnan(faster) else f", and its fans run {faster:.0%} faster"
        summary = (
            f"{entity}: air at {len(mine)} inlets is {value:.1f} Cel, {up:.1f} K above usual against {who}{blown}: "
            "recirculation, a missing panel or an air handler"
        )
        cohort = "own past" if alone else "all inlets elsewhere"
        compared = Comparison(value, value - up, float(step.spread[mine[0]]), cohort, others, up, "K")
        shown = make_evidence(
            f"ends when less than {self.delta / 2:.2g} K is left of it",
            compared,
            inlets=[frame.entities[i] for i in mine[:16].tolist()],
            fans_faster=None if np.isnan(faster) else round(faster, 3),
        )
        signals = ("sensor.temperature", "sensor.fan_speed") if faster >= self.fans else ("sensor.temperature",)
        score = float(np.median(step.score[mine]))
        return Finding(frame.time, due[0], entity, self.name, due[1], score, summary, shown, signals)


def _rows(frame: Frame, racks: Mapping[str, NDArray[np.int64]], known: list[str]) -> dict[str, NDArray[np.int64]]:
    """The same, with a row in place of its racks where most of them are warm."""
    above = frame.topology.ancestor_of_kind
    found, rows = dict(racks), dict[str, list[str]]()
    for rack in racks:
        if row := above(rack, "row"):
            rows.setdefault(row, []).append(rack)
    for row, mine in rows.items():
        size = sum(above(rack, "row") == row for rack in known)
        if len(mine) >= 2 and len(mine) >= _MOST * size:
            found[row] = np.concatenate([found.pop(rack) for rack in mine])
    return found
