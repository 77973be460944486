"""A congested leaf: six of its eight ports wait longer and get congestion marks, while the traffic varies."""

from __future__ import annotations

import numpy as np

from detectors.link.link_congestion import LinkCongestion
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

NODES, RAILS = 8, 4
PORTS = tuple(f"port:n{n}.p{r}" for n in range(NODES) for r in range(RAILS))
CONGESTED = [n * RAILS + 1 for n in range(6)]  # of leaf l1
FAULT, TICKS = 150, 330
LOAD = 5e9  # bytes a second


def topology() -> Topology:
    """Eight nodes in a rack, a leaf for each rail."""
    parents: dict[str, list[str]] = {f"node:n{n}": ["rack:r1"] for n in range(NODES)}
    return Topology({**parents, **{port: [f"node:n{port[6]}", f"leaf:l{port[-1]}"] for port in PORTS}})


def counted(
    tick: int, since: int | None, congested: list[int], times: float, pace: float = 1.0
) -> dict[str, np.ndarray]:
    """Counters at a tick; `congested` ports wait and are marked `times` as much from tick `since` on."""
    size = len(PORTS)
    port = np.arange(size)
    seconds = 10.0 * tick * pace * (1 + 0.2 * np.sin(port)) + 4 * np.sin(port + tick / 7)  # some wait more, and in turn
    more = np.zeros(size)
    if since is not None and tick >= since:
        more[congested] = (times - 1) * 10.0 * (tick - since + 1)
    return {
        "nic.tx_bytes": 1e12 + np.floor(LOAD * 10.0 * tick * pace * np.ones(size)),
        "nic.port_tx_wait": 1e9 + np.floor(1e4 * (seconds + more)),
        "nic.cnp_sent": 1e6 + np.floor(10 * (seconds + more)),
        "nic.cnp_handled": 1e6 + np.floor(10 * (seconds + more)),
        "nic.ecn_marked": 1e6 + np.floor(40 * (seconds + more)),
        "nic.symbol_errors": np.zeros(size),
        "nic.speed": np.full(size, 400_000.0),
    }


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    return {"nic": counted(tick, FAULT if broken else None, CONGESTED, 8.0)}, []


CASE = Case(
    *(LinkCongestion, {"nic": PORTS}, topology, instant, frozenset({"leaf:l1"}), "ticket", FAULT, TICKS),
)
