"""Gradient norms of one rank against its stage: a single spike is a suspect, common spikes are the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from detectors.sdc.sdc_gradient import SAMPLES, SdcGradient, chance_clusters, normal_tail, spike_rate, student_tail
from pipeline.model.records import SECOND, Frame
from tests.detectors.cases.sdc import GPUS
from tests.detectors.cases.sdc_gradient import CASE, run_detector


def test_a_spike_of_one_rank_in_one_step_is_a_suspect_for_ten_minutes():
    def spike(tick, norm, count):
        norm[3] *= 8.0 if tick == 100 else 1.0

    found = run_detector(spike)
    assert {(f.entity, f.level) for f in found} == {(GPUS[3], "suspect")}
    assert found[0].time == found[0].onset
    assert 9 * 60e6 < found[-1].time - found[0].time <= 10 * 60e6
    assert 6 < found[0].evidence["effect"] < 9
    assert found[0].evidence["cohort"] == "stage:7.0"
    assert found[0].evidence["peers"] == 7


@pytest.mark.parametrize(
    ("factor", "steps", "level"), [(8.0, (100, 103), "ticket"), (40.0, (100,), "suspect"), (8.0, (50, 150), "suspect")]
)
def test_clustered_spikes_are_a_ticket_and_a_single_one_is_not(factor, steps, level):
    def spike(tick, norm, count):
        norm[3] *= factor if tick in steps else 1.0

    found = run_detector(spike)
    assert {f.entity for f in found} == {GPUS[3]}
    assert found[-1].level == level


def test_the_same_step_read_twice_is_one_spike():
    def spike(tick, norm, count):
        norm[3] = 16.0 if tick in (100, 101, 102) else norm[3]

    assert {f.level for f in run_detector(spike)} == {"suspect"}


@pytest.mark.parametrize(("factor", "doubted"), [(1.5, set()), (20.0, {("job:7", "suspect")})])
def test_a_spike_of_all_ranks_puts_the_job_in_doubt(factor, doubted):
    def spike(tick, norm, count):
        norm *= factor if tick in (60, 100, 101, 102) else 1.0

    assert {(f.entity, f.level) for f in run_detector(spike)} == doubted


def test_norms_reported_after_the_reduction_put_the_job_in_doubt():
    def same(tick, norm, count):
        norm[:] = norm[0] * (9.0 if tick == 100 else 1.0)

    found = run_detector(same)
    assert {(f.entity, f.level) for f in found} == {("job:7", "suspect")}
    assert "results in doubt" in found[0].summary


def test_a_job_whose_norms_stay_high_is_in_doubt_for_a_limited_time():
    def high(tick, norm, count):
        norm *= 9.0 if tick >= 60 else 1.0

    detector = SdcGradient()
    assert run_detector(high, 900, detector)
    assert not detector.conditions


def test_a_spike_of_a_whole_stage_or_half_of_it_blames_no_gpu():
    def spike(tick, norm, count):
        norm[:8] *= 20.0 if tick == 60 else 1.0
        norm[8:12] *= 20.0 if tick == 100 else 1.0

    assert {f.entity for f in run_detector(spike)} <= {"job:7"}


def test_a_rank_with_a_larger_norm_is_reported_only_when_it_spikes():
    def larger(tick, norm, count):
        norm[3] *= 12.0

    assert run_detector(larger) == []

    def spikes(tick, norm, count):
        norm[3] *= 12.0 * (9.0 if tick == 150 else 1.0)

    assert {f.entity for f in run_detector(spikes)} == {GPUS[3]}


def test_less_than_five_times_the_median_is_not_reported():
    def some(tick, norm, count):
        norm[3] *= 3.0 if tick > 100 else 1.0

    assert run_detector(some) == []


def test_nonfinite_values_of_one_rank_are_a_ticket():
    def nan(tick, norm, count):
        count[3] = max(0, min(tick - 100, 2))
        norm[3] = np.nan if tick > 100 else norm[3]

    found = run_detector(nan)
    assert {(f.entity, f.level) for f in found} == {(GPUS[3], "ticket")}
    assert "not finite" in found[0].summary


def test_nonfinite_values_of_all_ranks_blame_no_gpu():
    def nan(tick, norm, count):
        count[:] = max(0, tick - 100)

    assert run_detector(nan) == []


def test_restarted_counters_and_stages_of_three_are_not_judged():
    def reset(tick, norm, count):
        count[3] = 5.0 if tick < 100 else 0.0

    assert run_detector(reset) == []

    def few(tick, norm, count):
        norm[3:8] = np.nan
        norm[2] *= 30.0 if tick > 100 else 1.0

    assert run_detector(few) == []


def test_ranks_whose_norms_have_heavy_tails_get_no_ticket():
    def tails(tick, norm, count):
        norm[:] = np.exp(0.2 * rng.standard_t(4, 16))

    rng, detector = np.random.default_rng(0), SdcGradient()
    levels = [f.level for f in run_detector(tails, 3000, detector)]
    assert detector.spikes.sum() > 20
    assert set(levels) == {"suspect"}


def test_chance_spikes_are_as_rare_as_the_budget_states():
    rng, found, days = np.random.default_rng(1), 0, 0.0
    for usual in (1e-4, 1e-3):
        steps = 400_000
        at = np.flatnonzero(rng.random(steps) < usual).tolist()
        for first, then in itertools.pairwise(at):
            found += then - first <= 60 and chance_clusters(usual, 2, then - first) <= 0.2
        days += steps / SAMPLES
    assert found <= 1
    assert chance_clusters(1e-5, 2, 3) < 0.2 < chance_clusters(1e-3, 2, 1)
    assert spike_rate((0, 0), (0, 0), (0, 0)) == pytest.approx(1e-5)
    assert spike_rate((50, 10_000), (0, 1e6), (50, 1e7)) > 4e-4  # its own past
    assert spike_rate((0, 0), (50, 10_000), (50, 1e7)) > 4e-4  # its stage's
    assert student_tail(0.0) == normal_tail(0.0) == 0.5
    assert student_tail(16 / np.sqrt(2)) == pytest.approx(4.42e-5, rel=0.01)  # tables of Student's t


@pytest.mark.parametrize("entity", [GPUS[3], "job:7"])
def test_feedback_makes_the_norm_of_a_rank_normal(entity):
    detector = SdcGradient()

    def high(tick, norm, count):
        norm[3] *= 6.0 if tick >= 60 else 1.0
        if tick == 150:
            detector.accept_as_normal(entity, {"rank": frame})

    frame = Frame(SECOND, "rank", CASE.names["rank"], {}, CASE.topology())
    found = run_detector(high, 400, detector)
    assert found
    last = max(f.time for f in found)
    assert (last - found[0].time) / SECOND < (700 if entity == "job:7" else 95) * 10
    assert not detector.conditions


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_large_part_of_a_stage_that_spikes_puts_the_job_in_doubt(ranks):
    def part(tick, norm, count):
        norm[:ranks] *= 8.0 if tick >= 100 else 1.0

    found = run_detector(part, 160)
    assert {(f.entity, f.level) for f in found} == {("job:7", "suspect")}
    assert (f"{ranks} of 8 ranks" in found[0].summary) == (ranks < 8)


def test_nan_zeros_infinities_and_constants_cause_no_error():
    def storm(tick, norm, count):
        if tick > 60:
            norm[:] = (np.nan, 0.0, np.inf, 2.0)[tick % 4]
            count[:] = np.nan

    assert run_detector(storm) == []


def test_a_clock_that_steps_back_extends_no_hold():
    def spike(tick, norm, count):
        norm[3] *= 8.0 if tick == 100 else 1.0

    detector = SdcGradient()
    run_detector(spike, 110, detector)
    (record,) = detector.held.values()
    early = record["last"] - 5000 * SECOND
    for after in (0, 590, 610):
        held = dict(detector.held)
        frame = Frame(early + after * SECOND, "rank", CASE.names["rank"], {}, CASE.topology())
        assert all(f.onset <= f.time for f in detector.observe({"rank": frame}))
        assert record["since"] <= early
        assert bool(detector.held) == (after < 600), held


def test_the_budget_includes_heavy_tails():
    spikes, tickets, *_ = SdcGradient().budget()
    assert "Student's t of 4, 14%) about 2,8" in spikes
    assert "below 1 per 1,000 node-days" in tickets
