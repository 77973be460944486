"""Findings that explain others, and those that do not: group events without a blamed member, doubtful instruments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detectors.corroboration import Corroboration
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
TOPOLOGY = Topology({"rank:7.0": ["stage:7.0", "gpu:n0.0"], "gpu:n0.0": ["node:n0"], "node:n0": ["cdu:c0"]})
SLOW = Finding(START, START, "rank:7.0", "straggler", "suspect", 1.0, "slow", {}, ("rank.compute_time",))
HOT = Finding(START, START, "cdu:c0", "thermal", "ticket", 1.0, "hot", {}, ("gpu.temperature",))


def explained(*findings, time=START):
    found = {f.detector: f for f in Corroboration().corroborate(findings, time, TOPOLOGY)}
    return "corroborated_by" in found["straggler"].evidence


@pytest.mark.parametrize("level", ["suspect", "ticket", "page"])
def test_a_slow_rank_names_the_hot_loop_that_explains_it_and_keeps_its_level(level):
    (slow, _) = Corroboration().corroborate([replace(SLOW, level=level), HOT], START, TOPOLOGY)
    assert slow.level == level
    assert slow.evidence["corroborated_by"] == {"detector": "thermal", "entity": "cdu:c0"}
    assert slow.summary == "slow"


def test_a_suspect_of_the_cooling_plant_explains_no_slow_rank_and_one_of_its_own_gpu_does():
    assert not explained(SLOW, replace(HOT, level="suspect"))
    assert explained(SLOW, replace(HOT, level="suspect", entity="gpu:n0.0"))


@pytest.mark.parametrize(("minutes", "explains"), [(-61, False), (-59, True), (9, True), (11, False)])
def test_heat_explains_a_suspect_that_began_about_then(minutes, explains):
    assert explained(SLOW, replace(HOT, onset=START + minutes * 60 * SECOND)) == explains


def test_the_heat_of_its_own_gpu_explains_a_slow_rank_for_any_duration():
    assert explained(SLOW, replace(HOT, entity="gpu:n0.0", onset=START - 7200 * SECOND))


def test_of_two_ends_of_a_cable_the_earlier_explains_the_later_and_not_the_reverse():
    cable = Topology({"port:a": ["node:n0"], "port:b": ["leaf:l0"]}, {"port:a": {"peer": "port:b"}})
    here, there = (
        replace(SLOW, entity=e, detector="link", signals=("nic.symbol_errors",)) for e in ("port:a", "port:b")
    )
    found = Corroboration().corroborate([replace(here, onset=START - SECOND), there], START, cable)
    assert [f.evidence.get("corroborated_by") for f in found] == [None, {"detector": "link", "entity": "port:a"}]


def test_a_slow_rank_explains_no_heat():
    found = Corroboration().corroborate([SLOW, replace(HOT, entity="gpu:n0.0")], START, TOPOLOGY)
    assert "corroborated_by" not in found[1].evidence


@pytest.mark.parametrize("evidence", [{"group": "cdu:c0, H100"}, {"doubted": True}])
def test_group_events_and_doubtful_instruments_explain_nothing(evidence):
    assert not explained(SLOW, replace(HOT, evidence=evidence))


def test_findings_dated_ahead_are_dropped_when_the_clock_is_set_back():
    corroboration = Corroboration()
    corroboration.corroborate([replace(HOT, time=START + 86_400 * SECOND)], START + 86_400 * SECOND, TOPOLOGY)
    corroboration.corroborate([], START, TOPOLOGY)
    (found,) = corroboration.corroborate([SLOW], START, TOPOLOGY)
    assert "corroborated_by" not in found.evidence
