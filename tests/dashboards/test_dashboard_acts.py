"""The page of acts: what waits, one plan with guards, who may approve, and the acts of an incident."""

from __future__ import annotations

from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import identity, snapshot
from dashboards.act_answers import parse_act, parse_acts
from dashboards.identity import Person
from dashboards.views.acts import approved_text, guard_result, headline, state_text, subtitle
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, silence_table
from tests.dashboards.test_dashboard_pages import page, shown

HOSTILE = "<script>alert(1)</script>"


def acts_script() -> None:
    from dashboards.views import acts

    acts.page()


def incident_script() -> None:
    from dashboards.views import incident

    incident.page()


def silences_script() -> None:
    from dashboards.views import silences

    silences.page()


def act_table(**more: Any) -> dict[str, Any]:
    """One act as in the API."""
    guards = [
        {
            "name": "nodes_out_per_rack",
            "now": "3 out in r0",
            "limit": "at most 2",
            "passed": False,
            "overridable": True,
        },
        {"name": "owner", "now": "held here", "limit": "held here", "passed": True, "overridable": False},
    ]
    plan = {
        "hash": "a" * 64,
        "commands": ["scontrol update NodeName=n042 State=DRAIN"],
        "guards": guards,
        "jobs": [{"job": "81", "nodes": 16, "gpus": 128, "account": "team"}],
        "before": {"n042": "IDLE"},
        "people": 2,
        "people_why": ["overrides the guard nodes_out_per_rack"],
    }
    made = {
        "id": "ACT-1",
        "text": "hold n042",
        "verb": "hold",
        "state": "awaiting_approval",
        "mode": "on",
        "targets": ["node:n042"],
        "requested_by": "alice",
        "by_person": True,
        "version": 3,
        "reason": "corrupts data",
        "incident": "A1",
        "created": iso(NOW - 60 * SECOND),
        "expires": iso(NOW + 3600 * SECOND),
        "open": True,
        "in_force": False,
        "held": [],
        "plan": plan,
        "approvals": [],
        "result": {},
        "history": [{"number": 1, "time": iso(NOW), "state": "proposed", "actor": "alice", "comment": "corrupts data"}],
    }
    return made | more


@pytest.fixture
def acts(api: Any) -> Any:
    api.answers["acts"] = {"acts": [act_table()], "breaker": None, "modes": {"hold": "on", "evict": "off"}}
    api.answers["acts/ACT-1"] = act_table()
    return api


def test_the_list_says_what_waits_and_leads_to_each_act(acts: Any) -> None:
    text = shown(page(acts_script))
    assert "1 act awaits approval" in text
    assert 'href="acts?id=ACT-1' in text
    assert "Modes: hold on, evict off" in text


def test_an_act_that_waits_says_for_what_in_the_list_and_on_its_page(acts: Any) -> None:
    waits = "executor executor has not asked for work for 5 min"
    acts.answers["acts"]["acts"] = [act_table(state="approved", waits_for=waits)]
    acts.answers["acts/ACT-1"] = act_table(state="proposed", plan=None, waits_for=waits)
    assert f"Waits: {waits}" in shown(page(acts_script))
    text = shown(page(acts_script, id="ACT-1"))
    assert waits in text
    assert "Not planned yet." in text


def test_an_act_that_is_over_is_closed_whatever_its_state(acts: Any) -> None:
    acts.answers["acts"]["acts"] = [act_table(state="executed", mode="dry-run", open=False)]
    text = shown(page(acts_script))
    assert "No open acts." in text
    assert "No closed acts." not in text


def test_a_hold_that_failed_and_keeps_nodes_out_is_in_force_and_offers_the_release_of_those(acts: Any) -> None:
    targets = ["node:n042", "node:n043"]
    failed = act_table(state="failed", open=False, in_force=True, held=["node:n043"], targets=targets)
    acts.answers["acts"] |= {"acts": [failed], "modes": {"hold": "on", "release": "on"}}
    acts.answers["acts/ACT-1"] = failed
    text = shown(page(acts_script))
    assert ("No holds in force." in text, "No closed acts." in text) == (False, True)
    test = page(acts_script, id="ACT-1")
    test.button(key="act-release-").click().run()
    assert [body["targets"] for _, body in acts.posted] == [["node:n043"]]


