"""Routes of receivers on a real service: PagerDuty's webhook to us, delivery status, dead messages sent again."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.api.server import create_app
from pipeline.commands import notify
from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.service import PipelineService
from pipeline.config.receivers import Notify
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.incidents.ledger import NOT_CONFIGURED
from pipeline.model.records import SECOND, Finding
from pipeline.notify.delivery import Answer, Request
from pipeline.notify.receivers import Message
from tests.pipeline.api.conftest import InProcess
from tests.pipeline.notifier_harness import Receiver
from tests.pipeline.test_service import EmptyJudge

NOW = 1_790_000_000 * SECOND
TOKEN = "a-token-of-some-length"
SECRET = "a-secret-of-pagerduty"


class Served:
    """A service with one PagerDuty receiver and one webhook, and a client of its API."""

    def __init__(self, folder: Path, hook: Receiver) -> None:
        for name, text in (("key", "k" * 32), ("secret", SECRET), ("tokens", f"ada:{TOKEN}")):
            (folder / name).write_text(text)
        url = f"http://127.0.0.1:{hook.server_port}"
        pager = {"name": "pager", "routing_key_file": f"{folder}/key", "url": url}
        table = {
            "store": {"path": f"{folder}/store.duckdb"},
            "spool": {"directory": f"{folder}/spool"},
            "api": {"token_file": f"{folder}/tokens"},
            "notify": {
                "webhooks": [{"name": "hook", "url": url}],
                "pagerduty": [{**pager, "webhook_secret_file": f"{folder}/secret"}, {**pager, "name": "deaf"}],
            },
        }
        self.now = NOW
        config = build_section(Config, table, "test")
        self.service = PipelineService(config, EmptyJudge(), clock=lambda: self.now)
        self.service.start_engine()
        app = create_app(PipelineBackend(self.service), config)
        self.client = httpx.Client(transport=InProcess(app), base_url="http://127.0.0.1:8600")

    def open_incident(self, entity: str = "gpu:n1.0") -> str:
        finding = Finding(self.now, self.now, entity, "sdc", "page", 9.0, "wrong results")
        assert self.service.engine is not None
        changes = self.service.engine.apply(lambda desk: desk.observe_own(self.now, [finding]), [], [finding])
        return str(changes[0].incident.id)

    def get(self, path: str) -> Any:
        return self.client.get(path, headers={"Authorization": f"Bearer {TOKEN}"}).json()

    def post(self, path: str, body: Any) -> Any:
        return self.client.post(path, json=body, headers={"Authorization": f"Bearer {TOKEN}"})

    def report(self, kind: str, incident: str, secret: str = SECRET, name: str = "pager", **event: Any) -> Any:
        """Posts an event as PagerDuty does, from another host's name and without a token."""
        agent = {"id": "P1", "type": "user_reference", "summary": "Bo Berg"}
        data = {"id": "PGR", "type": "incident", "incident_key": incident}
        made = {"id": f"ev-{kind}", "event_type": f"incident.{kind}", "agent": agent, "data": data, **event}
        body = json.dumps({"event": made}).encode()
        signature = f"v1={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
        headers = {"X-PagerDuty-Signature": signature, "Content-Type": "application/json", "Host": "fleet.example"}
        return self.client.post(f"/api/v1/receivers/{name}/pagerduty", content=body, headers=headers)


@pytest.fixture
def hook(receivers: Callable[[], Receiver]) -> Receiver:
    return receivers()


@pytest.fixture
def served(tmp_path: Path, hook: Receiver) -> Iterator[Served]:
    made = Served(tmp_path, hook)
    yield made
    made.service.close()


def test_an_acknowledgement_in_pagerduty_is_one_here_by_the_person_once(served: Served) -> None:
    incident = served.open_incident()
    assert served.report("acknowledged", incident).status_code == 200
    assert served.report("acknowledged", incident).json()["done"].endswith("nothing to change")
    detail = served.get(f"/api/v1/incidents/{incident}")
    assert detail["state"] == "acknowledged"
    rows = [(row["kind"], row["actor"]) for row in detail["history"]]
    assert rows == [("opened", "fleetpulse"), ("acknowledged", "pagerduty:Bo Berg")]
    (row,) = served.get("/api/v1/audit")["audit"]
    assert (row["actor"], row["role"], row["action"]) == ("pagerduty:Bo Berg", "operator", "acknowledge")
    assert row["origin"].endswith(" via receiver pager")
    served.report("resolved", incident)
    assert served.get(f"/api/v1/incidents/{incident}")["history"][-1]["comment"].startswith("resolved in PagerDuty")
    assert served.get(f"/api/v1/incidents/{incident}")["resolved"] is None, "the fault is still there"


