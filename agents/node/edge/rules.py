"""Applies all edge rules to one tick's readings. Missing values lead to no conclusion."""

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

MAX_WATCHED = 2048
"""Entities with state, each below 10 KiB; chosen: 64 BMCs with 32 sensors each. Further ones are not evaluated."""
MAX_EVENTS = 256
"""Events of one tick; chosen: a burst pipe affects every sensor of a row, and the first of them suffice."""


class EdgeRule(Protocol):
    """One rule. `evaluate` gets the values of an entity that has at least one of its signals."""

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that the rule needs."""

    def evaluate(self, time: int, entity: str, values: dict[str, float]) -> Event | list[Event] | None:
        """The events of these values."""


class EdgeRules:
    """The enabled rules, and their state for each entity; a restart clears it."""

    def __init__(self, settings: Settings) -> None:
        self._rules = _build_rules(settings) if settings.enabled else {}
        self._watched: set[str] = set()

    def evaluate(self, time: int, readings: Iterable[Reading]) -> list[Event]:
        """The conditions that begin or end with this tick's readings."""
        found: list[Event] = []
        for reading in readings:
            rules = self._rules.get(reading.device_class)
            if rules:
                found += self._evaluate_reading(time, reading, rules)
        return found[:MAX_EVENTS]

    def _evaluate_reading(self, time: int, reading: Reading, rules: Sequence[EdgeRule]) -> list[Event]:
        names = [name for rule in rules for name in rule.signals if name in reading.columns]
        columns = {name: _measured_values(reading, name) for name in dict.fromkeys(names)}
        found: list[Event] = []
        for i, entity in enumerate(reading.entities if columns else ()):
            values = {name: float(column[i]) for name, column in columns.items() if not np.isnan(column[i])}
            if not values or not self._is_watched(entity):
                continue
            for rule in rules:
                if any(name in values for name in rule.signals):
                    events = rule.evaluate(time, entity, values)
                    found += events if isinstance(events, list) else [events] if events else []
        return found

    def _is_watched(self, entity: str) -> bool:
        """Whether the entity is evaluated; a new one is added while there is room."""
        if entity in self._watched:
            return True
        if len(self._watched) >= MAX_WATCHED:
            return False
        self._watched.add(entity)
        return True


def _measured_values(reading: Reading, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The column as floats; missing, infinite and invalid values are NaN."""
    raw = np.asarray(reading.columns[name])
    out = raw.astype(np.float64)
    if raw.dtype.kind == "u":
        out[raw == np.iinfo(raw.dtype).max] = np.nan
    low, high = CATALOGUE[name].valid
    out[~np.isfinite(out) | (out < low) | (out > high)] = np.nan
    return out


def _build_rules(settings: Settings) -> dict[str, list[EdgeRule]]:
    """Device class -> its rules."""
    shared: tuple[dict[str, set[str]], dict[tuple[str, str], float]] = {}, {}
    flow = CollapseRule("flow_collapse", ("coolant.flow",), settings.flow_share, settings.least_flow, *shared)
    pressures = ("coolant.pressure", "coolant.supply_pressure")
    pressure = CollapseRule("pressure_collapse", pressures, settings.pressure_share, settings.least_pressure, *shared)
    supply = RiseRule("coolant.supply_temperature", "", settings.temperature_slope)
    gpu = RiseRule("gpu.temperature", "gpu.power", settings.temperature_slope)
    return {"leak": [LeakRule()], "coolant": [flow, pressure, supply], "gpu": [gpu]}