def test_an_open_breaker_is_the_first_thing_on_the_page(acts: Any) -> None:
    acts.answers["acts"]["breaker"] = "3 acts failed within an hour"
    assert "Policies are stopped." in shown(page(acts_script))


def test_one_act_shows_commands_guards_jobs_and_how_many_people_must_approve(acts: Any) -> None:
    text = shown(page(acts_script, id="ACT-1"))
    for wanted in (
        "scontrol update NodeName=n042 State=DRAIN",
        "FAIL: two people may override it",
        "1 of 2 fail",
        "Two people must stand behind it: overrides the guard nodes_out_per_rack.",
        "ACT-1 · requested by alice",
        "corrupts data",
    ):
        assert wanted in text


@pytest.mark.parametrize("person", [Person("local", "operator", notes_only=True), Person("eve", "viewer")])
def test_without_a_login_or_as_a_viewer_nobody_is_offered_a_decision(
    acts: Any, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "current", lambda: person)
    test = page(acts_script, id="ACT-1")
    assert "Not allowed." in shown(test)
    assert [button.label for button in test.button] == []


@pytest.mark.parametrize("person", [Person("local", "operator", notes_only=True), Person("eve", "viewer")])
@pytest.mark.parametrize(
    ("script", "label"),
    [
        (acts_script, "Propose an act"),
        (incident_script, "Plan an act"),
        (silences_script, "New silence"),
        (silences_script, "New maintenance window"),
        (silences_script, "Edit"),
        (silences_script, "End"),
    ],
)
def test_a_button_of_an_act_is_disabled_with_the_reason_for_who_may_not(
    acts: Any, person: Person, script: Any, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "current", lambda: person)
    acts.silences.append(silence_table("s0"))
    test = page(script, id="A1" if script is incident_script else "")
    (button,) = [button for button in test.button if button.label == label]
    assert button.disabled
    wanted = "Without a login" if person.notes_only else "eve has the role viewer; this needs operator."
    assert wanted in button.help


def test_the_form_of_an_act_says_in_words_when_it_begins(acts: Any) -> None:
    test = page(acts_script, opened="acts-new")
    (when,) = test.get("button_group")
    assert [option.content for option in when.proto.options] == ["Now", "When idle", "After a checkpoint"]


def test_an_approval_says_what_it_still_needs() -> None:
    assert approved_text(parse_act(act_table())) == "Approved. One more person must approve it."
    approved = act_table(state="approved")
    assert approved_text(parse_act(approved)) == "Approved. The executor begins within seconds."
    waiting = approved | {"waits_for": "until no job is on the nodes: n042 has 81"}
    assert approved_text(parse_act(waiting)) == "Approved. It waits: until no job is on the nodes: n042 has 81."


def test_an_operator_approves_the_plan_that_is_shown(acts: Any) -> None:
    test = page(acts_script, id="ACT-1")
    test.text_input(key="act-comment-ACT-1").input("looked at the rack")
    test.button(key="act-approve").click().run()
    assert acts.posted == [
        (
            "acts/ACT-1/approve",
            {"plan": "a" * 64, "comment": "looked at the rack", "typed": "", "break_glass": False},
        )
    ]
    assert "ACT-1: Approved." in shown(test)
    acts.answers["acts/ACT-2"] = act_table(id="ACT-2")
    test.query_params["id"] = "ACT-2"
    assert "ACT-1: Approved." not in shown(test.run()), "it belongs to the page of another act"
    assert test.text_input(key="act-comment-ACT-2").value == "", "what was written is about another act"


ALICE, BOB = Person("alice", "operator"), Person("bob", "operator")
APPROVED = {"approvals": [{"who": "alice", "comment": ""}], "by_person": False}