def test_an_acknowledgement_in_one_pagerduty_reaches_the_other_and_is_not_sent_back(served: Served) -> None:
    incident = served.open_incident()
    served.report("acknowledged", incident)
    query = "SELECT receiver, id, payload FROM outbox WHERE kind = 'update' ORDER BY receiver"
    rows = served.service.database.cursor().execute(query).fetchall()
    assert [name for name, _, _ in rows] == ["deaf", "pager"]
    sent: dict[str, list[str]] = {"deaf": [], "pager": []}
    for name, id_, text in rows:

        def call(request: Request, name: str = name) -> Answer:
            sent[name].append(json.loads(request.body or b"")["event_action"])
            return Answer(202, body=b'{"status": "success", "message": "Event processed"}')

        message = Message(id_, incident, "update", json.loads(text))
        assert served.service.notifier.receivers[name].send(message, call).outcome == "delivered"
    assert sent == {"deaf": ["acknowledge"], "pager": []}


def test_codes_in_what_pagerduty_reports_are_removed(served: Served) -> None:
    incident = served.open_incident()
    eve = {"type": "user_reference", "summary": "Eve\u202e\x1b[2J"}
    for _ in range(2):
        assert served.report("acknowledged", incident, agent=eve).status_code == 200
    rows = served.get(f"/api/v1/incidents/{incident}")["history"]
    assert [row["actor"] for row in rows] == ["fleetpulse", "pagerduty:Eve  [2J"]


@pytest.mark.parametrize("where", ["person", "comment", "kind", "incident"])
def test_half_of_a_surrogate_pair_in_what_pagerduty_reports_is_no_error(served: Served, where: str) -> None:
    """JSON may have it, UTF-8 has not: the acknowledgement was made, and the answer was 500."""
    incident, half = served.open_incident(), "\ud800x"
    more: dict[str, Any] = {
        "person": {"agent": {"type": "user_reference", "summary": half}},
        "comment": {"event_type": "incident.annotated", "data": {"incident_key": incident, "content": half}},
        "kind": {"event_type": f"incident.{half}"},
        "incident": {"data": {"incident_key": half}},
    }[where]
    answer = served.report("acknowledged", incident, **more)
    assert (answer.status_code, "done" in answer.json()) == (200, True)
    rows = served.get(f"/api/v1/incidents/{incident}")["history"][1:]
    said = {
        "person": ("acknowledged", "pagerduty:?x", "acknowledged in PagerDuty (ev-acknowledged)"),
        "comment": ("commented", "pagerduty:Bo Berg", "annotated in PagerDuty (ev-acknowledged): ?x"),
    }
    assert [(row["kind"], row["actor"], row["comment"]) for row in rows] == ([said[where]] if where in said else [])


@pytest.mark.parametrize("id_", ["x" * 101, "x" * 100_000, "", "x\n", "\ud800"])
def test_an_event_of_pagerduty_without_a_sound_id_changes_nothing(served: Served, id_: str) -> None:
    """Its id goes into the history: one of 100,000 characters did."""
    incident = served.open_incident()
    answer = served.report("acknowledged", incident, id=id_)
    assert (answer.status_code, "id: expected 1 to 100 printable characters" in answer.text) == (400, True)
    assert served.get(f"/api/v1/incidents/{incident}")["state"] == "open"
    assert served.report("acknowledged", incident, id="x" * 100).status_code == 200
    assert served.get(f"/api/v1/incidents/{incident}")["state"] == "acknowledged"


def test_only_pagerdutys_signature_opens_its_route_and_opens_nothing_else(served: Served) -> None:
    incident = served.open_incident()
    assert served.report("acknowledged", incident, secret="wrong").status_code == 401
    (row,) = served.get("/api/v1/audit")["audit"]
    assert (row["actor"], row["outcome"], row["target"]) == ("unknown", "refused", "")
    assert row["reason"] == "the signature is not that of webhook_secret_file"
    assert served.report("acknowledged", incident, name="deaf").status_code == 404
    assert served.report("acknowledged", incident, name="hook").status_code == 404
    assert served.report("acknowledged", incident, name="nobody").status_code == 404
    assert served.report("acknowledged", "inc-unknown").status_code == 200
    assert served.report("acknowledged", incident, agent={"type": "service_reference"}).status_code == 200
    assert served.get(f"/api/v1/incidents/{incident}")["state"] == "open"
    for path in ("/api/v1/receivers", "/api/v1/receivers/pager/pagerduty/x", "/api/v1/notifications"):
        assert served.client.get(path).status_code in (401, 404)
    assert served.client.post("/api/v1/notifications/replay", json={"ids": ["a"]}).status_code == 401


