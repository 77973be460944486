"""A rank whose gradient norm is 30 times that of its stage, from a tick on."""

from __future__ import annotations

import dataclasses

import numpy as np

from detectors.sdc.sdc_gradient import SdcGradient
from tests.detectors.cases.case import Case, Instant
from tests.detectors.cases.sdc import GPUS
from tests.detectors.cases.sdc_replica import GUILTY, RANKS, topology


def instant(tick: int, broken: bool, rng: np.random.Generator) -> Instant:
    norm = 2.0 * np.exp(0.1 * rng.standard_normal(16)) * (1 + 2.0 * (tick % 50 == 0))
    if broken:
        norm[GUILTY] *= 30.0
    return {"rank": {"rank.gradient_norm": norm, "rank.nonfinite": np.zeros(16)}}, []


CASE = Case(SdcGradient, {"rank": RANKS}, topology, instant, frozenset({GPUS[GUILTY]}), level="ticket")


def run_detector(change, ticks=200, detector=None):
    """Returns findings; change(tick, norm, count) changes the columns in place."""

    def instant(tick, broken, rng):
        norm, count = 2.0 * np.exp(0.1 * rng.standard_normal(16)), np.zeros(16)
        change(tick, norm, count)
        return {"rank": {"rank.gradient_norm": norm, "rank.nonfinite": count}}, []

    return dataclasses.replace(CASE, instant=instant).run_detector(detector or SdcGradient(), range(ticks))
