"""A GPU whose canary digests are wrong from a tick on, in two different ways; fifteen others are right."""

from __future__ import annotations

import numpy as np

from detectors.sdc.sdc import SdcVote
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case, Instant

GPUS = tuple(f"gpu:n{n}.{i}" for n in range(4) for i in range(4))
GUILTY = 5


def topology() -> Topology:
    return Topology({gpu: ["node:" + gpu[4:6]] for gpu in GPUS} | {f"node:n{n}": ["rack:r1"] for n in range(4)})


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    if tick % 6:
        return {"gpu": {"gpu.power": np.full(16, 300.0)}}, []
    data = {"canary": "gemm", "version": "1"}
    answers = [f"wrong{tick}" if broken and i == GUILTY else "right" for i in range(16)]
    events = [
        Event(START + tick * 10 * SECOND, g, "digest", data | {"digest": a}) for g, a in zip(GPUS, answers, strict=True)
    ]
    return {"gpu": {"gpu.power": np.full(16, 300.0)}}, events


CASE = Case(
    SdcVote, {"gpu": GPUS}, topology, instant, frozenset({GPUS[GUILTY]}), exact="digests are exact, and no samples"
)
