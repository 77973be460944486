"""Finds heat that is no longer taken away: temperatures that rise faster than their power explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, notes
from detectors.base.event_data import EdgeEvent, as_edge_event, edge_events, read_number, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

_KIND = "temperature_rise"
_TOGETHER = 60 * SECOND  # rises this close to each other have one reason: racks of a loop heat up within a minute
_LASTS = 600 * SECOND  # a rise whose end no event told is over: no part rises at 0.5 K/s for so long
_SOURCES = frozenset({"cdu", "loop", "connector", "chassis"})  # what brings coolant to a part
_NUMBERS = ("value", "slope", "rise", "seconds")
_MOST = 1e4  # K, Cel or s; more is no number of a rise; chosen
_UNITS = {"gpu": "node"}  # what shares a part's cooling most closely


@dataclass
class ThermalEdge(Detector):
    """One part that heats up is a suspect; `least` parts of a node, and at least half, are a page on the node.

    A single sensor cannot tell a lost cold plate from its own fault, and the part slows down by itself at its limit;
    several parts are several sensors, and what they share is the manifold. Coolant that warms fast at its supply is one
    sensor too: a suspect, and a page once a part that it cools rises. Flow that is lost is paged by its own detectors.

    Source: dT/dt = P / C is 2.3 K/s at 1 kW and 440 J/K of plate and water without flow.
    """

    name: ClassVar[str] = "thermal_edge"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = (f"event:{_KIND}",)
    on_arrival: ClassVar[tuple[str, ...]] = (_KIND,)
    cannot_see: ClassVar[str] = (
        "Rises while the load swings, below 0.5 K/s, in the first 30 s of an agent, and parts that do not tell power."
    )

    least: int = 3

    rising: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        for said in edge_events(frames, (_KIND,)):
            self._hear(said)
        self.rising = {e: r for e, r in self.rising.items() if abs(time - r["onset"]) <= _LASTS}
        blamed = self._blamed(next(iter(frames.values())).topology, frames.get("gpu"))
        close_ended(self.conditions, set(blamed))
        found = []
        for entity, (level, parts) in sorted(blamed.items()):
            onset = min(self.rising[part]["onset"] for part in parts)
            if due := due_report(self.conditions, entity, time, onset, level):
                found.append(self._finding(entity, time, due, parts, self.rising))
        return found

    def budget(self) -> list[str]:
        return [rule_line(f"rises of temperature that agents tell, of {self.least} parts of a node for a page")]

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """A suspect: what one part tells needs a second one."""
        said, part = as_edge_event(event), event.entity
        if said is None or not said.active or part in self.conditions:
            return None
        return self._finding(part, event.time, (said.since, "suspect"), [part], {part: _rise(said)})

    def _hear(self, said: EdgeEvent) -> None:
        if said.active:
            self.rising[said.entity] = _rise(said)
        else:
            self.rising.pop(said.entity, None)

    def _blamed(self, topology: Topology, frame: Frame | None) -> dict[str, tuple[Level, list[str]]]:
        """Whom to blame -> (level, the parts that rise): a node for several of its parts, else each part."""
        units: dict[str, list[str]] = {}
        for part in sorted(self.rising):
            wanted = _UNITS.get(kind_of(part))
            unit = topology.ancestor_of_kind(part, wanted) if wanted else None
            units.setdefault(unit or part, []).append(part)
        found: dict[str, tuple[Level, list[str]]] = {}
        for unit, parts in units.items():
            if unit != parts[0] and self._enough(topology, frame, unit, parts):
                found[unit] = ("page", parts)
            else:
                found |= {part: ("page" if self._feeds_heat(topology, part) else "suspect", [part]) for part in parts}
        return found

    def _feeds_heat(self, topology: Topology, part: str) -> bool:
        """Whether warm coolant reaches a part that rises too: two sensors far apart say the same."""
        if kind_of(part) in _UNITS:
            return False
        source = {e for e in (part, *topology.ancestors(part)) if kind_of(e) in _SOURCES}
        return any(source & set(topology.ancestors(other)) for other in self.rising if kind_of(other) in _UNITS)

    def _enough(self, topology: Topology, frame: Frame | None, unit: str, parts: list[str]) -> bool:
        """Whether the parts of a unit rise together."""
        onsets = sorted(self.rising[part]["onset"] for part in parts)
        close_by = any(b - a <= _TOGETHER for a, b in zip(onsets, onsets[self.least - 1 :], strict=False))
        known = frame.entities if frame is not None else ()
        size = sum(topology.ancestor_of_kind(e, kind_of(unit)) == unit for e in known)
        return len(parts) >= self.least and close_by and 2 * len(parts) >= size

    def _finding(
        self, entity: str, time: int, due: tuple[int, Level], parts: list[str], rising: Mapping[str, dict[str, Any]]
    ) -> Finding:
        worst = max(parts, key=lambda part: (rising[part]["slope"] or 0.0, part))
        rise = rising[worst]
        who = entity if parts == [entity] else f"{len(parts)} parts of {entity}"
        told_all = rise["rise"] is not None and rise["seconds"] is not None
        by = f" by {rise['rise']:.3g} K in {rise['seconds']:.3g} s" if told_all else ""
        summary = f"{who} rose{by} without more power"
        shown = make_evidence(
            "ends when the parts no longer rise, or after ten minutes",
            parts=parts[:16],
            slope=rise["slope"],
            temperature=rise["value"],
            holds=False,
        )
        signals = tuple(dict.fromkeys(rising[part]["signal"] for part in parts))
        return Finding(time, due[0], entity, self.name, due[1], float(len(parts)), summary, shown, signals)


def _rise(said: EdgeEvent) -> dict[str, Any]:
    """What is kept of a part that heats up."""
    numbers = {name: read_number(said.event.data.get(name), -_MOST, _MOST) for name in _NUMBERS}
    signal = read_text(said.event.data.get("signal")) or "gpu.temperature"
    return {"onset": said.since, "signal": signal, **numbers}
