"""What the straggler detector remembers of ranks that were slow beside sick peers, or before their job stopped."""

from __future__ import annotations

import numpy as np

from detectors.straggler.straggler import Straggler
from tests.detectors.cases import straggler as site
from tests.detectors.cases.case import Case

SINCE = 60
STAGE = slice(0, site.SIZE // site.STAGES)


def told(change, ticks, detector=None):
    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        if broken:
            change(tick, values)
        return values, []

    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=SINCE)
    return case.shown(detector or Straggler(), range(ticks))


def hot(tick, values, ranks, factor=1.3):
    values["rank"]["rank.compute_time"][ranks] *= factor
    values["gpu"]["gpu.sm_clock"][ranks] /= factor
    values["gpu"]["gpu.throttle_reasons"][ranks] = 0x40


def rests(values):
    for name in ("rank.step", "rank.compute_time"):
        values["rank"][name][:] = np.nan


def last_page(found):
    return max((f.time for f in found if f.level == "page"), default=0)


def test_a_rank_that_was_slow_when_its_job_stopped_is_not_slow_when_it_goes_on():
    def change(tick, values):
        if tick < SINCE + 40:
            hot(tick, values, [5])
        elif tick < SINCE + 140:
            rests(values)

    found = told(change, SINCE + 240)
    begins_again = 1_790_000_000_000_000 + (SINCE + 100) * 10_000_000
    assert found
    assert last_page(found) < begins_again


def test_a_rank_that_is_still_slow_after_the_rest_is_found_again():
    def change(tick, values):
        if SINCE + 40 <= tick < SINCE + 140:
            rests(values)
        else:
            hot(tick, values, [5])

    found = told(change, SINCE + 200)
    assert last_page(found) > 1_790_000_000_000_000 + (SINCE + 140) * 10_000_000


def test_a_stage_most_of_which_throttles_blames_nobody_meanwhile_or_afterwards():
    struck = np.arange(site.SIZE)[STAGE][:10]

    def change(tick, values):
        if tick < SINCE + 360:
            hot(tick, values, struck)

    assert told(change, SINCE + 560) == []


def test_a_few_throttled_ranks_of_a_stage_are_blamed_as_ever():
    found = told(lambda tick, values: hot(tick, values, [5, 9]), SINCE + 60)
    assert {f.entity for f in found if f.level == "page"} == {"rank:7.5", "rank:7.9"}


def test_a_restart_amid_the_heat_changes_nothing():
    struck = np.arange(site.SIZE)[STAGE][:10]
    first, after = Straggler(), Straggler()

    def change(tick, values):
        if tick < SINCE + 60:
            hot(tick, values, struck)

    told(change, SINCE + 50, first)
    after.restore(first.snapshot())
    assert after.struck.until.max() > 0
    assert after.struck.until.tolist() == first.struck.until.tolist()
