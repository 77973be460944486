"""A node with a job without telemetry after its kernel logged a machine check, while its neighbours report."""

from __future__ import annotations

import numpy as np

from detectors.telemetry.telemetry import Telemetry
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case, Instant

NODES = tuple(f"node:n{n}" for n in range(6))
GPUS = tuple(f"gpu:n{n}.{i}" for n in range(6) for i in range(4))
FAULT, GUILTY = 60, 2


def topology() -> Topology:
    """Six nodes of four GPUs in a rack, with a job on one of them."""
    parents: dict[str, list[str]] = {node: ["rack:r1"] for node in NODES}
    parents["rank:7.0"] = ["job:7", GPUS[4 * GUILTY]]
    return Topology({**parents, **{gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS}, "rack:r1": ["pdu:p1"]})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    load, power = 20.0 + rng.standard_normal(6), 600.0 + 20.0 * rng.standard_normal(24)
    events = []
    if broken:
        load[GUILTY], power[4 * GUILTY : 4 * GUILTY + 4] = np.nan, np.nan
        if tick == FAULT:
            data = {"pattern": "mce", "class": "cpu", "severity": "critical", "text": "mce: Machine Check Exception"}
            events.append(Event(START + tick * 10 * SECOND, NODES[GUILTY], "kernel", data))
    return {"node": {"node.load1": load}, "gpu": {"gpu.power": power}}, events


CASE = Case(Telemetry, {"node": NODES, "gpu": GPUS}, topology, instant, frozenset({NODES[GUILTY]}))
