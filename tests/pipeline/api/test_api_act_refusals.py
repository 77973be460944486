"""Attempts to get an act done without the right: each is refused, leaves a row of the audit, and changes no node."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest

import fleetpulse
from pipeline.acts.remote import RemoteBoard
from pipeline.commands.forgeries import MOST_SENDERS, ForgeryAudit
from pipeline.incidents.audit import check_chain, list_audit
from pipeline.model.errors import Refused
from pipeline.model.records import SECOND, Event
from tests.pipeline.api.test_api_acts import Served
from tests.pipeline.conftest import NOW


@pytest.fixture
def served(tmp_path, monkeypatch):
    made = Served(tmp_path, monkeypatch)
    yield made
    made.close()


def person(served, name, **more):
    return {"token": "dashboard", "person": name, **more}


def held(served):
    """n03 is held for alice, approved by bob."""
    act = served.propose(**person(served, "alice"))
    served.approve(act, **person(served, "bob"))
    for _ in range(3):
        served.executor.run_once()
    served.scheduler.log.clear()
    return act


def without_token(served):
    url = f"http://127.0.0.1:{served.server.port}/api/v1/acts"
    body = json.dumps({"verb": "hold", "targets": ["node:n03"], "reason": "x"}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def as_viewer(served):
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "x"}
    return served.call("POST", "/acts", body, token="viewer")[0]


def after_it_expired(served):
    act = served.propose(**person(served, "alice"))
    served.site.now += 25 * 3600 * SECOND
    return served.approve(act, **person(served, "bob"))[0]


def of_ones_own(served):
    held(served)
    act = served.propose("evict", **person(served, "alice"))
    body = {"plan": act["plan"]["hash"], "comment": "yes", "typed": "n03"}
    return served.call("POST", f"/acts/{act['id']}/approve", body, **person(served, "alice"))[0]


def by_a_token(served):
    return served.approve(served.propose(), token="admin")[0]


def of_a_changed_plan(served):
    act = served.propose(**person(served, "alice"))
    body = {"plan": "0" * 64, "comment": "yes"}
    return served.call("POST", f"/acts/{act['id']}/approve", body, **person(served, "bob"))[0]


def replayed(served):
    act = held(served)
    return served.approve(act, **person(served, "bob"))[0]


def with_a_key_of_another_request(served):
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "x", "key": "k1"}
    served.call("POST", "/acts", body)
    return served.call("POST", "/acts", {**body, "targets": ["node:n04"]})[0]


def as_the_executor(served):
    return served.call("POST", "/executor/claim", {"executor": "x"}, token="admin")[0]


CASES = {
    "no token": (without_token, 401),
    "a viewer": (as_viewer, 403),
    "an expired act": (after_it_expired, 403),
    "one's own act": (of_ones_own, 403),
    "a token that approves": (by_a_token, 403),
    "a changed plan": (of_a_changed_plan, 403),
    "a replayed approval": (replayed, 403),
    "a stolen idempotency key": (with_a_key_of_another_request, 403),
    "another token than the executor's": (as_the_executor, 403),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("case", CASES)
def test_an_attempt_without_the_right_is_refused_with_a_row_of_the_audit(case, served):
    attempt, status = CASES[case]
    assert attempt(served) == status
    assert list_audit(served.site.database.connection)[0]["outcome"] == "refused"
    served.executor.run_once()
    assert served.scheduler.log == []


@pytest.mark.slow
def test_a_copied_owner_mark_is_refused_with_exit_code_4(served, monkeypatch, capsys):
    mark = held(served)["mark"]
    served.scheduler.by_hand("n07", True, f"{mark} looks like ours")
    act = served.propose("release", "n07", **person(served, "alice"))
    assert (act["state"], act["result"]["reason"].partition(":")[0]) == ("refused", "owner")
    newest = list_audit(served.site.database.connection)[0]
    assert (newest["action"], newest["outcome"]) == ("refuse act", "refused")
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["operator"])
    assert fleetpulse.main(["act", "run", act["id"], "--config", str(served.file)]) == 4
    assert "refused: owner: n07" in capsys.readouterr().err
    assert served.scheduler.nodes["n07"].out


def plan(served, token="operator"):
    return ("act", "plan", "hold", "n03", "--reason", "x", "--wait", "1"), token


def plan_without_token(served):
    return plan(served, None)


def plan_as_viewer(served):
    return plan(served, "viewer")


def run_expired(served):
    act = served.propose(**person(served, "alice"))
    served.approve(act, **person(served, "bob"))
    served.site.now += 16 * 60 * SECOND  # an approval holds for 15 minutes
    served.board.expire_due()
    return ("act", "run", act["id"]), "operator"


def approve_own(served):
    return ("act", "approve", served.propose()["id"]), "operator"


def approve_by_token(served):
    return ("act", "approve", served.propose(**person(served, "alice"))["id"]), "admin"


def approve_before_the_plan(served):
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "x"}
    made = served.call("POST", "/acts", body, **person(served, "alice"))[1]
    return ("act", "approve", made["id"]), "admin"


def run_changed(served):
    act = served.propose(**person(served, "alice"))
    served.approve(act, **person(served, "bob"))
    served.scheduler.by_hand("n03", True, "NHC: check_fs failed")
    served.executor.run_once()
    return ("act", "run", act["id"]), "operator"


def approve_again(served):
    return ("act", "approve", held(served)["id"]), "admin"


def cancel_what_is_done(served):
    return ("act", "cancel", held(served)["id"], "--comment", "x"), "operator"


COMMANDS = {
    "no token": (plan_without_token, "unknown"),
    "a viewer": (plan_as_viewer, "viewer"),
    "an expired approval": (run_expired, "fleetpulse"),
    "one's own act": (approve_own, "operator"),
    "a token that approves": (approve_by_token, "admin"),
    "a token that approves what has no plan yet": (approve_before_the_plan, "admin"),
    "a changed plan": (run_changed, "executor"),
    "a replayed approval": (approve_again, "admin"),
    "a cancel of a finished act": (cancel_what_is_done, "operator"),
}
"""The command that is attempted, and the author in the newest row of the audit."""


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("case", COMMANDS)
def test_an_attempt_by_command_is_refused_with_exit_code_4_and_a_row_of_the_audit(case, served, monkeypatch, capsys):
    attempt, actor = COMMANDS[case]
    words, token = attempt(served)
    monkeypatch.delenv("FLEETPULSE_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens[token])
    assert fleetpulse.main([*words, "--config", str(served.file)]) == 4, capsys.readouterr().err
    newest = list_audit(served.site.database.connection)[0]
    assert newest["actor"] == actor
    assert newest["outcome"] == "refused" or newest["after"]["state"] in ("refused", "expired")
    monkeypatch.delenv("FLEETPULSE_TOKEN", raising=False)  # the executor has its own token
    served.executor.run_once()
    assert served.scheduler.log == []


def test_a_refusal_says_by_its_type_whether_another_token_would_do(served):
    served.tokens["unknown"] = "x" * 40
    held(served)
    act = served.propose("evict", **person(served, "alice"))
    body = {"plan": act["plan"]["hash"], "comment": "yes", "typed": "n03"}
    answers = [
        served.call("POST", f"/acts/{act['id']}/approve", body, **person(served, "alice")),
        served.call("POST", f"/acts/{act['id']}/approve", body, token="viewer"),
        served.call("POST", f"/acts/{act['id']}/approve", body, token="viewer", person="alice"),
        served.call("GET", "/acts", token="unknown"),
    ]
    assert [(status, found["type"].rpartition(":")[2]) for status, found in answers] == [
        (403, "refused"),
        (403, "no-right"),
        (403, "no-right"),
        (401, "no-right"),
    ]


def test_an_executor_with_another_token_is_refused_with_exit_code_4(served, tmp_path):
    file = tmp_path / "other.token"
    file.write_text(f"admin:{served.tokens['admin']}\n")
    other = replace(served.config, executor=replace(served.config.executor, token_file=file))
    with pytest.raises(Refused) as refused:
        RemoteBoard(other).claim("other")
    assert refused.value.exit_code == 4
    assert list_audit(served.site.database.connection)[0]["outcome"] == "refused"


def test_a_token_of_the_environment_that_overrides_the_executors_file_is_named_in_the_refusal(served, monkeypatch):
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["admin"])
    with pytest.raises(Refused) as refused:
        RemoteBoard(served.config).claim("executor")
    file = served.config.executor.token_file
    assert f"; the token is that of FLEETPULSE_TOKEN, not of {file} (HTTP 403)" in str(refused.value)
    monkeypatch.delenv("FLEETPULSE_TOKEN")
    assert RemoteBoard(served.config).claim("executor") == []


@pytest.mark.slow
def test_a_forged_owner_mark_is_not_released_over_the_api_either(served):
    mark = held(served)["mark"]
    served.scheduler.by_hand("n07", True, f"{mark} looks like ours")
    act = served.propose("release", "n07", **person(served, "alice"))
    assert served.approve(act, **person(served, "bob"))[0] == 403
    assert list_audit(served.site.database.connection)[0]["outcome"] == "refused"
    assert served.scheduler.log == []


# --- findings of senders that do not own the node -----------------------------------------------------------


def lost(entity):
    return Event(NOW, entity, "xid", {"xid": 79, "text": "GPU has fallen off the bus"})


def watch(site, ingest):
    """The audit of forgeries over a store and its ingest."""
    return ForgeryAudit(SimpleNamespace(ingest=ingest, database=site.database, clock=lambda: NOW))


def test_a_forged_finding_never_becomes_an_incident_and_is_a_row_of_the_audit(site):
    site.send_events("evil", lost("gpu:h2.0"))
    site.send_events("h2", lost("gpu:h2.1"))
    ingest = site.drain()
    assert site.rows("SELECT entity FROM events WHERE kind = 'xid'") == [("gpu:h2.1",)]
    reason = "owner: event xid: 'gpu:h2.0': belongs to node h2 by its name"
    assert site.rows("SELECT reason FROM dead_letter") == [(reason,)]
    audit = watch(site, ingest)
    assert (audit.run(), audit.run()) == (True, False)
    (row,) = list_audit(site.database.connection)
    said = [row[name] for name in ("actor", "action", "target", "outcome", "reason")]
    assert said == ["agent 'evil'", "report", "'evil'", "refused", reason]
    assert check_chain(site.database.connection) is None


@pytest.mark.slow
def test_forgeries_are_rows_once_per_sender_and_minute_also_after_a_restart(site):
    site.send_events("evil", *(lost(f"gpu:h{number}.0") for number in range(2, 30)))
    site.send_events("<b>evil", lost("gpu:h2.0"))
    for _ in range(2):
        watch(site, site.drain()).run()
        assert sorted(row["target"] for row in list_audit(site.database.connection)) == ["'<b>evil'", "'evil'"]


@pytest.mark.slow
def test_a_flood_of_made_up_senders_does_not_fill_the_audit(site):
    for number in range(MOST_SENDERS + 8):
        site.send_events(f"evil{number}", lost("gpu:h2.0"))
    watch(site, site.drain()).run()
    assert len(list_audit(site.database.connection)) == MOST_SENDERS


def test_an_act_that_changed_since_it_was_read_is_neither_approved_nor_cancelled(served):
    act = served.propose(**person(served, "alice"))
    approval, why = {"plan": act["plan"]["hash"], "comment": "yes"}, {"comment": "no"}
    old, now = ({"If-Match": f'"{version}"'} for version in (act["version"] - 1, act["version"]))
    bob = person(served, "bob")
    assert served.call("POST", f"/acts/{act['id']}/approve", approval, headers=old, **bob)[0] == 412
    assert served.call("POST", f"/acts/{act['id']}/cancel", why, headers=old, **bob)[0] == 412
    assert served.call("POST", "/acts/none/cancel", why, headers=old, **bob)[0] == 404
    status, approved = served.call("POST", f"/acts/{act['id']}/approve", approval, headers=now, **bob)
    assert (status, approved["state"], approved["version"] > act["version"]) == (200, "approved", True)
    assert served.call("POST", f"/acts/{act['id']}/cancel", why, headers=now, **bob)[0] == 412
    assert served.call("POST", f"/acts/{act['id']}/cancel", why, **bob)[0] == 200
