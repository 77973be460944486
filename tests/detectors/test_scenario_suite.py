"""The results of the small suite match its stored table, including false pages."""

from __future__ import annotations

import copy
import tomllib
from collections import Counter

import pytest

from agents.sim.fleet import FleetSimulator
from agents.sim.kinds import KINDS
from benchmarks.detection import small
from benchmarks.detection.renew import moved
from benchmarks.detection.scenarios import family, is_fault

MEND = "if that is meant: python -m benchmarks.detection.renew, and look at what it prints"
KIND = {"events": 4, "found": 3, "at_least": 2, "at_most": 4, "delay_s": 100.0}
PAGES = {"clean": {"straggler": 1}, "network": {}}
ALL = {"precision": 0.9, "recall": 0.75}
SOME = {"tolerance": dict(small.TOLERANCE), "all": ALL, "false_pages": PAGES, "kinds": {"straggler": KIND}}


@pytest.mark.slow
def test_the_results_of_the_small_suite_match_the_stored_table():
    moved = small.differences(small.stored(), small.measured())
    assert moved == [], "\n".join([*moved, MEND])


def test_three_of_each_kind_of_fault_can_be_found():
    """Hard or soft: with an invisible one, a kind that is no longer found would not be noticed."""
    sought = Counter()
    for scenario in small.scenarios().values():
        truth = FleetSimulator(scenario, small.SEED).truth(scenario.duration)
        sought.update(line["kind"] for line in truth if line["class"] in ("hard", "soft"))
    assert sought == {name: small.EACH for name, kind in KINDS.items() if happens(kind)}


def happens(kind):
    """Whether it is a fault that can happen outside of drawn worlds."""
    return is_fault(kind) and not kind.world_only


def test_the_table_is_based_on_three_events_of_each_kind():
    events: Counter[str] = Counter()
    for name, block in small.stored()["kinds"].items():  # a kind has two rows where some of its devices have no job
        events[name.removesuffix(" (soft)")] += block["events"]
    assert events == {name: small.EACH for name, kind in KINDS.items() if happens(kind)}


def test_parameters_that_make_a_kind_visible_are_allowed_in_scenarios():
    for name, given in small.VISIBLE.items():
        kind = KINDS[name](**given)
        for key, (low, high) in kind.limits.items():
            assert key not in given or low <= given[key] <= high


def test_the_suite_has_every_kind_of_fault():
    affected = {line.kind.name for scenario in small.scenarios().values() for line in scenario.faults}
    assert affected == {name for name, kind in KINDS.items() if happens(kind)}


def test_every_kind_of_fault_has_a_family_with_a_scenario():
    assert {family(kind) for kind in KINDS.values() if happens(kind)} <= set(small.scenarios())


def test_a_change_within_the_tolerance_is_not_a_difference():
    found = copy.deepcopy(SOME)
    found["kinds"]["straggler"] = {**KIND, "found": 4, "delay_s": 124.0}
    found["all"] |= {"precision": 0.81, "recall": 0.84}
    assert small.differences(SOME, found) == []


@pytest.mark.parametrize(
    ("where", "key", "value", "says"),
    [
        ("straggler", "found", 1, "kinds.straggler.found: found 1, expected 2 to 4"),
        ("straggler", "found", 0, "kinds.straggler.found: found 0, expected 2 to 4"),
        ("straggler", "events", 5, "kinds.straggler.events: found 5, expected 4 +- 0"),
        ("straggler", "delay_s", 130.0, "kinds.straggler.delay_s: found 130.0, expected 100.0 +- 25"),
        ("all", "precision", 0.7, "all.precision: found 0.7, expected 0.9 +- 0.1"),
        ("all", "recall", None, "all.recall: found None, expected 0.75"),
    ],
)
def test_a_difference_names_the_figure_with_found_and_expected_values(where, key, value, says):
    found = copy.deepcopy(SOME)
    (found["all"] if where == "all" else found["kinds"][where])[key] = value
    assert small.differences(SOME, found) == [says]


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"clean": {"straggler": 2}, "network": {}}, ["false_pages.clean.straggler: found 2, expected 1"]),
        ({"clean": {}, "network": {}}, ["false_pages.clean.straggler: found 0, expected 1"]),
        (
            {"clean": {"link": 1}, "network": {}},
            ["false_pages.clean.link: found 1, expected 0", "false_pages.clean.straggler: found 0, expected 1"],
        ),
        (
            {"clean": {}, "network": {"straggler": 1}},
            ["false_pages.clean.straggler: found 0, expected 1", "false_pages.network.straggler: found 1, expected 0"],
        ),
        ({**PAGES, "new": {"link": 1}}, ["false_pages.new.link: found 1, expected 0"]),
    ],
)
def test_one_false_page_more_or_less_or_elsewhere_is_a_difference(pages, says):
    assert small.differences(SOME, {**SOME, "false_pages": pages}) == says


@pytest.mark.parametrize(("found", "at_least", "at_most"), [(0, 0, 1), (1, 1, 2), (2, 1, 3), (3, 2, 3)])
def test_losing_the_last_found_event_of_a_kind_is_a_difference(found, at_least, at_most):
    block = {"events": 2, "found": found - (found > 0), "small": 1, "small_found": int(found > 0), "delay_median_s": 1}
    figures = small._figures(block)
    assert [figures[key] for key in ("events", "found", "at_least", "at_most")] == [3, found, at_least, at_most]


@pytest.mark.parametrize("kind", [name for name, block in small.stored()["kinds"].items() if block["found"]])
def test_a_kind_found_in_the_stored_table_and_not_any_more_is_a_difference(kind):
    found = copy.deepcopy(small.stored())
    found["kinds"][kind]["found"] = 0
    assert small.differences(small.stored(), found)


def test_renewing_lists_changes_and_reports_a_table_of_another_format_as_all_new():
    found = copy.deepcopy(SOME)
    found["kinds"]["straggler"]["found"] = 0
    assert moved(small.text(SOME), found) == ["kinds.straggler.found: found 0, expected 2 to 4"]
    assert moved("", SOME) == ["the stored table has no 'tolerance': everything is new"]


def test_a_new_or_removed_kind_is_a_difference():
    assert small.differences(SOME, {**SOME, "kinds": {}}) == [
        "kinds.straggler: there are no events of it, expected some"
    ]
    assert small.differences({**SOME, "kinds": {}}, SOME) == ["kinds.straggler: there are events of it, expected none"]


def test_the_table_can_be_written_as_text_and_read_back():
    assert tomllib.loads(small.text(SOME)) == SOME


def test_kinds_that_were_never_found_have_no_delay_in_the_table():
    lost = {**SOME, "kinds": {"straggler": {**KIND, "found": 0, "at_least": 0, "delay_s": None}}}
    assert tomllib.loads(small.text(lost))["kinds"]["straggler"].keys() == KIND.keys() - {"delay_s"}
    assert small.differences(tomllib.loads(small.text(lost)), lost) == []
