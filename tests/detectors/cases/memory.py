"""Uncontained uncorrected errors of a GPU's memory, and a pending row remap."""

from __future__ import annotations

import numpy as np

from detectors.memory.memory import Memory
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, Instant

GPUS = tuple(f"gpu:n{n}.{i}" for n in range(2) for i in range(8))
NODES = ("node:n0", "node:n1")


def topology() -> Topology:
    return Topology({gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS}, {gpu: {"sku": "H100"} for gpu in GPUS})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    counts = {
        name: np.zeros(16)
        for name in (
            *("gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.sram_corrected", "gpu.sram_uncorrected"),
            *("gpu.rows_corrected", "gpu.rows_uncorrected", "gpu.rows_pending", "gpu.rows_failed"),
        )
    }
    counts["gpu.generation"] = np.full(16, 1.7e9)
    server = {"node.memory_corrected": np.zeros(2), "node.memory_uncorrected": np.zeros(2)}
    server["node.generation"] = np.full(2, 1.7e9)
    if broken:
        counts["gpu.dram_uncorrected"][5] = 2.0
    return {"gpu": counts, "node": server}, []


CASE = Case(
    Memory,
    {"gpu": GPUS, "node": NODES},
    topology,
    instant,
    frozenset({"gpu:n0.5"}),
    exact="uncorrected errors are facts that ECC counts",
)
