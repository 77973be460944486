"""GPUs that throttle with others of their loop are left to coolant and power; other GPUs are still found."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.topology import Topology, kind_of
from tests.detectors.cases import straggler_inferred as site
from tests.detectors.cases.case import Case

ABOVE = ("rack", "cdu", "loop", "pdu")
SINCE, STUCK = 60, 14
FEW, MANY = [0, 4, 8], [0, 1, 4, 5, 8, 9]  # of the 16 GPUs of a rack


def findings(gpus, ticks=200, stuck=True, every=1, detector=None, topology=site.topology, warmer=0.0):
    """Findings: `gpus` stay hot, with throttle bits for 4 of `every` ticks; the clock of STUCK is low."""

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if warmer:
            values["gpu"]["gpu.temperature"] = np.full(len(site.GPUS), 60.0 + warmer * broken)
        if broken:
            values["gpu"]["gpu.sm_clock"][gpus] *= 0.9
            values["gpu"]["gpu.throttle_reasons"][gpus] = 0x20 * (tick % every < 4)
            if stuck:
                values["gpu"]["gpu.sm_clock"][STUCK] *= 0.7
        return values, []

    case = Case(StragglerInferred, site.NAMES, topology, instant, frozenset(), fault=SINCE)
    return case.run_detector(detector or StragglerInferred(), range(ticks))


def pages(found):
    return {f.entity for f in found if f.level == "page"}


@pytest.mark.parametrize("many", [FEW, MANY])
def test_those_that_throttle_together_do_not_hide_another_slow_gpu_of_their_loop(many):
    assert pages(findings(many)) == {site.GPUS[STUCK]}
    assert findings(many, stuck=False) == []


def bare():
    """The site without racks and their ancestors."""
    whole = site.topology()
    parents = {e: tuple(p for p in ps if kind_of(p) not in ABOVE) for e, ps in whole.parents.items()}
    return Topology({e: ps for e, ps in parents.items() if kind_of(e) not in ABOVE}, whole.attributes)


def test_a_fleet_without_racks_of_which_a_third_throttles_is_left_to_other_detectors():
    many = [i for i in range(len(site.GPUS)) if i % 4 < 2]
    assert {f.level for f in findings(many, stuck=False, topology=bare)} <= {"suspect"}


def test_in_a_fleet_without_racks_a_few_are_found_one_by_one():
    few = {site.GPUS[i] for i in FEW}
    assert pages(findings(FEW, topology=bare)) == {*few, site.GPUS[STUCK]}
