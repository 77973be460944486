"""One of six supplies of a node fails, the others carry its share, and the power brake holds the node's GPUs."""

from __future__ import annotations

import numpy as np

from detectors.power.power import Power
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES = tuple(f"node:n{n}" for n in range(4))
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(4) for i in range(4))
PSUS = tuple(f"psu:n{n}.{i}" for n in range(4) for i in range(6))
GUILTY = 8


def topology() -> Topology:
    """Four nodes in a rack of one unit."""
    parents: dict[str, list[str]] = {node: ["rack:r1"] for node in NODES}
    parents |= {entity: [f"node:{entity[4:6]}"] for entity in (*GPUS, *PSUS)}
    return Topology({**parents, "rack:r1": ["pdu:p1"]})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    status, output, reasons = np.zeros(24), 1000.0 + 5.0 * rng.standard_normal(24), np.zeros(16)
    if broken:
        status[GUILTY], output[6:12], output[GUILTY], reasons[4:8] = 2.0, 1200.0, 0.0, 128.0
    values = {
        "psu": {"psu.status": status, "psu.output_power": output},
        "gpu": {"gpu.throttle_reasons": reasons},
        "node": {"node.load1": 20.0 + rng.standard_normal(4)},
        "power": {"power.voltage": np.full(1, 415.0), "power.draw": np.full(1, 24_000.0)},
    }
    return values, []


CASE = Case(
    Power,
    {"psu": PSUS, "gpu": GPUS, "node": NODES, "power": ("pdu:p1",)},
    topology,
    instant,
    frozenset({PSUS[GUILTY]}),
    exact="a BMC's status and a bit of the driver need no learning",
)
