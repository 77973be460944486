"""Memory that falls steadily on one node of six, which a job uses up within two hours."""

from __future__ import annotations

import numpy as np

from detectors.host.host_health import HostHealth
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES = tuple(f"node:n{n}" for n in range(6))
GUILTY, WHOLE = 4, 2e12


def topology() -> Topology:
    """Six nodes of one GPU each, with a rank of a job on each."""
    parents: dict[str, list[str]] = {f"gpu:n{n}.0": [f"node:n{n}"] for n in range(6)}
    return Topology({**parents, **{f"rank:7.{n}": ["job:7", f"gpu:n{n}.0"] for n in range(6)}})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    available = WHOLE * (0.6 + 0.01 * rng.standard_normal(6))
    if broken:
        available[GUILTY] = WHOLE * max(0.6 - 0.005 * (tick - CASE.fault), 0.01)
    return {"node": {"node.memory_available": available, "node.memory_total": np.full(6, WHOLE)}}, []


CASE = Case(HostHealth, {"node": NODES}, topology, instant, frozenset({NODES[GUILTY]}), ticks=175, step=60)
