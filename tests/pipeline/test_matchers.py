"""Matchers of silences and routes: what a person types is what Alertmanager would understand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.incidents.silences import Matcher, parse_matcher
from pipeline.model.errors import UsageError
from pipeline.model.matcher_text import quote_value, unquote_value
from pipeline.notify import routes


def test_backslashes_of_a_regular_expression_stay_in_quotes() -> None:
    made = parse_matcher(r'rack=~"r1\.2|r\d+"')
    assert made == Matcher("rack", r"r1\.2|r\d+", is_regex=True)
    assert made.matches({"rack": ("r17",)})
    assert not made.matches({"rack": ("r1-2",)})


def test_a_quote_a_backslash_and_a_newline_are_escaped() -> None:
    assert parse_matcher(r'job="a\"b\\c\nd"').value == 'a"b\\c\nd'


def test_an_expression_that_ends_within_an_escape_is_refused() -> None:
    with pytest.raises(UsageError, match="expected LABEL=VALUE"):
        parse_matcher('rack="r1\\"')


@given(st.text())
def test_a_value_is_read_as_it_was_written(value: str) -> None:
    assert unquote_value(quote_value(value)) == value
    written = Matcher("rack", value)
    assert parse_matcher(str(written)) == written
    (routed,) = routes.parse_matchers([str(written)], "[notify.route] matchers")
    assert (routed.value, str(routed)) == (value, str(written))
