"""Medians and means of groups are those of NumPy, group by group; cut rates are those of a sorted list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.base.statistics import group_means, grouped_mad, grouped_median
from detectors.link.counters import cut_highest

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


@given(values_and_groups)
def test_the_mean_of_a_group_is_that_of_its_finite_values(pairs):
    values, groups = np.array([v for v, _ in pairs]), np.array([g for _, g in pairs], np.int32)
    means = group_means(values, groups, 6)
    for group in range(6):
        members = values[(groups == group) & np.isfinite(values)]
        assert means[group] == pytest.approx(members.mean(), abs=1e-6) if len(members) else np.isnan(means[group])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0, 1.0, 7.0, 50.0]), st.floats(1, 100)), max_size=80))
def test_the_highest_error_rates_are_cut_to_the_next(pairs):
    errors, exposure = np.array([e for e, _ in pairs]), np.array([x for _, x in pairs])
    many = max(2, int(0.05 * len(pairs)))
    rates = sorted((e / x for e, x in pairs), reverse=True)
    expected = [min(e, rates[many] * x) if len(pairs) > many else 0.0 for e, x in pairs]
    assert cut_highest(errors, exposure).tolist() == expected


def test_more_groups_than_a_16_bit_integer_are_distinguished():
    groups = np.arange(80_000, dtype=np.int32) // 2
    values = np.random.default_rng(1).standard_normal(80_000)
    median, size = grouped_median(values, groups)
    assert np.allclose(median[::2], values.reshape(-1, 2).mean(axis=1))
    assert set(size) == {2}
