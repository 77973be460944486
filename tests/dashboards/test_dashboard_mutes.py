"""Verdicts and mutes on the pages: what they say they do, what reaches the API, and what it refused."""

from __future__ import annotations

from typing import Any

from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, detector_table, mute_table
from tests.dashboards.test_dashboard_pages import incident_script, page, shown


def detectors_script() -> None:
    from dashboards.views import detectors

    detectors.page()


def test_not_a_fault_says_what_it_does_and_reaches_the_api(api: Any) -> None:
    test = page(incident_script, id="A1")
    assert "take what was seen (straggler on rank 17 of job 81) for normal" in shown(test)
    test.text_input(key="why").set_value("always so")
    test.button(key="not_a_fault").click().run()
    assert api.posted == [("incidents/A1/resolve", {"comment": "always so", "not_a_fault": True})]
    assert "Resolved as no fault." in shown(test)


def test_not_a_fault_wants_a_reason(api: Any) -> None:
    test = page(incident_script, id="A1")
    test.button(key="not_a_fault").click().run()
    assert api.posted == []
    assert "Write why it is normal first." in shown(test)


def test_a_mute_offers_the_places_around_and_reaches_the_api(api: Any) -> None:
    api.incidents["A1"]["above"] = ["gpu:n003.1", "node:n003", "rack:r1"]
    test = page(incident_script, id="A1")
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


def test_what_the_api_says_against_a_mute_is_shown_as_it_is(api: Any) -> None:
    test = page(incident_script, id="A1")
    api.broken["mutes"] = (400, b'{"detail": "reason: is empty; wanted why"}')
    test.button(key="mute").click().run()
    assert "Nothing was muted. Reason: is empty; wanted why (HTTP 400)" in shown(test)


def test_a_mute_elsewhere_or_over_is_not_told_on_an_incident(api: Any) -> None:
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
        "1 detector judges, 1 off for want of signals, 1 with errors, 1 mute",
        "by ann until 2999-01-01 00:00:00Z",
        "what it finds is stored; nobody is told",
        "record on rack r2",
        "Off: the input lacks:</i> coolant.flow",
        "failed on 2 frames",
        "suspects per 1,000 node-days",
        "A stage that is slow as a whole.",
        "old (ended by bob)",
    ):
        assert part in text
    test.button(key="end-m1").click().run()
    assert api.mutes[0]["ended"]
    assert "Ended: straggler on rack r1 may speak again." in shown(test)
    assert "Nothing is muted" in shown(test)


def test_a_mute_that_is_over_already_is_told(api: Any) -> None:
    api.mutes = [mute_table("m1")]
    test = page(detectors_script)
    api.broken["mutes/m1/end"] = (404, b'{"detail": "mute m1 is not known, or is over"}')
    test.button(key="end-m1").click().run()
    assert "Nothing was ended. Mute m1 is not known, or is over (HTTP 404)" in shown(test)


def test_an_unreachable_api_is_told(api: Any) -> None:
    api.broken["detectors"] = api.broken["mutes"] = (503, b'{"detail": "stopping"}')
    assert "Stopping (HTTP 503)" in shown(page(detectors_script))


def test_what_is_muted_or_recorded_is_told_with_the_evidence(api: Any) -> None:
    api.incidents["A1"]["findings"][0]["evidence"] = {"mode": "record"}
    assert "Only recorded" in shown(page(incident_script, id="A1"))
