"""A port with errors: two symbol errors every 10 s, about BER 5e-13 at 400 Gb/s."""

from __future__ import annotations

import numpy as np

from detectors.link.link import Link
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

PORTS = tuple(f"port:n{n}.p{p}" for n in range(4) for p in range(4))
FAULT, GUILTY = 60, 9


def topology() -> Topology:
    """Four nodes in a rack, a leaf for each rail."""
    parents: dict[str, list[str]] = {f"node:n{n}": ["rack:r1"] for n in range(4)}
    return Topology({**parents, **{port: [f"node:{port[5:7]}", f"leaf:l{port[-1]}"] for port in PORTS}})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    errors = np.zeros(16)
    errors[GUILTY] = 2.0 * (tick - FAULT + 1) if broken else 0.0
    values = {
        "nic.state": np.ones(16),
        "nic.carrier_changes": np.full(16, 2.0),
        "nic.symbol_errors": errors,
        "nic.speed": np.full(16, 400_000.0),
        "nic.module_temperature": 50.0 + rng.standard_normal(16),
    }
    return {"nic": values}, []


CASE = Case(Link, {"nic": PORTS}, topology, instant, frozenset({PORTS[GUILTY]}))
