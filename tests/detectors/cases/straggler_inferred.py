"""A GPU that throttles by heat, without compute times: its clock falls, a throttle bit is set, its peers wait."""

from __future__ import annotations

import numpy as np

from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES, WIDTH, STAGES = 8, 4, 2
SIZE = NODES * WIDTH
RANKS = tuple(f"rank:7.{i}" for i in range(SIZE))
GPUS = tuple(f"gpu:n{i // WIDTH}.{i % WIDTH}" for i in range(SIZE))
HOSTS = tuple(f"node:n{n}" for n in range(NODES))
NAMES = {"gpu": GPUS, "node": HOSTS, "rank": RANKS}
GUILTY, SLOWER = 5, 1.15
CLOCK = 1755.0 * (1 - 0.01 * (np.arange(SIZE) % 3))
ACTIVE = np.where(np.arange(SIZE) < SIZE // STAGES, 0.74, 0.82)


def topology() -> Topology:
    """One job of two stages of four nodes each, in two racks; the first stage waits for the second by design."""
    parents: dict[str, list[str]] = {host: [f"rack:r{n // 4}"] for n, host in enumerate(HOSTS)}
    parents |= {gpu: [HOSTS[i // WIDTH]] for i, gpu in enumerate(GPUS)}
    parents |= {f"stage:7.{s}": ["job:7"] for s in range(STAGES)}
    ranks = {r: [f"stage:7.{i * STAGES // SIZE}", "job:7", GPUS[i]] for i, r in enumerate(RANKS)}
    return Topology({**parents, **ranks})


def healthy_values(tick: int, rng: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
    """Values of a healthy instant; the caller may change them."""
    return {
        "gpu": {
            "gpu.sm_clock": np.rint(CLOCK * (1 + 0.002 * rng.standard_normal(SIZE)) / 15) * 15,
            "gpu.sm_active": ACTIVE - 0.008 * np.abs(rng.standard_normal(SIZE)),
            "gpu.utilization": np.full(SIZE, 1.0),
            "gpu.power": 620.0 * (1 + 0.03 * rng.standard_normal(SIZE)),
            "gpu.throttle_reasons": np.zeros(SIZE),
            "gpu.pcie_width": np.full(SIZE, 16.0),
            "gpu.pcie_generation": np.full(SIZE, 5.0),
        },
        "node": {
            "node.cpu_pressure": np.full(NODES, 1e9 + 2e4 * tick),
            "node.load1": np.full(NODES, 20.0),
            "node.cpu_count": np.full(NODES, 192.0),
        },
    }


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    values = healthy_values(tick, rng)
    if broken:
        gpu = values["gpu"]
        waits = np.arange(SIZE) != GUILTY
        gpu["gpu.sm_clock"][GUILTY] = np.rint(gpu["gpu.sm_clock"][GUILTY] / SLOWER / 15) * 15
        gpu["gpu.throttle_reasons"][GUILTY] = 0x40
        gpu["gpu.sm_active"][waits] *= 0.93
        gpu["gpu.power"][waits] *= 0.93
    return values, []


CASE = Case(StragglerInferred, NAMES, topology, instant, frozenset({GPUS[GUILTY]}))
