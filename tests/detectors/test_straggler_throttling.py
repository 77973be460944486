"""The straggler detector with ranks that throttle together, and with ranks that were slow before their job stopped."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND
from tests.detectors.cases import straggler as site
from tests.detectors.cases.case import START, Case

SINCE = 60
TICK = 10 * SECOND
STAGE = slice(0, site.SIZE // site.STAGES)


def findings(change, ticks, detector=None):
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if broken:
            change(tick, values)
        return values, []

    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=SINCE)
    return case.run_detector(detector or Straggler(), range(ticks))


def throttle(tick, values, ranks, factor=1.3):
    values["rank"]["rank.compute_time"][ranks] *= factor
    values["gpu"]["gpu.sm_clock"][ranks] /= factor
    values["gpu"]["gpu.throttle_reasons"][ranks] = 0x40


def pause(values):
    for name in ("rank.step", "rank.compute_time"):
        values["rank"][name][:] = np.nan


def last_page(found):
    return max((f.time for f in found if f.level == "page"), default=0)


def test_a_rank_that_was_slow_when_its_job_stopped_is_not_reported_when_it_continues():
    def change(tick, values):
        if tick < SINCE + 40:
            throttle(tick, values, [5])
        elif tick < SINCE + 140:
            pause(values)

    found = findings(change, SINCE + 240)
    resumed = 1_790_000_000_000_000 + (SINCE + 100) * 10_000_000
    assert found
    assert last_page(found) < resumed


def test_a_rank_that_is_still_slow_after_the_pause_is_found_again():
    def change(tick, values):
        if SINCE + 40 <= tick < SINCE + 140:
            pause(values)
        else:
            throttle(tick, values, [5])

    found = findings(change, SINCE + 200)
    assert last_page(found) > 1_790_000_000_000_000 + (SINCE + 140) * 10_000_000


def test_a_stage_that_throttles_in_its_majority_gives_no_finding_during_or_after_it():
    throttled = np.arange(site.SIZE)[STAGE][:10]

    def change(tick, values):
        if tick < SINCE + 360:
            throttle(tick, values, throttled)

    found = findings(change, SINCE + 560)
    assert found == []


def test_two_throttled_ranks_of_a_stage_page():
    found = findings(lambda tick, values: throttle(tick, values, [5, 9]), SINCE + 60)
    assert {f.entity for f in found if f.level == "page"} == {"rank:7.5", "rank:7.9"}


def throttle_repeatedly(tick, values, ranks, bits=0x20, factor=1.05):
    """Makes ranks a little slow for good, with throttle bits for 20 s in each 500 s."""
    values["rank"]["rank.compute_time"][ranks] *= factor
    values["gpu"]["gpu.sm_clock"][ranks] /= factor
    if tick % 50 < 2:
        values["gpu"]["gpu.throttle_reasons"][ranks] = bits


SOME = [0, 1, 4, 5, 8, 9]  # of the 16 of a stage, on three of its nodes
HEALTHY, SLOW = 13, 4


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0x20, 0x80])
def test_a_healthy_rank_that_becomes_slow_is_found_while_others_of_its_stage_throttle_repeatedly(bits):
    def change(tick, values):
        throttle_repeatedly(tick, values, SOME, bits)
        if tick >= SINCE + 100:
            values["rank"]["rank.compute_time"][HEALTHY] *= 1.5

    found = findings(change, SINCE + 400)
    assert {f.entity for f in found if f.level == "page"} == {f"rank:7.{HEALTHY}"}
    pages = [f.time for f in found if f.level == "page"]
    assert min(pages) <= START + (SINCE + 100 + 70) * TICK
    assert max(pages) >= START + (SINCE + 390) * TICK
