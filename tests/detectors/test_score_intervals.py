"""Intervals of the scorer against published tables, closed forms and sums without a quantile."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.scoring.figures import poisson_interval, time_until_share, wilson_interval


@pytest.mark.parametrize(  # Garwood (1936), Biometrika 28, 437-442
    ("count", "low", "high"),
    [
        (0, 0.0, 3.689),
        (1, 0.0253, 5.572),
        (2, 0.2422, 7.225),
        (3, 0.6187, 8.767),
        (5, 1.6235, 11.668),
        (10, 4.795, 18.390),
        (20, 12.217, 30.888),
        (50, 37.111, 65.919),
        (100, 81.364, 121.627),
    ],
)
def test_poisson_intervals_are_those_of_the_tables(count, low, high):
    assert poisson_interval(count) == pytest.approx((low, high), abs=1e-3)


def test_no_event_has_the_bound_of_the_closed_form():
    assert poisson_interval(0)[1] == pytest.approx(-math.log(0.025), rel=1e-12)
    assert poisson_interval(0, 0.90)[1] == pytest.approx(-math.log(0.05), rel=1e-12)  # the rule of three: 2.996


def test_one_event_has_the_lower_bound_of_the_closed_form():
    assert poisson_interval(1)[0] == pytest.approx(-math.log(0.975), rel=1e-12)


@given(st.integers(1, 150))
def test_the_tails_at_the_bounds_hold_two_and_a_half_percent(count):
    def at_most(most, mean):
        return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(most + 1))

    low, high = poisson_interval(count)
    assert 1 - at_most(count - 1, low) == pytest.approx(0.025, rel=1e-9)
    assert at_most(count, high) == pytest.approx(0.025, rel=1e-9)


def test_a_huge_count_has_the_interval_of_the_normal_approximation():
    low, high = poisson_interval(10**6)
    assert (low, high) == pytest.approx((10**6 - 1960, 10**6 + 1960), abs=5)


def test_wilson_intervals_are_those_of_the_tables():
    """Newcombe (1998), Stat. Med. 17, 857-872, table I, method 3."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert wilson_interval(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert wilson_interval(0, 0) is None


@given(st.integers(1, 10_000), st.data())
def test_the_ends_of_a_wilson_interval_are_the_limits_of_the_score_test(of, data):
    hits = data.draw(st.integers(0, of))
    for end in wilson_interval(hits, of):
        if 0 < end < 1:
            score = (hits / of - end) ** 2 / (end * (1 - end) / of)
            assert score == pytest.approx(1.959964**2, rel=1e-6)


def test_waiting_times_match_the_textbook():
    """The example of Kaplan and Meier: found at 0.8, 3.1, 5.4, 9.2, still waiting at 1.0, 2.7, 7.0, 12.1."""
    waits = [
        (0.8, True),
        (1.0, False),
        (2.7, False),
        (3.1, True),
        (5.4, True),
        (7.0, False),
        (9.2, True),
        (12.1, False),
    ]
    # share left after each: 7/8, 7/8 x 4/5 = 0.7, 0.7 x 3/4 = 0.525, 0.525 x 1/2 = 0.2625
    assert [time_until_share(waits, share) for share in (0.12, 0.3, 0.47, 0.5, 0.73, 0.74)] == [
        0.8,
        3.1,
        5.4,
        9.2,
        9.2,
        None,
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_without_anything_still_waiting_the_share_is_that_of_the_sorted_list(times):
    found = time_until_share([(t, True) for t in times], 0.5)
    assert found == sorted(times)[math.ceil(len(times) / 2) - 1]
