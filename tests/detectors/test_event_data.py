"""Data of events are checked before use."""

from __future__ import annotations

import pytest

from detectors.base.event_data import LONGEST_S, read_duration, read_integer, read_number, read_text

HOSTILE = [None, True, "7", [7], {"a": 1}, float("nan"), float("inf"), -float("inf"), 10**400, -1, 1e300]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_values_that_are_not_numbers_in_range_are_none(value):
    assert read_number(value, 0.0, 1e12) is None
    assert read_integer(value, 0, 10**12) is None


def test_numbers_in_range_are_read():
    assert (read_number(7), read_number(7.5), read_integer(7.0), read_integer(7.5)) == (7.0, 7.5, 7, None)


def test_durations_are_above_zero_and_bounded():
    assert [read_duration(v) for v in (0, -1, 5, 1e12, "5")] == [None, None, 5.0, LONGEST_S, None]


def test_only_texts_are_read_as_text():
    assert [read_text(v) for v in ("a", None, 5, ["a"])] == ["a", "", "", ""]
