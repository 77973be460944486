"""Finds heat that is not removed any more: temperatures that rise faster than the power of the part explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, notes
from detectors.base.event_data import EdgeEvent, as_edge_event, edge_events, read_number, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

_KIND = "temperature_rise"
_TOGETHER = 60 * SECOND  # us between rises of one cause: racks of a loop heat up within a minute
_LASTS = 600 * SECOND  # us after which a rise without an end event is over: no part rises at 0.5 K/s for so long
_SOURCES = frozenset({"cdu", "loop", "connector", "chassis"})  # what brings coolant to a part
_NUMBERS = ("value", "slope", "rise", "seconds")
_MOST = 1e4  # K, Cel or s; more is not a number of a rise; chosen
_UNITS = {"gpu": "node"}  # what shares a part's cooling most closely


@dataclass
class ThermalEdge(Detector):
    """One part that heats up is a suspect; `least` parts of a node, and at least half, are a page on the node.

    A single sensor cannot distinguish a lost cold plate from its own fault, and the part throttles at its limit anyway;
    several parts are several sensors, and share the manifold. Coolant that warms fast at its supply is one sensor too:
    a suspect, and a page once a part that it cools rises. Lost flow is paged by its own detectors.

    Source: dT/dt = P / C is 2.3 K/s at 1 kW and 440 J/K of plate and water without flow.
    """

    name: ClassVar[str] = "thermal_edge"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = (f"event:{_KIND}",)
    on_arrival: ClassVar[tuple[str, ...]] = (_KIND,)
    cannot_see: ClassVar[str] = (
        "Rises while the load swings, below 0.5 K/s, in the first 30 s of an agent, and parts that do not report power."
    )

    least: int = 3

    rising: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on the fast temperature rises that agents reported."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        for event in edge_events(frames, (_KIND,)):
            self._record(event)
        self.rising = {e: r for e, r in self.rising.items() if abs(time - r["onset"]) <= _LASTS}
        blamed = self._find_blamed(next(iter(frames.values())).topology, frames.get("gpu"))
        close_ended(self.conditions, set(blamed))
        found = []
        for entity, (level, parts) in sorted(blamed.items()):
            onset = min(self.rising[part]["onset"] for part in parts)
            if due := due_report(self.conditions, entity, time, onset, level):
                found.append(self._rise_finding(entity, time, due, parts, self.rising))
        return found

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        return [rule_line(f"temperature rises that agents report, of {self.least} parts of a node for a page")]

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """Returns a suspect: the report of one part needs a second one."""
        edge, part = as_edge_event(event), event.entity
        if edge is None or not edge.active or part in self.conditions:
            return None
        return self._rise_finding(part, event.time, (edge.since, "suspect"), [part], {part: _read_rise(edge)})

    def _record(self, event: EdgeEvent) -> None:
        if event.active:
            self.rising[event.entity] = _read_rise(event)
        else:
            self.rising.pop(event.entity, None)

    def _find_blamed(self, topology: Topology, frame: Frame | None) -> dict[str, tuple[Level, list[str]]]:
        """Returns entity to blame -> (level, rising parts): a node for several of its parts, else each part."""
        units: dict[str, list[str]] = {}
        for part in sorted(self.rising):
            kind = _UNITS.get(kind_of(part))
            unit = topology.ancestor_of_kind(part, kind) if kind else None
            units.setdefault(unit or part, []).append(part)
        found: dict[str, tuple[Level, list[str]]] = {}
        for unit, parts in units.items():
            if unit != parts[0] and self._rise_together(topology, frame, unit, parts):
                found[unit] = ("page", parts)
            else:
                found |= {part: ("page" if self._warms_part(topology, part) else "suspect", [part]) for part in parts}
        return found

    def _warms_part(self, topology: Topology, part: str) -> bool:
        """Returns whether warm coolant reaches a part that rises too: two distant sensors agree."""
        if kind_of(part) in _UNITS:
            return False
        source = {e for e in (part, *topology.ancestors(part)) if kind_of(e) in _SOURCES}
        return any(source & set(topology.ancestors(other)) for other in self.rising if kind_of(other) in _UNITS)

    def _rise_together(self, topology: Topology, frame: Frame | None, unit: str, parts: list[str]) -> bool:
        """Returns whether enough parts of a unit rise together."""
        onsets = sorted(self.rising[part]["onset"] for part in parts)
        close_by = any(b - a <= _TOGETHER for a, b in zip(onsets, onsets[self.least - 1 :], strict=False))
        known = frame.entities if frame is not None else ()
        size = sum(topology.ancestor_of_kind(e, kind_of(unit)) == unit for e in known)
        return len(parts) >= self.least and close_by and 2 * len(parts) >= size

    def _rise_finding(
        self, entity: str, time: int, due: tuple[int, Level], parts: list[str], rising: Mapping[str, dict[str, Any]]
    ) -> Finding:
        worst = max(parts, key=lambda part: (rising[part]["slope"] or 0.0, part))
        rise = rising[worst]
        known = rise["rise"] is not None and rise["seconds"] is not None
        size = f" {rise['rise']:.2g} K in {rise['seconds']:.2g} s" if known else ""
        subject = "heats up" if parts == [entity] else f"{len(parts)} parts heat up"
        return self.finding(
            time,
            entity,
            due,
            score=float(len(parts)),
            summary=pager_title(entity, f"{subject}{size} without more power"),
            signals=tuple(dict.fromkeys(rising[part]["signal"] for part in parts)),
            clears="ends when the parts no longer rise, or after ten minutes",
            parts=parts[:16],
            slope=rise["slope"],
            temperature=rise["value"],
            holds=False,
        )


def _read_rise(event: EdgeEvent) -> dict[str, Any]:
    """Returns the verdict on a part that heats up."""
    numbers = {name: read_number(event.event.data.get(name), -_MOST, _MOST) for name in _NUMBERS}
    signal = read_text(event.event.data.get("signal")) or "gpu.temperature"
    return {"onset": event.since, "signal": signal, **numbers}
