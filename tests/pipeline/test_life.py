"""The life of an incident, as docs/incidents.md describes it; time is injected."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.receivers import InhibitRule
from pipeline.config.sections import EscalationStep, Incidents
from pipeline.incidents import ledger
from pipeline.incidents.audit import check_chain, list_audit
from pipeline.incidents.cases import NoSuchIncident
from pipeline.incidents.matchers import parse_matchers
from pipeline.incidents.silences import make_scope_matchers
from pipeline.incidents.storms import STORM
from pipeline.model.errors import FleetpulseError, Outdated, Refused, UsageError
from pipeline.model.records import Caller, Finding
from tests.examples import examples
from tests.pipeline.living import HOUR, MINUTE, LivingSite

ANN = Caller("ann", "operator", "10.0.0.7")


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


def test_an_acknowledged_page_is_open_again_and_sent_again_after_two_hours(site):
    page = site.report("gpu:n0.0")
    shown = site.people.acknowledge(page, ANN, "on it")
    assert (shown.state, shown.life.acknowledged_by) == ("acknowledged", "ann")
    site.wait(119)
    assert site.state(page) == "acknowledged"
    site.wait(2)
    assert site.state(page) == "open"
    assert site.kinds(page) == ["opened", "acknowledged", "acknowledgement_expired"]
    assert site.comments(page)[-1] == "acknowledgement of ann ended"
    assert site.alerts() == [(page, "firing"), (page, "firing")]


@pytest.mark.slow
def test_an_acknowledged_ticket_stays_acknowledged(site):
    ticket = site.report("gpu:n0.0", level="ticket")
    site.people.acknowledge(ticket, ANN, "next week")
    site.wait(300)
    assert site.state(ticket) == "acknowledged"


@pytest.mark.slow
def test_an_acknowledgement_can_have_another_end_or_none(site):
    one, two = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    site.people.acknowledge(one, ANN, "lunch", hours=0.5)
    site.people.acknowledge(two, ANN, "waits for parts", hours=0)
    site.wait(31)
    assert (site.state(one), site.state(two)) == ("open", "acknowledged")
    site.wait(200)
    assert site.state(two) == "acknowledged"


def test_a_worse_severity_pages_again_although_somebody_acknowledged_the_ticket(site):
    ticket = site.report("gpu:n0.0", level="ticket")
    site.people.acknowledge(ticket, ANN, "next week")
    site.wait(5)
    site.report("gpu:n0.0", level="page")
    assert site.state(ticket) == "open"
    assert site.bodies()[-1]["alerts"][-1]["labels"]["severity"] == "critical"


def test_twice_as_many_members_page_again_although_somebody_acknowledged_the_page(site):
    page = site.report("node:n0")
    site.people.acknowledge(page, ANN, "on it")
    site.wait(5)
    site.report("gpu:n0.0", "gpu:n0.1")
    assert site.state(page) == "open"
    assert site.kinds(page)[-1] == "worsened"
    assert site.alerts()[-1] == (page, "firing")


def test_assigning_keeps_the_state_and_survives_a_restart(site):
    page = site.report("gpu:n0.0")
    site.people.assign(page, ANN, "bob", "his rack")
    site.restart()
    assert site.shown()[page].life.assignee == "bob"
    assert site.state(page) == "open"
    site.people.assign(page, ANN, "", "")
    assert site.stored(page).life.assignee == ""
    assert len(site.alerts()) == 1


@pytest.mark.slow
def test_a_page_that_nobody_takes_is_escalated_step_by_step_and_acknowledging_stops_it(tmp_path):
    steps = (EscalationStep(5.0, ("boss",)), EscalationStep(15.0, ("on-call", "boss")))
    site = LivingSite(tmp_path / "s.duckdb", Incidents(escalation=steps))
    page, other = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    site.wait(4)
    assert site.alerts("boss") == [(page, "firing"), (other, "firing")]
    site.wait(2)
    site.restart()
    site.people.acknowledge(other, ANN, "mine")
    assert site.alerts("boss").count((page, "firing")) == 2
    assert site.alerts("on-call").count((page, "firing")) == 1
    site.wait(10)
    assert site.alerts("boss").count((page, "firing")) == 3
    assert site.alerts("on-call").count((page, "firing")) == 2
    assert site.alerts("boss").count((other, "firing")) == 2
    site.wait(60)
    assert site.kinds(page) == ["opened", "escalated", "escalated"]
    assert site.stored(page).life.escalation == 2
    site.database.close()


@pytest.mark.slow
def test_a_silenced_incident_opens_without_an_alert_and_is_sent_when_the_silence_ends(site):
    matchers = parse_matchers(['rack="r0"', 'severity=~"critical|warning"'])
    silence = site.people.add_silence("silence", matchers, None, site.now + 30 * MINUTE, "new cable", ANN)
    quiet, loud = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    assert (site.state(quiet), site.state(loud)) == ("silenced", "open")
    assert site.alerts() == [(loud, "firing")]
    site.wait(31)
    assert site.state(quiet) == "open"
    assert site.alerts() == [(loud, "firing"), (quiet, "firing")]
    assert site.kinds(quiet) == ["opened", "silenced", "unsilenced"]
    assert site.comments(quiet)[-1] == f"silence {silence.id} of ann ended: new cable"


@pytest.mark.slow
def test_an_acknowledged_page_is_sent_when_its_acknowledgement_expires_and_not_when_its_silence_ends(site):
    page = site.report("gpu:n0.0")
    site.people.acknowledge(page, "bob", "mine")
    matchers = parse_matchers([r'gpu=~"n0\.0"'])
    site.people.add_silence("silence", matchers, None, site.now + 30 * MINUTE, "new cable", ANN)
    site.wait(31)
    assert site.kinds(page) == ["opened", "acknowledged", "silenced", "unsilenced"]
    ended = [(page, "firing"), (page, "resolved")]
    assert (site.state(page), site.alerts()) == ("acknowledged", ended)
    site.wait(90)
    assert (site.state(page), site.alerts()) == ("open", [*ended, (page, "firing")])


@pytest.mark.slow
def test_an_alert_that_was_sent_ends_at_its_receivers_when_a_silence_begins_and_fires_again_at_its_end(site):
    page = site.report("gpu:n0.0")
    site.people.add_silence("silence", parse_matchers(["gpu=n0.0"]), None, site.now + 30 * MINUTE, "new cable", ANN)
    assert site.alerts() == [(page, "firing"), (page, "resolved")]
    site.wait(31)
    assert site.alerts() == [(page, "firing"), (page, "resolved"), (page, "firing")]
    site.clear("gpu:n0.0")
    site.wait(15)
    assert site.alerts()[3:] == [(page, "resolved")]


PAGE_OVER_TICKET = InhibitRule(('severity="critical"',), ('severity="warning"',), ("rack",))


@pytest.mark.slow
def test_the_history_says_which_rule_and_which_incident_inhibit_an_alert_and_until_when(tmp_path):
    site = LivingSite(tmp_path / "s.duckdb", inhibit_rules=(PAGE_OVER_TICKET,))
    ticket = site.report("gpu:n0.0", level="ticket")
    page, elsewhere = site.report("gpu:n1.1"), site.report("gpu:n5.0", level="ticket")
    rule = 'rule 1: severity="critical" inhibits severity="warning", equal rack'
    assert (site.stored(ticket).life.inhibitor, site.stored(ticket).life.inhibit_rule) == (page, rule)
    assert site.comments(ticket)[-1] == f"by {page} ({rule})"
    assert (site.kinds(page), site.kinds(elsewhere)) == (["opened"], ["opened"])
    site.restart()
    site.wait(2)
    assert site.kinds(ticket) == ["opened", "inhibited"]
    site.clear("gpu:n1.1")
    site.wait(15)
    assert site.state(page) == "resolved"
    assert site.kinds(ticket) == ["opened", "inhibited", "uninhibited"]
    assert site.comments(ticket)[-1] == f"{page} no longer does ({rule})"
    assert site.stored(ticket).as_json()["inhibitor"] is None
    site.database.close()


@pytest.mark.slow
def test_an_inhibited_page_is_not_escalated_before_its_source_ends(tmp_path):
    rule = InhibitRule(('entity="gpu:n1.1"',), ('entity="gpu:n0.0"',))
    steps = Incidents(escalation=(EscalationStep(5.0, ("boss",)),))
    site = LivingSite(tmp_path / "s.duckdb", steps, inhibit_rules=(rule,))
    source, target = site.report("gpu:n1.1"), site.report("gpu:n0.0")
    site.wait(10)
    assert (site.kinds(source), site.kinds(target)) == (["opened", "escalated"], ["opened", "inhibited"])
    site.people.resolve(source, ANN, "changed")
    site.wait(4)
    assert site.kinds(target) == ["opened", "inhibited", "uninhibited"], "the time starts again"
    site.wait(2)
    assert site.kinds(target)[:4] == ["opened", "inhibited", "uninhibited", "escalated"]
    site.database.close()


def test_an_incident_that_was_sent_is_resolved_at_its_receivers_also_under_a_silence(site):
    page = site.report("gpu:n0.0")
    site.people.add_silence("silence", parse_matchers(["gpu=n0.0"]), None, site.now + HOUR, "known", ANN)
    assert site.state(page) == "silenced"
    site.clear("gpu:n0.0")
    site.wait(12)
    assert site.state(page) == "resolved"
    assert site.alerts() == [(page, "firing"), (page, "resolved")]


def test_labels_that_change_under_a_silence_end_the_alert_that_was_sent_before(site):
    ticket = site.report("gpu:n0.0", level="ticket")
    made = site.people.add_silence("silence", parse_matchers(["gpu=n0.0"]), None, site.now + HOUR, "known", ANN)
    site.report("gpu:n0.0", level="page")
    assert [body["alerts"][0]["labels"]["severity"] for body in site.bodies()] == ["warning", "warning"]
    assert site.alerts() == [(ticket, "firing"), (ticket, "resolved")]
    site.people.expire_silence(made.id, ANN)
    assert site.bodies()[-1]["alerts"][0]["labels"]["severity"] == "critical"


def test_a_silence_is_previewed_edited_extended_and_expired_and_each_version_is_in_the_audit(site):
    page = site.report("gpu:n0.0")
    matchers = parse_matchers(['node=~"n0|n1"', "severity!=info"])
    assert [i.id for i in site.people.preview_silence(matchers)] == [page]
    assert site.people.preview_silence(parse_matchers(["node=n7"])) == []
    made = site.people.add_silence("silence", matchers, None, site.now + 10 * MINUTE, "cable", ANN)
    longer = site.people.edit_silence(made.id, ANN, 1, ends=site.now + HOUR)
    site.wait(11)
    assert site.state(page) == "silenced"
    other = site.people.edit_silence(made.id, ANN, longer.version, matchers=parse_matchers(["node=n7"]))
    assert (site.state(page), other.version) == ("open", 3)
    with pytest.raises(Outdated, match="is version 3 now"):
        site.people.edit_silence(made.id, ANN, 1, reason="old screen")
    site.people.expire_silence(made.id, ANN)
    with pytest.raises(UsageError, match="has ended"):
        site.people.edit_silence(made.id, ANN, ends=site.now + HOUR)
    rows = [row for row in list_audit(site.database.connection) if row["target"] == made.id]
    assert [row["action"] for row in rows] == ["expire silence", "edit silence", "edit silence", "add silence"]
    assert {(row["actor"], row["role"], row["origin"]) for row in rows} == {("ann", "operator", "10.0.0.7")}
    assert rows[2]["before"]["ends"] < rows[2]["after"]["ends"]


@pytest.mark.parametrize(
    ("matchers", "why"),
    [
        (["a"], "expected LABEL=VALUE"),
        (['a=~"("'], "Invalid regular"),
        (["a!=b"], "silences everything"),
        ([], "found 0"),
    ],
)
def test_matchers_that_alertmanager_would_refuse_are_refused(matchers, why):
    with pytest.raises(UsageError, match=why):
        parse_matchers(matchers)


@pytest.mark.slow
def test_maintenance_records_findings_silences_incidents_and_judges_again_15_minutes_after_its_end(site):
    scopes = make_scope_matchers(["rack:r0", "node:n7"])
    site.people.add_silence("maintenance", scopes, None, site.now + HOUR, "pump swap", ANN)
    inside, outside = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    assert (site.state(inside), site.state(outside)) == ("silenced", "open")
    assert site.database.connection.execute("SELECT count(*) FROM findings").fetchone() == (2,)
    site.wait(60 + 14)
    assert site.state(inside) == "silenced"
    site.wait(2)
    assert site.state(inside) == "open"
    assert (inside, "firing") in site.alerts()


def test_an_incident_with_members_outside_the_maintenance_window_is_not_silenced(site):
    site.people.add_silence("maintenance", make_scope_matchers(["node:n0"]), None, site.now + HOUR, "swap", ANN)
    page = site.report("rack:r0")
    site.report("node:n0", "node:n1")
    site.people.merge(page, [i for i in site.shown() if i != page], ANN, "one fault") if len(site.shown()) > 1 else None
    assert site.state(page) == "open"


@pytest.mark.slow
def test_pages_after_the_twentieth_in_ten_minutes_are_one_storm_page(tmp_path):
    site = LivingSite(tmp_path / "s.duckdb")
    first = [site.report(f"host:h{i}") for i in range(20)]
    site.wait(1)
    later = [site.report(f"host:x{i}") for i in range(15)]
    storm = next(i for i in site.shown().values() if i.detector == STORM)
    fired = [incident for incident, _ in site.alerts()]
    assert fired[:20] == first
    assert set(fired[20:]) == {storm.id}
    assert list(storm.life.represents) == later
    assert {site.shown()[i].life.inhibited_by for i in later} == {(storm.id,)}
    assert storm.summary == "Alert storm: 15 more pages, all Hot"
    storm_alert = site.bodies()[-1]["alerts"][0]["annotations"]
    assert storm_alert["description"].startswith("Further pages since 2026-")
    assert "host:x0, host:x1" in storm_alert["description"]
    assert site.bodies()[20]["alerts"][0]["labels"]["alertname"] == "AlertStorm"
    site.restart()
    site.people.acknowledge(storm.id, ANN, "the whole hall")
    assert {site.state(i) for i in later} == {"acknowledged"}
    with pytest.raises(Refused, match="ends with the incidents"):
        site.people.resolve(storm.id, ANN, "over")
    site.wait(10)
    alone = site.report("host:y")
    assert site.alerts()[-1] == (alone, "firing")
    site.active = {}
    site.wait(12)
    assert site.state(storm.id) == "resolved"
    assert [i for i, kind in site.alerts() if kind == "resolved" and i in later] == []
    site.database.close()


def flap(site, entity, times):
    for _ in range(times):
        site.clear(entity)
        site.wait(11)
        site.report(entity)


@pytest.mark.slow
def test_an_incident_that_flaps_stays_open_until_it_was_quiet_for_longer(site):
    page = site.report("gpu:n0.0")
    flap(site, "gpu:n0.0", 3)
    before = len(site.alerts())
    flap(site, "gpu:n0.0", 1)
    assert site.state(page) == "open"
    assert site.kinds(page)[-2:] == ["held_open", "returned"]
    assert len(site.alerts()) == before
    site.clear("gpu:n0.0")
    site.wait(12)
    site.restart()
    assert site.state(page) == "open"
    site.wait(31)
    assert site.state(page) == "resolved"
    assert site.alerts()[-1] == (page, "resolved")


def flap_every_25_minutes(site, entity, times):
    for _ in range(times):
        site.clear(entity)
        site.wait(20)
        site.report(entity)
        site.wait(5)


def test_what_returns_every_25_minutes_is_told_three_times_and_then_when_it_stayed_away(site):
    page = site.report("gpu:n0.0")
    site.wait(5)
    flap_every_25_minutes(site, "gpu:n0.0", 12)
    assert [kind for id_, kind in site.alerts() if id_ == page] == [*["firing", "resolved"] * 3, "firing"]
    site.restart()
    site.clear("gpu:n0.0")
    site.wait(39)
    assert site.state(page) == "open"
    site.wait(3)
    assert site.alerts()[-1] == (page, "resolved")
    assert len(site.alerts()) == 8


def test_a_person_who_reopens_a_flap_that_is_held_open_sends_it_to_nobody_again(site):
    page = site.report("gpu:n0.0")
    flap(site, "gpu:n0.0", 3)
    site.clear("gpu:n0.0")
    site.wait(11)
    site.people.acknowledge(page, ANN, "known")
    before = len(site.alerts())
    site.people.reopen(page, ANN, "not over")
    assert site.kinds(page)[-1] == "returned"
    assert (len(site.alerts()), site.state(page)) == (before, "acknowledged")


@pytest.mark.parametrize(
    ("again", "kind"),
    [
        ({"entities": ["gpu:n0.0"], "level": "page"}, "severity_raised"),
        ({"entities": ["gpu:n0.0"], "level": "ticket", "also": "zap"}, "worsened"),
        ({"entities": ["node:n0", "gpu:n0.0", "gpu:n0.1", "gpu:n0.2"], "level": "ticket"}, "worsened"),
        ({"entities": ["gpu:n0.0"], "level": "ticket"}, "returned"),
    ],
)
def test_a_flap_hides_nothing_worse_also_if_it_is_acknowledged(site, again, kind):
    root = again["entities"][0]
    ticket = site.report(root, level="ticket")
    for _ in range(3):
        site.clear(root)
        site.wait(11)
        site.report(root, level="ticket")
    site.people.acknowledge(ticket, ANN, "next week")
    site.clear(root)
    site.wait(11)
    before = len(site.alerts())
    if also := again.get("also"):
        site.active[also, root] = Finding(site.now, site.now, root, also, "ticket", 1.0, "too")
    site.report(*again["entities"], level=again["level"])
    assert site.kinds(ticket)[-2:] == ["held_open", kind]
    if kind == "returned":
        assert (site.state(ticket), len(site.alerts())) == ("acknowledged", before)
    else:
        assert site.state(ticket) == "open"
        assert site.alerts()[-1] == (ticket, "firing")
        assert len(site.alerts()) > before


@pytest.mark.slow
def test_a_slow_gpu_that_each_new_job_finds_again_is_one_incident_that_goes_on(site):
    slow = site.report("rank:1.0", detector="straggler")
    assert site.shown()[slow].cause == "gpu:n0.0"
    site.people.acknowledge(slow, ANN, "swap on Friday", hours=0)
    alerts = len(site.alerts())
    site.topology.remove_entities(["rank:1.0"])
    site.clear("rank:1.0")
    site.wait(90)
    assert site.state(slow) == "acknowledged"
    site.restart()
    site.topology.merge({"rank:2.5": ("job:2", "gpu:n0.0")})
    assert site.report("rank:2.5", detector="straggler") == slow
    assert site.kinds(slow) == ["opened", "acknowledged", "held_open", "returned"]
    assert (site.state(slow), len(site.alerts())) == ("acknowledged", alerts)


@pytest.mark.slow
def test_a_slow_gpu_resolves_when_another_job_shows_it_as_normal(site):
    slow = site.report("rank:1.0", detector="straggler")
    site.topology.remove_entities(["rank:1.0"])
    site.clear("rank:1.0")
    site.wait(30)
    site.topology.merge({"rank:2.5": ("job:2", "gpu:n0.0")})
    site.wait(13)
    assert site.state(slow) == "resolved"


@pytest.mark.slow
def test_missing_telemetry_never_resolves_an_incident(site):
    page = site.report("gpu:n0.0")
    site.silent.add("gpu:n0.0")
    site.clear("gpu:n0.0")
    site.wait(24 * 60)
    assert site.state(page) == "open"
    site.silent.clear()
    site.wait(12)
    assert site.state(page) == "resolved"


@pytest.mark.slow
def test_a_person_reopens_an_incident_also_one_of_long_ago_and_only_a_person_resolves_it(site):
    page = site.report("gpu:n0.0")
    site.people.resolve(page, ANN, "swapped")
    site.clear("gpu:n0.0")
    site.wait(300)
    site.restart()
    assert page not in site.engine.desk.incidents
    site.people.reopen(page, ANN, "it is back in the log")
    assert site.alerts()[-1] == (page, "firing")
    site.wait(60)
    assert site.state(page) == "open"
    site.people.resolve(page, ANN, "really swapped")
    assert site.kinds(page) == ["opened", "resolved", "reopened", "resolved"]


@pytest.mark.slow
def test_what_was_merged_by_a_person_stays_merged_and_its_findings_move(site):
    one, two = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    kept = site.people.merge(one, [two], ANN, "same firmware")
    assert set(kept.members) == {"gpu:n0.0", "gpu:n5.0"}
    assert (site.state(two), site.stored(two).life.merged_into) == ("resolved", one)
    assert site.alerts()[-1] == (two, "resolved")
    homes = site.database.connection.execute("SELECT DISTINCT incident FROM findings").fetchall()
    assert homes == [(one,)]
    site.wait(60)
    site.restart()
    assert site.report("gpu:n5.0", onset=site.now) == one


@pytest.mark.slow
def test_what_was_split_by_a_person_stays_apart_with_its_findings(site):
    one = site.report("node:n0")
    site.report("gpu:n0.1")
    assert set(site.shown()[one].members) == {"node:n0", "gpu:n0.1"}
    site.people.assign(one, ANN, "bob", "")
    other = site.people.split(one, ["gpu:n0.1"], ANN, "another fault")
    assert other.members == ("gpu:n0.1",)
    assert other.life.assignee == "bob"
    assert site.stored(one).members == ("node:n0",)
    homes = dict(site.database.connection.execute("SELECT entity, incident FROM findings").fetchall())
    assert homes == {"node:n0": one, "gpu:n0.1": other.id}
    site.wait(5)
    site.restart()
    site.wait(5)
    assert site.incident_of("gpu:n0.1") == other.id
    with pytest.raises(Refused, match="not all"):
        site.people.split(one, ["node:n0"], ANN, "nothing would stay")


@pytest.mark.slow
def test_feedback_counts_in_the_page_budget_and_can_be_taken_back(site):
    page = site.report("gpu:n0.0")
    counted = lambda: site.database.connection.execute("SELECT incident, reason FROM wrong_pages").fetchall()  # noqa: E731
    site.people.give_feedback(page, ANN, "wrong", "a test run")
    assert counted() == [(page, "marked as a wrong page")]
    site.people.give_feedback(page, ANN, "useful", "it was real")
    assert counted() == []
    site.clear("gpu:n0.0")
    site.wait(12)
    site.people.give_feedback(page, ANN, "known", "ticket 4711")
    assert (counted(), site.stored(page).life.feedback) == ([], "known")


def test_a_write_for_another_version_is_refused_and_changes_nothing(site):
    page = site.report("gpu:n0.0")
    version = site.people.read_version(page)
    site.people.acknowledge(page, ANN, "mine", version)
    with pytest.raises(Outdated, match=f"is version {version + 1} now, not {version}"):
        site.people.resolve(page, Caller("bob"), "mine", version)
    assert site.kinds(page) == ["opened", "acknowledged"]


def test_every_act_is_in_the_audit_with_its_history_or_neither_is(site, monkeypatch):
    page = site.report("gpu:n0.0")
    monkeypatch.setattr("pipeline.engine.people.write_audit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        site.people.acknowledge(page, ANN, "mine")
    monkeypatch.undo()
    assert (site.kinds(page), site.shown()[page].state) == (["opened"], "open")
    site.people.acknowledge(page, ANN, "mine")
    (row,) = list_audit(site.database.connection)
    assert (row["action"], row["target"], row["reason"], row["outcome"]) == ("acknowledge", page, "mine", "done")
    assert (row["before"]["state"], row["after"]["state"]) == ("open", "acknowledged")


def test_a_changed_or_removed_row_of_the_audit_is_found(site):
    page = site.report("gpu:n0.0")
    for text in "abcd":
        site.people.comment(page, ANN, text)
    assert check_chain(site.database.connection) is None
    site.database.connection.execute("UPDATE audit SET reason = 'x' WHERE number = 2")
    assert check_chain(site.database.connection) == 2
    site.database.connection.execute("UPDATE audit SET reason = 'b' WHERE number = 2")
    site.database.connection.execute("DELETE FROM audit WHERE number = 3")
    assert check_chain(site.database.connection) == 4


ENTITIES = ["gpu:n0.0", "gpu:n0.1", "gpu:n5.0", "node:n0", "rack:r1"]
STEPS = st.one_of(
    st.tuples(st.just("report"), st.sampled_from(ENTITIES), st.sampled_from(["suspect", "ticket", "page"])),
    st.tuples(st.just("clear"), st.sampled_from(ENTITIES), st.none()),
    st.tuples(st.just("wait"), st.integers(1, 40), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
    st.tuples(st.just("silence"), st.sampled_from(ENTITIES), st.integers(1, 60)),
    st.tuples(
        st.sampled_from(["acknowledge", "resolve", "reopen", "comment", "assign", "merge", "split", "feedback"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
)


def act(site, verb, first, second):
    """One step of a random life. What people may not do is refused and changes nothing."""
    ids = sorted(site.shown())
    if verb == "report":
        site.report(first, level=second)
    elif verb in ("clear", "wait", "restart"):
        getattr(site, verb)(*(() if first is None else (first,)))
    elif verb == "silence":
        site.people.add_silence("silence", make_scope_matchers([first]), None, site.now + second * MINUTE, "x", ANN)
    elif ids:
        one, other = ids[first % len(ids)], ids[second % len(ids)]
        extra = {"assign": ("bob",), "feedback": ("known",), "merge": ([other],)}.get(verb, ())
        if verb == "split":
            extra = (site.shown()[one].members[:1],)
        name = {"feedback": "give_feedback"}.get(verb, verb)
        words = (*extra, ANN, "x") if verb in ("merge", "split") else (ANN, *extra, "x")
        getattr(site.people, name)(one, *words)


def history(site):
    rows = site.database.connection.execute(
        "SELECT incident, number, epoch_us(time), kind, actor, comment, incident_json FROM history ORDER BY 1, 2"
    )
    return rows.fetchall()


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=3, max_size=25))
def test_any_life_has_an_immutable_history_from_which_its_state_follows(tmp_path_factory, steps):
    site = LivingSite(tmp_path_factory.mktemp("life") / "store.duckdb", receivers=("on-call",))
    before = []
    for verb, first, second in steps:
        kept = (history(site), dict(site.shown())) if verb not in ("report", "clear", "wait", "silence") else None
        try:
            act(site, verb, first, second)
        except FleetpulseError:
            assert kept is not None
            assert (history(site), site.shown()) == kept
        after = history(site)
        assert set(before) <= set(after)
        before = after
        check_life(site, after)
    assert check_chain(site.database.connection) is None
    site.database.close()


def check_life(site, rows):
    """Numbers have no holes; the newest row has the stored life and state; memory has what the store has."""
    for id_, group in itertools.groupby(rows, key=lambda row: row[0]):
        mine = list(group)
        assert [row[1] for row in mine] == list(range(1, len(mine) + 1))
        newest, stored = json.loads(mine[-1][6]), site.stored(id_)
        assert newest["life"] == json.loads(ledger.encode_life(stored.life))
        assert newest["state"] == stored.state
        assert site.shown().get(id_, stored).life == stored.life
        resolved = stored.resolved is not None
        silenced, taken = bool(stored.life.silenced_by), bool(stored.life.acknowledged_by)
        wanted = "resolved" if resolved else "silenced" if silenced else "acknowledged" if taken else "open"
        assert stored.state == wanted


def test_acts_on_an_unknown_incident_are_refused(site):
    for act_ in (site.people.acknowledge, site.people.resolve, site.people.reopen, site.people.comment):
        with pytest.raises(NoSuchIncident):
            act_("inc-nope", ANN, "x")


def test_acts_on_an_incident_that_is_only_stored_do_not_read_within_the_transaction_of_another_thread(site):
    with site.database.transaction() as connection:
        connection.execute(
            """INSERT INTO incidents VALUES ('inc-new', 'c', now(), now(), NULL, 'page', [], 1, 'open', 's', false,
               'd', 'e', now(), NULL, NULL)"""
        )
        for act_ in (site.people.comment, site.people.reopen):
            with pytest.raises(NoSuchIncident):
                act_("inc-new", ANN, "x")


def make_version_3(path):
    """Gives a store the tables of version 3, with a mute and an acknowledged incident."""
    connection = duckdb.connect(str(path))
    connection.execute("""
        DROP VIEW mutes; DROP TABLE silences; DROP TABLE audit; ALTER TABLE incidents DROP COLUMN life;
        CREATE TABLE mutes (id VARCHAR PRIMARY KEY, detector VARCHAR NOT NULL, scope VARCHAR NOT NULL,
            since TIMESTAMPTZ NOT NULL, "until" TIMESTAMPTZ NOT NULL, reason VARCHAR NOT NULL, "user" VARCHAR NOT NULL,
            ended TIMESTAMPTZ, ended_by VARCHAR);
        INSERT INTO mutes VALUES
            ('m1', 'hot', '*', '2026-01-01', '2027-01-01', 'paste', 'ann', NULL, NULL),
            ('m2', '*', 'rack:r9', '2026-01-01', '2027-01-01', 'it''s', 'bob', '2026-01-02', 'eve');
        UPDATE incidents SET state = 'acknowledged';
        INSERT INTO history SELECT id, 2, opened, 'acknowledged', 'ann', 'mine', '{}' FROM incidents;
        UPDATE meta SET value = '3' WHERE key = 'schema_version'""")
    connection.close()


@pytest.mark.slow
def test_a_store_of_version_3_opens_with_its_mutes_as_silences_and_its_acknowledgements(tmp_path):
    site = LivingSite(tmp_path / "s.duckdb")
    page = site.report("gpu:n0.0")
    site.database.close()
    make_version_3(site.path)
    site.start()
    rows = site.database.connection.execute('SELECT id, detector, scope, "user", ended_by FROM mutes ORDER BY id')
    assert rows.fetchall() == [("m1", "hot", "*", "ann", None), ("m2", "*", "rack:r9", "bob", "eve")]
    assert {s.id: len(s.matchers) for s in site.people.list_silences("mute")} == {"m1": 1, "m2": 1}
    shown = site.shown()[page]
    assert (shown.state, shown.life.acknowledged_by, shown.life.acknowledged_until) == ("acknowledged", "ann", None)
    site.wait(10)
    assert site.people.comment(page, ANN, "still mine").state == "acknowledged"
    site.restart()
    assert site.state(page) == "acknowledged"
    site.database.close()


CHILD = """
import pathlib, sys
from tests.pipeline.living import LivingSite
site = LivingSite(pathlib.Path(sys.argv[1]))
page = site.report("gpu:n0.0")
print(page, flush=True)
for number in range(10_000):
    verb = (site.people.comment, site.people.acknowledge)[number % 2]
    verb(page, "ann", str(number))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_what_was_answered_before_a_kill_is_there_after_it_with_its_audit(tmp_path):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", CHILD, str(tmp_path / "s.duckdb")]
    environ = {**os.environ, "PYTHONPATH": "."}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=root, env=environ) as child:
        page = child.stdout.readline().strip()
        for _ in range(25):
            answered = int(child.stdout.readline())
        child.kill()
        answered = max([answered, *map(int, child.stdout.read().split())])
    site = LivingSite(tmp_path / "s.duckdb")
    rows = site.database.connection.execute("SELECT comment FROM history WHERE incident = ? AND actor = 'ann'", [page])
    kept = {int(text) for (text,) in rows.fetchall()}
    audited = {int(row["reason"]) for row in list_audit(site.database.connection, most=10_000)}
    assert set(range(answered + 1)) <= kept
    assert kept == audited
    assert max(kept) <= answered + 1
    assert check_chain(site.database.connection) is None
    check_life(site, history(site))
    site.database.close()
