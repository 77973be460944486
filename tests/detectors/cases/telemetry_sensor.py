"""A GPU's thermometer that reads 8 K too much from one reading to the next, at unchanged memory and power readings."""

from __future__ import annotations

import numpy as np

from detectors.telemetry.telemetry_sensor import TelemetrySensor
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES = tuple(f"node:n{n}" for n in range(3))
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(3) for i in range(8))
GUILTY = 11


def topology() -> Topology:
    """Three nodes of eight GPUs in a rack."""
    parents: dict[str, list[str]] = {node: ["rack:r1"] for node in NODES}
    return Topology({**parents, **{gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS}})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    own = np.linspace(-4, 4, 24)
    power = 600.0 + 15.0 * rng.standard_normal(24)
    heat = 32.0 + 0.037 * 600.0 + own + 0.4 * rng.standard_normal(24)
    memory = heat + 8.0 - own / 2
    if broken:
        heat[GUILTY] += 8.0
    columns = {
        "gpu.temperature": np.rint(heat),
        "gpu.memory_temperature": np.rint(memory),
        "gpu.power": np.rint(power),
    }
    return {"gpu": columns}, []


CASE = Case(
    TelemetrySensor,
    {"gpu": GPUS},
    topology,
    instant,
    frozenset({GPUS[GUILTY]}),
    level="ticket",
)
