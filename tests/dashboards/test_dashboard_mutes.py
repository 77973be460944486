"""Mark as normal and mutes on the pages: explanation, requests to the API, errors."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards import snapshot
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, detector_table, mute_table
from tests.dashboards.test_dashboard_pages import incident_script, page, shown


def detectors_script() -> None:
    from dashboards.views import detectors

    detectors.page()


def test_mark_as_normal_explains_itself_and_reaches_the_api(api: Any) -> None:
    test = page(incident_script, opened="more-A1", id="A1")
    assert "accept the current state as normal (straggler on rank 17 of job 81)" in shown(test)
    test.text_input(key="more-A1-why").set_value("always so")
    test.button(key="more-A1-normal").click().run()
    assert api.posted == [("incidents/A1/resolve", {"comment": "always so", "not_a_fault": True})]
    assert "Resolved as normal." in shown(test)


@pytest.mark.slow
def test_mark_as_normal_requires_a_reason(api: Any) -> None:
    test = page(incident_script, opened="more-A1", id="A1")
    test.button(key="more-A1-normal").click().run()
    assert api.posted == []
    assert "Enter a reason first." in shown(test)


@pytest.mark.slow
def test_a_mute_offers_scopes_and_reaches_the_api(api: Any) -> None:
    api.incidents["A1"]["above"] = ["gpu:n003.1", "node:n003", "rack:r1"]
    test = page(incident_script, opened="more-A1", id="A1")
    assert test.selectbox(key="mute-detector-A1").options == ["straggler", "all detectors"]
    assert test.selectbox(key="mute-scope-A1").options == [
        *("rank 17 of job 81", "GPU 1 of n003", "node n003", "rack r1"),
        "everywhere",
    ]
    test.selectbox(key="mute-scope-A1").set_value("rack:r1")
    test.text_input(key="mute-reason-A1").set_value("new paste")
    test.button(key="mute").click().run()
    wanted = {"detector": "straggler", "scope": "rack:r1", "seconds": 28_800.0, "reason": "new paste"}
    assert api.posted == [("mutes", wanted)]
    text = shown(test)
    assert "Muted: straggler on rack r1 until" in text
    assert "<b>Muted:</b> straggler on rack r1, by ann until" in text


@pytest.mark.slow
def test_the_error_of_a_refused_mute_is_shown(api: Any) -> None:
    test = page(incident_script, opened="more-A1", id="A1")
    api.broken["mutes"] = (400, b'{"detail": "reason: is empty; wanted why"}')
    test.button(key="mute").click().run()
    assert "Not muted. Reason: is empty; wanted why (HTTP 400)" in shown(test)


@pytest.mark.slow
def test_only_active_mutes_of_the_incident_are_shown(api: Any) -> None:
    api.mutes = [
        mute_table("m1", scope="rack:r9"),
        mute_table("m2", detector="power", scope="*"),
        mute_table("m3", scope="*", ended=iso(NOW)),
        mute_table("m4", scope="*", until=iso(NOW + SECOND)),
    ]
    assert "<b>Muted:</b>" not in shown(page(incident_script, id="A1"))


def test_the_page_lists_mutes_modes_and_detectors_and_ends_a_mute(api: Any) -> None:
    api.mutes = [mute_table("m1"), mute_table("m2", scope="*", reason="old", ended=iso(NOW), ended_by="bob")]
    rule = {"detector": "straggler", "scope": "rack:r2", "mode": "record"}
    api.panel = {
        "detectors": [detector_table(modes=[rule]), detector_table(name="coolant", off=["coolant.flow"], errors=2)],
        "modes": [rule],
    }
    test = page(detectors_script)
    text = shown(test)
    for part in (
        "1 detector active, 1 disabled: missing signals, 1 with errors, 1 active mute",
        "by ann until 2999-01-01 00:00:00Z",
        "stores findings; no incidents, no alerts",
        "record on rack r2",
        "Disabled, missing signals:</i> coolant.flow",
        "failed on 2 frames",
        "suspects per 1,000 node-days",
        "A stage that is slow as a whole.",
        "old (ended by bob)",
    ):
        assert part in text
    test.button(key="end-m1").click().run()
    assert api.mutes[0]["ended"]
    assert "Mute ended: straggler on rack r1." in shown(test)
    assert "No active mutes" in shown(test)


@pytest.mark.slow
def test_ending_an_expired_mute_shows_the_error(api: Any) -> None:
    api.mutes = [mute_table("m1")]
    test = page(detectors_script)
    api.broken["mutes/m1/end"] = (404, b'{"detail": "mute m1 is not known or has ended"}')
    test.button(key="end-m1").click().run()
    assert "Mute not ended. Mute m1 is not known or has ended (HTTP 404)" in shown(test)


def test_an_unreachable_api_is_shown(api: Any) -> None:
    api.broken["detectors"] = api.broken["mutes"] = (503, b'{"detail": "stopping"}')
    assert "Stopping (HTTP 503)" in shown(page(detectors_script))


def test_suppressed_findings_show_a_notice_with_the_evidence(api: Any) -> None:
    api.incidents["A1"]["findings"][0]["evidence"] = {"mode": "record"}
    assert "Only recorded" in shown(page(incident_script, id="A1"))


def test_mutes_and_thresholds_that_cannot_be_read_are_not_said_to_be_none(api: Any) -> None:
    for path in ("mutes", "calibration"):
        api.broken[path] = (503, b'{"detail": "the store is busy"}')
    text = shown(page(detectors_script, detector="straggler"))
    assert text.count("The store is busy") == 2
    for word in ("No expired mutes", "No active mutes", "It has no thresholds that a site teaches"):
        assert word not in text


def test_the_headline_of_the_detectors_is_unknown_while_the_api_is_away(api: Any) -> None:
    assert "1 detector active" in shown(page(detectors_script))
    for path in ("detectors", "mutes", "fleet"):
        api.broken[path] = (503, b'{"detail": "away"}')
    snapshot._fetch_cached.clear()
    text = shown(page(detectors_script))
    assert "Unknown since" in text
    assert "Last known: " in text
