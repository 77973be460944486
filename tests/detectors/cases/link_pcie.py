"""A GPU whose PCIe link retrains to half of its lanes, with a burst of replays; others are idle at times."""

from __future__ import annotations

import numpy as np

from detectors.link.link_pcie import LinkPcie
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

GPUS = tuple(f"gpu:n{n}.{g}" for n in range(4) for g in range(4))
PORTS = tuple(f"port:n{n}.p{p}" for n in range(4) for p in range(4))
FAULT, GUILTY = 60, 6


def topology() -> Topology:
    """Four nodes in a rack."""
    parents: dict[str, list[str]] = {f"node:n{n}": ["rack:r1"] for n in range(4)}
    parents |= {gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS} | {port: [f"node:{port[5:7]}"] for port in PORTS}
    return Topology(parents, {gpu: {"sku": "H100"} for gpu in GPUS})


def values(tick: int) -> dict[str, dict[str, np.ndarray]]:
    """Healthy values; every third minute the GPUs of the first node are idle and save power."""
    idle = (np.arange(16) < 4) & (tick // 18 % 3 == 1)
    gpu = {
        "gpu.pcie_width": np.full(16, 16.0),
        "gpu.pcie_generation": np.where(idle, 1.0, 5.0),
        "gpu.utilization": np.where(idle, 0.0, 0.98),
        "gpu.pcie_replays": np.full(16, 4.0),
    }
    nic = {"nic.pcie_width": np.full(16, 16.0), "nic.pcie_speed": np.full(16, 32.0), "nic.state": np.ones(16)}
    return {"gpu": gpu, "nic": nic}


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    shown = values(tick)
    if broken:
        shown["gpu"]["gpu.pcie_width"][GUILTY] = 8.0
        shown["gpu"]["gpu.pcie_replays"][GUILTY] += 120.0
    return shown, []


CASE = Case(LinkPcie, {"gpu": GPUS, "nic": PORTS}, topology, instant, frozenset({GPUS[GUILTY]}))