@pytest.mark.parametrize(
    ("person", "changes", "said", "offered"),
    [
        (ALICE, {}, "You requested it: another person must approve.", []),
        (BOB, {}, "", ["act-approve"]),
        (ALICE, {"by_person": False}, "", ["act-approve"]),
        (ALICE, APPROVED, "You approved it: another person must approve.", []),
        (BOB, APPROVED, "", ["act-approve"]),
        (Person("alice", "admin"), {}, "You requested it: another person must approve.", ["act-glass-now"]),
        (Person("alice", "admin"), APPROVED, "You approved it: another person must approve.", []),
        (Person("bob", "admin"), {"targets": ["node:n042", "node:n043"]}, "", ["act-approve"]),
    ],
)
def test_who_cannot_approve_a_plan_is_told_why_and_not_offered_to(
    acts: Any, person: Person, changes: dict[str, Any], said: str, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "current", lambda: person)
    acts.answers["acts/ACT-1"] = act_table(**changes)
    test = page(acts_script, id="ACT-1")
    assert [button.key for button in test.button] == [*offered, "act-cancel"]
    assert ("another person must approve" in shown(test)) == bool(said)
    assert said in shown(test)


def test_a_requester_approves_alone_what_needs_one_person(acts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "current", lambda: ALICE)
    acts.answers["acts/ACT-1"]["plan"] |= {"people": 1, "people_why": []}
    test = page(acts_script, id="ACT-1")
    assert [button.key for button in test.button] == ["act-approve", "act-cancel"]


def test_for_a_verb_without_an_undo_the_name_of_the_node_is_typed(acts: Any) -> None:
    acts.answers["acts/ACT-1"] = act_table(verb="evict", text="evict n042")
    test = page(acts_script, id="ACT-1")
    test.text_input(key="act-typed-ACT-1").input("n042")
    test.button(key="act-approve").click().run()
    assert acts.posted[0][1]["typed"] == "n042"


def test_the_result_of_an_approval_goes_when_the_act_has_another_state(acts: Any) -> None:
    test = page(acts_script, id="ACT-1")
    acts.answers["acts/ACT-1"] = act_table(state="approved", version=4)
    test.button(key="act-approve").click().run()
    assert "The executor begins within seconds." in shown(test)
    acts.answers["acts/ACT-1"] = act_table(state="executed", version=6)
    snapshot._drop_answers()
    text = shown(test.run())
    assert "EXECUTED" in text
    assert "The executor begins within seconds." not in text


def test_a_refusal_stays_for_the_state_after_it_and_goes_with_the_next(acts: Any) -> None:
    test = page(acts_script, id="ACT-1")
    acts.broken["acts/ACT-1/approve"] = (403, b'{"detail": "the plan has changed since it was shown"}')
    acts.answers["acts/ACT-1"] = act_table(state="executing", version=5)
    test.button(key="act-approve").click().run()
    assert "Nothing changed. The plan has changed since it was shown" in shown(test)
    acts.answers["acts/ACT-1"] = act_table(state="executed", version=6)
    snapshot._drop_answers()
    assert "Nothing changed." not in shown(test.run())


def test_what_a_form_said_goes_with_it_and_is_on_no_other_page(acts: Any) -> None:
    test = page(acts_script, opened="acts-new")
    test.button(key="acts-new-send").click().run()
    assert "Enter at least one node" in shown(test)
    test.query_params["id"] = "ACT-1"
    assert "Enter at least one node" not in shown(test.run())
    test.session_state["acts-new-0"] = False
    del test.query_params["id"]
    assert "Enter at least one node" not in shown(test.run())
    test.session_state["acts-new-0"] = True
    assert "Enter at least one node" not in shown(test.run()), "it was closed since"


def test_a_proposal_that_fails_is_an_error_of_the_page_that_it_came_from(acts: Any) -> None:
    held = act_table(state="verified", open=False, in_force=True, held=["node:n042"])
    acts.answers["acts"] |= {"modes": {"hold": "on", "release": "on"}}
    acts.answers["acts/ACT-1"], acts.answers["acts/ACT-2"] = held, act_table(id="ACT-2")
    test = page(acts_script, id="ACT-1")
    acts.broken["acts"] = (400, b'{"detail": "no such node"}')
    test.button(key="act-release-").click().run()
    assert "Nothing changed. No such node" in shown(test)
    test.query_params["id"] = "ACT-2"
    assert "Nothing changed." not in shown(test.run())


