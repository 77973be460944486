"""Repeated spikes of gradient norms, even rare ones: the series of a GPU, over all ranks that ran on it."""

from __future__ import annotations

import numpy as np

from detectors.sdc.sdc_gradient import SdcGradient, add_to_series, chance_clusters, is_series
from pipeline.model.records import SECOND, Frame
from tests.detectors.cases.case import START
from tests.detectors.cases.sdc import GPUS
from tests.detectors.cases.sdc_gradient import CASE, run_detector

STEP = 10 * SECOND
SPIKES, SEEN, STAGE = np.zeros(64), np.full(64, 2000.0), np.arange(64) < 16


def test_a_gpu_with_repeated_spikes_is_a_ticket_and_stays_one_between_them():
    def spike(tick, norm, count):
        norm[3] *= 8.0 if tick % 120 == 60 else 1.0  # each 20 min

    found = run_detector(spike, 1200)
    assert {f.entity for f in found} == {GPUS[3]}
    start = next(f.time for f in found if f.level == "ticket")
    assert start - found[0].time == 240 * STEP
    after = [f for f in found if f.time >= start]
    assert {(f.level, f.onset) for f in after} == {("ticket", start)}
    assert "60 min without another" in after[-1].evidence["clears"]


def test_a_series_ends_after_three_of_its_usual_pauses():
    def spike(tick, norm, count):
        norm[3] *= 8.0 if tick % 120 == 60 and tick < 500 else 1.0

    detector = SdcGradient()
    last = max(f.time for f in run_detector(spike, 1200, detector))
    assert 420 + 350 < (last - START) / STEP <= 420 + 360
    assert not detector.held


def test_several_ranks_with_rare_spikes_get_no_ticket():
    def spike(tick, norm, count):
        norm[[1, 3, 5][tick // 120 % 3]] *= 8.0 if tick % 120 == 60 else 1.0

    assert {f.level for f in run_detector(spike, 1800)} == {"suspect"}


def time_at(hours):
    return START + int(hours * 3600 * SECOND)


def test_spikes_count_for_the_gpu_whichever_rank_is_on_it():
    gpus, spikes = {}, SPIKES.copy()
    for k, rank in enumerate((3, 3, 9)):  # the job moved after the second
        spikes[rank] += 1
        known = add_to_series(gpus, "gpu:a", (rank, 1000.0 + 120 * k), time_at(k / 3))
    assert (known["spikes"], known["steps"]) == (3, 240)
    assert is_series(known, spikes, SEEN, STAGE, 0.2)


def test_spikes_that_follow_a_rank_come_from_its_data():
    gpus, spikes = {}, SPIKES.copy()
    series = []
    for k in range(12):
        spikes[3] += 1
        known = add_to_series(gpus, "gpu:a" if k < 3 else "gpu:b", (3, 120.0 * k), time_at(k / 3))
        series.append(is_series(known, spikes, SEEN, STAGE, 0.2))
    assert series[2]
    assert not any(series[3:])


def test_a_gpu_that_spikes_as_often_as_its_stage_has_no_series():
    spikes = SPIKES.copy()
    spikes[3], spikes[4] = 5, 5
    known = {"spikes": 5, "steps": 2000, "by": {"3": 5}}
    assert not is_series(known, spikes, SEEN, STAGE, 0.2)
    spikes[4] = 1
    assert is_series(known, spikes, SEEN, STAGE, 0.2)


def test_a_series_is_dropped_after_a_day_and_series_are_bounded():
    gpus = {}
    add_to_series(gpus, "gpu:a", (3, 0.0), time_at(0))
    assert add_to_series(gpus, "gpu:a", (3, 9000.0), time_at(25))["spikes"] == 1
    for k in range(2000):
        add_to_series(gpus, f"gpu:{k}", (k, 0.0), time_at(26))
    assert len(gpus) == 1000
    assert "gpu:1999" in gpus


def test_thousands_of_spikes_do_not_overflow():
    assert chance_clusters(1e-2, 4000, 400_000) > 1e6
    assert chance_clusters(1e-5, 4000, 400_000) < 1e-9


def test_feedback_drops_the_series_of_a_gpu():
    detector = SdcGradient()
    detector.series = {GPUS[3]: {"spikes": 9}, GPUS[4]: {"spikes": 9}}
    frame = Frame(SECOND, "rank", CASE.names["rank"], {}, CASE.topology())
    detector.grow(16)
    detector.accept_as_normal(GPUS[3], {"rank": frame})
    assert set(detector.series) == {GPUS[4]}
    detector.accept_as_normal("job:7", {"rank": frame})
    assert not detector.series
