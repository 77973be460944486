"""Pages of several answers: what one of them said is no fact while that one fails, also if all others arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dashboards.freshness.component import stamp_data
from tests.dashboards.conftest import Api, silence_table
from tests.dashboards.device_tables import empty_caches, serve_node
from tests.dashboards.jobs_tables import answers as job_answers
from tests.dashboards.quality_tables import quality_table, receivers_table
from tests.dashboards.test_dashboard_acts import acts_script
from tests.dashboards.test_dashboard_link import PORT, link_script
from tests.dashboards.test_dashboard_lists import handover_script, silences_script
from tests.dashboards.test_dashboard_mutes import detectors_script
from tests.dashboards.test_dashboard_node import node_script
from tests.dashboards.test_dashboard_pages import fleet_script, incident_script, page, shown
from tests.dashboards.test_data_quality import script as data_script
from tests.dashboards.test_jobs import script as jobs_script

BUSY = (503, b'{"detail": "the store is busy"}')
NODE, LINK = {"entity": "node:n003", "live": "0"}, {"entity": PORT, "live": "0"}
CLAIMS: list[tuple[Callable[[], None], dict[str, str], str, list[str]]] = [
    (detectors_script, {}, "mutes", ["no active mutes", "No expired mutes", "0 active mutes"]),
    (detectors_script, {}, "incidents", ["1 unresolved incident"]),
    (silences_script, {}, "incidents", ["Holds back no incident"]),
    (silences_script, {"empty": "1"}, "silences", ["No silences, maintenance windows or mutes", "Nothing has ended"]),
    (handover_script, {}, "handover", ["Nothing is silenced", "No silenced incidents", "Nothing changed"]),
    (acts_script, {}, "acts", ["No open acts", "No holds in force"]),
    (incident_script, {"id": "A1"}, "acts", ["No act was proposed for this incident"]),
    (node_script, NODE, "acts", ["not held by Fleetpulse", "No act was proposed for this node"]),
    (node_script, NODE, "events", ["Nothing happened in this time range"]),
    (link_script, LINK, "events", ["Nothing happened in this time range"]),
    (jobs_script, {"entity": "job:81"}, "timeline", []),
    (data_script, {}, "receivers", ["No receiver is configured"]),
]


def name_case(value: object) -> str:
    """Returns a part of the name of a case; not what differs from process to process, as an address does."""
    return str(getattr(value, "__name__", value))[:40]


def serve_nothing_wrong(api: Api) -> None:
    """Lets the API answer every page, with empty lists."""
    serve_node(api)
    api.tables |= {"events": lambda _: {"items": [], "truncated": False}, "timeline": lambda _: {"items": []}}
    api.answers |= {"quality": quality_table(), "receivers": {**receivers_table(), "receivers": []}}
    api.answers |= job_answers()
    api.answers["acts"] = {"acts": [], "breaker": None, "modes": {"hold": "on"}}


def facts(text: str, claim: str) -> list[str]:
    """Returns the parts of a page that state a claim as a fact of now."""
    found = [part for part in text.split("\n") if claim.lower() in part.lower()]
    return [part for part in found if "fp-now" in part or "unknown since" not in part.lower()]


@pytest.mark.parametrize(("script", "query", "path", "claims"), CLAIMS, ids=name_case)
def test_what_an_answer_said_is_no_fact_while_it_fails(
    api: Api, script: Callable[[], None], query: dict[str, str], path: str, claims: list[str]
) -> None:
    empty_caches()
    serve_nothing_wrong(api)
    if script is silences_script and "empty" not in query:
        api.silences = [silence_table("s1")]
    known = shown(page(script, **query))
    assert [claim for claim in claims if not facts(known, claim)] == [], "the page has changed: look for other claims"
    api.broken[path] = BUSY
    empty_caches()
    text = shown(page(script, **query))
    assert {claim: said for claim in claims if (said := facts(text, claim))} == {}
    assert "The store is busy (HTTP 503)" in text


def break_power(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets only the map in one colour fail."""
    answer = api.get
    monkeypatch.setattr(
        api, "get", lambda path, query: BUSY if query.get("colour") == ["power"] else answer(path, query)
    )


def test_a_map_whose_colour_alone_fails_leaves_the_rest_of_the_page_as_it_is(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_caches()
    stamps: list[str] = []
    monkeypatch.setattr("dashboards.views.parts.freshness", lambda *given: stamps.append(stamp_data(*given)["fault"]))
    break_power(api, monkeypatch)
    test = page(fleet_script, colour="power")
    text = shown(test)
    assert ">1 critical of 3 nodes, 1 without data<" in text
    assert "Unknown since 20" not in text
    assert "<b>Map by rack, coloured by Power, unknown.</b> The store is busy (HTTP 503)" in text
    assert "1 opened in the last hour" in text
    assert [len(test.get("button_group")), stamps] == [2, [""]]


def test_a_new_colour_while_the_api_is_away_keeps_what_the_last_map_said(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_caches()
    monkeypatch.setattr("dashboards.views.parts.freshness", lambda *_: None)
    assert ">1 critical of 3 nodes, 1 without data<" in shown(page(fleet_script, by="leaf"))
    for path in ("fleet", "fleet/map", "incidents"):
        api.broken[path] = BUSY
    empty_caches()
    text = shown(page(fleet_script, by="rail", colour="power"))
    assert "Last known: 1 critical of 3 nodes, 1 without data" in text
    assert "<b>Showing the last known state.</b> The store is busy (HTTP 503)" in text
    assert "<b>Map by rail, coloured by Power, unknown.</b>" in text


def test_mutes_never_read_are_unknown_beside_detectors_that_are(api: Api) -> None:
    empty_caches()
    api.broken["mutes"] = BUSY
    text = shown(page(detectors_script))
    assert "active mutes unknown" in text
    assert "0 active mutes" not in text


def test_mutes_of_an_incident_that_cannot_be_read_are_said_to_be_unknown(api: Api) -> None:
    empty_caches()
    api.broken["mutes"] = BUSY
    text = shown(page(incident_script, id="A1"))
    assert "<b>Mutes unknown.</b> The store is busy (HTTP 503)" in text
