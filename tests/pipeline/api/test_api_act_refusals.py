"""Attempts to get an act done without the right: each is refused, leaves a row of the audit, and changes no node."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

import fleetpulse
from pipeline.incidents.audit import list_audit
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


@pytest.mark.parametrize("case", CASES)
def test_an_attempt_without_the_right_is_refused_with_a_row_of_the_audit(case, served):
    attempt, status = CASES[case]
    assert attempt(served) == status
    assert list_audit(served.site.database.connection)[0]["outcome"] == "refused"
    served.executor.run_once()
    assert served.scheduler.log == []


def test_a_copied_owner_mark_is_refused_with_exit_code_4(served, monkeypatch, capsys):
    mark = held(served)["mark"]
    served.scheduler.by_hand("n07", True, f"{mark} looks like ours")
    act = served.propose("release", "n07", **person(served, "alice"))
    assert (act["state"], act["result"]["reason"].partition(":")[0]) == ("refused", "owner")
    assert list_audit(served.site.database.connection)[0]["action"] == "refuse act"
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["operator"])
    assert fleetpulse.main(["act", "run", act["id"], "--config", str(served.file)]) == 4
    assert "refused: owner: n07" in capsys.readouterr().err
    assert served.scheduler.nodes["n07"].out


def test_an_xid_from_a_sender_that_does_not_own_the_node_never_becomes_an_incident(site):
    site.send_events("evil", Event(NOW, "gpu:h2.0", "xid", {"xid": 79, "text": "GPU has fallen off the bus"}))
    site.send_events("h2", Event(NOW, "gpu:h2.1", "xid", {"xid": 79, "text": "GPU has fallen off the bus"}))
    site.drain()
    assert site.rows("SELECT entity FROM events WHERE kind = 'xid'") == [("gpu:h2.1",)]
    assert site.rows("SELECT reason FROM dead_letter") == [
        ("owner: event xid: 'gpu:h2.0': belongs to node h2 by its name",)
    ]
