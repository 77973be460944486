"""A rack whose nodes take in the warm air of the row behind it."""

from __future__ import annotations

import numpy as np

from detectors.heat.thermal_inlet import ThermalInlet
from pipeline.model.records import Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Values

NODES, PER_RACK = 32, 8
SENSORS = tuple(f"sensor:n{n}.{what}" for n in range(NODES) for what in ("inlet", "fan"))
NAMES = {"sensor": SENSORS}


def topology(per_rack: int = PER_RACK) -> Topology:
    parents = {sensor: (f"node:n{k // 2}",) for k, sensor in enumerate(SENSORS)}
    return Topology(parents | {f"node:n{n}": (f"rack:r{n // per_rack}",) for n in range(NODES)})


def air(rng: np.random.Generator, warmer: np.ndarray, faster: np.ndarray) -> Values:
    """Inlets in halves of a degree and fans in steps of 60 rpm, in turn."""
    base = 24 + np.random.default_rng(5).normal(0, 0.6, NODES)
    inlet = np.rint((base + warmer + 0.2 * rng.standard_normal(NODES)) * 2) / 2
    fan = np.rint(6000 * (1 + faster) * (1 + 0.01 * rng.standard_normal(NODES)) / 60) * 60
    warmth, speed = np.full(2 * NODES, np.nan), np.full(2 * NODES, np.nan)
    warmth[0::2], speed[1::2] = inlet, fan
    return {"sensor": {"sensor.temperature": warmth, "sensor.fan_speed": speed}}


def instant(tick: int, broken: bool, rng: np.random.Generator) -> tuple[Values, list[Event]]:
    mine = np.arange(NODES) // PER_RACK == 2
    return air(rng, 6.0 * (mine & broken), 0.8 * (mine & broken)), []


CASE = Case(ThermalInlet, NAMES, topology, instant, frozenset({"rack:r2"}), level="ticket")
