"""The leading finding as a story: values with units, peers, distance, witnesses and what would end it."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards import evidence
from dashboards import evidence as comparison
from dashboards.answers import Detail
from pipeline.model.records import SECOND, Finding, Incident

NOON = 1_767_268_800 * SECOND
COMPARED = {"value": 0.61, "expected": 0.43, "spread": 0.006, "cohort": "stage:81.2", "peers": 511, "effect": 0.42}


def finding(detector: str = "straggler", entity: str = "rank:81.17", **more: Any) -> Finding:
    return Finding(NOON, NOON - 900 * SECOND, entity, detector, "page", 3.0, "it is slow", **more)


def said(one: Finding, *others: Finding) -> dict[str, str]:
    incident = Incident("A1", one.entity, NOON, NOON, None, "page", (one.entity,), 0.9, "open", "slow", True)
    return dict(comparison.story(one, Detail(incident, (one, *others), (), (), {}), NOON))


def test_a_comparison_is_told_with_units_peers_and_distance() -> None:
    told = said(finding(evidence={**COMPARED, "unit": "s", "clears": "ends when stage:81.2 is as quick"}))
    assert told == {
        "Seen on": "rank 17 of job 81",
        "Measured": "0.61 s",
        "Expected": "0.43 s, spread 0.006 s",
        "Compared with": "the median of 511 peers: stage 2 of job 81",
        "Off by": "0.18 s more: 41.9 %",
        "Began": "11:45:00Z (15 min ago)",
        "Borne out by": "nothing else so far",
        "Ends when": "stage 2 of job 81 is as quick",
    }


@pytest.mark.parametrize(
    ("facts", "signal", "wanted"),
    [
        (
            {"value": 34.2, "expected": 30.0, "unit": "K"},
            "coolant.supply_temperature",
            ("34.2 °C", "30 °C", "4.2 K"),
        ),
        (
            {"value": -6.0, "expected": -8.0, "unit": "decade"},
            "nic.pre_fec_ber",
            ("1.0e-06", "1.0e-08", "100 times more"),
        ),
        ({"value": 8.0, "expected": 16.0, "unit": "share"}, "gpu.pcie_width", ("8", "16", "8 less: 50 %")),
        (
            {"value": 90.0, "expected": 30.0, "unit": "errors/h"},
            "x",
            ("90 errors/h", "30 errors/h", "60 errors/h"),
        ),
        ({"value": 0.0, "expected": 2.5e10, "unit": "By/s"}, "x", ("0 By/s", "25 GB/s", "25 GB/s less: 100 %")),
        ({"value": 0.4, "expected": 0.0, "unit": "s"}, "x", ("0.4 s", "0 s", "0.4 s more")),
    ],
)
def test_each_unit_is_written_as_people_write_it(facts: dict[str, Any], signal: str, wanted: tuple[str, ...]) -> None:
    told = said(finding(evidence={**facts, "spread": None, "cohort": "own past", "peers": 0}, signals=(signal,)))
    assert (told["Measured"], told["Expected"]) == wanted[:2]
    assert told["Off by"].startswith(wanted[2])
    assert told["Compared with"] == "its own past"


def test_witnesses_are_those_that_the_detectors_name_else_what_was_found_beside_it() -> None:
    by = {"detector": "thermal", "entity": "gpu:n003.1"}
    assert said(finding(evidence={"corroborated_by": by}))["Borne out by"] == "thermal on GPU 1 of n003"
    named = finding(evidence={"corroborated_by": ["pump.speed", "odd"]})
    assert said(named)["Borne out by"] == "pump speed and odd"
    beside = [finding("thermal", f"gpu:n003.{i}") for i in range(6)]
    assert said(finding(), *beside)["Borne out by"] == (
        "found beside it: thermal on GPU 0 of n003, thermal on GPU 1 of n003, thermal on GPU 2 of n003, "
        "thermal on GPU 3 of n003 and 2 more"
    )


def test_evidence_that_is_no_comparison_still_says_since_when_and_until_when() -> None:
    told = said(finding(evidence={"value": float("nan"), "clears": "nothing: it is over"}))
    assert list(told) == ["Seen on", "Began", "Borne out by", "Now"]
    assert "Measured" not in said(finding(evidence={"value": None, "expected": 3.0, "unit": "s"}))


def test_the_figures_leave_out_what_the_story_tells() -> None:
    one = finding(evidence={**COMPARED, "unit": "s", "clears": "x", "mode": "act", "slowdown": 1.42})
    assert [label for label, _ in evidence.rows(one)] == ["Times slower than peers"]


def test_what_is_held_back_says_why() -> None:
    muted = {"id": "m1", "reason": "new paste", "until": "2026-01-01T20:00:00.000000Z"}
    assert comparison.held_back(finding(evidence={"muted": muted})) == (
        "Muted until 2026-01-01 20:00:00Z: new paste. It is stored, and tells nobody."
    )
    assert "mode of this detector is `record`" in comparison.held_back(finding(evidence={"mode": "record"}))
    assert comparison.held_back(finding(evidence={"mode": "act"})) == ""
