"""Statistics against definitions that are slow and plain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.method.baseline import (
    CELL,
    COUNTER,
    LEARN,
    Pcc,
    counter_delta,
    grouped_mad,
    grouped_median,
    poisson_cusum,
)

SECOND = 1_000_000
values_and_groups = st.lists(
    st.tuples(st.one_of(st.just(np.nan), st.floats(-1e9, 1e9)), st.integers(-1, 5)), min_size=1, max_size=40
)


@given(values_and_groups)
def test_grouped_median_is_the_median_of_each_group(pairs):
    values, groups = np.array([v for v, _ in pairs]), np.array([g for _, g in pairs], np.int32)
    median, size = grouped_median(values, groups)
    for i, group in enumerate(groups):
        members = values[(groups == group) & np.isfinite(values)] if group >= 0 else np.empty(0)
        assert size[i] == len(members)
        assert median[i] == pytest.approx(np.median(members)) if len(members) else np.isnan(median[i])


@given(values_and_groups)
def test_grouped_mad_is_the_median_distance_from_the_median(pairs):
    values, groups = np.array([v for v, _ in pairs]), np.array([g for _, g in pairs], np.int32)
    mad, _ = grouped_mad(values, groups)
    for i, group in enumerate(groups):
        members = values[(groups == group) & np.isfinite(values)] if group >= 0 else np.empty(0)
        if len(members):
            assert mad[i] == pytest.approx(np.median(np.abs(members - np.median(members))), abs=1e-6)


def test_more_groups_than_a_short_integer_holds_are_told_apart():
    groups = np.arange(80_000, dtype=np.int32) // 2
    values = np.random.default_rng(1).standard_normal(80_000)
    median, size = grouped_median(values, groups)
    assert np.allclose(median[::2], values.reshape(-1, 2).mean(axis=1))
    assert set(size) == {2}


def readings(*values):
    cells, out = np.zeros(1, COUNTER), []
    for tick, value in enumerate(values, 1):
        delta, seconds = counter_delta(cells, np.array([float(value)]), tick * SECOND)
        out.append((float(delta[0]), float(seconds[0])))
    return out


def test_the_first_reading_of_a_counter_tells_no_growth():
    assert np.isnan(readings(1000)[0]).all()


def test_growth_over_a_missing_reading_counts_with_its_whole_time():
    assert readings(10, np.nan, 16)[2] == (6.0, 2.0)


def test_a_counter_that_fell_was_reset_and_goes_on_from_there():
    told = readings(1000, 3, 5)
    assert np.isnan(told[1]).all()
    assert told[2] == (2.0, 1.0)


def test_a_counter_of_32_bits_that_wrapped_has_grown():
    assert readings(2**32 - 5, 7)[1] == (12.0, 1.0)


def lives(*readings):
    """Growth told at each (value, generation)."""
    cells, out = np.zeros(1, COUNTER), []
    for tick, (value, generation) in enumerate(readings, 1):
        told = counter_delta(cells, np.array([float(value)]), tick * SECOND, np.array([float(generation)]))
        out.append(float(told[0][0]))
    return out


NO = np.nan


@pytest.mark.parametrize(
    ("readings", "wanted"),
    [
        ([(10, 7), (900, 9), (905, 9)], [NO, NO, 5]),  # the new life has outgrown the old one
        ([(10, 7), (3, 9), (5, 9)], [NO, NO, 2]),
        ([(10, 9), (20, 7)], [NO, NO]),  # a clock that was set back
        ([(2**32 - 5, 7), (7, 9)], [NO, NO]),  # no wrap: another life
        ([(2**32 - 5, 7), (7, 7)], [NO, 12]),
        ([(10, 7), (NO, 9), (900, 9), (901, 9)], [NO, NO, NO, 1]),  # the reset falls into a missing reading
        ([(10, 7), (12, NO), (15, 7)], [NO, 2, 3]),  # a reading without its generation, as after an older agent
        ([(10, 7), (900, NO), (905, 9), (906, 9)], [NO, 890, NO, 1]),
        ([(10, NO), (12, 7), (15, 7)], [NO, 2, 3]),  # the agent was upgraded
        ([(10, NO), (3, NO), (5, NO)], [NO, NO, 2]),
    ],
)
def test_growth_is_told_only_within_one_life_of_a_counter(readings, wanted):
    assert lives(*readings) == pytest.approx(wanted, nan_ok=True)


def test_five_errors_at_a_faulty_rate_pass_the_limit_and_a_quiet_hour_takes_them_back():
    cells = np.zeros(1, COUNTER)
    for tick in range(1, 6):
        poisson_cusum(cells, np.array([1.0]), np.array([1.0]), 1.44 / 3600, 144 / 3600, 22.0, tick * SECOND)
    assert cells["sum"][0] > 22
    assert cells["total"][0] == 5
    poisson_cusum(cells, np.array([0.0]), np.array([3600.0]), 1.44 / 3600, 144 / 3600, 22.0, 10 * SECOND)
    assert cells["sum"][0] == 0


def run(pcc, series, groups):
    """Cells after each tick of a (ticks, N) series."""
    cells = np.zeros(series.shape[1], CELL)
    for tick, row in enumerate(series):
        pcc.step(cells, row, groups, tick * 10 * SECOND)
        yield tick, cells


def after(pcc, series):
    """Cells after the whole series of one cohort."""
    return list(run(pcc, series, np.zeros(series.shape[1], np.int32)))[-1][1]


def noise(ticks, n, seed=1):
    """Student t with 4 degrees of freedom, unit variance: tails as heavy as in the field."""
    return np.random.default_rng(seed).standard_t(4, (ticks, n)) / np.sqrt(2)


def test_heavy_tailed_noise_gives_no_alarm_in_two_million_samples():
    groups = np.zeros(500, np.int32)
    for _, cells in run(Pcc(0.01, 0.03, phi=0.0), 0.03 * noise(4000, 500), groups):
        assert not cells["on"].any()


def test_a_step_of_three_scales_is_found_within_fifteen_samples_and_its_onset_is_near():
    series = 0.02 * noise(400, 50)
    series[300:, 7] += 0.06 * 1.4
    found = next(t for t, cells in run(Pcc(0.01, 0.03), series, np.zeros(50, np.int32)) if cells["on"][7])
    assert 300 < found <= 315
    cells = after(Pcc(0.01, 0.03), series[: found + 1])
    assert abs(int(cells["since"][7]) // (10 * SECOND) - 300) <= 3


def test_a_fault_does_not_teach_the_baseline():
    series = 0.01 * noise(3000, 50)
    series[300:, 7] += 0.1
    cells = after(Pcc(0.01, 0.03), series)
    assert cells["on"][7]
    assert abs(cells["baseline"][7]) < 0.02


def test_what_a_chip_always_lacked_is_no_fault():
    series = 0.01 * noise(1000, 50)
    series[:, 7] += 0.2
    for _, cells in run(Pcc(0.01, 0.03), series, np.zeros(50, np.int32)):
        assert not cells["on"].any()


def test_a_condition_ends_when_half_of_the_least_effect_is_left():
    series = 0.01 * noise(600, 50)
    series[300:330, 7] += 0.1
    states = [bool(cells["on"][7]) for _, cells in run(Pcc(0.01, 0.03), series, np.zeros(50, np.int32))]
    assert any(states[300:330])
    assert not any(states[360:])


def test_nothing_is_said_before_a_stream_has_twenty_samples():
    series = np.zeros((LEARN, 1))
    series[10:] = 5.0
    for _, cells in run(Pcc(0.01, 0.03), series, np.zeros(1, np.int32)):
        assert not cells["on"].any()
