"""Slack: a new message for what fires after its end, and in the channel what joins what fires."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Notify, Route, Slack
from pipeline.model.records import Life, iso
from pipeline.notify.alertmanager import make_body
from pipeline.notify.receivers import Message, build_receiver
from tests.pipeline.notifier_harness import NotifierHarness
from tests.pipeline.receiver_servers import Service
from tests.pipeline.test_receivers import CALL, NOW, Secret, alert, message, secret, service, slack, teams

__all__ = ["secret", "service"]
GROUPED = Route("r", group_by=("alertname",), group_wait="0s", group_interval="1m")


@pytest.mark.parametrize("route", [None, GROUPED])
def test_what_fires_after_its_end_is_a_new_message_in_slack(
    tmp_path: Path, service: Service, secret: Secret, route: Any
) -> None:
    one: Any = slack(service, secret)
    assert isinstance(one, Slack)
    harness = NotifierHarness(tmp_path, [], Notify(slack=(one,), route=route))
    for kind, cause in (("opened", "gpu:n1.0"), ("resolved", "gpu:n1.0"), ("opened", "gpu:n2.0")):
        if kind == "resolved":
            harness.resolve(cause)
        elif route is None and cause == "gpu:n2.0":  # alone: the same incident returns
            harness.write_change("reopened", "gpu:n1.0", resolved=None, state="open")
        else:
            harness.write_change("opened", cause)
        for seconds in (0, 61, 61):
            harness.send_due(seconds, one.name)
    harness.resolve("gpu:n1.0" if route is None else "gpu:n2.0")
    for seconds in (0, 61, 61):
        harness.send_due(seconds, one.name)
    harness.close()
    posted = [b["text"].split(":")[0] for b in service.bodies("/slack/chat.post") if "thread_ts" not in b]
    assert posted == ["critical", "critical"]
    edits = [(b["ts"][-1], b["text"].split(":")[0]) for b in service.bodies("/slack/chat.update")]
    assert edits == [("1", "RESOLVED"), ("3", "RESOLVED")], "each message ends with what it fired"


def of_group(*statuses: str, reason: str, event: str = "opened", kind: str = "firing") -> Message:
    """A message of a group whose first message Slack has."""
    alerts = [alert(number, status) for number, status in enumerate(statuses)]
    body = {**make_body(alerts, {"alertname": "LinkDegraded"}, "r", "", reason, "{}:x"), "fleetpulse": {}}
    body["fleetpulse"] = {"event": event, "incidents": ["inc-0", "inc-1"], "time": iso(NOW)}
    return Message("grp-0.2.r", "grp-0", kind, body, "C0123456789:1700000000.000001", NOW)


@pytest.mark.parametrize(
    ("reason", "event", "shown"),
    [
        ("new alerts added", "opened", True),
        ("some alerts resolved", "opened", False),
        ("repeat interval elapsed", "opened", False),
        ("worsened", "worsened", True),
    ],
)
def test_slack_shows_in_the_channel_that_a_page_joined_a_group_that_fires(
    service: Service, secret: Secret, reason: str, event: str, shown: bool
) -> None:
    one = build_receiver(slack(service, secret))[0]
    one.send(message(), CALL)
    one.send(of_group("firing", "firing", reason=reason, event=event), CALL)
    (reply,) = [b for b in service.bodies("/slack/chat.post") if "thread_ts" in b]
    assert (reply.get("reply_broadcast", False), reply["text"].split(":")[0]) == (shown, reason.capitalize())


@pytest.mark.parametrize("event", ["opened", "reopened", "unsilenced"])
def test_slack_shows_in_the_channel_what_fires_anew_in_its_thread(service: Service, secret: Secret, event: str) -> None:
    one = build_receiver(slack(service, secret))[0]
    reference = one.send(message(), CALL).reference
    one.send(message(reference=reference, event=event), CALL)
    (reply,) = [b for b in service.bodies("/slack/chat.post") if "thread_ts" in b]
    assert reply["reply_broadcast"] is True


def test_slack_and_teams_say_that_all_of_a_group_is_acknowledged(service: Service, secret: Secret) -> None:
    said = of_group("firing", "firing", reason="unknown", event="acknowledged", kind="update")
    one = build_receiver(slack(service, secret))[0]
    one.send(message(), CALL)
    one.send(said, CALL)
    (edit,) = service.bodies("/slack/chat.update")
    assert (edit["text"].split(":")[0], edit["attachments"][0]["color"]) == ("ACKNOWLEDGED", "#0072B2")
    build_receiver(teams(service, secret))[0].send(said, CALL)
    assert "ACKNOWLEDGED: 2 alerts firing" in json.dumps(service.received[-1][2].decode())


SILENCED = Life(silenced_by=("s1",))


@pytest.fixture
def silenced(tmp_path: Path, service: Service, secret: Secret) -> Iterator[NotifierHarness]:
    """A page of which Slack shows that it is silenced."""
    one: Any = slack(service, secret)
    harness = NotifierHarness(tmp_path, [], Notify(slack=(one,)))
    for kind, more in (("opened", {}), ("silenced", {"state": "silenced", "life": SILENCED})):
        harness.write_change(kind, **more)
        harness.send_due(1, "r")
    assert list_states(service) == ["critical", "SILENCED"]
    yield harness
    harness.close()


def list_states(service: Service) -> list[str]:
    """Returns what the one message in the channel said, in order."""
    shown = [
        (b.get("ts"), b["text"]) for _, _, body, _ in service.received if "thread_ts" not in (b := json.loads(body))
    ]
    assert [ts for ts, _ in shown[:1]] == [None]
    assert len({ts for ts, _ in shown[1:]}) <= 1
    return [text.split(":")[0] for _, text in shown]


def list_news(service: Service) -> list[str]:
    """Returns the replies that the channel shows."""
    replies = [b for b in service.bodies("/slack/chat.post") if "thread_ts" in b]
    return [b["text"].split(":")[0] for b in replies if b.get("reply_broadcast")]


def test_slack_shows_again_in_its_message_what_fires_after_a_silence(
    silenced: NotifierHarness, service: Service
) -> None:
    silenced.write_change("unsilenced", state="open", life=Life())
    silenced.send_due(1, "r")
    assert (list_states(service)[2:], len(list_news(service))) == (["critical"], 1)
    silenced.resolve()
    silenced.send_due(1, "r")
    assert list_states(service)[3:] == ["RESOLVED"]


def test_slack_shows_that_an_acknowledged_page_is_silenced_no_longer_and_tells_nobody(
    silenced: NotifierHarness, service: Service
) -> None:
    owned = Life(acknowledged_by="ann")
    silenced.write_change("unsilenced", state="acknowledged", life=owned)
    silenced.send_due(1, "r")
    assert (list_states(service)[2:], list_news(service)) == (["ACKNOWLEDGED"], [])
    silenced.resolve()
    silenced.send_due(1, "r")
    assert (list_states(service)[3:], list_news(service)) == (["RESOLVED"], [])


@pytest.mark.parametrize("first", [None, "unsilenced"])
def test_slack_shows_that_a_silenced_page_is_over_and_tells_nobody(
    silenced: NotifierHarness, service: Service, first: Any
) -> None:
    if first:  # it is not sent to anybody while another silence goes on
        silenced.write_change("updated", summary="still wrong")
    silenced.resolve()
    silenced.send_due(1, "r")
    assert (list_states(service)[2:], list_news(service)) == (["RESOLVED"], [])
    silenced.write_change("reopened", resolved=None, state="open", life=Life())
    silenced.send_due(1, "r")
    posted = [b for b in service.bodies("/slack/chat.post") if "thread_ts" not in b]
    assert len(posted) == 2, "what fires after its end is a new message"


def test_a_page_that_slack_never_got_is_not_shown_when_its_silence_ends(
    tmp_path: Path, service: Service, secret: Secret
) -> None:
    one: Any = slack(service, secret)
    harness = NotifierHarness(tmp_path, [], Notify(slack=(one,)))
    harness.write_change("opened", state="silenced", life=SILENCED)
    harness.write_change("unsilenced", state="acknowledged", life=Life(acknowledged_by="ann"))
    harness.resolve()
    harness.send_due(1, "r")
    assert service.received == []
    harness.close()


@pytest.mark.parametrize("error", ["channel_not_found", "is_inactive", "is_archived", "not_in_channel"])
def test_slack_posts_to_the_configured_channel_where_that_of_the_message_is_gone(
    service: Service, secret: Secret, error: str
) -> None:
    def call(request: Any) -> Any:
        answer = CALL(request)
        if request.target.url.endswith("chat.update"):
            return dataclasses.replace(answer, body=json.dumps({"ok": False, "error": error}).encode())
        return answer

    one = build_receiver(slack(service, secret))[0]
    result = one.send(message("resolved", reference="C9999999999:1.1"), call)
    assert (result.outcome, result.reference) == ("delivered", "C0123456789:1700000000.000001")
    assert service.bodies("/slack/chat.post")[-1]["channel"] == "C0123456789"
