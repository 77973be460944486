"""One GPU of a job whose voltage regulator wastes a fifth more, and that is warmer because of it."""

from __future__ import annotations

import numpy as np

from detectors.power.power_draw import PowerDraw
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant, Values

NODES, WIDTH = 4, 8
COUNT = NODES * WIDTH
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(NODES) for i in range(WIDTH))
GUILTY = 11


def topology(placed: bool = True) -> Topology:
    """Four nodes of a rack, all in one job."""
    parents: dict[str, tuple[str, ...]] = {gpu: (f"node:n{k // WIDTH}",) for k, gpu in enumerate(GPUS)}
    parents |= {f"node:n{n}": ("rack:r1",) for n in range(NODES)}
    if placed:
        parents |= {f"rank:j.{k}": ("job:j", gpu) for k, gpu in enumerate(GPUS)}
        parents["job:j"] = ()
    return Topology(parents, {gpu: {"sku": "H100"} for gpu in GPUS})


def drawn(rng: np.random.Generator, share: np.ndarray, load: np.ndarray, meter: np.ndarray | None = None) -> Values:
    """GPUs of one kind: idle power plus the cost of clock x activity, times their own share."""
    clock = 1900 + 15 * rng.integers(-2, 3, COUNT)
    activity = np.clip(load * (1 + 0.02 * rng.standard_normal(COUNT)), 0, 1)
    power = (90 + 390 * clock / 1000 * activity) * share * (1 + 0.01 * rng.standard_normal(COUNT))
    return {
        "gpu": {
            "gpu.power": power if meter is None else power * meter,
            "gpu.sm_clock": clock.astype(float),
            "gpu.sm_active": activity,
            "gpu.utilization": np.ones(COUNT),
            "gpu.temperature": np.rint(32 + 0.04 * power),
            "gpu.throttle_reasons": np.zeros(COUNT),
        }
    }


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    share = np.exp(np.random.default_rng(3).normal(0, 0.03, COUNT))
    share[GUILTY] *= 1.2 if broken else 1.0
    return drawn(rng, share, np.full(COUNT, 0.8)), []


CASE = Case(
    PowerDraw,
    {"gpu": GPUS},
    topology,
    instant,
    frozenset({GPUS[GUILTY]}),
    level="suspect",
    fault=120,  # evaluations are 30 s apart, and the line is used after 5 min
    ticks=300,
)
