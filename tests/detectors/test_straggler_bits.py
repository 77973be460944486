"""Invalid readings of throttle bits and compute times, in every straggler detector."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.throttle import read_reasons
from detectors.straggler.straggler import Straggler
from detectors.straggler.straggler_inferred import StragglerInferred
from detectors.straggler.straggler_job import StragglerJob
from tests.detectors.cases import straggler as site
from tests.detectors.cases.case import Case

INVALID = [np.inf, -np.inf, 1e300, -1e300, 2.0**64, 2.0**53, -1.0, np.nan]


def test_only_whole_numbers_below_2_to_the_53_are_throttle_reasons():
    bits, known = read_reasons([*INVALID, 0.0, 0x40, 2.0**53 - 1])
    assert known.tolist() == [False] * len(INVALID) + [True] * 3
    assert bits.tolist() == [0] * (len(INVALID) + 1) + [0x40, 2**53 - 1]


@pytest.mark.parametrize("detector", [Straggler, StragglerInferred, StragglerJob])
@pytest.mark.parametrize("signal", ["gpu.throttle_reasons", "rank.compute_time"])
def test_invalid_readings_give_no_finding(detector, signal):
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if broken:
            values[signal.split(".")[0]][signal][: len(INVALID)] = INVALID
        return values, []

    case = Case(detector, site.NAMES, site.topology, instant, frozenset(), fault=60)
    assert case.run_detector(detector(), range(150)) == []
