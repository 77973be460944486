"""A replica that holds other parameters than its seven peers from a tick on; digests come every ten steps."""

from __future__ import annotations

import numpy as np

from detectors.sdc.sdc_replica import SdcReplica
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case, Instant
from tests.detectors.cases.sdc import GPUS

RANKS = tuple(f"rank:7.{i}" for i in range(16))
GUILTY = 3


def topology() -> Topology:
    parents = {gpu: ["node:" + gpu[4:6]] for gpu in GPUS}
    return Topology(parents | {r: [f"stage:7.{i // 8}", "job:7", GPUS[i]] for i, r in enumerate(RANKS)})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    values = {"rank": {"rank.step": np.full(16, float(tick))}}
    if tick % 10:
        return values, []
    time = START + tick * 10 * SECOND
    events = []
    for i, rank in enumerate(RANKS):
        digest = f"other{tick}" if broken and i == GUILTY else f"{i // 8}.{tick}"
        data = {"step": tick, "bucket": "weights", "digest": digest, "group": f"stage:7.{i // 8}"}
        events.append(Event(time, rank, "replica_digest", data))
    return values, events


CASE = Case(
    SdcReplica, {"rank": RANKS}, topology, instant, frozenset({GPUS[GUILTY]}), exact="digests are exact, and no samples"
)
