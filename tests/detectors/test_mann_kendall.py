"""Mann-Kendall's z of one series and of many, with gaps, against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.base.statistics import row_trend_z

SERIES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=20)


def defined(series: list[float]) -> float:
    known = [x for x in series if not math.isnan(x)]
    n = len(known)
    score = sum((b > a) - (b < a) for k, a in enumerate(known) for b in known[k + 1 :])
    if n < 2 or score == 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


@given(SERIES)
def test_z_of_a_row_is_as_mann_and_kendall_define_it(series):
    assert row_trend_z(np.array([series]))[0] == pytest.approx(defined(series))


def test_rows_are_independent():
    rising, noise = np.arange(48.0), np.random.default_rng(1).standard_normal(48)
    z = row_trend_z(np.stack([rising, -rising, noise, np.full(48, np.nan)]))
    assert z[0] > 9
    assert z[1] < -9
    assert abs(z[2]) < 3
    assert z[3] == 0
