"""A GPU that falls off the bus: XID 79, the recovery action of the driver, and later XIDs of the neighbouring GPU."""

from __future__ import annotations

import numpy as np

from detectors.xid.xid import Xid
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case, Instant

GPUS = tuple(f"gpu:n{n}.{i}" for n in range(2) for i in range(4))
NODES = ("node:n0", "node:n1")


def topology() -> Topology:
    ranks = {f"rank:7.{k}": ["job:7", gpu] for k, gpu in enumerate(GPUS)}
    return Topology({**{gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS}, **ranks})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    values = {
        "gpu": {"gpu.present": np.ones(8), "gpu.recovery_action": np.zeros(8), "gpu.generation": np.full(8, 1.7e9)},
        "node": {"node.generation": np.full(2, 1.7e9)},
    }
    if not broken or tick % 6:
        return values, []
    time, gpu = START + tick * 10 * SECOND - SECOND, "gpu:n1.2"
    catalogue = {"name": "GPU has fallen off the bus", "action": "reboot node", "then": "contact support"}
    root = {"xid": 79, "entity": gpu, "time": time}
    events = [
        Event(time, gpu, "xid", {"xid": 79, **catalogue}),
        Event(time + 1000, gpu, "xid", {"xid": 154, "detail": {"to": 2}, "action": "reboot node", "root": root}),
        Event(time + 2000, "gpu:n1.3", "xid", {"xid": 45, "name": "pre-emptive cleanup", "root": root}),
    ]
    return values, events


CASE = Case(
    Xid,
    {"gpu": GPUS, "node": NODES},
    topology,
    instant,
    frozenset({"gpu:n1.2"}),
    exact="XIDs are facts that the driver logs, not samples",
)
