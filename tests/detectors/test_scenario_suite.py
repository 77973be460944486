"""The small suite finds what it found when its table was written, and pages as rarely."""

from __future__ import annotations

import copy
import tomllib

import pytest

from agents.sim.kinds import KINDS
from benchmarks.detection import small
from benchmarks.detection.scenarios import family, is_fault

MEND = "if that is meant: python -m benchmarks.detection.renew, and look at what it prints"
KIND = {"events": 4, "found": 3, "delay_s": 100.0}
ALL = {"false_pages": 2, "false_pages_clean": 0, "precision": 0.9, "recall": 0.75, "false_by_detector": {}}
SOME = {"tolerance": dict(small.TOLERANCE), "all": ALL, "kinds": {"straggler": KIND}}


@pytest.mark.slow
def test_the_detectors_find_of_the_small_suite_what_the_table_says():
    moved = small.differences(small.stored(), small.measured())
    assert moved == [], "\n".join([*moved, MEND])


def test_the_suite_has_every_kind_of_fault():
    struck = {line.kind.name for scenario in small.scenarios().values() for line in scenario.faults}
    assert struck == {name for name, kind in KINDS.items() if is_fault(kind)}


def test_every_kind_of_fault_has_a_family_with_a_scenario():
    assert {family(kind) for kind in KINDS.values() if is_fault(kind)} <= set(small.scenarios())


def test_a_figure_that_moved_within_its_tolerance_is_no_difference():
    found = copy.deepcopy(SOME)
    found["kinds"]["straggler"] = {"events": 4, "found": 4, "delay_s": 124.0}
    found["all"] |= {"false_pages": 3, "precision": 0.81, "recall": 0.84}
    assert small.differences(SOME, found) == []


@pytest.mark.parametrize(
    ("where", "key", "value", "says"),
    [
        ("straggler", "found", 1, "kinds.straggler.found: found 1, wanted 3 +- 1"),
        ("straggler", "events", 5, "kinds.straggler.events: found 5, wanted 4 +- 0"),
        ("straggler", "delay_s", 130.0, "kinds.straggler.delay_s: found 130.0, wanted 100.0 +- 25"),
        ("all", "false_pages", 4, "all.false_pages: found 4, wanted 2 +- 1"),
        ("all", "false_pages_clean", 2, "all.false_pages_clean: found 2, wanted 0 +- 1"),
        ("all", "precision", 0.7, "all.precision: found 0.7, wanted 0.9 +- 0.1"),
        ("all", "recall", None, "all.recall: found None, wanted 0.75"),
    ],
)
def test_a_difference_says_which_figure_what_was_found_and_what_was_wanted(where, key, value, says):
    found = copy.deepcopy(SOME)
    (found["all"] if where == "all" else found["kinds"][where])[key] = value
    assert small.differences(SOME, found) == [says]


def test_a_kind_that_is_new_or_gone_is_a_difference():
    assert small.differences(SOME, {**SOME, "kinds": {}}) == ["kinds.straggler: there are no events of it, wanted some"]
    assert small.differences({**SOME, "kinds": {}}, SOME) == ["kinds.straggler: there are events of it, wanted none"]


def test_the_table_as_text_reads_back_as_it_was():
    assert tomllib.loads(small.text(SOME)) == SOME


def test_what_was_never_found_has_no_delay_in_the_table():
    lost = {**SOME, "kinds": {"straggler": {"events": 4, "found": 0, "delay_s": None}}}
    assert tomllib.loads(small.text(lost))["kinds"]["straggler"] == {"events": 4, "found": 0}
    assert small.differences(tomllib.loads(small.text(lost)), lost) == []
