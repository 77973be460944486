"""A job whose collectives do not match: no step, its GPUs poll at a quarter of their power."""

from __future__ import annotations

import numpy as np

from detectors.straggler.straggler_job import StragglerJob
from tests.detectors.cases.case import Case, Instant
from tests.detectors.cases.straggler import NAMES, SIZE, healthy_values, topology

FAULT = 60


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    values = healthy_values(min(tick, FAULT - 1) if broken else tick, rng)
    values["node"] = healthy_values(tick, rng)["node"]
    if broken:
        values["gpu"]["gpu.power"] = np.full(SIZE, 150.0)
    return values, []


CASE = Case(StragglerJob, NAMES, topology, instant, frozenset({"job:7"}), fault=FAULT)
