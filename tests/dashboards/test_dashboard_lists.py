"""The list of incidents, silences and maintenance, handover, audit, and the links of the detectors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import streamlit as st

from dashboards import routes
from dashboards.answers import parse_detail, parse_incident
from dashboards.budget_text import plain_budget
from dashboards.incident_list.component import list_rows
from dashboards.list_query import ListQuery, parse_query
from dashboards.people_answers import parse_audit, parse_incident_page, parse_silence, write_matcher
from dashboards.views import audit, handover, incidents, silences
from dashboards.views.detectors import detection_text, parse_budgets, precision_text
from detectors.base.budget import budget_line
from detectors.base.streams import Channel
from detectors.heat.coolant import loop_budget_line
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, detector_table, incident_table, silence_table
from tests.dashboards.test_dashboard_mutes import detectors_script
from tests.dashboards.test_dashboard_pages import incidents_script, page, shown
from tests.dashboards.test_dashboard_response import shown_in_popover

HOSTILE = "<script>alert(1)</script>"


def silences_script() -> None:
    from dashboards.views import silences

    silences.page()


def handover_script() -> None:
    from dashboards.views import handover

    handover.page()


def incident_script() -> None:
    from dashboards.views import incident

    incident.page()


def audit_script() -> None:
    from dashboards.views import audit

    audit.page()


@pytest.fixture
def plain_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "live_value", lambda: "")
    monkeypatch.setattr(routes, "is_local_time", lambda: False)


def test_every_filter_is_in_the_address_and_comes_back_from_it(plain_address: None) -> None:
    query = ListQuery("silenced", "a b", ('rack="r&1"', 'job!="x"'), "ann", "members", "rack", 3)
    single = {name: value for name, value in query.parameters().items() if name != "filter"}
    assert parse_query(single, query.parameters()["filter"]) == query
    assert ListQuery().href() == "incidents"
    assert query.href(matchers=(), text="", assignee="", group="", sort="severity") == "incidents?state=silenced"
    assert "filter=rack%3D%22r%261%22&filter=job" in query.href()


@pytest.mark.parametrize("value", ["x", "-1", "0", "1e9", "²", "99999999"])
def test_a_wrong_address_shows_the_default_list(value: str) -> None:
    assert parse_query({"state": value, "sort": value, "group": value, "page": value}, [""]) == ListQuery()


def test_states_of_older_addresses_are_understood() -> None:
    assert parse_query({"state": "open"}, []).show == "pending"
    assert parse_query({"state": "muted"}, []).show == "silenced"


@pytest.mark.slow
def test_the_list_asks_for_one_page_with_its_filters(api: Any) -> None:
    text = shown(page(incidents_script, state="pending", q="rank", group="rack", page="2"))
    asked = next(query for path, query in api.asked if path == "incidents")
    assert asked["show"] == ["pending"]
    assert (asked["q"], asked["group"], asked["limit"], asked["offset"]) == (["rank"], ["rack"], ["100"], ["100"])
    assert "&quot;rank&quot; ✕" in text
    assert 'href="incidents?state=silenced&amp;q=rank&amp;group=rack"' in text


@pytest.mark.slow
def test_tabs_have_no_counts_while_the_api_is_away(api: Any) -> None:
    assert "Pending <b>1</b>" in shown(page(incidents_script))
    api.broken["incidents"] = (503, b'{"detail": "away"}')
    text = shown(page(incidents_script, q="never asked before"))
    assert "Away (HTTP 503)" in text
    assert "<b>0</b>" not in text
    assert "No unresolved incidents" not in text


def test_a_tab_that_an_older_api_does_not_count_has_no_number(api: Any) -> None:
    found = api.list_incidents({})
    counts = {"muted" if name == "silenced" else name: number for name, number in found["counts"].items()}
    api.answers["incidents"] = {**found, "counts": counts}
    text = shown(page(incidents_script))
    assert "Pending <b>1</b>" in text
    assert ">Silenced</a>" in text
    assert incidents.headline({}, ListQuery()) == "Incidents"


def test_a_wrong_matcher_is_shown_with_its_fault(api: Any) -> None:
    api.broken["incidents"] = (400, b'{"detail": "matcher \\"rack\\": expected LABEL=VALUE"}')
    assert "expected LABEL=VALUE" in shown(page(incidents_script, filter="rack"))


def test_a_selection_is_acknowledged_one_by_one_and_says_what_failed(api: Any) -> None:
    api.incidents["C3"] = {**incident_table("C3"), "findings": [], "history": [], "notifications": []}
    incidents._acknowledge([("A1", None), ("C3", None)])
    assert [path for path, _ in api.posted] == ["incidents/A1/acknowledge", "incidents/C3/acknowledge"]
    assert incidents._describe(2, [], "acknowledged").text == "2 incidents acknowledged."
    assert incidents._describe(1, [], "acknowledged", title="hot").text == "1 incident acknowledged: hot."
    assert incidents._describe(3, ["A1: no"], "acknowledged").text == "1 of 3 not acknowledged. A1: no"
    assert "or it is not known" in incidents._describe(3, ["A1: lost"], "acknowledged", unsure=True).text


def test_a_selection_is_assigned_to_one_person_and_says_what_failed(api: Any) -> None:
    api.incidents["C3"] = {**incident_table("C3"), "findings": [], "history": [], "notifications": []}
    incidents._assign([("A1", None), ("C3", None)], "ann")
    wanted = {"to": "ann", "comment": ""}
    assert api.posted == [("incidents/A1/assign", wanted), ("incidents/C3/assign", wanted)]
    assert st.session_state["fleetpulse.list.result"].text == "2 incidents assigned to ann."
    api.broken["incidents/C3/assign"] = (409, b'{"detail": "it is resolved"}')
    incidents._assign([("A1", None), ("C3", None)], "")
    said = st.session_state["fleetpulse.popover_failed"][1]
    assert said.text.startswith("1 of 2 not assigned to no one. C3: It is resolved")
    assert not said.done


def test_a_selection_is_written_with_the_versions_that_the_list_showed(api: Any) -> None:
    """Another person took the second incident after the list was drawn: it stays theirs, the first is assigned."""
    rest = {"version": 1, "findings": [], "history": [], "notifications": []}
    api.incidents = {name: {**incident_table(name), **rest} for name in ("A1", "A2")}
    page(incidents_script)
    found = parse_incident_page(api.list_incidents({}))
    taken = {"number": 2, "time": iso(NOW), "kind": "assigned", "actor": "bob@example.org", "comment": "mine"}
    api.incidents["A2"] |= {"version": 2, "history": [taken], "assignee": "bob@example.org"}
    seen = incidents.seen_versions(found.incidents, found)
    incidents._assign(seen, "ann")
    said = st.session_state["fleetpulse.popover_failed"][1]
    assert said.text.startswith("1 of 2 not assigned to ann. A2: bob@example.org assigned it")
    assert api.incidents["A2"]["assignee"] == "bob@example.org"
    assert api.incidents["A1"]["assignee"] == "ann"
    incidents._acknowledge(seen[1:], "rank 17 is slow")
    assert "rank 17 is slow: bob@example.org assigned it" in st.session_state["fleetpulse.list.result"].text


@pytest.mark.slow
def test_a_button_of_the_list_sends_the_version_of_its_row(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api.incidents = {"A1": {**incident_table("A1"), "version": 7, "findings": [], "history": []}}
    monkeypatch.setattr(incidents, "selectable_list", lambda *_: ["A1"])
    page(incidents_script).button(key="bulk-acknowledge").click().run()
    assert api.posted_headers[-1]["If-Match"] == '"7"'


@pytest.mark.slow
def test_an_incident_that_only_the_list_had_shows_its_row_while_the_api_is_away(api: Any) -> None:
    api.incidents["L7"] = incident_table("L7", assignee="bob")
    page(incidents_script)
    api.broken["incidents/L7"] = (503, b'{"detail": "the store is not open"}')
    api.broken["incidents/L8"] = (503, b'{"detail": "the store is not open"}')
    text = shown(page(incident_script, id="L7"))
    assert "The store is not open" in text
    assert "Rank 17 of job 81 computes 0.61 s a step" in text
    assert "assigned to bob" in text
    assert "Only the row of the list is known, as of" in text
    assert "GPU 1 of n003" in text
    assert "No data." in shown(page(incident_script, id="L8"))


def test_a_row_shows_who_has_the_incident() -> None:
    found = parse_detail(incident_table("A1", acknowledged_by="ann", state="acknowledged")).incident
    assert list_rows([found], NOW)[0]["owner"] == "ann"


def test_silences_are_listed_with_what_they_hold_back(api: Any) -> None:
    api.silences = [silence_table("s1", reason=HOSTILE, text=f'rack="{HOSTILE}"'), silence_table("s2", state="expired")]
    api.incidents["A1"] |= {"state": "silenced", "silenced_by": ["s1"]}
    text = shown(page(silences_script))
    assert "1 silence in force" in text
    assert HOSTILE not in text
    assert 'href="incident?id=A1"' in text


@pytest.mark.parametrize(
    ("opened", "button", "said"),
    [
        ("silences-window", "window-add", "Enter at least one entity, such as rack:r12."),
        ("end-s1", "end-now-s1", "Nothing changed. It has ended (HTTP 409)"),
        ("extend-s1", "by-8 h-s1", "Nothing changed. It has ended (HTTP 409)"),
        ("edit-s1", "edit-s1-1-save", "Nothing changed. It has ended (HTTP 409)"),
    ],
)
def test_what_a_form_of_a_silence_did_not_do_is_said_in_the_form_alone(
    api: Any, opened: str, button: str, said: str
) -> None:
    api.silences = [silence_table("s1")]
    for path in ("silences/s1", "silences/s1/expire"):
        api.broken[path] = (409, b'{"detail": "it has ended"}')
    test = page(silences_script, opened=opened)
    test.button(key=button).click().run()
    assert shown(test).count(said) == 1
    assert said in shown_in_popover(test)


def test_only_what_came_of_the_newest_change_of_a_silence_is_said(api: Any) -> None:
    test = page(silences_script, opened="silences-new")
    test.text_area[0].set_value("rack=r1")
    test.text_input(key="silences-form-reason").set_value("fan")
    test.button(key="silences-form-add").click().run()
    assert "Silenced until" in shown(test)
    made = api.silences[0]["id"]
    test.session_state[f"end-{made}-0"] = True
    test.run()
    test.button(key=f"end-now-{made}").click().run()
    text = shown(test)
    assert "Ended: " in text
    assert "Silenced until" not in text


@pytest.mark.slow
def test_a_silence_is_extended_and_ended_with_its_version(api: Any) -> None:
    api.silences = [silence_table("s1", ends=iso(NOW + 3600 * SECOND))]
    test = page(silences_script, opened="extend-s1")
    test.button(key="by-8 h-s1").click().run()
    assert api.posted[-1] == ("silences/s1", {"ends": iso(NOW + 9 * 3600 * SECOND), "reason": "new paste"})
    assert "Extended: " in shown(test)
    test = page(silences_script, opened="end-s1")
    test.button(key="end-now-s1").click().run()
    assert api.posted[-1] == ("silences/s1/expire", {})
    assert "Ended: " in shown(test)


@pytest.mark.slow
def test_an_edited_silence_with_a_wrong_time_is_not_sent(api: Any) -> None:
    api.silences = [silence_table("s1")]
    test = page(silences_script, opened="edit-s1")
    test.text_input(key="edit-s1-1-ends").set_value("tomorrow")
    test.button(key="edit-s1-1-save").click().run()
    assert "&#x27;tomorrow&#x27; is no time; expected one such as 2026-01-31T08:00:00Z." in shown(test)
    assert [path for path, _ in api.posted if path != "silences/preview"] == []


@pytest.mark.slow
def test_a_maintenance_window_is_added(api: Any) -> None:
    test = page(silences_script, opened="silences-window")
    test.text_area(key="window-scopes").set_value("rack:r1\nnode:n1")
    test.text_input(key="window-reason").set_value("firmware")
    test.button(key="window-add").click().run()
    path, body = api.posted[-1]
    assert (path, body["scopes"], body["reason"]) == ("maintenance", ["rack:r1", "node:n1"], "firmware")
    assert "Maintenance window added" in shown(test)


@pytest.mark.slow
def test_a_window_of_all_nodes_is_edited_without_its_matchers_which_are_too_long_for_a_form(api: Any) -> None:
    nodes = "|".join(f"node:n{i:05d}" for i in range(12_500))
    matcher = {"name": "scope", "value": nodes, "isRegex": True, "isEqual": True}
    api.silences = [silence_table("s1", "maintenance", matchers=[matcher], text="scope=~… (12,500 values)")]
    test = page(silences_script, opened="edit-s1")
    assert "They are too long to be edited here." in shown(test)
    test.text_input(key="edit-s1-1-reason").set_value("longer")
    test.button(key="edit-s1-1-save").click().run()
    path, body = api.posted[-1]
    assert (path, body["matchers"], body["reason"]) == ("silences/s1", None, "longer")


def test_matchers_are_written_as_they_are_read() -> None:
    row = {"name": "rack", "value": 'a"b\\', "isRegex": True, "isEqual": False}
    assert write_matcher(row) == 'rack!~"a\\"b\\\\"'


def test_silences_of_slurm_and_planned_ones_say_so() -> None:
    later = parse_silence(silence_table("m", "maintenance", state="pending", source="slurm:root_1", updated_by="bob"))
    text = silences.describe(later, NOW)
    assert text.startswith("by ann (slurm:root_1), changed by bob, from 11:00:00Z until 2999-01-01 00:00:00Z")


def test_the_handover_shows_what_waits_and_links_to_it(api: Any) -> None:
    api.changed = [
        {
            "id": "B2",
            "changes": ["opened", "updated", "updated", "resolved"],
            "time": iso(NOW),
            "summary": "gpu:n1.0 was hot",
            "state": "resolved",
            "severity": "ticket",
        }
    ]
    text = shown(page(handover_script, since="24 h"))
    assert "1 open incident, 0 silenced, 1 pending, 1 changed" in text
    for part in ("page without an owner", "opened, updated, resolved", "no owner", 'href="incident?id=B2"'):
        assert part in text
    asked = next(query for path, query in api.asked if path == "handover")
    assert asked["since"][0].endswith("00.000000Z")


def test_the_handover_counts_what_is_in_storms(api: Any) -> None:
    made = api.hand_over
    storms = [{"id": "A1", "unresolved": 1980, "acknowledged": 0, "changed": 5}]
    api.hand_over = lambda query: {**made(query), "storms": storms}
    assert "1; 1,980 more in storms" in shown(page(handover_script))


def test_the_begin_of_a_shift_is_a_length_or_a_time() -> None:
    assert handover.parse_since("12 h", NOW) == NOW - 12 * 3600 * SECOND
    assert handover.parse_since("2026-01-01T06:00Z", NOW) == NOW - 6 * 3600 * SECOND
    assert handover.parse_since("soon", NOW) == NOW - 8 * 3600 * SECOND


def test_the_audit_links_to_what_was_changed(api: Any) -> None:
    row = {
        "number": 1,
        "time": iso(NOW),
        "actor": "eve",
        "role": "viewer",
        "origin": "10.0.0.9",
        "target": "A1",
        "action": "acknowledge",
        "reason": HOSTILE,
        "outcome": "refused",
        "before": None,
        "after": None,
    }
    api.audit = [row, {**row, "action": "add silence", "target": "s1"}, {**row, "action": "x", "target": "node:n1"}]
    text = shown(page(audit_script, actor="eve"))
    assert next(query for path, query in api.asked if path == "audit")["actor"] == ["eve"]
    for part in ("acknowledge (refused)", 'href="incident?id=A1"', 'href="silences?id=s1"', "node?entity=node%3An1"):
        assert part in text
    assert HOSTILE not in text


def test_a_broken_chain_of_the_audit_is_an_alarm() -> None:
    assert parse_audit({"audit": [], "broken": 7}).broken == 7
    assert audit.audit_rows((), NOW) == []


@pytest.mark.slow
def test_a_detector_links_to_its_incidents_and_shows_its_calibration(api: Any) -> None:
    api.panel = {"detectors": [detector_table(name="coolant"), detector_table()], "modes": []}
    text = shown(page(detectors_script, detector="straggler"))
    assert text.index("<b>straggler</b>") < text.index("<b>coolant</b>")
    assert "1 unresolved incident</a>" in text
    assert "filter=detector%3D%22straggler%22" in text
    assert "thresholds of straggler" in text
    assert "No detector" in shown(page(detectors_script, detector="nope"))


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["", ""], "precision not known: no feedback"),
        (["useful"] * 8 + ["known", "wrong", ""], "precision 90 % (60 to 98 %): 9 of 10 with feedback right"),
        (["wrong"], "precision 0 % (0 to 79 %): 0 of 1 with feedback right"),
    ],
)
def test_the_precision_of_a_detector_has_its_count_and_interval(verdicts: list[str], said: str) -> None:
    assert precision_text(verdicts) == said


@pytest.mark.parametrize(
    ("minutes", "said"),
    [
        ([], "time to detect not known: no incident"),
        ([-1], "time to detect 0 s (median of 1 incident)"),
        ([2, 10, 4], "time to detect 4 min (median of 3 incidents)"),
        ([2] * 18 + [90, 100], "time to detect 2 min (median of 20 incidents, slowest tenth over 1 h 21 min)"),
    ],
)
def test_the_time_to_detect_runs_from_the_onset_to_the_incident(minutes: list[int], said: str) -> None:
    tables = [incident_table("A", onset=iso(NOW - m * 60 * SECOND), opened=iso(NOW)) for m in minutes]
    assert detection_text([parse_incident(t) for t in tables]) == said


def test_a_detector_shows_its_own_time_to_detect(api: Any) -> None:
    api.panel = {"detectors": [detector_table(name="coolant"), detector_table()], "modes": []}
    text = shown(page(detectors_script))
    assert "time to detect 5 min (median of 2 incidents)" in text
    assert "time to detect not known: no incident" in text


BUDGETS = [
    (budget_line(Channel(0.01, 0.02), 8, 10.0), r"exceeds it once in [\d,]+ years; .* without peers once in"),
    (loop_budget_line(Channel(0.01, 0.02)), r"1 false alarm per [\d,]+ years and loop, at most"),
    ("a rule on counters: no statistical alarm rate", "^a rule on counters: no statistical alarm rate$"),
    ("threshold 4 at 10 s: once in 8.6e+04 ticks (0 years)", "^threshold 4 at 10 s: once in 10 days$"),
    ("threshold 4 at 10 s: once in 720 ticks", "^threshold 4 at 10 s: once in 2.0 h$"),
    ("threshold 4 at 10 s: once in 3e+20 ticks", "once in over a million years$"),
]


@pytest.mark.parametrize(("line", "said"), BUDGETS)
def test_a_false_alarm_budget_is_said_in_times_not_in_ticks(line: str, said: str) -> None:
    assert re.search(said, plain_budget(line)), plain_budget(line)
    assert "tick" not in plain_budget(line)


BUDGET = {"detector": "straggler", "exempt": False, "allowed": 3.0, "wrong_pages": 1, "lowered": False}
USED, EARLY = "1 of 3 wrong pages used", "per node-day not known before a day has passed"


@pytest.mark.parametrize(
    ("more", "table", "said"),
    [
        ({"pages": 2}, {"days": 30.0, "node_days": 4000.0}, f"0.5 pages per 1,000 node-days (2 pages in 30 d), {USED}"),
        ({"pages": 0}, {"days": 30.0, "node_days": 4000.0}, f"0 pages per 1,000 node-days (0 pages in 30 d), {USED}"),
        ({"pages": 1}, {"days": 30.0, "node_days": None}, f"1 page, {EARLY}, {USED}"),
        ({}, {}, USED),
    ],
)
def test_pages_of_a_detector_are_per_node_day_and_beside_its_budget(
    more: dict[str, Any], table: dict[str, Any], said: str
) -> None:
    assert parse_budgets({"budgets": [BUDGET | more], **table}) == {"straggler": said}


def test_the_headline_of_a_filtered_list_agrees_with_its_number() -> None:
    query = ListQuery(text="rank")
    counts = {"unresolved": 1, "pending": 1}
    assert incidents.headline(counts, query) == "1 unresolved incident that matches, 1 not acknowledged"
    assert incidents.headline({"unresolved": 2}, query).startswith("2 unresolved incidents that match,")
