"""The comparison of the main finding: values with units, peers, difference, corroboration, clear condition."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards import evidence
from dashboards.answers import IncidentDetail
from pipeline.model.records import SECOND, Finding, Incident

NOON = 1_767_268_800 * SECOND
COMPARED = {"value": 0.61, "expected": 0.43, "spread": 0.006, "cohort": "stage:81.2", "peers": 511, "effect": 0.42}


def finding(detector: str = "straggler", entity: str = "rank:81.17", **more: Any) -> Finding:
    return Finding(NOON, NOON - 900 * SECOND, entity, detector, "page", 3.0, "it is slow", **more)


def comparison_rows(one: Finding, *others: Finding) -> dict[str, str]:
    incident = Incident("A1", one.entity, NOON, NOON, None, "page", (one.entity,), 0.9, "open", "slow", True)
    return dict(evidence.comparison_rows(one, IncidentDetail(incident, (one, *others), (), (), {}), NOON))


def test_a_comparison_shows_units_peers_and_difference() -> None:
    rows = comparison_rows(finding(evidence={**COMPARED, "unit": "s", "clears": "ends when stage:81.2 is as quick"}))
    assert rows == {
        "Entity": "rank 17 of job 81",
        "Measured": "0.61 s",
        "Expected": "0.43 s, spread 0.006 s",
        "Compared with": "the median of 511 peers: stage 2 of job 81",
        "Difference": "0.18 s more: 41.9 %",
        "Onset": "11:45:00Z (15 min ago)",
        "Corroborated by": "nothing so far",
        "Clears when": "stage 2 of job 81 is as quick",
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
        ({"value": 0.0, "expected": 2.5e10, "unit": "By/s"}, "x", ("0 B/s", "25 GB/s", "25 GB/s less: 100 %")),
        ({"value": 0.4, "expected": 0.0, "unit": "s"}, "x", ("0.4 s", "0 s", "0.4 s more")),
    ],
)
def test_units_are_written_in_their_common_form(facts: dict[str, Any], signal: str, wanted: tuple[str, ...]) -> None:
    rows = comparison_rows(
        finding(evidence={**facts, "spread": None, "cohort": "own past", "peers": 0}, signals=(signal,))
    )
    assert (rows["Measured"], rows["Expected"]) == wanted[:2]
    assert rows["Difference"].startswith(wanted[2])
    assert rows["Compared with"] == "its own past"


def test_corroboration_comes_from_the_detector_or_from_other_findings() -> None:
    by = {"detector": "thermal", "entity": "gpu:n003.1"}
    assert comparison_rows(finding(evidence={"corroborated_by": by}))["Corroborated by"] == "thermal on GPU 1 of n003"
    named = finding(evidence={"corroborated_by": ["pump.speed", "odd"]})
    assert comparison_rows(named)["Corroborated by"] == "pump speed and odd"
    beside = [finding("thermal", f"gpu:n003.{i}") for i in range(6)]
    assert comparison_rows(finding(), *beside)["Corroborated by"] == (
        "other findings: thermal on GPU 0 of n003, thermal on GPU 1 of n003, thermal on GPU 2 of n003, "
        "thermal on GPU 3 of n003 and 2 more"
    )


def test_evidence_without_comparison_shows_onset_and_clear_condition() -> None:
    rows = comparison_rows(finding(evidence={"value": float("nan"), "clears": "nothing: it is over"}))
    assert list(rows) == ["Entity", "Onset", "Corroborated by", "Status"]
    assert "Measured" not in comparison_rows(finding(evidence={"value": None, "expected": 3.0, "unit": "s"}))


def test_figures_exclude_the_fields_of_the_comparison() -> None:
    one = finding(evidence={**COMPARED, "unit": "s", "clears": "x", "mode": "act", "slowdown": 1.42})
    assert [label for label, _ in evidence.figure_rows(one)] == ["Slowdown factor"]


def test_a_suppressed_finding_shows_the_reason() -> None:
    muted = {"id": "m1", "reason": "new paste", "until": "2026-01-01T20:00:00.000000Z"}
    assert evidence.suppression_notice(finding(evidence={"muted": muted})) == (
        "Muted until 2026-01-01 20:00:00Z: new paste. The finding is stored, but sends no alert."
    )
    assert "this detector has the mode `record`" in evidence.suppression_notice(finding(evidence={"mode": "record"}))
    assert evidence.suppression_notice(finding(evidence={"mode": "act"})) == ""
