"""Matchers of silences and routes: what a person types is what Alertmanager would understand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleetpulse
from pipeline.api import federate
from pipeline.config.receivers import InhibitRule
from pipeline.incidents.matchers import (
    MAX_MATCHER_CHARACTERS,
    Matcher,
    list_values,
    make_list,
    parse_matcher,
    read_matcher,
)
from pipeline.model.errors import ConfigError, UsageError
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


@pytest.mark.parametrize("pattern", [r"r1)|(?:zz", "a)(?:b", ")(", r"r1)|(r2"])
def test_an_expression_is_one_by_itself_wherever_matchers_are_read(pattern: str) -> None:
    text = f'rack=~"{pattern}"'
    with pytest.raises(UsageError, match="matcher rack=~"):
        parse_matcher(text)
    with pytest.raises(UsageError, match="matcher rack=~"):
        parse_matcher({"name": "rack", "value": pattern, "isRegex": True})
    with pytest.raises(ConfigError, match=r"matcher rack=~.*; expected a regular expression of RE2"):
        routes.parse_matchers([text], "[notify.route] matchers")
    with pytest.raises(ConfigError, match=r"matcher rack=~.*; expected a regular expression of RE2"):
        routes.build_inhibitions([InhibitRule(source_matchers=(text,), target_matchers=("a=b",))])
    matcher = federate.Matcher("rack", "=~", pattern)
    with pytest.raises(UsageError, match="not an expression of RE2"):
        matcher.select(pa.array(["r1"]))


def test_a_stored_silence_that_would_be_refused_today_is_still_read() -> None:
    assert read_matcher({"name": "rack", "value": "r1)|(?:zz", "isRegex": True}).value == "r1)|(?:zz"


@given(st.lists(st.text(), min_size=1, max_size=5), st.text())
def test_a_list_of_values_matches_those_and_no_others(values: list[str], other: str) -> None:
    made = make_list("rack", values)
    assert made.values == frozenset(values)
    assert [made.matches({"rack": (value,)}) for value in values] == [True] * len(values)
    assert made.matches({"rack": (other,)}) is (other in values)
    assert read_matcher(made.as_stored()) == made


@given(st.text(alphabet="ab|.\\:-_(*", max_size=8), st.text(alphabet="ab|.\\:-_(*", max_size=8))
def test_a_pattern_that_is_compared_as_a_set_matches_what_re2_would(pattern: str, value: str) -> None:
    listed = list_values(pattern)
    if listed is not None:
        found = pc.match_substring_regex(pa.scalar(value), f"^(?s:{pattern})$").as_py()
        assert found is (value in listed)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_list_of_100_000_nodes_is_stored_so_that_versions_before_read_it_and_match_nothing(is_equal: bool) -> None:
    nodes = [f"node:gpu-a{i:06d}" for i in range(100_000)]
    made = replace(make_list("scope", nodes), is_equal=is_equal)
    stored = made.as_stored()
    assert read_matcher(stored) == made
    assert made.matches({"scope": ("rack:r1", nodes[-1])}) is is_equal
    before = Matcher(stored["name"], stored["value"], stored["isRegex"], stored["isEqual"])
    assert len(before.value) < MAX_MATCHER_CHARACTERS
    assert not before.matches({"scope": (nodes[0],)})
    assert not before.matches({})
    with pytest.raises(UsageError, match="lists 100,001 values, at most 100,000"):
        make_list("scope", [*nodes, "node:one-more"])


def test_long_values_are_short_for_people_and_say_how_much_they_are() -> None:
    made = make_list("scope", [f"x:{i:03d}{'y' * 190}" for i in range(200)])
    assert made.shorten() == f'scope=~"x:000{"y" * 115}…|… (200 values)"'
    assert parse_matcher(f"rack=~{'a.*' * 300}").shorten().endswith('… (900 characters)"')


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ('node=~"n[[:digit:]]+"', "n12", True),
        ('node!~"n[[:digit:]]+"', "n12", False),
        ('node=~"n[[:digit:]]+"', "nd]", False),
        (r'node=~"\\pL+"', "näher", True),
        ('node=~"a.b"', "a\nb", True),
        ('node=~"n1|n2"', "n2", True),
        ('node!~"n1|n2"', "n2", False),
        ('node=~"n1"', "n12", False),
    ],
)
def test_expressions_of_routes_and_rules_are_those_of_silences(text: str, value: str, holds: bool) -> None:
    labels = {"node": value}
    assert routes.match_all(routes.parse_matchers([text], "x"), labels) is holds
    assert parse_matcher(text).matches({"node": (value,)}) is holds
    (rule,) = routes.build_inhibitions([InhibitRule(source_matchers=("a=b",), target_matchers=(text,))])
    assert (rule.find_source(labels, {"inc-1": {"a": "b"}}) == "inc-1") is holds


def test_no_expression_of_a_route_takes_long() -> None:
    """Python's `re` takes years for this one."""
    (matcher,) = routes.parse_matchers(['job=~"(a+)+"'], "x")
    assert not matcher.holds("a" * 5000 + "b")


@pytest.mark.parametrize("command", [("config", "check"), ("routes", "test", "severity=critical")])
@pytest.mark.parametrize("pattern", [r"(?=n)n1", r"(a)\\1", "n(", "(?P<x>a)(?P=x)"])
def test_an_expression_that_re2_refuses_is_named_with_its_file_and_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], pattern: str
) -> None:
    hook = '[[notify.webhooks]]\nname = "hook"\nurl = "https://x.example/"\n'
    route = f'[notify.route]\nreceiver = "hook"\n[[notify.route.routes]]\nmatchers = [\'node=~"{pattern}"\']\n'
    (path := tmp_path / "fleetpulse.toml").write_text(hook + route)
    assert fleetpulse.main([*command, "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert f'{path}: [notify.route.routes[0]] matchers: matcher node=~"{pattern}": ' in said
    assert "; expected a regular expression of RE2" in said
