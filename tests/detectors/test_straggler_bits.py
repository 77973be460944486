"""Readings that are none, of throttle bits and of times: no detector of slow ranks stumbles over them."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.throttle import read_reasons
from detectors.straggler.straggler import Straggler
from detectors.straggler.straggler_inferred import StragglerInferred
from detectors.straggler.straggler_job import StragglerJob
from tests.detectors.cases import straggler as site
from tests.detectors.cases.case import Case

ABSURD = [np.inf, -np.inf, 1e300, -1e300, 2.0**64, 2.0**53, -1.0, np.nan]


def test_only_numbers_that_hold_single_bits_are_reasons():
    bits, known = read_reasons([*ABSURD, 0.0, 0x40, 2.0**53 - 1])
    assert known.tolist() == [False] * len(ABSURD) + [True] * 3
    assert bits.tolist() == [0] * (len(ABSURD) + 1) + [0x40, 2**53 - 1]


@pytest.mark.parametrize("detector", [Straggler, StragglerInferred, StragglerJob])
@pytest.mark.parametrize("signal", ["gpu.throttle_reasons", "rank.compute_time"])
def test_absurd_readings_blame_nobody(detector, signal):
    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        if broken:
            values[signal.split(".")[0]][signal][: len(ABSURD)] = ABSURD
        return values, []

    case = Case(detector, site.NAMES, site.topology, instant, frozenset(), fault=60)
    assert case.shown(detector(), range(150)) == []
