"""Finds loops whose flow or pressure collapsed, as reported by the agent of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes
from detectors.base.event_data import EdgeEvent, as_edge_event, edge_events, read_number, values_by_entity
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.streams import Floats
from detectors.heat.coolant_loops import DOUBTED
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

_KINDS = ("flow_collapse", "pressure_collapse")
_SIGNALS = ("coolant.flow", "coolant.pressure", "coolant.supply_pressure")
_LEARN = 20  # frames of a pressure before it is used: the replay contract
_FOLLOWS = 1 / 360  # gain of a frame: an hour at 10 s, so that a set-point is followed and a collapse is not; chosen
_NEAR = 0.1  # share by which a normal pressure may differ; flow under 70 % takes half of it away; chosen
_NUMBERS, _MOST = ("usual", "share", "value"), 1e6  # L/min or bar; more is not a reading; chosen
_RECOVERED = 1.15  # times its threshold above which a sensor is normal: as in the agents' rule


@dataclass
class CoolantEdge(Detector):
    """A collapse pages as its event arrives. One that was over within its frame before it arrived is a suspect.

    A flow that collapses while the loop's pressure is normal, as the event or the frames before show, is a suspect too:
    pressure goes with the square of the flow (affinity laws of pumps), so the cause is the meter, or a valve that
    closed. It is reported with its frame.

    It ends by the agent's event, or, if that was lost, once the sensor is normal in two frames. It is reported while
    the sensor is read and not normal.

    Source: without flow a GPU's margin of 27 K is gone in about 12 s, so it does not wait for a frame; the agent
    decides by two measurements in a row.
    """

    name: ClassVar[str] = "coolant_edge"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "coolant"
    needs: ClassVar[tuple[str, ...]] = _SIGNALS[:1]
    wants: ClassVar[tuple[str, ...]] = (*_SIGNALS[1:], *(f"event:{kind}" for kind in _KINDS))
    on_arrival: ClassVar[tuple[str, ...]] = _KINDS
    cannot_see: ClassVar[str] = (
        "Slow declines; a collapse within 30 readings after the agent started; and whether a value of 0 is a failed "
        "sensor or a failed loop."
    )

    well: int = 2
    """Frames in a row that end a collapse without an end event; chosen."""

    collapsed: dict[str, dict[str, dict[str, Any]]] = notes()  # loop -> signal -> onset, limit, value, well
    usual: Floats = memory(np.nan)
    samples: NDArray[np.int64] = memory(0, np.int64)
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on the collapses that agents reported."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        normal = self._find_normal_pressures(frames.get("coolant"))
        fresh, brief = self._read_events(frames)
        read = self._read_sensors(frames.get("coolant"))
        close_ended(self.conditions, set(self.collapsed))
        found = [self._brief_finding(event, time) for event in brief if event.entity not in self.collapsed]
        for entity in sorted((fresh | read) & set(self.collapsed)):
            sensors = self.collapsed[entity]
            onset = min(sensor["onset"] for sensor in sensors.values())
            doubted = set(sensors) == {"coolant.flow"} and entity in normal
            if due := due_report(self.conditions, entity, time, onset, "suspect" if doubted else "page"):
                found.append(self._collapse_finding(entity, time, due, sensors, doubted))
        return found

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """Returns a page, unless the event reports a normal pressure of the loop."""
        edge, signal = as_edge_event(event), str(event.data.get("signal"))
        if edge is None or not edge.active or signal not in _SIGNALS or event.entity in self.conditions:
            return None
        others = event.data.get("others")
        pressure = read_number(others.get(_SIGNALS[1]), 0.0, _MOST) if isinstance(others, Mapping) else None
        if signal == _SIGNALS[0] and pressure is not None and pressure >= 1 - _NEAR:
            return None
        return self._collapse_finding(
            event.entity, event.time, (edge.since, "page"), {signal: _read_sensor(edge)}, False
        )

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        return [rule_line("collapses of flow and pressure that agents report")]

    def _find_normal_pressures(self, frame: Frame | None) -> set[str]:
        """Returns loops whose pressure is measured and near its usual value, which is followed slowly."""
        if frame is None:
            return set()
        pressure, n = frame["coolant.pressure"], len(frame.entities)
        self.grow(n)
        usual, samples = self.usual[:n], self.samples[:n]
        known = (pressure > 0) & (pressure <= CATALOGUE["coolant.pressure"].valid[1])
        share = np.maximum(1 / np.maximum(samples + 1, 1), _FOLLOWS)
        near = known & (samples >= _LEARN)
        near[near] = np.abs(pressure[near] / usual[near] - 1) <= _NEAR
        learns = known & (near | (samples < _LEARN))
        value = np.where(learns, pressure, np.nan)
        usual[:] = np.where(learns, np.where(samples == 0, value, usual + share * (value - usual)), usual)
        samples += learns
        return {frame.entities[i] for i in np.flatnonzero(near).tolist()}

    def _read_events(self, frames: Mapping[str, Frame]) -> tuple[set[str], list[EdgeEvent]]:
        """Reads the events; returns the loops that collapsed, and collapses that began and ended in these frames."""
        fresh: dict[tuple[str, str], EdgeEvent] = {}
        brief: list[EdgeEvent] = []
        for event in edge_events(frames, _KINDS):
            signal = str(event.event.data.get("signal"))
            if signal not in _SIGNALS:
                continue
            sensors = self.collapsed.setdefault(event.entity, {})
            if event.active:
                fresh[event.entity, signal] = event
                sensors[signal] = _read_sensor(event)
            else:
                sensors.pop(signal, None)
                if (began := fresh.pop((event.entity, signal), None)) is not None:
                    brief.append(began)
            if not sensors:
                del self.collapsed[event.entity]
        return {entity for entity, _ in fresh}, brief

    def _read_sensors(self, frame: Frame | None) -> set[str]:
        """Returns the collapsed loops whose sensors are read; removes those that are normal for long enough."""
        read: set[str] = set()
        for signal in _SIGNALS:
            for entity, value in values_by_entity(frame, signal).items():
                sensor = self.collapsed.get(entity, {}).get(signal)
                if sensor is None:
                    continue
                read.add(entity)
                # without a valid limit any flow is normal: its agent reports again if it is not
                sensor["well"] = sensor["well"] + 1 if value > (sensor["limit"] or 0.0) * _RECOVERED else 0
                if value < (sensor["limit"] or 0.0):
                    sensor["value"] = value  # a pump runs down: its event has only the first value under the limit
                if sensor["well"] >= self.well:
                    del self.collapsed[entity][signal]
                    if not self.collapsed[entity]:
                        del self.collapsed[entity]
        return read

    def _brief_finding(self, event: EdgeEvent, time: int) -> Finding:
        signal = str(event.event.data["signal"])
        return self.finding(
            time,
            event.entity,
            (event.since, "suspect"),
            score=0.5,
            summary=pager_title(event.entity, f"{_signal_name(signal)} collapsed for less than a frame"),
            signals=(signal,),
            clears="it is over",
            value=read_number(event.event.data.get("value"), 0.0, _MOST),
            usual=read_number(event.event.data.get("usual"), 0.0, _MOST),
            seconds=(time - event.since) / SECOND,
        )

    def _collapse_finding(
        self, entity: str, time: int, due: tuple[int, Level], sensors: Mapping[str, dict[str, Any]], doubted: bool
    ) -> Finding:
        signals = tuple(s for s in _SIGNALS if s in sensors)
        parts = [
            f"{_signal_name(s)} {_number_text(sensors[s]['value'])} {CATALOGUE[s].unit},"
            f" minimum {_number_text(sensors[s]['limit'])}"
            for s in signals
        ]
        shown: dict[str, Any] = {s: {"value": sensors[s]["value"], "limit": sensors[s]["limit"]} for s in signals}
        more = {DOUBTED: doubted, **shown}
        return self.finding(
            time,
            entity,
            due,
            score=float(len(signals)),
            summary=pager_title(entity, "; ".join([*parts, *(["likely its meter"] if doubted else [])])),
            signals=signals,
            clears="ends when the sensor is normal in two frames, or its agent reports it",
            **more,
        )


def _read_sensor(event: EdgeEvent) -> dict[str, Any]:
    """Returns the verdict on a sensor that collapsed."""
    usual, share, value = (read_number(event.event.data.get(name), 0.0, _MOST) for name in _NUMBERS)
    limit = usual * share if usual is not None and share is not None else None
    return {"onset": event.since, "limit": limit, "value": value, "well": 0}


def _number_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _signal_name(signal: str) -> str:
    return signal.removeprefix("coolant.").replace("_", " ")
