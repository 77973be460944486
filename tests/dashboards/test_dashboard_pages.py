"""The pages' wiring against a real API, without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import dashboards
from dashboards import snapshot

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


def page(script: Any, **query: str) -> AppTest:
    test = AppTest.from_function(script, default_timeout=30)
    for name, value in query.items():
        test.query_params[name] = value
    return test.run()


def shown(test: AppTest) -> str:
    """All our markup on the page."""
    assert not test.exception, test.exception
    return "\n".join(element.proto.body for element in test.get("html"))


def test_the_app_opens_on_the_fleet(api: Any) -> None:
    test = AppTest.from_file(str(APP), default_timeout=30).run()
    text = shown(test)
    assert "1 critical, 1 silent of 3 nodes" in text
    assert "2 of 3 agents reporting · 2 gaps in the data · 2 of 3 nodes are SIMULATED" in text
    assert "--fp-critical:light-dark(" in text


def test_an_address_with_a_node_opens_its_panel(api: Any) -> None:
    test = page(fleet_script, node="node:n003")
    assert "Node n003" in shown(test)
    assert [button.label for button in test.button] == ["Open A1", "Close"]
    assert "There is no node n9" in shown(page(fleet_script, node="node:n9"))


def test_a_quiet_fleet_says_why_one_may_believe_it(api: Any) -> None:
    api.incidents.clear()
    assert "No open incidents. 2 of 3 agents reporting" in shown(page(fleet_script))


def test_a_pipeline_without_input_is_told_on_every_page_and_nothing_is_called_well(api: Any) -> None:
    api.fleet |= {"unready": ["kafka k1:9092: no answer"], "stalled": True, "backlog": True}
    api.fleet["newest"] = "2026-01-01T11:59:15.000000Z"
    pages = [page(fleet_script), page(incidents_script, state="silenced"), page(incident_script, id="A1")]
    why = "The pipeline does not take in telemetry:</b> kafka k1:9092: no answer. What is shown is as of 11:59:15Z."
    for text in map(shown, pages):
        assert why in text
        assert text.index(why) < text.index("fp-title")
        assert "reporting" not in text
    assert "3 agents known · 2 gaps in the data · waiting for input" in shown(pages[0])
    assert "catching up" not in shown(pages[0])


def test_an_empty_list_without_input_does_not_say_that_all_is_well(api: Any) -> None:
    api.fleet |= {"unready": ["kafka k1:9092: no answer"], "stalled": True}
    api.incidents.clear()
    text = shown(page(fleet_script))
    assert "Unknown since 2026-01-01 11:59:20Z. Last known: no open incidents." in text
    assert "Unknown since 2026-01-01 11:59:20Z. Last known: 1 critical, 1 silent of 3 nodes" in text
    assert "No open incidents" not in text


def test_an_api_that_is_away_leaves_what_was_known_last_with_its_time(api: Any) -> None:
    api.incidents.clear()
    assert "No open incidents." in shown(page(fleet_script))
    for path in ("fleet", "incidents"):
        api.broken[path] = (503, b'{"detail": "away"}')
    snapshot._asked.clear()
    text = shown(page(fleet_script))
    assert re.search(r"Unknown since [0-9-]*:?[0-9: ]+Z\. Last known: no open incidents\.", text)
    assert "No open incidents" not in text
    text = shown(page(incidents_script))
    assert "Last known: no incidents" in text
    assert text.count("Unknown since") == 2


def test_a_backlog_that_is_read_is_caught_up_with_and_no_banner_is_shown(api: Any) -> None:
    api.fleet["backlog"] = True
    text = shown(page(fleet_script))
    assert "catching up with a backlog" in text
    assert "The pipeline does not" not in text


def test_an_unreachable_api_is_told_on_every_page(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPULSE_API_URL", "http://127.0.0.1:9")
    for script, query in ((fleet_script, {}), (incidents_script, {}), (incident_script, {"id": "A1"})):
        text = shown(page(script, **query))
        assert "No data." in text
        assert "Is the pipeline running? Start it with: fleetpulse pipeline" in text


def test_incidents_are_filtered_by_the_state_in_the_address(api: Any) -> None:
    assert "1 incident needs somebody" in shown(page(incidents_script, state="open"))
    text = shown(page(incidents_script, state="silenced"))
    assert "No incidents in this state. 2 of 3 agents reporting." in text


def test_an_unknown_state_in_the_address_is_as_none(api: Any) -> None:
    assert "No incidents in this state" not in shown(page(incidents_script, state="splendid"))


def test_an_incident_shows_what_why_who_and_what_to_do(api: Any) -> None:
    text = shown(page(incident_script, id="A1"))
    for part in (
        "CRITICAL",
        "SIMULATED",
        "Rank 17 of job 81 computes 0.61 s a step",
        "Computation of the last step, rank 17 of job 81 against its peers",
        "1 GPU",
        "The whole job waits for rank 17 of job 81",
        "Checkpoint: step 7",
        "None: no receiver is configured",
    ):
        assert part in text


def test_a_finding_without_a_curve_says_so(api: Any) -> None:
    api.incidents["A1"]["findings"][0]["signals"] = ["gpu.sm_clock"]
    assert "There is no curve to show" in shown(page(incident_script, id="A1"))


def test_a_vote_is_shown_instead_of_a_curve(api: Any) -> None:
    api.incidents["A1"]["findings"][0]["evidence"] = {"digest": "aaaa1111", "expected": "aaaa2222", "peers": 7}
    text = shown(page(incident_script, id="A1"))
    assert "Most of 7 others" in text
    assert "<mark>1111</mark>" in text


def test_no_incident_and_an_unknown_one_lead_to_the_list(api: Any) -> None:
    missing = page(incident_script)
    assert "No incident was named" in shown(missing)
    assert missing.button[0].label == "To all incidents"
    assert "There is no incident Z9" in shown(page(incident_script, id="Z9"))


def test_an_acknowledgement_with_a_comment_reaches_the_api(api: Any) -> None:
    test = page(incident_script, id="A1")
    test.text_area(key="note").set_value(" on it ")
    test.button(key="acknowledge").click().run()
    assert api.posted == [("incidents/A1/acknowledge", {"comment": "on it"})]
    assert "Acknowledged. Everybody who looks sees it." in shown(test)
    assert test.button(key="acknowledge").disabled
    assert test.text_area(key="note").value == ""


def test_a_refused_note_is_told_kindly_and_the_text_is_kept(api: Any) -> None:
    api.broken["incidents/A1/resolve"] = (409, b'{"detail": "somebody else resolved it"}')
    test = page(incident_script, id="A1")
    test.text_area(key="note").set_value("over")
    test.button(key="resolve").click().run()
    assert "Nothing was written. Somebody else resolved it (HTTP 409)" in shown(test)
    assert test.text_area(key="note").value == "over"


def test_an_empty_comment_is_not_sent(api: Any) -> None:
    test = page(incident_script, id="A1")
    test.button(key="comment").click().run()
    assert "Write the comment first." in shown(test)
    assert api.posted == []
