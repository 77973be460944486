"""State of a stream stays finite for any input; order, restarts and clocks do not change its verdicts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.base.streams import Channel, Streams
from pipeline.model.records import SECOND
from tests.examples import examples

SIZE, TICKS, TICK = 24, 60, 10 * SECOND
GROUPS = (np.arange(SIZE) % 3).astype(np.int32) - 1
CHANNEL = Channel(floor=0.01, delta=0.03, both=True)
WEIRD = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e8, 1e-30])
FEW = settings(max_examples=examples(25), deadline=None)


def rows(seed, shifted=0):
    values = np.random.default_rng(seed).normal(0.0, 0.02, (TICKS, SIZE))
    values[TICKS // 2 :, :shifted] += 0.3
    return values


def verdicts(streams, values, groups=GROUPS, first=0):
    """Returns state and verdicts after each sample."""
    out = []
    for tick, row in enumerate(values, first):
        step = streams.step(row, groups, (1 + tick) * TICK)
        out.append([a.copy() for a in (step.on, step.moved, step.off, step.effect, step.held)])
    return out


def alike(one, other):
    pairs = ((a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@FEW
@given(st.integers(0, 99), st.integers(0, SIZE), st.randoms(use_true_random=False))
def test_the_order_of_entities_changes_nothing(seed, shifted, random):
    order = np.arange(SIZE)
    random.shuffle(order)
    values = rows(seed, shifted)
    there = verdicts(Streams(CHANNEL), values)
    back = verdicts(Streams(CHANNEL), values[:, order], GROUPS[order])
    assert alike([[a[order] for a in line] for line in there], back)


@FEW
@given(st.integers(0, 99), st.integers(0, SIZE), st.integers(0, TICKS))
def test_a_restart_at_any_time_continues_bit_by_bit(seed, shifted, stop):
    values, first, second = rows(seed, shifted), Streams(CHANNEL), Streams(CHANNEL)
    whole = verdicts(Streams(CHANNEL), values)
    verdicts(first, values[:stop])
    second.restore(copy.deepcopy(first.snapshot()))
    assert alike(verdicts(second, values[stop:], first=stop), whole[stop:])


@FEW
@given(st.lists(st.tuples(st.integers(0, TICKS - 1), st.integers(0, SIZE - 1), WEIRD), max_size=200))
def test_no_sequence_of_extreme_values_makes_the_state_infinite(storm):
    values, streams = rows(1), Streams(CHANNEL)
    for tick, i, value in storm:
        values[tick, i] = value
    verdicts(streams, values)
    assert np.isfinite(streams.cells[:5]).all()


@FEW
@given(st.lists(st.integers(-50, 200), min_size=1, max_size=80))
def test_a_clock_that_jumps_is_followed_without_findings(times):
    streams, last = Streams(CHANNEL), 0
    for tick in times:
        time = 1_000 * SECOND + tick * TICK
        step = streams.step(np.zeros(SIZE), GROUPS, time)
        last = time if time > last or last - time >= 600 * SECOND else last
        assert streams.last == last
        assert not step.on.any()
        assert np.isfinite(streams.cells[:5]).all()


@pytest.mark.slow
@settings(max_examples=examples(4), deadline=None)
@given(st.integers(0, 99))
def test_no_member_learns_while_the_cohort_is_shifted(seed):
    """Else a member that did not change would count as slow once the others are healthy again."""
    values, streams = np.random.default_rng(seed).normal(0.0, 0.01, (900, SIZE)), Streams(CHANNEL)
    values[300:600, :10] += 0.1
    groups = np.zeros(SIZE, np.int32)
    verdicts(streams, values[:400], groups)
    learnt = streams.cells[0].copy()
    assert streams.step(values[400], groups, 401 * TICK).moved.all()
    verdicts(streams, values[401:600], groups, 401)
    assert np.abs(streams.cells[0] - learnt).max() <= 1e-6
    after = verdicts(streams, values[600:], groups, 600)
    assert not np.any([line[0] for line in after[60:]])
