"""The straggler detector: comparison with the own stage, corroboration by the GPU, hold, and cases without findings."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.runner import Runner
from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND, Event
from tests.detectors.snapshots import packed

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND


def slowed(rank, factor, since=60, until=10**9):
    def change(tick, values):
        if since <= tick < until:
            values["rank"]["rank.compute_time"][rank] *= factor

    return change


def first(found, level):
    return next(f for f in found if f.level == level)


def test_a_slow_rank_is_suspected_within_minutes_and_paged_after_the_hold(site, watch):
    found = watch(Straggler(), site, 160, slowed(3, 1.15))
    suspect, page = first(found, "suspect"), first(found, "page")
    assert {f.entity for f in found} == {"rank:7.3"}
    assert (suspect.time - found[0].onset) / 1e6 <= 120
    assert (first(found, "ticket").time - page.onset) / 1e6 <= 120
    assert 300 <= (page.time - page.onset) / 1e6 <= 310
    assert page.evidence["slowdown"] == pytest.approx(1.15, abs=0.06)
    assert page.evidence["gpu"] == "gpu:n0.3"


@pytest.mark.parametrize("factor", [1.1, 1.4, 3.0])
def test_a_slowdown_of_five_minutes_does_not_page_at_any_strength(site, watch, factor):
    assert "page" not in {f.level for f in watch(Straggler(), site, 200, slowed(3, factor, 60, 90))}


def test_a_pause_of_the_job_before_a_slowdown_does_not_count_for_its_page(site, watch):
    def change(tick, values):
        if 40 <= tick < 60:
            values["rank"]["rank.compute_time"][:] = np.nan
        slowed(3, 1.18, 60, 87)(tick, values)

    found = watch(Straggler(), site, 160, change)
    assert {f.level for f in found} == {"suspect", "ticket"}
    assert min(f.onset for f in found) >= START + 59 * STEP


@pytest.mark.parametrize("minutes", [3, 4])
def test_minutes_of_a_slightly_slow_rank_do_not_count_for_the_page_of_a_short_strong_slowdown(site, watch, minutes):
    def change(tick, values):
        strong = 60 + 6 * minutes
        values["rank"]["rank.compute_time"][3] *= 1.07 if 60 <= tick < strong else 1.4 if 0 <= tick - strong < 18 else 1

    assert "page" not in {f.level for f in watch(Straggler(), site, 160, change)}


def test_a_rank_ten_percent_slow_is_a_ticket_within_two_minutes_and_a_page_within_five(site, watch):
    found = watch(Straggler(), site, 160, slowed(11, 1.1))
    fault = START + 60 * STEP
    assert (first(found, "ticket").time - fault) / SECOND <= 120
    assert (first(found, "page").time - fault) / SECOND <= 310


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.03, 1.05, 1.06])
def test_an_imbalance_of_a_few_percent_that_begins_later_is_at_most_a_ticket(site, watch, factor):
    assert "page" not in {f.level for f in watch(Straggler(), site, 400, slowed(3, factor))}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.03, 1.06])
def test_a_stable_imbalance_of_a_few_percent_from_the_start_gives_no_finding(site, watch, factor):
    assert watch(Straggler(), site, 400, slowed([3, 11], factor, 0)) == []


def test_a_slow_rank_for_which_its_job_does_not_wait_is_a_ticket(site, watch):
    site.slow = np.where(np.arange(16) < 8, 1.0, 1.3)  # the second stage takes longer by design
    assert max(f.level for f in watch(Straggler(), site, 200, slowed(3, 1.15))) == "ticket"


def test_a_clock_below_that_of_the_peers_pages_without_the_hold(site, watch):
    def change(tick, values):
        slowed(3, 1.15)(tick, values)
        if tick >= 60:
            values["gpu"]["gpu.sm_clock"][3] = 1700.0

    found = watch(Straggler(), site, 100, change)
    page = first(found, "page")
    assert (page.time - page.onset) / 1e6 <= 300
    assert "sm_clock_below_peers" in page.evidence
    assert page.signals == ("rank.compute_time", "gpu.sm_clock")


@pytest.mark.parametrize(("bits", "pages"), [(0x20, True), (0x40, True), (0x8, True), (0x80, True), (0x4, False)])
def test_throttle_bits_page_without_the_hold_but_a_power_cap_is_policy(site, watch, bits, pages):
    def change(tick, values):
        slowed(3, 1.15)(tick, values)
        if tick >= 60:
            values["gpu"]["gpu.throttle_reasons"][3] = bits

    found = watch(Straggler(), site, 90, change)
    assert found
    assert any(f.level == "page" for f in found) == pages


def test_a_low_clock_of_a_rank_that_is_not_slow_gives_no_finding(site, watch):
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][3] = 1200.0

    assert watch(Straggler(), site, 300, change) == []


def test_a_stage_that_is_slow_as_a_whole_gives_no_finding(site, watch):
    assert watch(Straggler(), site, 300, slowed(slice(8, 16), 1.5)) == []


def test_most_ranks_of_a_stage_on_both_of_its_nodes_give_no_finding_as_the_median_is_not_a_reference(site, watch):
    assert watch(Straggler(), site, 300, slowed([8, 9, 10, 12, 13, 14], 1.5)) == []


def test_stages_that_differ_are_not_compared_with_each_other(site, watch):
    site.slow = np.where(np.arange(16) < 8, 1.0, 2.0)
    assert watch(Straggler(), site, 300) == []


def test_a_checkpoint_that_slows_all_ranks_gives_no_finding(site, watch):
    def change(tick, values):
        if 100 <= tick < 110:
            values["rank"]["rank.compute_time"][:] *= 3

    assert watch(Straggler(), site, 300, change) == []


@pytest.mark.slow
def test_one_slow_step_now_and_again_gives_no_finding(site, watch):
    def change(tick, values):
        if tick % 40 == 0:
            values["rank"]["rank.compute_time"][tick % 16] *= 2

    assert watch(Straggler(), site, 500, change) == []


def test_a_rank_of_two_that_was_slow_from_the_start_is_a_ticket_and_never_a_page(site, watch):
    site.names["rank"] = ["rank:8.0", "rank:8.1"]
    site.topology.merge({r: ["stage:8.0", "job:8"] for r in site.names["rank"]})

    def change(tick, values):
        values["rank"]["rank.compute_time"] = np.array([4.0, 8.0]) * (1 + 0.01 * site.rng.standard_normal(2))

    found = watch(Straggler(), site, 200, change)
    assert {(f.entity, f.level) for f in found} == {("rank:8.1", "suspect"), ("rank:8.1", "ticket")}
    assert found[0].level == "suspect"
    assert found[0].evidence["slowdown"] == pytest.approx(2.0, abs=0.1)


def test_the_condition_ends_with_the_slowdown_and_returns_with_a_new_onset(site, watch):
    def change(tick, values):
        slowed(3, 1.3, 60, 120)(tick, values)
        slowed(3, 1.3, 200)(tick, values)

    found = watch(Straggler(), site, 260, change)
    assert len({f.onset for f in found}) == 2
    ticks = [(f.time - START) // (10 * SECOND) for f in found]
    assert not [tick for tick in ticks if 145 <= tick < 200]


@pytest.mark.parametrize("restart", [False, True])
def test_a_slow_node_accepted_as_normal_is_learned_again_also_right_after_a_restart(site, restart):
    runner, reports = Runner([Straggler()]), []
    for tick in range(230):
        values, events = site.values(), []
        if tick >= 60:
            values["rank"]["rank.compute_time"][4:8] *= 1.4
        if tick == 200:
            events = [
                Event(START + tick * STEP, "node:n1", "feedback", {"detector": "straggler", "verdict": "not_a_fault"})
            ]
            if restart:
                snapshot, runner = packed(runner), Runner([Straggler()])
                runner.restore(snapshot)
        reports += [(tick, f.entity, f.level) for f in runner.observe(site.frames(tick, values, events))]
    assert ("node:n1", "page") in {(entity, level) for tick, entity, level in reports if tick < 200}
    assert not [tick for tick, *_ in reports if tick >= 200]


@pytest.mark.slow
def test_a_step_that_is_reported_many_times_counts_once(site, watch):
    """One slow step of a long job, in 30 samples."""

    def change(tick, values):
        values["rank"]["rank.step"] = np.full(16, float(tick // 30))
        values["rank"]["rank.compute_time"] = 4.0 * site.slow
        if 900 <= tick < 930:
            values["rank"]["rank.compute_time"][3] *= 1.4

    assert watch(Straggler(), site, 1200, change) == []