def test_a_result_is_forgotten_when_the_page_is_left() -> None:
    def script() -> None:
        import streamlit as st

        from dashboards.views import place

        for step in st.session_state["way"]:
            place.enter(*step)

    test = AppTest.from_function(script)
    for way, kept in (
        ([("acts", "ACT-1"), ("acts", "ACT-1")], True),
        ([("acts", "ACT-1"), ("acts", "ACT-2"), ("acts", "ACT-1")], False),
        ([("fleet", ""), ("acts", "ACT-1")], False),
    ):
        test.session_state["way"] = way[:1]
        test.run()
        test.session_state["fleetpulse.acts.result"] = "Approved."
        test.session_state["way"] = way
        test.run()
        assert ("fleetpulse.acts.result" in test.session_state) == kept


def test_a_result_is_kept_for_the_page_that_opens_from_whatever_page() -> None:
    def script() -> None:
        import streamlit as st

        from dashboards.views import place

        page, identity, proposes = st.session_state["step"]
        place.enter(page, identity)
        if proposes:
            st.session_state["fleetpulse.acts.result"] = "ACT-1: Proposed."
            place.expect("acts", "ACT-1")

    test = AppTest.from_function(script)
    for origin, subject in (("incident", "A1"), ("acts", "")):
        for step, kept in (
            ((origin, subject, True), True),
            ((origin, subject, False), True),  # the run that gives the browser the address
            (("acts", subject, False), True),  # a browser that is late
            (("acts", "ACT-1", False), True),
            (("acts", "ACT-1", False), True),
            (("fleet", "", False), False),
        ):
            test.session_state["step"] = step
            assert ("fleetpulse.acts.result" in test.run().session_state) == kept, step


def test_an_act_is_proposed_with_nodes_and_a_reason(acts: Any) -> None:
    test = page(acts_script, opened="acts-new")
    test.button(key="acts-new-send").click().run()
    assert shown(test).count("Enter at least one node, and a reason.") == 1
    assert test.session_state["acts-new-0"], "the form is still open, with its result"
    test.text_area(key="acts-new-nodes").input("n042\nnode:n043")
    test.text_input(key="acts-new-reason").input("corrupts data")
    test.button(key="acts-new-send").click().run()
    assert acts.posted[0][0] == "acts"
    assert acts.posted[0][1]["targets"] == ["node:n042", "node:n043"]
    assert acts.posted[0][1]["verb"] == "hold"
    assert not any(button.key == "acts-new-send" for button in test.button), "the form is done"


def test_the_key_a_does_nothing_behind_the_form_of_a_new_act(acts: Any) -> None:
    closed = page(incident_script, id="A1")
    assert closed.button(key="acknowledge").proto.shortcut
    opened = page(incident_script, opened="incident-act", id="A1").run()
    assert opened.button(key="incident-act-send")
    assert not opened.button(key="acknowledge").proto.shortcut


def test_names_and_reasons_from_outside_are_text(acts: Any) -> None:
    acts.answers["acts/ACT-1"] = act_table(reason=HOSTILE, requested_by=HOSTILE, text=HOSTILE)
    text = shown(page(acts_script, id="ACT-1"))
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text


@pytest.mark.slow
def test_an_unknown_act_and_an_api_that_is_away_say_so(api: Any) -> None:
    assert "Act ACT-9" in shown(page(acts_script, id="ACT-9"))
    api.broken["acts"] = (503, b"{}")
    assert "No act awaits approval" not in shown(page(acts_script))


@pytest.mark.slow
def test_the_page_of_an_incident_has_its_acts(acts: Any) -> None:
    text = shown(page(incident_script, id="A1"))
    assert 'href="acts?id=ACT-1' in text
    assert "awaiting approval" in text


def test_words_of_states_guards_and_headlines() -> None:
    act = parse_act(act_table(mode="dry-run", approvals=[{"who": "bob", "comment": ""}]))
    assert state_text(act) == "awaiting approval (dry run)"
    assert "approved by bob" in subtitle(act, NOW)
    assert guard_result(False, False) == "FAIL: no override"
    assert headline(parse_acts({"acts": [], "breaker": None, "modes": {}})) == "No act awaits approval"
