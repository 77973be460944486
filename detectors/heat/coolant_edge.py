"""Finds loops whose flow or pressure collapsed, as the agent beside the loop tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes
from detectors.base.event_data import EdgeEvent, as_edge_event, edge_events, read_number, values_by_entity
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.heat.coolant_loops import DOUBTED
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

_KINDS = ("flow_collapse", "pressure_collapse")
_SIGNALS = ("coolant.flow", "coolant.pressure", "coolant.supply_pressure")
_LEARN = 20  # frames of a pressure before it can bear witness: the replay contract
_FOLLOWS = 1 / 360  # of a frame: an hour at 10 s, so that a set-point is followed and a collapse is not; chosen
_NEAR = 0.1  # share by which a pressure may differ that stands; flow under 70 % takes half of it away; chosen
_NUMBERS, _MOST = ("usual", "share", "value"), 1e6  # L/min or bar; more is no reading; chosen
_RECOVERED = 1.15  # above its threshold by so much a sensor is well: as the agents' rule has it


@dataclass
class CoolantEdge(Detector):
    """A collapse pages as its event arrives. One that was over within its frame before it arrived is a suspect.

    A flow that collapses while the loop's pressure stands, as the event says or the frames before, is a suspect too:
    pressure goes with the square of the flow (affinity laws of pumps), so that the meter is to blame, or a valve that
    closed. It is reported with its frame.

    It ends by the agent's event, or, if that was lost, once the sensor shows well in two frames. It is told while the
    sensor is seen and not well.

    Source: without flow a GPU's margin of 27 K is gone in about 12 s, so no frame is waited for; two measurements in a
    row have decided already.
    """

    name: ClassVar[str] = "coolant_edge"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "coolant"
    needs: ClassVar[tuple[str, ...]] = _SIGNALS[:1]
    wants: ClassVar[tuple[str, ...]] = (*_SIGNALS[1:], *(f"event:{kind}" for kind in _KINDS))
    on_arrival: ClassVar[tuple[str, ...]] = _KINDS
    cannot_see: ClassVar[str] = (
        "Slow declines, a collapse within 30 looks after the agent began, and whether a sensor failed to 0 or the loop."
    )

    well: int = 2
    """Frames in a row that end a collapse whose end no event told; chosen."""

    collapsed: dict[str, dict[str, dict[str, Any]]] = notes()
    usual: NDArray[np.float64] = memory(np.nan)
    looks: NDArray[np.int64] = memory(0, np.int64)
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        stands = self._pressures(frames.get("coolant"))
        fresh, brief = self._hear(frames)
        seen = self._look(frames.get("coolant"))
        close_ended(self.conditions, set(self.collapsed))
        found = [self._brief(said, time) for said in brief if said.entity not in self.collapsed]
        for entity in sorted((fresh | seen) & set(self.collapsed)):
            sensors = self.collapsed[entity]
            onset = min(sensor["onset"] for sensor in sensors.values())
            doubted = set(sensors) == {"coolant.flow"} and entity in stands
            if due := due_report(self.conditions, entity, time, onset, "suspect" if doubted else "page"):
                found.append(self._finding(entity, time, due, sensors, doubted))
        return found

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """A page, unless the event says that the loop's pressure stands."""
        said, signal = as_edge_event(event), str(event.data.get("signal"))
        if said is None or not said.active or signal not in _SIGNALS or event.entity in self.conditions:
            return None
        others = event.data.get("others")
        pressure = read_number(others.get(_SIGNALS[1]), 0.0, _MOST) if isinstance(others, Mapping) else None
        if signal == _SIGNALS[0] and pressure is not None and pressure >= 1 - _NEAR:
            return None
        return self._finding(event.entity, event.time, (said.since, "page"), {signal: _sensor(said)}, False)

    def budget(self) -> list[str]:
        return [rule_line("collapses of flow and pressure that agents tell")]

    def _pressures(self, frame: Frame | None) -> set[str]:
        """Loops whose pressure is measured and stands near its usual value, which is followed slowly."""
        if frame is None:
            return set()
        pressure, n = frame["coolant.pressure"], len(frame.entities)
        self.grow(n)
        usual, looks = self.usual[:n], self.looks[:n]
        known = (pressure > 0) & (pressure <= CATALOGUE["coolant.pressure"].valid[1])
        share = np.maximum(1 / np.maximum(looks + 1, 1), _FOLLOWS)
        near = known & (looks >= _LEARN)
        near[near] = np.abs(pressure[near] / usual[near] - 1) <= _NEAR
        takes = known & (near | (looks < _LEARN))
        read = np.where(takes, pressure, np.nan)
        usual[:] = np.where(takes, np.where(looks == 0, read, usual + share * (read - usual)), usual)
        looks += takes
        return {frame.entities[i] for i in np.flatnonzero(near).tolist()}

    def _hear(self, frames: Mapping[str, Frame]) -> tuple[set[str], list[EdgeEvent]]:
        """Takes the events: (who collapsed, collapses that began and ended within these frames)."""
        fresh: dict[tuple[str, str], EdgeEvent] = {}
        brief: list[EdgeEvent] = []
        for said in edge_events(frames, _KINDS):
            signal = str(said.event.data.get("signal"))
            if signal not in _SIGNALS:
                continue
            mine = self.collapsed.setdefault(said.entity, {})
            if said.active:
                fresh[said.entity, signal] = said
                mine[signal] = _sensor(said)
            else:
                mine.pop(signal, None)
                if (began := fresh.pop((said.entity, signal), None)) is not None:
                    brief.append(began)
            if not mine:
                del self.collapsed[said.entity]
        return {entity for entity, _ in fresh}, brief

    def _look(self, frame: Frame | None) -> set[str]:
        """Whose sensors are seen; those that are well for long enough are let go."""
        seen: set[str] = set()
        for signal in _SIGNALS:
            for entity, value in values_by_entity(frame, signal).items():
                sensor = self.collapsed.get(entity, {}).get(signal)
                if sensor is None:
                    continue
                seen.add(entity)
                # without a limit that makes sense any flow is well: its agent tells anew if it is not
                sensor["well"] = sensor["well"] + 1 if value > (sensor["limit"] or 0.0) * _RECOVERED else 0
                if sensor["well"] >= self.well:
                    del self.collapsed[entity][signal]
                    if not self.collapsed[entity]:
                        del self.collapsed[entity]
        return seen

    def _brief(self, said: EdgeEvent, time: int) -> Finding:
        signal = str(said.event.data["signal"])
        summary = f"{said.entity}: {_word(signal)} collapsed for less than a frame"
        shown = make_evidence(
            "it is over",
            value=read_number(said.event.data.get("value"), 0.0, _MOST),
            usual=read_number(said.event.data.get("usual"), 0.0, _MOST),
            seconds=(time - said.since) / SECOND,
        )
        return Finding(time, said.since, said.entity, self.name, "suspect", 0.5, summary, shown, (signal,))

    def _finding(
        self, entity: str, time: int, due: tuple[int, Level], sensors: Mapping[str, dict[str, Any]], doubted: bool
    ) -> Finding:
        signals = tuple(s for s in _SIGNALS if s in sensors)
        words = " and ".join(
            f"{_word(s)} {_said(sensors[s]['value'])} of at least {_said(sensors[s]['limit'])} {CATALOGUE[s].unit}"
            for s in signals
        )
        shown: dict[str, Any] = {s: {"value": sensors[s]["value"], "limit": sensors[s]["limit"]} for s in signals}
        clears = "ends when the sensor shows well in two frames, or its agent says so"
        summary = f"{entity} collapsed: {words}" + (", but its pressure stands: the meter?" if doubted else "")
        score, more = float(len(signals)), make_evidence(clears, None, **{DOUBTED: doubted}, **shown)
        return Finding(time, due[0], entity, self.name, due[1], score, summary, more, signals)


def _sensor(said: EdgeEvent) -> dict[str, Any]:
    """What is kept of a sensor that collapsed."""
    usual, share, value = (read_number(said.event.data.get(name), 0.0, _MOST) for name in _NUMBERS)
    limit = usual * share if usual is not None and share is not None else None
    return {"onset": said.since, "limit": limit, "value": value, "well": 0}


def _said(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _word(signal: str) -> str:
    return signal.removeprefix("coolant.").replace("_", " ")
