"""The acts on an incident's page: what they send, what they need, and the case that another person was faster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import acting, cause_and_impact, detail_answers, identity, snapshot
from dashboards.answers import Change, parse_detail
from dashboards.client import ApiError, Client
from dashboards.jobs.answers import Harm
from dashboards.jobs.markup import harms
from dashboards.links import Link
from dashboards.views import silencing
from dashboards.words import signal_name
from pipeline.model.job_effect import name_doubt
from pipeline.model.loss_owner import name_owner
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, OPERATOR, incident_table, silence_table
from tests.dashboards.test_dashboard_pages import incident_script, page, shown

HISTORY = [{"number": 1, "time": iso(NOW), "kind": "opened", "actor": "fleetpulse", "comment": ""}]
IMPACT = {
    "gpus": 8,
    "nodes": 1,
    "ranks": 8,
    "job_count": 1,
    "jobs": [
        {
            "job": "job:81",
            "name": "run<b>17</b>",
            "gpus": 512,
            "ranks": 8,
            "basis": "",
            "state": "slow",
            "slowdown": 0.31,
            "lost_gpu_hours": 12.4,
            "lost_gpu_hours_per_hour": 158.0,
        }
    ],
    "lost_gpu_hours": 12.4,
    "lost_gpu_hours_per_hour": 158.0,
    "cost": {"amount": 31.0, "per_hour": 395.0, "currency": "EUR"},
    "affected": ["node:n1"],
    "affected_count": 1,
}


def act(api: Any, opened: str, values: dict[str, str], button: str) -> str:
    """Opens a form on the page of A1, fills it in, presses the button and returns the page."""
    test = page(incident_script, opened=f"{opened}-A1", id="A1")
    for name, value in values.items():
        key = f"{opened}-A1-{name}"
        (test.text_area if name == "text" and opened == "comment" else test.text_input)(key=key).set_value(value)
    test.button(key=f"{opened}-A1-{button}").click().run()
    return shown(test)


def test_acknowledge_sends_the_version_that_was_shown(api: Any) -> None:
    api.incidents["A1"] |= {"version": 1, "history": HISTORY}
    test = page(incident_script, id="A1")
    test.button(key="acknowledge").click().run()
    assert api.posted == [("incidents/A1/acknowledge", {"comment": ""})]
    assert "Acknowledged." in shown(test)
    assert test.button(key="acknowledge").disabled


def test_an_act_after_a_change_by_another_person_is_not_done_and_says_what_changed(api: Any) -> None:
    api.incidents["A1"] |= {"version": 1, "history": HISTORY}
    test = page(incident_script, id="A1")
    taken = {"number": 2, "time": iso(NOW), "kind": "acknowledged", "actor": "bob", "comment": "mine"}
    api.incidents["A1"] |= {"version": 2, "history": [*HISTORY, taken]}
    test.button(key="acknowledge").click().run()
    assert api.posted == []
    assert "Nothing changed: bob acknowledged it" in shown(test)


def test_ones_own_change_does_not_stop_the_next_act(api: Any) -> None:
    api.incidents["A1"] |= {"version": 1, "history": HISTORY}
    test = page(incident_script, id="A1")
    own = {"number": 2, "time": iso(NOW), "kind": "silenced", "actor": OPERATOR.name, "comment": ""}
    api.incidents["A1"] |= {"version": 2, "history": [*HISTORY, own]}
    test.button(key="acknowledge").click().run()
    assert [path for path, _ in api.posted] == ["incidents/A1/acknowledge"]


@pytest.mark.slow
def test_an_update_by_the_pipeline_does_not_stop_a_person(api: Any) -> None:
    api.incidents["A1"] |= {"version": 1, "history": HISTORY}
    test = page(incident_script, id="A1")
    api.incidents["A1"] |= {"version": 2, "history": [*HISTORY, {**HISTORY[0], "number": 2, "kind": "updated"}]}
    test.button(key="acknowledge").click().run()
    assert [path for path, _ in api.posted] == ["incidents/A1/acknowledge"]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("opened", "values", "button", "path", "body"),
    [
        ("assign", {"to": "bob", "text": "yours"}, "do", "assign", {"to": "bob", "comment": "yours"}),
        ("comment", {"text": " on it "}, "do", "comment", {"comment": "on it"}),
        ("resolve", {"text": "valve"}, "do", "resolve", {"comment": "valve"}),
        ("feedback", {"text": ""}, "wrong", "feedback", {"verdict": "wrong", "comment": ""}),
    ],
)
def test_each_form_reaches_the_api(
    api: Any, opened: str, values: dict[str, str], button: str, path: str, body: dict[str, Any]
) -> None:
    act(api, opened, values, button)
    assert api.posted == [(f"incidents/A1/{path}", body)]


def shown_in_popover(test: AppTest) -> str:
    """Returns the markup in popovers: the part below an open one is not seen."""

    def read(block: Any, inside: bool) -> Iterator[str]:
        for child in block.children.values():
            if inside and child.type == "html":
                yield child.proto.body
            if hasattr(child, "children"):
                yield from read(child, inside or child.type == "popover")

    return "\n".join(read(test.main, False))


REASON = "Enter a reason first."


@pytest.mark.parametrize(
    ("opened", "state", "button", "said"),
    [
        ("reopen", "resolved", "do", REASON),
        ("comment", "open", "do", "Enter a comment first."),
        ("more", "open", "normal", REASON),
        ("more", "open", "merge-do", "Choose at least one of the incidents first."),
        ("more", "open", "split-do", "Choose at least one of the entities first."),
    ],
)
def test_what_a_form_still_needs_is_said_in_the_form_alone(
    api: Any, opened: str, state: str, button: str, said: str
) -> None:
    api.incidents["A1"]["state"] = state
    api.incidents["C1"] = incident_table("C1")
    test = page(incident_script, opened=f"{opened}-A1", id="A1")
    test.button(key=f"{opened}-A1-{button}").click().run()
    assert shown(test).count(said) == 1
    assert said in shown_in_popover(test)
    assert api.posted == []


def test_an_error_of_the_api_is_said_in_the_form_and_a_result_below_the_closed_one(api: Any) -> None:
    api.broken["incidents/A1/assign"] = (409, b'{"detail": "another user resolved it"}')
    test = page(incident_script, opened="assign-A1", id="A1")
    test.button(key="assign-A1-do").click().run()
    assert "Another user resolved it (HTTP 409)" in shown_in_popover(test)
    del api.broken["incidents/A1/assign"]
    test.button(key="assign-A1-do").click().run()
    assert shown_in_popover(test) == ""
    assert "Assignee removed." in shown(test)


@pytest.mark.slow
def test_a_resolved_incident_offers_to_reopen_it(api: Any) -> None:
    api.incidents["A1"]["state"] = "resolved"
    assert "Enter a reason first." in act(api, "reopen", {}, "do")
    act(api, "reopen", {"text": "still hot"}, "do")
    assert api.posted == [("incidents/A1/reopen", {"comment": "still hot"})]


@pytest.mark.slow
def test_an_empty_comment_is_not_sent(api: Any) -> None:
    assert "Enter a comment first." in act(api, "comment", {}, "do")
    assert api.posted == []


@pytest.mark.slow
def test_a_refused_act_shows_the_error_and_keeps_the_text(api: Any) -> None:
    api.broken["incidents/A1/resolve"] = (409, b'{"detail": "another user resolved it"}')
    test = page(incident_script, opened="resolve-A1", id="A1")
    test.text_input(key="resolve-A1-text").set_value("over")
    test.button(key="resolve-A1-do").click().run()
    assert "Nothing changed. Another user resolved it (HTTP 409)" in shown(test)
    assert test.text_input(key="resolve-A1-text").value == "over"


@pytest.mark.slow
def test_an_act_whose_response_is_lost_is_not_said_to_have_changed_nothing(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = page(incident_script, opened="resolve-A1", id="A1")

    def lost(*_: Any) -> None:
        raise ApiError("The API does not answer within 2.5 s", unsure=True)

    monkeypatch.setattr(Client, "send", lost)
    test.button(key="resolve-A1-do").click().run()
    assert "It is not known whether this was written: look before you repeat it. The API does not answer" in shown(test)
    assert "Nothing changed" not in shown(test)


def test_a_lost_response_is_shown_until_a_newer_answer_shows_the_state(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt, now = "It is not known whether this was written", snapshot.now()
    test = page(incident_script, id="A1")
    api.broken["incidents/A1/acknowledge"] = (502, b"")
    test.button(key="acknowledge").click().run()
    assert doubt in shown(test)
    api.incidents["A1"]["state"] = "acknowledged"  # it was written
    monkeypatch.setattr(snapshot, "now", lambda: now + 60 * SECOND)
    api.broken["incidents/A1"] = (503, b'{"detail": "busy"}')
    snapshot._fetch_cached.clear()
    assert doubt in shown(test.run())
    del api.broken["incidents/A1"]
    snapshot._fetch_cached.clear()
    text = shown(test.run())
    assert doubt not in text
    assert "ACKNOWLEDGED" in text


@pytest.mark.slow
def test_a_viewer_is_offered_no_act(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "current", lambda: identity.Person("vera", "viewer"))
    test = page(incident_script, id="A1")
    own = {b.label: b.disabled for b in test.button if b.label in ("Acknowledge", "Assign", "Silence", "Resolve")}
    assert own == dict.fromkeys(("Acknowledge", "Assign", "Silence", "Resolve"), True)
    assert "You may read only: writing needs the role operator." in shown(test)


@pytest.mark.slow
def test_a_silence_is_prefilled_previewed_and_added(api: Any) -> None:
    scope = ["gpu:n003.1", "node:n003", "rack:r1"]
    api.incidents["A1"]["labels"] = {"scope": scope, "detector": ["straggler"], "incident": ["A1"]}
    test = page(incident_script, opened="silence-A1", id="A1")
    assert test.selectbox(key="silence-A1-scope").options == [
        *("this incident only", "GPU 1 of n003", "node n003 and all below it", "rack r1 and all below it"),
    ]
    assert "Matches 1 unresolved incident now." in shown(test)
    test.selectbox(key="silence-A1-scope").set_value("rack:r1").run()
    test.text_input(key="silence-A1-reason").set_value("new paste")
    test.button(key="silence-A1-add").click().run()
    wanted = {"matchers": ['scope="rack:r1"', 'detector="straggler"'], "seconds": 7200.0, "reason": "new paste"}
    assert [posted for posted in api.posted if posted[0] == "silences"] == [("silences", wanted)]


@pytest.mark.slow
def test_the_walk_from_an_alert_to_feedback_in_one_session(api: Any) -> None:
    scope = {"scope": ["gpu:n003.1", "rack:r1"], "detector": ["straggler"], "incident": ["A1"]}
    api.incidents["A1"] |= {"version": 1, "history": HISTORY, "labels": scope}
    test = page(incident_script, id="A1")
    assert f"{signal_name('rank.compute_time')}, rank 17 of job 81 and its peers" in shown(test)
    test.button(key="acknowledge").click().run()
    steps = (
        ("assign", "to", "bob", "do", "Assigned to bob."),
        ("silence", "reason", "fan is ordered", "add", "Silenced until"),
        ("resolve", "text", "fan", "do", "Reopen undoes this."),
        ("feedback", "text", "", "useful", "Feedback: Useful."),
    )
    for name, field, value, button, said in steps:
        test.session_state[f"{name}-A1-0"] = True
        test.run()
        test.text_input(key=f"{name}-A1-{field}").set_value(value)
        test.button(key=f"{name}-A1-{button}").click().run()
        assert said in shown(test)
        assert f"{name}-A1-{button}" not in {widget.key for widget in test.button}
    done = [path for path, _ in api.posted if path != "silences/preview"]
    acts = [f"incidents/A1/{act}" for act in ("acknowledge", "assign", "resolve", "feedback")]
    assert done == [*acts[:2], "silences", *acts[2:]]


def test_matchers_of_several_incidents_name_what_they_share() -> None:
    found = [parse_detail(incident_table(i, detector=d)).incident for i, d in (("A.1", "link"), ("B", "link_flap"))]
    labels = {"A.1": {"scope": ("gpu:n1.0", "rack:r1")}, "B": {"scope": ("gpu:n2.0", "rack:r1")}}
    assert silencing.scope_choices(found, labels) == [silencing.ONLY_THIS, "rack:r1"]
    assert silencing.write_matchers(found, "rack:r1") == ['scope="rack:r1"', 'detector=~"link|link_flap"']
    assert silencing.write_matchers(found, silencing.ONLY_THIS) == ['incident=~"A\\\\.1|B"']


@pytest.mark.slow
def test_impact_shows_jobs_and_loss_as_text(api: Any) -> None:
    api.incidents["A1"]["impact"] = IMPACT
    text = shown(page(incident_script, id="A1"))
    for part in (
        "8 GPUs on 1 node, 8 ranks",
        "12.4 GPU-hours lost, 158 per hour (31 EUR, 395 EUR per hour)",
        'href="jobs?entity=job%3A81"',
        "job 81</span> run&lt;b&gt;17&lt;/b&gt;</a>",
        "31 % slower",
        "1 node only affected, not at fault",
    ):
        assert part in text
    assert "not computed" not in text


def test_a_missing_impact_is_said(api: Any) -> None:
    assert "Loss of goodput: not computed by this API." in shown(page(incident_script, id="A1"))


@pytest.mark.slow
def test_the_cause_shows_its_alternatives(api: Any) -> None:
    api.incidents["A1"]["explanation"] = {
        "root": "cdu:c2",
        "kind": "cdu",
        "probability": 0.93,
        "evidence": "flow of cdu:c2 fell first",
        "alternatives": [{"cause": "row:a", "probability": 0.05}, {"cause": None, "probability": 0.002}],
        "explained_count": 1,
        "explained": [{"entity": "gpu:n003.1", "detector": "thermal", "onset": iso(NOW), "path": [], "step": "hot"}],
    }
    text = shown(page(incident_script, id="A1"))
    for part in (
        "93 %",
        "Flow of CDU c2 fell first",
        "Alternative, 5 %",
        "Alternative, under 1 %",
        "no shared cause",
        "1 finding that this cause explains",
    ):
        assert part in text


@pytest.mark.slow
def test_who_has_it_and_what_holds_it_back_is_shown(api: Any) -> None:
    api.incidents["A1"] |= {
        "acknowledged_by": "ann",
        "acknowledged_until": iso(NOW + 3600 * SECOND),
        "assignee": "bob",
        "inhibited_by": ["S1"],
        "runbook_url": "javascript:alert(1)",
    }
    text = shown(page(incident_script, id="A1"))
    assert "acknowledged by ann until 2026-01-01 13:00:00Z, assigned to bob" in text
    assert "No separate alert: part of" in text
    assert 'href="javascript' not in text


def test_a_job_without_a_measured_slowdown_says_why() -> None:
    job = detail_answers.parse_impact({**IMPACT, "jobs": [{**IMPACT["jobs"][0], "slowdown": None, "state": "unknown"}]})
    assert job is not None
    assert cause_and_impact.job_effect(job.jobs[0], NOW) == "effect unknown"
    assert isinstance(cause_and_impact.job_rows(job, NOW)[0][0], Link)


def test_a_job_that_runs_as_before_has_recovered_if_the_pipeline_says_that_it_was_slow() -> None:
    basis = "step time 4.61 s, was 4.58 s before the onset"
    now = {"slowdown": 0.007, "basis": basis, "lost_gpu_hours": 0.077}
    hit, never_hit = ({**IMPACT["jobs"][0], **now, "state": state} for state in ("recovered", "unaffected"))
    impact = detail_answers.parse_impact({**IMPACT, "jobs": [hit, never_hit]})
    assert impact is not None
    compared = "not slower than before the onset: step time 4.61 s, was 4.58 s"
    assert [cause_and_impact.job_effect(job, NOW) for job in impact.jobs] == [f"recovered: {basis}", compared]


def test_results_in_doubt_are_the_effect_on_the_pages_of_incident_and_job_and_no_loss_is_denied() -> None:
    basis = name_doubt("step time 4.61 s, was 4.58 s before the onset", NOW)
    none = {"lost_gpu_hours": 0.0, "lost_gpu_hours_per_hour": 0.0}
    job = {**IMPACT["jobs"][0], **none, "slowdown": 0.007, "state": "unaffected", "basis": basis}
    impact = detail_answers.parse_impact({**IMPACT, **none, "jobs": [job]})
    assert impact is not None
    doubt = "results in doubt since 12:00:00Z"
    assert cause_and_impact.job_effect(impact.jobs[0], NOW) == doubt
    assert cause_and_impact.impact_lines(impact)[1] == "no GPU-hours lost to slowness so far"
    harm = Harm("A1", "GPU 1: wrong results", "page", NOW, None, "unaffected", 0.007, basis, 0.0, "sdc")
    assert f">{doubt}<" in harms([harm], NOW)


@pytest.mark.parametrize("basis", ["step time 1.92 s, was 1.47 s before the onset", ""])
def test_a_slow_job_says_what_it_is_compared_with(basis: str) -> None:
    job = {**IMPACT["jobs"][0], "slowdown": 0.306, "state": "slow", "basis": name_owner(basis, "B2")}
    impact = detail_answers.parse_impact({**IMPACT, "jobs": [job]})
    assert impact is not None
    measured = ": step time 1.92 s, was 1.47 s" if basis else ""
    assert cause_and_impact.job_effect(impact.jobs[0], NOW) == f"31 % slower than before the onset{measured}"
    harm = Harm("A1", "GPU 1 hot", "page", NOW, None, "slow", 0.306, job["basis"], 1.0, "thermal")
    assert f"31 % slower than before the onset{measured}<" in harms([harm], NOW)


def test_a_conflict_names_people_only() -> None:
    changes = [Change(NOW, "updated", acting.MACHINE, "", 2), Change(NOW - 60 * SECOND, "resolved", "bob", "fixed", 3)]
    text = acting.describe_conflict(changes, NOW)
    assert text.startswith('bob resolved it 1 min ago ("fixed").')


def test_merge_says_why_it_offers_no_incident(api: Any) -> None:
    api.incidents = {"A1": api.incidents["A1"]}
    assert "There is no other unresolved incident." in shown(page(incident_script, opened="more-A1", id="A1"))


def test_merge_says_that_the_other_incidents_cannot_be_read(api: Any) -> None:
    api.broken["incidents"] = (503, b'{"detail": "the store is not open yet"}')
    test = page(incident_script, opened="more-A1", id="A1")
    text = shown(test)
    assert "The other incidents cannot be read.</b> The store is not open yet (HTTP 503)" in text
    assert not [box for box in test.multiselect if box.key == "more-A1-merge"]


def test_merge_offers_the_last_known_incidents_with_their_time(api: Any) -> None:
    api.incidents["A3"] = incident_table("A3")
    snapshot.fetch_unresolved()
    snapshot._fetch_cached.clear()
    api.broken["incidents"] = (503, b'{"detail": "the store is not open yet"}')
    test = page(incident_script, opened="more-A1", id="A1")
    assert "The list is as of " in shown(test)
    assert [option[:2] for option in test.multiselect(key="more-A1-merge").options] == ["A3"]


def test_a_job_whose_loss_another_incident_counts_says_which() -> None:
    job = {**IMPACT["jobs"][0], "basis": name_owner("step time 9 s, was 6 s before the onset", "B2")}
    quiet = {"lost_gpu_hours": 0.0, "lost_gpu_hours_per_hour": 0.0, "jobs": [job]}
    found = detail_answers.parse_impact({**IMPACT, **quiet})
    assert found is not None
    assert cause_and_impact.impact_lines(found)[-1] == (
        "no GPU-hours lost so far here: the loss of a job is counted once, now in B2"
    )
    loss = cause_and_impact.job_rows(found, NOW)[0][2]
    assert isinstance(loss, Link)
    assert (loss.text.endswith(" GPU-h; now in B2"), loss.href) == (True, "incident?id=B2")


@pytest.mark.slow
@pytest.mark.parametrize("merged_into", [None, "A2"])
def test_a_merged_incident_offers_no_reopen_and_names_the_one_that_has_its_findings(
    api: Any, merged_into: str | None
) -> None:
    api.incidents["A1"] |= {"state": "resolved", "resolved": iso(NOW), "merged_into": merged_into}
    test = page(incident_script, opened="reopen-A1", id="A1")
    assert ("reopen-A1-do" in {widget.key for widget in test.button}) == (merged_into is None)
    assert ("Merged into" in shown(test)) == (merged_into is not None)


@pytest.mark.parametrize("merged_into", [None, "A2"])
def test_a_merged_incident_says_where_its_findings_are(api: Any, merged_into: str | None) -> None:
    api.incidents["A1"] |= {"findings": [], "merged_into": merged_into}
    text = shown(page(incident_script, id="A1"))
    assert ("No findings yet." in text) == (merged_into is None)
    assert (
        re.search(r'It was merged into <a [^>]*incident\?id=A2"[^>]*>A2</a>, with its findings', text) is not None
    ) == (merged_into is not None)


@pytest.mark.parametrize(
    ("unlisted", "jobs", "expected", "never"),
    [
        (0, 0, "No job is hit.", "not known"),
        (1, 0, "Jobs of these nodes are not known: no inventory with jobs has arrived.", "No job is hit."),
        (1, 1, "Jobs of these nodes are not known: no inventory with jobs has arrived.", "No job is hit."),
    ],
)
def test_the_page_tells_no_job_from_jobs_that_are_not_known(
    api: Any, unlisted: int, jobs: int, expected: str, never: str
) -> None:
    more = {"jobs": IMPACT["jobs"][:jobs], "job_count": jobs, "nodes_without_job_list": unlisted}
    api.incidents["A1"]["impact"] = {**IMPACT, **more}
    text = shown(page(incident_script, id="A1"))
    assert expected in text
    assert never not in text


@pytest.mark.parametrize(
    ("url", "text", "href"),
    [
        ("https://fleet.example/detectors?detector=sdc", "About this detector", "detectors?detector=sdc"),
        ("https://wiki.example/detectors?detector=sdc&page=2", "Runbook", ""),
        ("https://wiki.example/fans", "Runbook", ""),
    ],
)
def test_only_a_page_of_the_site_is_called_a_runbook(
    monkeypatch: pytest.MonkeyPatch, url: str, text: str, href: str
) -> None:
    monkeypatch.setattr(cause_and_impact.routes, "href", lambda page, **query: f"{page}?{urlencode(query)}")
    link = cause_and_impact.runbook_link(
        parse_detail({**incident_table("A1"), "findings": [], "history": [], "notifications": [], "runbook_url": url})
    )
    assert isinstance(link, Link)
    assert (link.text, link.href) == (text, href or url)


@pytest.mark.parametrize(("until", "disabled"), [("2999-01-01T00:00:00Z", True), ("2026-01-01T00:00:00Z", False)])
def test_an_acknowledged_incident_under_a_silence_says_who_silenced_it(api: Any, until: str, disabled: bool) -> None:
    api.silences = [silence_table("s1")]
    acknowledged = {"acknowledged_by": "alice", "acknowledged_until": until}
    api.incidents["A1"] |= {"state": "silenced", "silenced_by": ["s1"], **acknowledged}
    test = page(incident_script, id="A1")
    assert test.button(key="acknowledge").disabled is disabled
    text = shown(test)
    assert "<b>Silenced by</b>" in text
    assert ">ann until 2999-01-01 00:00:00Z: new paste</a>" in text
