"""An hour of a small simulated fleet with one fault, and the same hour without it."""

from __future__ import annotations

from functools import cache

import numpy as np

from agents.sim.faults.kind import Kind
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario
from pipeline.model.records import Event

ONSET, END = 900.0, 2400.0
WITHIN = slice(130, 235)
SEED = 3


class Run:
    """An hour of 16 nodes in one piece: columns with NaN (or -1 of a whole number) where there is no row."""

    def __init__(self, *lines: Line, nodes: int = 16) -> None:
        self.simulator = FleetSimulator(Scenario(3600.0, 10.0, None, Fleet(nodes, 8), lines), SEED)
        self.chunks = list(self.simulator.chunks())

    def column(self, signal: str, device_class: str | None = None) -> np.ndarray:
        device_class = device_class or signal.split(".")[0]
        values = np.concatenate([c.columns[device_class][signal] for c in self.chunks]).astype(float)
        there = np.concatenate([c.present[device_class] for c in self.chunks])
        return np.where(there, values, np.nan)

    def events(self, *kinds: str) -> list[Event]:
        return [e for c in self.chunks for _, e in c.events if e.kind in kinds]

    def changed(self, device_class: str, signal: str) -> np.ndarray:
        """(ticks, devices) where it differs from the fleet in which nothing happens."""
        mine, sound = self.column(signal, device_class), simulate_quiet_hour().column(signal, device_class)
        return ~((mine == sound) | (np.isnan(mine) & np.isnan(sound)))


@cache
def simulate_quiet_hour() -> Run:
    return Run()


def simulate_fault(kind: Kind, entity: str | None = None, end: float = END) -> Run:
    return Run(Line(kind, ONSET, end, entity))


def only_within(changed: np.ndarray, after: int = 0) -> bool:
    return bool(changed.any()) and not changed[:90].any() and not changed[240 + after :].any()
