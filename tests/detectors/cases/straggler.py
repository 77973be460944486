"""A GPU that throttles by heat: its rank computes 15 % longer, its clock falls, a throttle bit is set."""

from __future__ import annotations

import numpy as np

from detectors.straggler.straggler import Straggler
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES, WIDTH, STAGES = 8, 4, 2
SIZE = NODES * WIDTH
RANKS = tuple(f"rank:7.{i}" for i in range(SIZE))
GPUS = tuple(f"gpu:n{i // WIDTH}.{i % WIDTH}" for i in range(SIZE))
HOSTS = tuple(f"node:n{n}" for n in range(NODES))
NAMES = {"rank": RANKS, "gpu": GPUS, "node": HOSTS}
GUILTY, SLOWER = 5, 1.15
OFFSETS = np.where(np.arange(SIZE) < SIZE // STAGES, 1.0, 1.2)


def topology() -> Topology:
    """One job of two stages of four nodes each; the second stage computes longer by design."""
    parents: dict[str, list[str]] = {host: ["rack:r1"] for host in HOSTS}
    parents |= {gpu: [HOSTS[i // WIDTH]] for i, gpu in enumerate(GPUS)}
    parents |= {f"stage:7.{s}": ["job:7"] for s in range(STAGES)}
    return Topology(
        {**parents, **{r: [f"stage:7.{i * STAGES // SIZE}", "job:7", GPUS[i]] for i, r in enumerate(RANKS)}}
    )


def healthy_values(tick: int, rng: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
    """Values of a healthy instant; the caller may change them."""
    compute = 4.0 * OFFSETS * (1 + 0.005 * rng.standard_normal(SIZE))
    return {
        "rank": {
            "rank.step": np.full(SIZE, 1000.0 + 2 * tick),
            "rank.compute_time": compute,
            "rank.step_time": np.full(SIZE, 5.8),
            "rank.communication_time": 5.8 - compute,
        },
        "gpu": {
            "gpu.sm_clock": np.full(SIZE, 1755.0),
            "gpu.throttle_reasons": np.zeros(SIZE),
            "gpu.pcie_width": np.full(SIZE, 16.0),
            "gpu.pcie_generation": np.full(SIZE, 5.0),
            "gpu.power": np.full(SIZE, 600.0),
            "gpu.utilization": np.full(SIZE, 1.0),
        },
        "node": {
            "node.cpu_pressure": np.full(NODES, 1e9 + 2e4 * tick),
            "node.io_pressure": np.full(NODES, 1e9 + 2e3 * tick),
        },
    }


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    values = healthy_values(tick, rng)
    if broken:
        values["rank"]["rank.compute_time"][GUILTY] *= SLOWER
        values["gpu"]["gpu.sm_clock"][GUILTY] /= SLOWER
        values["gpu"]["gpu.throttle_reasons"][GUILTY] = 0x40
    return values, []


CASE = Case(Straggler, NAMES, topology, instant, frozenset({RANKS[GUILTY]}))
