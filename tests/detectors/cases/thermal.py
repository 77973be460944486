"""One GPU of a loop whose cold plate loosens: hot at the same power, and its memory too."""

from __future__ import annotations

import numpy as np

from detectors.heat.thermal import Thermal
from pipeline.model.records import Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Values

NODES, WIDTH = 4, 8
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(NODES) for i in range(WIDTH))
NAMES = {"gpu": GPUS, "coolant": ("cdu:c1",)}
GUILTY = GPUS[11]
SUPPLY, PLATE = 32.0, 0.038  # Cel, K/W


def topology() -> Topology:
    parents = {gpu: (f"node:n{k // WIDTH}",) for k, gpu in enumerate(GPUS)}
    parents |= {f"node:n{n}": (f"rack:r{n // 2}",) for n in range(NODES)}
    parents |= {f"rack:r{r}": ("cdu:c1",) for r in range(NODES // 2)}
    return Topology(parents, {gpu: {"sku": "H100"} for gpu in GPUS})


def heat(rng: np.random.Generator, resistance: np.ndarray, supply: float = SUPPLY) -> Values:
    """Working GPUs: 1 K of rounding, noise of power and sensor, a memory some K above its core."""
    power = 640 * (1 + 0.02 * rng.standard_normal(len(GPUS)))
    core = supply + resistance * 640 + 0.3 * rng.standard_normal(len(GPUS))
    return {
        "gpu": {
            "gpu.temperature": np.rint(core),
            "gpu.memory_temperature": np.rint(core + 18),
            "gpu.power": np.rint(power),
            "gpu.throttle_reasons": np.zeros(len(GPUS)),
        },
        "coolant": {"coolant.supply_temperature": np.array([supply + 0.05 * rng.standard_normal()])},
    }


def instant(tick: int, broken: bool, rng: np.random.Generator) -> tuple[Values, list[Event]]:
    lottery = np.random.default_rng(3).normal(0, 0.1, len(GPUS))
    resistance = PLATE * np.exp(lottery)
    if broken:
        resistance[GPUS.index(GUILTY)] *= 1.4
    return heat(rng, resistance), []


CASE = Case(Thermal, NAMES, topology, instant, frozenset({GUILTY}), level="ticket")
