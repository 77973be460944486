"""A clock that is 20 s ahead, among clocks that are right to a millisecond."""

from __future__ import annotations

import numpy as np

from detectors.telemetry.telemetry_clock import TelemetryClock
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES = tuple(f"node:n{n}" for n in range(6))
GUILTY = 4


def topology() -> Topology:
    """Six nodes in a rack."""
    return Topology({node: ["rack:r1"] for node in NODES})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    offset = 1e-3 * rng.standard_normal(6)
    if broken:
        offset[GUILTY] = -20.0
    return {"node": {"node.clock_offset": offset}}, []


CASE = Case(
    TelemetryClock,
    {"node": NODES},
    topology,
    instant,
    frozenset({NODES[GUILTY]}),
    level="ticket",
    exact="the offset is measured, not learnt",
)
