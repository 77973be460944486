"""The pages with a real API, without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import dashboards
from dashboards import snapshot
from tests.dashboards.conftest import finding_table, series_table

APP = Path(dashboards.__file__).parent / "app.py"


def fleet_script() -> None:
    from dashboards.views import fleet

    fleet.page()


def incidents_script() -> None:
    from dashboards.views import incidents

    incidents.page()


def incident_script() -> None:
    from dashboards.views import incident

    incident.page()


def page(script: Any, opened: str = "", **query: str) -> AppTest:
    """Runs a page; opened: name of a popover that is open."""
    test = AppTest.from_function(script, default_timeout=30)
    if opened:
        test.session_state[f"{opened}-0"] = True
    for name, value in query.items():
        test.query_params[name] = value
    return test.run()


def shown(test: AppTest) -> str:
    """Returns all markup of the page."""
    assert not test.exception, test.exception
    return "\n".join(element.proto.body for element in test.get("html"))


def test_the_app_opens_on_the_fleet(api: Any) -> None:
    test = AppTest.from_file(str(APP), default_timeout=30).run()
    text = shown(test)
    assert "1 critical of 3 nodes, 1 without data" in text
    assert "2 of 3 agents reporting · 2 data gaps" in text
    assert "--fp-critical:light-dark(" in text
    test.session_state["fleetpulse.list.result"] = "2 incidents acknowledged."
    assert "fleetpulse.list.result" in test.run().session_state, "the page was not left"
    test.session_state["fleetpulse.place"] = "incidents", ""
    assert "fleetpulse.list.result" not in test.run().session_state


@pytest.mark.slow
def test_the_address_of_the_fleet_page_narrows_filters_and_selects(api: Any) -> None:
    text = shown(page(fleet_script, within="rack:r1", state="critical", selection="rack:r1", table="1"))
    assert "1 critical of 2 nodes in rack r1, 1 without data" in text
    assert ">node n003</a>" in text
    assert "Nodes by rack and state" in text
    assert "What do these share?" in text
    assert ("share", {"entities": ["rack:r1"]}) in api.posted
    page(fleet_script, selection="incident:A1")
    assert api.posted[-1] == ("share", {"entities": [], "incident": "A1"})


def test_an_unknown_word_in_the_address_of_the_fleet_page_is_ignored(api: Any) -> None:
    text = shown(page(fleet_script, by="shoe", colour="mood", state="odd", within="r1", selection="x"))
    assert "1 critical of 3 nodes" in text
    assert api.posted == []


def test_a_healthy_fleet_shows_the_reporting_agents(api: Any) -> None:
    api.incidents.clear()
    assert "No unresolved incidents. 2 of 3 agents reporting" in shown(page(fleet_script))


@pytest.mark.slow
def test_a_stalled_pipeline_is_shown_on_every_page(api: Any) -> None:
    api.fleet |= {"unready": ["kafka k1:9092: no answer"], "stalled": True, "backlog": True}
    api.fleet["newest"] = "2026-01-01T11:59:15.000000Z"
    pages = [page(fleet_script), page(incidents_script, state="silenced"), page(incident_script, id="A1")]
    why = "Pipeline stalled:</b> kafka k1:9092: no answer. Data as of 11:59:15Z."
    for text in map(shown, pages):
        assert why in text
        assert text.index(why) < text.index("fp-title")
        assert "reporting" not in text
    assert "3 agents known · 2 data gaps · waiting for input" in shown(pages[0])
    assert "catching up" not in shown(pages[0])


def test_an_empty_list_of_a_stalled_pipeline_is_unknown(api: Any) -> None:
    api.fleet |= {"unready": ["kafka k1:9092: no answer"], "stalled": True}
    api.incidents.clear()
    text = shown(page(fleet_script))
    assert "Unknown since 2026-01-01 11:59:20Z. Last known: no unresolved incidents." in text
    assert "Unknown since 2026-01-01 11:59:20Z. Last known: 1 critical of 3 nodes, 1 without data" in text
    assert "No unresolved incidents" not in text


@pytest.mark.slow
def test_an_unreachable_api_keeps_the_last_known_state_with_its_time(api: Any) -> None:
    api.incidents.clear()
    assert "No unresolved incidents." in shown(page(fleet_script))
    assert "No incidents in this state." in shown(page(incidents_script))
    for path in ("fleet", "fleet/map", "incidents"):
        api.broken[path] = (503, b'{"detail": "away"}')
    snapshot._fetch_cached.clear()
    text = shown(page(fleet_script))
    assert re.search(r"Unknown since [0-9-]*:?[0-9: ]+Z\. Last known: no unresolved incidents\.", text)
    assert "No unresolved incidents" not in text
    text = shown(page(incidents_script))
    assert "Last known: no incidents" in text
    assert text.count("Unknown since") == 2


@pytest.mark.slow
def test_a_backlog_is_shown_without_a_banner(api: Any) -> None:
    api.fleet["backlog"] = True
    text = shown(page(fleet_script))
    assert "processing a backlog" in text
    assert "The pipeline does not" not in text


@pytest.mark.slow
def test_an_unreachable_api_is_shown_on_every_page(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPULSE_API_URL", "http://127.0.0.1:9")
    for script, query in ((fleet_script, {}), (incidents_script, {}), (incident_script, {"id": "A1"})):
        text = shown(page(script, **query))
        assert "No data." in text
        assert "Is the pipeline running? fleetpulse doctor says how to start it" in text


def test_incidents_are_filtered_by_the_state_in_the_address(api: Any) -> None:
    assert "1 unresolved incident, 1 not acknowledged" in shown(page(incidents_script, state="open"))
    text = shown(page(incidents_script, state="silenced"))
    assert "No incidents in this state. 2 of 3 agents reporting." in text


def test_an_unknown_state_in_the_address_is_ignored(api: Any) -> None:
    assert "No incidents in this state" not in shown(page(incidents_script, state="splendid"))


def test_the_chart_of_an_incident_of_link_errors_is_per_hour_as_its_title(api: Any) -> None:
    port, name = "port:n003.mlx5_0", "nic.symbol_errors"
    api.incidents["A1"]["findings"] = [{**finding_table(), "entity": port, "detector": "link", "signals": [name]}]
    rate = {"name": name, "unit": "{error}/s", "help": "Symbol errors", "kind": "counter"}
    api.tables["series"] = lambda _: {**series_table(port, name), "signal": rate}
    (chart,) = page(incident_script, id="A1").get("vega_lite_chart")
    spec = chart.proto.spec
    assert '"error/h"' in spec
    assert "error/s" not in spec


def test_an_incident_shows_title_evidence_impact_and_action(api: Any) -> None:
    text = shown(page(incident_script, id="A1"))
    for part in (
        "CRITICAL",
        "SIMULATED",
        "Rank 17 of job 81 computes 0.61 s a step",
        "compute time, rank 17 of job 81 and its peers",
        "1 GPU",
        "The whole job waits for rank 17 of job 81",
        "Checkpoint: step 7",
        "No notifications: no receiver is configured",
        'href="./?selection=incident%3AA1"',
    ):
        assert part in text


def test_the_advice_of_a_resolved_incident_is_not_one_for_now(api: Any) -> None:
    assert "while it was open" not in shown(page(incident_script, id="A1"))
    snapshot._fetch_cached.clear()
    resolved = {"state": "resolved", "resolved": "2026-01-01T12:00:00.000000Z"}
    api.incidents["A1"] |= {**resolved, "advice": "Go to the CDU now."}
    text = shown(page(incident_script, id="A1"))
    assert text.count("while it was open") == 1
    assert "Resolved since 2026-01-01 12:00:00Z. The advice while it was open: “Go to the CDU now.”" in text
    assert text.count("Go to the CDU now") == 1
    assert "fp-notice-advice" not in text


def test_the_advice_of_a_merged_incident_is_that_of_the_other(api: Any) -> None:
    resolved = {"state": "resolved", "resolved": "2026-01-01T12:00:00.000000Z"}
    api.incidents["A1"] |= {**resolved, "advice": "Go to the CDU now.", "merged_into": "B2"}
    text = shown(page(incident_script, id="A1"))
    assert re.search(r'Merged into <a [^>]*incident\?id=B2"[^>]*>B2</a>, whose advice holds\.', text)
    assert "Resolved since" not in text
    assert "Go to the CDU now" not in text
    assert "while it was open" not in text


def test_a_finding_without_a_chart_shows_a_notice(api: Any) -> None:
    api.incidents["A1"]["findings"][0]["signals"] = ["gpu.sm_clock"]
    assert "No chart for this kind of finding" in shown(page(incident_script, id="A1"))


def test_a_vote_replaces_the_chart(api: Any) -> None:
    api.incidents["A1"]["findings"][0]["evidence"] = {"digest": "aaaa1111", "expected": "aaaa2222", "peers": 7}
    text = shown(page(incident_script, id="A1"))
    assert "Most of 7 others" in text
    assert "<mark>1111</mark>" in text


@pytest.mark.slow
def test_a_missing_or_unknown_incident_links_to_the_list(api: Any) -> None:
    missing = page(incident_script)
    assert "No incident selected" in shown(missing)
    assert missing.button[0].label == "Show all incidents"
    assert "Incident Z9 not found" in shown(page(incident_script, id="Z9"))


def test_a_timeline_without_events_says_why_they_are_missing(api: Any) -> None:
    api.broken["timeline"] = (503, b'{"detail": "the store is busy"}')
    text = shown(page(incident_script, id="A1"))
    assert "Events unavailable." in text
    assert "The store is busy" in text
    assert "No events." not in text


def test_chart_and_timeline_of_an_incident_stay_while_the_api_is_away(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Checkpoint: step 7" in shown(page(incident_script, id="A1"))
    later = snapshot.now() + 60_000_000
    monkeypatch.setattr(snapshot, "now", lambda: later)
    for path in ("series", "timeline"):
        api.broken[path] = (503, b'{"detail": "the store is busy"}')
    text = shown(page(incident_script, id="A1"))
    assert "Chart unavailable" not in text
    assert "and its peers, up to " in text
    assert "Events are the last known ones." in text
    assert "Checkpoint: step 7" in text


def place(test: AppTest, label: str) -> list[int]:
    """Returns the indices that lead to the control in the tree of the page."""

    def path(block: Any) -> list[int]:
        for index, child in getattr(block, "children", {}).items():
            if getattr(child, "label", "") == label:
                return [index]
            if below := path(child):
                return [index, *below]
        return []

    return path(test.main)


@pytest.mark.slow
def test_a_notice_that_comes_or_goes_leaves_the_controls_of_the_fleet_in_their_place(api: Any) -> None:
    test = page(fleet_script)
    before = place(test, "Colour by")
    assert before
    api.fleet["unready"] = ["the consumer is behind"]
    snapshot._fetch_cached.clear()
    test = page(fleet_script)
    assert "the consumer is behind" in shown(test)
    assert place(test, "Colour by") == before
    api.fleet |= {"unready": [], "nodes": [], "counts": dict.fromkeys(api.fleet["counts"], 0)}
    snapshot._fetch_cached.clear()
    test = page(fleet_script)
    assert "Nothing to show yet." in shown(test)
    assert place(test, "Colour by") == before
