"""Medians of groups are those of NumPy, group by group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.base.statistics import grouped_mad, grouped_median

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


def test_more_groups_than_a_16_bit_integer_are_distinguished():
    groups = np.arange(80_000, dtype=np.int32) // 2
    values = np.random.default_rng(1).standard_normal(80_000)
    median, size = grouped_median(values, groups)
    assert np.allclose(median[::2], values.reshape(-1, 2).mean(axis=1))
    assert set(size) == {2}
