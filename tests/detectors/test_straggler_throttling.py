"""The straggler detector with ranks that throttle together, and with ranks that were slow before their job stopped."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler import mass_throttling
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

    assert findings(change, SINCE + 560) == []


def test_two_throttled_ranks_of_a_stage_page():
    found = findings(lambda tick, values: throttle(tick, values, [5, 9]), SINCE + 60)
    assert {f.entity for f in found if f.level == "page"} == {"rank:7.5", "rank:7.9"}


def test_a_restart_during_the_throttling_keeps_the_state():
    throttled = np.arange(site.SIZE)[STAGE][:10]
    first, after = Straggler(), Straggler()

    def change(tick, values):
        if tick < SINCE + 60:
            throttle(tick, values, throttled)

    findings(change, SINCE + 50, first)
    after.restore(first.snapshot())
    assert after.throttling.until.max() > 0
    assert after.throttling.excluded.any()
    assert after.throttling.allowance.used.max() > 0
    for name in ("until", "excluded"):
        assert getattr(after.throttling, name).tolist() == getattr(first.throttling, name).tolist()
    assert (
        after.throttling.allowance.snapshot()["used"].tolist() == first.throttling.allowance.snapshot()["used"].tolist()
    )


def throttle_repeatedly(tick, values, ranks, bits=0x20, factor=1.05):
    """Makes ranks a little slow for good, with throttle bits for 20 s in each 500 s."""
    values["rank"]["rank.compute_time"][ranks] *= factor
    values["gpu"]["gpu.sm_clock"][ranks] /= factor
    if tick % 50 < 2:
        values["gpu"]["gpu.throttle_reasons"][ranks] = bits


SOME = [0, 1, 4, 5, 8, 9]  # of the 16 of a stage, on three of its nodes
HEALTHY, SLOW = 13, 4


@pytest.mark.parametrize("bits", [0x20, 0x80])
def test_a_healthy_rank_that_becomes_slow_is_found_while_others_of_its_stage_throttle_repeatedly(bits):
    def change(tick, values):
        throttle_repeatedly(tick, values, SOME, bits)
        if tick >= SINCE + 100:
            values["rank"]["rank.compute_time"][HEALTHY] *= 1.5

    found = findings(change, SINCE + 400)
    assert {f.entity for f in found} == {f"rank:7.{HEALTHY}"}
    pages = [f.time for f in found if f.level == "page"]
    assert min(pages) <= START + (SINCE + 100 + 70) * TICK
    assert max(pages) >= START + (SINCE + 390) * TICK
    assert found[-1].evidence["peers"] == 9  # the healthy ones


def test_a_slow_rank_is_still_found_once_the_others_have_used_up_their_allowance(monkeypatch):
    monkeypatch.setattr(mass_throttling, "LONGEST_EXCUSE", 1800 * SECOND)

    def change(tick, values):
        throttle_repeatedly(tick, values, SOME)
        if tick >= SINCE + 100:
            values["rank"]["rank.compute_time"][HEALTHY] *= 1.5

    found = findings(change, SINCE + 600)
    assert {f.entity for f in found} == {f"rank:7.{HEALTHY}"}
    assert last_page(found) >= START + (SINCE + 590) * TICK


@pytest.mark.parametrize("ranks", [SOME, list(range(10))])
def test_ranks_that_throttle_together_are_excused_for_four_hours_at_most(monkeypatch, ranks):
    monkeypatch.setattr(mass_throttling, "LONGEST_EXCUSE", 1800 * SECOND)

    def change(tick, values):
        throttle_repeatedly(tick, values, ranks, factor=1.0)
        if tick >= SINCE + 100:
            values["rank"]["rank.compute_time"][SLOW] *= 1.5

    found = findings(change, SINCE + 400)
    assert {f.entity for f in found} == {f"rank:7.{SLOW}"}
    assert min(f.time for f in found) >= START + (SINCE + 180) * TICK
    assert last_page(found)


def test_an_allowance_recovers_as_slowly_as_it_is_spent_and_gaps_in_the_telemetry_do_not_spend_it():
    one, steps = mass_throttling.ExcuseAllowance(), 4 * 3600 // 30
    spent = [bool(one.spend(np.array([tick <= 2 * steps]), tick * 30 * SECOND)[0]) for tick in range(1, 3 * steps)]
    assert spent.index(True) in (steps - 1, steps)
    assert all(spent[steps + 1 : -2])
    other = mass_throttling.ExcuseAllowance()
    other.spend(np.array([True]), 30 * SECOND)
    assert not other.spend(np.array([True]), 10**6 * SECOND)[0]
    assert not other.spend(np.array([True, True]), 5 * SECOND).any()  # a clock that was set back