def test_receivers_and_messages_are_listed_and_dead_ones_sent_again(served: Served, hook: Receiver) -> None:
    incident = served.open_incident()
    notifier = served.service.notifier
    notifier.send_due("hook")
    with served.service.database.transaction() as connection:
        connection.execute("UPDATE outbox SET state = 'dead', answer = 'HTTP 400, 9 times' WHERE receiver = 'hook'")
    states = {row["name"]: row for row in served.get("/api/v1/receivers")["receivers"]}
    assert (states["hook"]["state"], states["hook"]["dead"], states["hook"]["kind"]) == ("ok", 1, "webhooks")
    assert (states["pager"]["state"], states["pager"]["pending"]) == ("unknown", 1)
    (dead,) = served.get("/api/v1/notifications?state=dead")["notifications"]
    assert (dead["incident"], dead["answer"]) == (incident, "HTTP 400, 9 times")
    found = served.post("/api/v1/notifications/replay", {"ids": [dead["id"]]}).json()
    assert (found["replayed"], found["notifications"][0]["answer"]) == (1, "sent again by ada")
    before = len(hook.posts)
    notifier.send_due("hook")
    assert len(hook.posts) == before + 1
    for body in ({}, {"ids": ["a"], "receiver": "hook"}, {"receiver": "nobody"}, {"id": "x"}):
        assert served.post("/api/v1/notifications/replay", body).status_code == 400


def test_an_alert_that_is_sent_again_after_its_incident_ended_is_ended_again(served: Served, hook: Receiver) -> None:
    incident = served.open_incident()
    served.service.notifier.send_due("hook")
    served.post(f"/api/v1/incidents/{incident}/resolve", {"comment": "done"})
    served.service.notifier.send_due("hook")
    with served.service.database.transaction() as connection:
        connection.execute("UPDATE outbox SET state = 'dead' WHERE receiver = 'hook' AND kind = 'firing'")
    assert served.post("/api/v1/notifications/replay", {"receiver": "hook"}).json()["replayed"] == 1
    for _ in range(2):
        served.service.notifier.send_due("hook")
    assert [body["status"] for _, body in hook.posts] == ["firing", "resolved", "firing", "resolved"]


def test_a_page_that_ended_while_its_receiver_was_not_configured_is_ended_after_it(
    served: Served, hook: Receiver
) -> None:
    incident = served.open_incident()
    with served.service.database.transaction() as connection:
        dead = "UPDATE outbox SET state = 'dead', answer = ? WHERE receiver = 'hook'"
        connection.execute(dead, [NOT_CONFIGURED])
    served.post(f"/api/v1/incidents/{incident}/resolve", {"comment": "done"})
    assert served.post("/api/v1/notifications/replay", {"receiver": "hook"}).json()["replayed"] == 1
    for _ in range(2):
        served.service.notifier.send_due("hook")
    assert [body["status"] for _, body in hook.posts] == ["firing", "resolved"]


def test_doctor_reports_what_the_running_pipeline_was_answered(
    served: Served, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Alertmanager answers 400 to a webhook's body: every Watchdog shows it, also before the first page."""
    served.service._trouble = None
    hook.statuses = [400]
    served.service.notifier._alive = lambda: True
    served.service.notifier.send_watchdog("hook")
    monkeypatch.setattr(notify.client, "get", lambda config, path: (200, served.get(path)))
    config = dataclasses.replace(served.service.config, notify=Notify(served.service.config.notify.webhooks))
    (found,) = notify.check_receivers(config)
    assert (found.name, found.state, found.found[:8]) == ("receiver hook", "fail", "HTTP 400")
    served.now += 300 * SECOND
    served.service.notifier.send_watchdog("hook")
    (found,) = notify.check_receivers(config)
    assert (found.state, found.found[:21]) == ("ok", "last message accepted")


def test_a_replay_of_an_id_that_is_no_dead_message_says_so_and_fails(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident = served.open_incident()
    with served.service.database.transaction() as connection:
        connection.execute("UPDATE outbox SET state = 'dead' WHERE receiver = 'hook'")
    monkeypatch.setattr(notify.client, "post", lambda config, path, body: served.post(path, body).json())
    said: list[str] = []
    known = f"{incident}.1.hook"
    given = argparse.Namespace(verb="replay", ids=[known, "x.1.hook"], receiver=None)
    rows, _, code = notify.run_notify(served.service.config, given, said.append)
    assert ([row["id"] for row in rows], code) == ([known], 1)
    assert said == [
        "1 messages are sent again",
        "x.1.hook: no dead message has this id; expected one of `fleetpulse notify list --state dead`",
    ]
    given = argparse.Namespace(verb="replay", ids=["x.1.hook"], receiver=None)
    assert notify.run_notify(served.service.config, given, said.append)[2] == 1
