"""Contents of an incident's page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dashboards import evidence
from dashboards.answers import Change, IncidentDetail, Notification, TimelineItem, parse_detail
from dashboards.incident_timeline import timeline_rows
from dashboards.links import Link
from dashboards.views.incident import history_rows
from pipeline.model.records import SECOND, Finding, from_iso, iso

NOON = from_iso("2026-01-01T12:00:00Z")


def finding(entity: str = "gpu:n1.0", level: str = "page", detector: str = "sdc", **more: Any) -> Finding:
    times = more.pop("time", NOON), more.pop("onset", NOON)
    return Finding(*times, entity, detector, level, 1.0, "it is wrong", **more)  # type: ignore[arg-type]


def detail(*findings: Finding, **changes: Any) -> IncidentDetail:
    table = {
        "id": "A",
        "cause": "gpu:n1.0",
        "opened": iso(NOON),
        "onset": iso(NOON),
        "resolved": None,
        "severity": "page",
        "members": ["gpu:n1.0"],
        "confidence": None,
        "state": "open",
        "summary": "s",
        "simulated": False,
        "detector": "sdc",
        "entity": "gpu:n1.0",
        "findings": [f.as_json() for f in findings],
        **changes,
    }
    return parse_detail(table)


def test_the_main_finding_is_of_the_incidents_entity() -> None:
    found = detail(finding("gpu:n1.1", "page"), finding("gpu:n1.0", "suspect"))
    leading = evidence.main_finding(found)
    assert leading is not None
    assert leading.entity == "gpu:n1.0"
    assert evidence.main_finding(detail()) is None


@pytest.mark.parametrize(
    ("title", "entity", "noted"),
    [
        ("rank 3 is 33 % slow", "gpu:n1.0", True),
        ("rank 3 is 34 % slow; job 81 31 % slower", "gpu:n1.0", False),
        ("rank 3 is 34 %…", "gpu:n1.0", False),
        ("rack r1 is hot", "gpu:n1.1", False),
    ],
)
def test_a_main_finding_with_other_numbers_than_the_title_says_why(title: str, entity: str, noted: bool) -> None:
    strongest = replace(finding(entity), summary="rank 3 is 34 % slow")
    said = evidence.describe_main_finding(strongest, detail(strongest, summary=title).incident)
    assert said == "Rank 3 is 34 % slow" + (" (strongest report; the title has the newest)" if noted else "")


def test_chart_signals_start_with_the_main_finding_and_are_unique() -> None:
    first = finding(signals=("gpu.sm_clock", "gpu.power"))
    second = finding("gpu:n1.1", signals=("gpu.sm_clock", "gpu.power", "gpu.temperature"))
    assert evidence.chart_signals(detail(second, first)) == [
        ("gpu:n1.0", "gpu.sm_clock"),
        ("gpu:n1.0", "gpu.power"),
        ("gpu:n1.1", "gpu.sm_clock"),
        ("gpu:n1.1", "gpu.power"),
    ]


def test_a_finding_of_a_leaf_is_charted_by_a_port_of_the_incident_or_not_at_all() -> None:
    found = finding("leaf:l2", detector="link", signals=("nic.state", "nic.tx_bytes"))
    ports = ["leaf:l2", "port:n1.mlx5_0", "port:n2.mlx5_0"]
    assert evidence.chart_signals(detail(found, cause="leaf:l2", entity="leaf:l2", members=ports)) == [
        ("port:n1.mlx5_0", "nic.state"),
        ("port:n1.mlx5_0", "nic.tx_bytes"),
    ]
    assert evidence.chart_signals(detail(found, cause="leaf:l2", entity="leaf:l2", members=["leaf:l2"])) == []


def test_the_chart_span_starts_before_the_onset_and_is_rounded() -> None:
    incident = detail().incident
    start, end = evidence.chart_span(incident, NOON + 600 * SECOND)
    assert start == NOON - 1800 * SECOND
    assert end == NOON + 600 * SECOND
    assert evidence.chart_span(incident, NOON + 609 * SECOND) == (start, end)
    assert evidence.chart_span(incident, NOON - 5 * SECOND)[1] > NOON  # a clock behind ours gives no empty span


def test_a_vote_requires_two_results_and_the_number_of_voters() -> None:
    facts = {"digest": "aa", "expected": "bb", "peers": 7}
    ballot = evidence.parse_vote(finding(evidence=facts))
    assert ballot == evidence.Vote("gpu:n1.0", "aa", "bb", 7, None)
    assert evidence.parse_vote(finding(evidence={**facts, "agreeing": 7})) != ballot
    assert evidence.parse_vote(finding(evidence={"digest": "aa"})) is None


def test_figures_have_the_unit_of_their_signal() -> None:
    facts = {"value": 412.2, "expected": 624.0, "supply_temperature": 33.9, "supply_rise": 4.2, "down_s": 75.0}
    coolant = finding("cdu:c1", evidence=facts, signals=("coolant.flow",))
    said = dict(evidence.figure_rows(coolant))
    assert said["Measured"] == "412 L/min"
    assert said["Supply temperature"] == "33.9 °C"
    assert said["Supply rise"] == "4.2 K"
    assert said["Down for"] == "1 min"


@pytest.mark.parametrize(
    ("odds", "shown"), [(0.5, "0.5 to 1"), (1200.0, "1,200 to 1"), (1e12, "more than 1,000,000 to 1")]
)
def test_odds_are_numbers_that_people_know(odds: float, shown: str) -> None:
    assert dict(evidence.figure_rows(finding(evidence={"odds": odds}))) == {"Odds of a defect": shown}


def test_figures_exclude_the_fields_of_the_vote() -> None:
    facts = {"digest": "aa", "expected": "bb", "peers": 7, "mismatches": 3}
    assert [label for label, _ in evidence.figure_rows(finding(evidence=facts))] == ["Checks with a wrong result"]


def test_the_figures_of_wrong_results_name_the_parts_of_the_checks_in_the_title() -> None:
    facts = {"reproduced": 49, "mismatches": 22, "right_rounds": 350}  # title: wrong results in 71 of 421 checks
    assert evidence.figure_rows(finding(evidence=facts)) == [
        ("Retests of them, wrong again", "49"),
        ("Checks with a wrong result", "22"),
        ("Checks and retests with a right result", "350"),
    ]


@pytest.mark.parametrize(
    ("blast", "said"),
    [
        ({}, ["1 GPU"]),
        ({"entities": {"gpu": 64, "node": 8}, "jobs": ["job:81"]}, ["8 nodes", "64 GPUs", "job 81"]),
        ({"entities": {"gpu": 1, "job": 1}, "jobs": ["job:81"]}, ["1 GPU", "job 81"]),
    ],
)
def test_impact_comes_from_the_blast_radius_or_the_members(blast: dict[str, Any], said: list[str]) -> None:
    assert evidence.impact(detail(blast_radius=blast)) == said


def test_a_main_finding_that_is_no_longer_reported_says_so_and_what_keeps_the_incident_open() -> None:
    clears = {"clears": "ends when the sensor is normal in two frames"}
    now = NOON + 1500 * SECOND
    flow = finding("gpu:n1.0", time=NOON, evidence=clears)
    later = finding("gpu:n1.1", detector="thermal", time=now - 60 * SECOND)
    quiet = detail(flow, later)
    assert evidence.quiet_notice(quiet, now) == (
        "GPU 0 of n1 was last reported at 12:00:00Z (25 min ago). Still reported: thermal on GPU 1 of n1."
    )
    rows = dict(evidence.comparison_rows(flow, quiet, now))
    assert ("Last reported" in rows, "Clears when" in rows) == (True, False)
    reported = detail(flow, finding("gpu:n1.1", detector="thermal", time=NOON + 60 * SECOND))
    held = finding("gpu:n1.0", time=NOON, evidence={**clears, "holds": True})
    for shown in (reported, detail(held, later), detail(flow, later, state="resolved", resolved=iso(now))):
        assert evidence.quiet_notice(shown, now) == ""
        assert "Clears when" in dict(evidence.comparison_rows(shown.findings[0], shown, now))


def test_the_timeline_shows_a_finding_once() -> None:
    found = finding()
    item = TimelineItem(found.onset, "finding", found.entity, "page sdc: it is wrong")
    rows = timeline_rows(detail(found), [item], NOON)
    time, kind, entity, text = rows[0]
    assert (len(rows), time, kind, text) == (1, "12:00:00Z", "finding", "Page sdc: it is wrong")
    assert isinstance(entity, Link)
    assert (entity.text, entity.title) == ("GPU 0 of n1", "gpu:n1.0")


@pytest.mark.parametrize("before", ["page sdc: it is 29 % slow", "ticket sdc (only recorded): it is 31 % slow"])
def test_a_finding_whose_title_changed_is_in_the_timeline_once_with_the_newest(before: str) -> None:
    found = finding()
    items = [
        TimelineItem(found.onset, "finding", found.entity, before),
        TimelineItem(found.onset, "finding", found.entity, "page xid: another detector"),
        TimelineItem(found.onset, "event", found.entity, "page sdc: no finding"),
    ]
    texts = [text for *_, text in timeline_rows(detail(found), items, NOON)]
    assert sorted(texts) == ["Page sdc: it is wrong", "Page sdc: no finding", "Page xid: another detector"]


@pytest.mark.parametrize("text", ["", "page"])
def test_a_finding_without_a_text_stays_in_the_timeline(text: str) -> None:
    found = finding()
    items = [TimelineItem(found.onset, "finding", found.entity, text)]
    assert len(timeline_rows(detail(found), items, NOON)) == 2


def test_notifications_show_their_delivery_status() -> None:
    base = detail()
    late = Notification("chat", "firing", "waiting", 3, NOON, NOON, "503")
    shown = evidence.delivery_rows(IncidentDetail(base.incident, (), (), (late,), {}), NOON)
    assert shown == [("12:00:00Z", "chat", "firing", "waiting after 3 attempts: 503")]


def test_clock_event_reasons_are_in_words_not_in_bits() -> None:
    rows = dict(evidence.figure_rows(finding("rank:81.17", detector="straggler", evidence={"throttled": 0x40})))
    assert rows == {"Throttled": "HW thermal"}
    assert dict(evidence.figure_rows(finding(evidence={"throttled": True}))) == {"Throttled": "yes"}


def test_measured_values_of_a_signal_have_its_unit() -> None:
    facts = {"coolant.flow": {"measured": 199.0, "limit": 230.0}}
    rows = dict(evidence.figure_rows(finding("cdu:c1", detector="coolant_edge", evidence=facts)))
    assert rows == {"Coolant flow: measured": "199 L/min", "Coolant flow: limit": "230 L/min"}


def test_updates_without_a_comment_are_one_row_of_the_history() -> None:
    def change(number: int, kind: str, comment: str = "") -> Change:
        return Change(NOON + number * SECOND, kind, "fleetpulse", comment, number)

    history = [change(1, "opened"), *(change(n, "updated") for n in (2, 3, 4)), change(5, "resolved", "over")]
    rows = history_rows(history, NOON + 60 * SECOND)
    assert [(kind, comment) for _, _, kind, comment in rows] == [
        ("resolved", "over"), ("updated (3 times)", ""), ("opened", ""),
    ]  # fmt: skip
    assert rows[1][0] == "12:00:04Z"


def test_shares_and_heat_have_units_and_words() -> None:
    facts = {"heat_kw": 12.6, "heat_share": 0.63, "sm_clock_below_peers": 0.25, "doubted": False}
    assert dict(evidence.figure_rows(finding("loop:l1", detector="coolant", evidence=facts))) == {
        "Heat carried": "12.6 kW",
        "Heat carried, of the power of the GPUs": "63 %",
        "SM clock below peers": "25 %",
        "Measurement in doubt": "no",
    }
