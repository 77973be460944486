"""All edge rules over one tick's readings. They look at what was measured; where nothing was, nothing is concluded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from agents.collector import Reading
from agents.node.edge.coolant import CollapseRule, LeakRule
from agents.node.edge.temperature import RiseRule
from pipeline.config.sections import Edge as Settings
from pipeline.model.records import Event
from pipeline.model.signals import CATALOGUE

MOST_WATCHED = 2048
"""Entities whose past is kept, each below 10 KiB; chosen: 64 BMCs of 32 sensors each. Those beyond are not watched."""
MOST_EVENTS = 256
"""Events of one tick; chosen: a burst pipe moves every sensor of a row, and the first of them say it."""


class Rule(Protocol):
    """One rule: `look` gets the measured values of an entity that bears one of its signals."""

    @property
    def signals(self) -> tuple[str, ...]: ...

    def look(self, time: int, entity: str, values: dict[str, float]) -> Event | list[Event] | None: ...


class Edge:
    """The rules that are on, and what they remember of each entity; a restart forgets it."""

    def __init__(self, settings: Settings) -> None:
        self._rules = _rules(settings) if settings.enabled else {}
        self._watched: set[str] = set()

    def take(self, time: int, readings: Iterable[Reading]) -> list[Event]:
        """What began or ended with this tick's readings."""
        found: list[Event] = []
        for reading in readings:
            rules = self._rules.get(reading.device_class)
            if rules:
                found += self._judge(time, reading, rules)
        return found[:MOST_EVENTS]

    def _judge(self, time: int, reading: Reading, rules: Sequence[Rule]) -> list[Event]:
        names = [name for rule in rules for name in rule.signals if name in reading.columns]
        columns = {name: _measured(reading, name) for name in dict.fromkeys(names)}
        found: list[Event] = []
        for i, entity in enumerate(reading.entities if columns else ()):
            values = {name: float(column[i]) for name, column in columns.items() if not np.isnan(column[i])}
            if not values or not self._watch(entity):
                continue
            for rule in rules:
                if any(name in values for name in rule.signals):
                    said = rule.look(time, entity, values)
                    found += said if isinstance(said, list) else [said] if said else []
        return found

    def _watch(self, entity: str) -> bool:
        if entity in self._watched:
            return True
        if len(self._watched) >= MOST_WATCHED:
            return False
        self._watched.add(entity)
        return True


def _measured(reading: Reading, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The column as floats; what is missing, infinite or outside the signal's valid range is NaN."""
    raw = np.asarray(reading.columns[name])
    out = raw.astype(np.float64)
    if raw.dtype.kind == "u":
        out[raw == np.iinfo(raw.dtype).max] = np.nan
    low, high = CATALOGUE[name].valid
    out[~np.isfinite(out) | (out < low) | (out > high)] = np.nan
    return out


def _rules(settings: Settings) -> dict[str, list[Rule]]:
    """Device class -> its rules."""
    shared: tuple[dict[str, set[str]], dict[tuple[str, str], float]] = {}, {}
    flow = CollapseRule("flow_collapse", ("coolant.flow",), settings.flow_share, settings.least_flow, *shared)
    pressures = ("coolant.pressure", "coolant.supply_pressure")
    pressure = CollapseRule("pressure_collapse", pressures, settings.pressure_share, settings.least_pressure, *shared)
    supply = RiseRule("coolant.supply_temperature", "", settings.temperature_slope)
    part = RiseRule("gpu.temperature", "gpu.power", settings.temperature_slope)
    return {"leak": [LeakRule()], "coolant": [flow, pressure, supply], "gpu": [part]}
