"""What bears a suspect out, and what does not: a group of which nobody is blamed, an instrument that may lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detectors.corroboration import Corroboration
from pipeline.records import SECOND, Finding
from pipeline.topology import Topology

START = 1_790_000_000 * SECOND
TOPOLOGY = Topology({"rank:7.0": ["stage:7.0", "gpu:n0.0"], "gpu:n0.0": ["node:n0"], "node:n0": ["cdu:c0"]})
SLOW = Finding(START, START, "rank:7.0", "straggler", "suspect", 1.0, "slow", {}, ("rank.compute_time",))
HOT = Finding(START, START, "cdu:c0", "thermal", "ticket", 1.0, "hot", {}, ("gpu.temperature",))


def raised(*findings, time=START):
    return {f.detector: f for f in Corroboration().raised(findings, time, TOPOLOGY)}["straggler"]


def test_what_feeds_it_and_is_hot_bears_a_slow_rank_out():
    assert raised(SLOW, HOT).level == "page"


def test_a_plant_that_is_a_suspect_itself_explains_no_slow_rank_while_its_own_gpu_does():
    assert raised(SLOW, replace(HOT, level="suspect")).level == "suspect"
    assert raised(SLOW, replace(HOT, level="suspect", entity="gpu:n0.0")).level == "page"


@pytest.mark.parametrize(("minutes", "level"), [(-61, "suspect"), (-59, "page"), (9, "page"), (11, "suspect")])
def test_heat_explains_what_began_with_it_and_not_what_it_has_outlasted_for_hours(minutes, level):
    assert raised(SLOW, replace(HOT, onset=START + minutes * 60 * SECOND)).level == level


def test_the_own_heat_of_a_gpu_explains_its_slow_rank_however_long_it_has_been_told():
    assert raised(SLOW, replace(HOT, entity="gpu:n0.0", onset=START - 7200 * SECOND)).level == "page"


@pytest.mark.parametrize("evidence", [{"group": "cdu:c0, H100"}, {"doubted": True}])
def test_a_group_of_which_nobody_is_blamed_and_an_instrument_that_may_lie_explain_nothing(evidence):
    assert raised(SLOW, replace(HOT, evidence=evidence)).level == "suspect"


def test_what_was_dated_ahead_of_the_clock_is_forgotten_when_the_clock_goes_back():
    corroboration = Corroboration()
    corroboration.raised([replace(HOT, time=START + 86_400 * SECOND)], START + 86_400 * SECOND, TOPOLOGY)
    corroboration.raised([], START, TOPOLOGY)
    assert [f.level for f in corroboration.raised([SLOW], START, TOPOLOGY)] == ["suspect"]


def test_a_page_never_begins_after_it_is_told():
    told = raised(replace(SLOW, onset=START + 60 * SECOND), HOT)
    assert told.onset <= told.time
