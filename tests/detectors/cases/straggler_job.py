"""A job whose collectives do not match: no step, its GPUs poll at a quarter of their power."""

from __future__ import annotations

import numpy as np

from detectors.straggler.straggler_job import StragglerJob
from tests.detectors.cases.case import Case, Shown
from tests.detectors.cases.straggler import NAMES, SIZE, quiet, topology

FAULT = 60


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Shown:
    values = quiet(min(tick, FAULT - 1) if broken else tick, rng)
    values["node"] = quiet(tick, rng)["node"]
    if broken:
        values["gpu"]["gpu.power"] = np.full(SIZE, 150.0)
    return values, []


CASE = Case(StragglerJob, NAMES, topology, instant, frozenset({"job:7"}), fault=FAULT)
