"""Errors within five minutes: their probability by chance, old ones that are dropped, and restarts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.detection.link_rates import alarms, delays
from detectors.link.error_counts import WINDOW_CHANCE, WINDOW_S, ErrorWindow, probability_at_least
from detectors.link.link import Link
from pipeline.model.records import SECOND

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND


def test_the_probability_is_poisson_or_negative_binomial():
    m = 0.12
    poisson = 1 - sum(math.exp(-m) * m**k / math.factorial(k) for k in range(6))
    assert probability_at_least(np.array([6.0]), np.array([m]), 0.0)[0] == pytest.approx(poisson, rel=1e-4)
    geometric = (m / (1 + m)) ** 6  # a = 1
    assert probability_at_least(np.array([6.0]), np.array([m]), 1.0)[0] == pytest.approx(geometric, rel=1e-4)


@given(st.integers(1, 30), st.floats(1e-4, 3.0), st.floats(0.0, 50.0))
def test_the_probability_falls_with_the_count(count, mean, bunched):
    few, many = probability_at_least(np.array([count, count + 1.0]), np.full(2, mean), bunched)
    assert 0 <= many <= few <= 1


def test_six_errors_in_five_minutes_are_too_many_at_1e_15_and_four_at_1e_16():
    for mean, least in ((0.12, 6), (0.012, 4)):
        chances = probability_at_least(np.arange(1.0, 9.0), np.full(8, mean), 0.0)
        assert int(np.flatnonzero(chances < WINDOW_CHANCE)[0]) + 1 == least


def test_errors_older_than_the_window_or_in_the_future_are_dropped():
    window, at, began = ErrorWindow(), np.array([3]), np.array([START - STEP])
    window.add_errors(at, np.array([2.0]), began, START)
    window.add_errors(at, np.array([1.0]), began + 29 * STEP, START + 29 * STEP)
    assert window.recent[3] == 3
    window.add_errors(at[:0], np.empty(0), began[:0], START + 30 * STEP)
    assert window.recent[3] == 1
    window.add_errors(at[:0], np.empty(0), began[:0], START)  # the clock went back
    assert window.recent[3] == 0
    assert not window.batches


def test_a_reading_longer_than_the_window_does_not_count_and_hides_no_other():
    window, began = ErrorWindow(), np.array([START - int((WINDOW_S + 1) * SECOND), START - STEP])
    window.add_errors(np.array([0, 1]), np.array([5.0, 2.0]), began, START)
    assert window.recent.tolist() == [0, 2]


def slow_errors(tick, values):
    """One error every 50 s from tick 50 on, six in 250 s: the sum alone would need eight."""
    values["nic"]["nic.symbol_errors"] = np.zeros(16)
    values["nic"]["nic.symbol_errors"][6] = max(0, (tick - 45) // 5)


def test_six_errors_in_five_minutes_page_and_five_do_not(site, watch):
    found = [f for f in watch(Link(), site, 110, slow_errors) if f.level == "page"]
    assert found
    assert found[0].time - (START + 50 * STEP) <= 300 * SECOND
    assert "6 symbol errors" in found[0].summary

    def five(tick, values):
        slow_errors(min(tick, 70), values)

    assert not [f for f in watch(Link(), type(site)(), 200, five) if f.level == "page"]


def test_the_window_continues_after_a_restart(site, watch):
    first, second = Link(), Link()
    watch(first, site, 66, slow_errors)
    second.restore(first.snapshot())
    assert [f for f in watch(second, site, 30, slow_errors, 66) if f.level == "page"]


@pytest.mark.slow
def test_a_ber_of_1e_13_is_found_in_time_at_the_worst_healthy_rate():
    """Of all tests that alarm once in 100,000 link-days on links at 1e-15 none finds more than 0.978 of them."""
    assert delays(1e-13, 100, 0, 1e-15).recall >= 0.94


def test_healthy_links_with_bunched_errors_do_not_page():
    assert alarms(1e-15, 0.005, 0, 5.0).count == 0
