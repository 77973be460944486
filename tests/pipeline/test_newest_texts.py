"""A message that is sent again has the current texts: alerts pushed to an Alertmanager, and messages of groups."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Alertmanager, Notify, Route, Webhook
from pipeline.model.records import Incident
from pipeline.notify.newest_texts import renew_texts
from tests.pipeline.notifier_harness import NotifierHarness, Receiver
from tests.pipeline.receiver_servers import Service
from tests.pipeline.test_receivers import service

__all__ = ["service"]
OLD, NOW = "CDU c1: flow 193 L/min, minimum 225", "CDU c1: flow 3 L/min, minimum 225"
ROUTE = Route("hook", group_by=("alertname",), group_wait="30s", group_interval="1m", repeat_interval="10m")


@pytest.fixture
def pushed(tmp_path: Path, service: Service) -> Iterator[NotifierHarness]:
    made = NotifierHarness(tmp_path, [], Notify(alertmanagers=(Alertmanager("am", (service.url,)),)))
    yield made
    made.close()


@pytest.fixture
def grouped(tmp_path: Path, receiver: Receiver) -> Iterator[NotifierHarness]:
    hook = Webhook("hook", f"http://127.0.0.1:{receiver.server_port}/")
    made = NotifierHarness(tmp_path, [], Notify(webhooks=(hook,), route=ROUTE))
    yield made
    made.close()


def pushes(service: Service) -> list[Mapping[str, Any]]:
    """The alerts that an Alertmanager got, without the Watchdog."""
    sent = [alert for body in service.bodies("/api/v2/alerts") for alert in body]
    return [one for one in sent if one["labels"]["alertname"] != "Watchdog"]


@pytest.mark.parametrize("kind", ["retitled", "updated"])
def test_an_alert_is_pushed_again_with_the_text_of_now_and_the_labels_that_were_sent(
    pushed: NotifierHarness, service: Service, kind: str
) -> None:
    pushed.write_change("opened", summary=OLD)
    pushed.send_due(name="am")
    pushed.write_change(kind, summary=NOW)
    assert pushed.send_due(1, name="am") == 0, "a new title alone is no message"
    pushed.notifier.send_watchdog("am")
    first, again = pushes(service)
    assert [one["annotations"]["summary"] for one in (first, again)] == [OLD, NOW]
    assert (first["labels"], first["startsAt"]) == (again["labels"], again["startsAt"])


def test_an_alert_that_has_ended_is_pushed_again_as_it_ended(pushed: NotifierHarness, service: Service) -> None:
    pushed.write_change("opened", summary=OLD)
    pushed.send_due(name="am")
    pushed.resolve()
    pushed.send_due(name="am")
    pushed.notifier.send_watchdog("am")
    ended = pushes(service)[1:]
    assert len(ended) == 2
    assert ended[0] == ended[1]


def summaries(receiver: Receiver) -> list[tuple[str, str]]:
    return [(b["notification_reason"], b["alerts"][0]["annotations"]["summary"]) for _, b in receiver.posts]


def test_a_group_says_the_titles_of_now_when_it_is_sent_first_and_when_it_is_repeated(
    grouped: NotifierHarness, receiver: Receiver
) -> None:
    grouped.write_change("opened", summary="CDU c1: flow 224 L/min, minimum 225")
    grouped.send_due(0, "hook")
    grouped.write_change("retitled", summary=OLD)
    for _ in range(2):
        grouped.send_due(31, "hook")
    grouped.write_change("updated", summary=NOW)
    for _ in range(5):
        grouped.send_due(61, "hook")
    assert summaries(receiver) == [("first notification", OLD)], "a new title alone is no message"
    grouped.restart()
    for _ in range(6):
        grouped.send_due(61, "hook")
    assert summaries(receiver) == [("first notification", OLD), ("repeat interval elapsed", NOW)]
    assert receiver.posts[0][1]["alerts"][0]["labels"] == receiver.posts[1][1]["alerts"][0]["labels"]


def test_the_texts_are_made_of_the_incident_and_its_impact_as_stored(grouped: NotifierHarness) -> None:
    asked: list[tuple[str, Any]] = []

    def annotate(incident: Incident, impact: tuple[str, str] | None) -> Mapping[str, str]:
        asked.append((incident.summary, impact))
        return {"impact": (impact or ("",))[0]}

    for cause, detail in (("a", {"text": "job 81 hangs", "title": "job 81 hangs"}), ("b", None)):
        grouped.write_change("opened", cause, summary=cause)
        assert grouped.database is not None
        with grouped.database.transaction() as connection:
            if detail is not None:
                values = [f"inc-{cause}", json.dumps(detail)]
                connection.execute(
                    "INSERT INTO impact VALUES (?, now(), 0, 0, 0, 0, 0, 0, NULL, NULL, false, ?, '[]')", values
                )
    grouped.write_change("opened", "c")
    grouped.resolve("c")
    alerts: list[dict[str, Any]] = [
        {"status": "firing", "labels": {"incident": f"inc-{name}"}, "annotations": {"impact": "old"}}
        for name in ("a", "b", "c", "unknown")
    ]
    assert grouped.database is not None
    found = renew_texts(grouped.database.cursor(), alerts, "", annotate)
    assert [one["annotations"].get("impact") for one in found] == ["job 81 hangs", None, "old", "old"]
    assert asked == [("a", ("job 81 hangs", "job 81 hangs")), ("b", ("", ""))]
    assert [one["labels"] for one in found] == [one["labels"] for one in alerts]
