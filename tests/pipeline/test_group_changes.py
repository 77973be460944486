"""What people did reaches receivers with routes as without: of one incident the same, of several it is said of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Notify, PagerDuty, Route, Slack, Webhook
from pipeline.model.records import Life
from tests.pipeline.notifier_harness import NotifierHarness
from tests.pipeline.receiver_servers import Service
from tests.pipeline.test_receivers import KEY, Secret, secret, service

__all__ = ["secret", "service"]
ONE, ALL = ("...",), ("alertname",)
Start = Callable[..., NotifierHarness]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    made: list[NotifierHarness] = []

    def begin(group_by: tuple[str, ...] | None, **receivers: Any) -> NotifierHarness:
        (name,) = (one.name for every in receivers.values() for one in every)
        route = None if group_by is None else Route(name, group_by=group_by, group_wait="0s", group_interval="10s")
        (folder := tmp_path / str(len(made))).mkdir()
        made.append(NotifierHarness(folder, [], Notify(route=route, **receivers)))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def act(harness: NotifierHarness, kind: Any, cause: str, actor: str, comment: str = "", **more: Any) -> None:
    """A change, and the messages sent of it."""
    harness.actor, harness.comment = actor, comment
    harness.write_change(kind, cause, **more)
    send(harness)


def send(harness: NotifierHarness) -> None:
    (name,) = harness.notifier.receivers
    for _ in range(4):
        harness.send_due(11, name)


def owned(by: str) -> dict[str, Any]:
    return {"state": "acknowledged", "life": Life(acknowledged_by=by)}


def live(harness: NotifierHarness) -> None:
    """An incident from its opening to its end."""
    act(harness, "opened", "gpu:n1.0", "fleetpulse")
    act(harness, "commented", "gpu:n1.0", "ada", "looking")
    act(harness, "assigned", "gpu:n1.0", "ada", life=Life(assignee="bob"))
    act(harness, "updated", "gpu:n1.0", "fleetpulse", members=("gpu:n1.0", "gpu:n1.1"))
    act(harness, "acknowledged", "gpu:n1.0", "bob", "fan replaced", **owned("bob"))
    act(harness, "commented", "gpu:n1.0", "ada", "thanks")
    act(harness, "resolved", "gpu:n1.0", "bob", "done", state="resolved", resolved=harness.now)


def events(service: Service) -> list[dict[str, Any]]:
    return service.bodies("/hook")


def hook(service: Service) -> tuple[Webhook, ...]:
    return (Webhook("r", f"{service.url}/hook", format="event"),)


def test_of_one_incident_a_group_says_what_a_receiver_without_routes_is_sent(start: Start, service: Service) -> None:
    names = ("actor", "comment", "change", "title", "status")
    said = []
    for group_by in (None, ONE):
        service.received.clear()
        live(start(group_by, webhooks=hook(service)))
        said.append(
            [(e["type"], *(e["data"][n] for n in names), e["data"]["detail"]["state"]) for e in events(service)]
        )
    assert said[1] == said[0]
    assert [type_.removeprefix("incident.") for type_, *_ in said[0]] == [
        *("opened", "commented", "assigned", "updated", "acknowledged", "commented", "resolved")
    ]


def test_a_channel_shows_person_and_comment_of_one_incident_as_without_routes(
    start: Start, service: Service, secret: Secret
) -> None:
    said = []
    for group_by in (None, ONE):
        service.received.clear()
        live(start(group_by, slack=(Slack("r", "C0123456789", secret("t", "xoxb-1"), url=f"{service.url}/slack"),)))
        said.append([body["text"] for body in service.bodies("/slack/chat.post")])
    assert said[1] == said[0]
    assert "Commented by ada: looking" in said[0]


def test_in_a_group_of_several_it_is_said_of_each_what_a_person_did(start: Start, service: Service) -> None:
    harness = start(ALL, webhooks=hook(service))
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        act(harness, "opened", cause, "fleetpulse", summary=f"{cause} is wrong")
    service.received.clear()
    act(harness, "commented", "gpu:n1.0", "ada", "looking")
    act(harness, "updated", "gpu:n1.0", "fleetpulse", members=("gpu:n1.0", "gpu:n1.1"))
    act(harness, "acknowledged", "gpu:n2.0", "bob", **owned("bob"))
    act(harness, "acknowledged", "gpu:n1.0", "ada", "mine", **owned("ada"))
    act(harness, "resolved", "gpu:n2.0", "bob", "done", state="resolved", resolved=harness.now)
    found = events(service)
    assert [(e["type"].removeprefix("incident."), e["data"]["change"]) for e in found] == [
        ("commented", ["Commented by ada: looking (gpu:n1.0 is wrong)"]),
        ("acknowledged", ["Acknowledged by bob (gpu:n2.0 is wrong)"]),
        ("acknowledged", ["Acknowledged by ada: mine (gpu:n1.0 is wrong)"]),
        ("updated", ["Resolved by bob: done (gpu:n2.0 is wrong)"]),
        ("acknowledged", []),  # the rest
    ]
    assert [len(e["data"]["alerts"]) for e in found] == [2, 2, 2, 2, 1]
    (first,) = found[0]["data"]["changes"]
    assert (first["incident"], first["event"], first["actor"]) == ("inc-gpu:n1.0", "commented", "ada")
    assert {e["data"]["incident"] for e in found} == {found[0]["data"]["incident"]}


def test_a_group_of_several_is_acknowledged_at_a_pager_and_in_its_colour_only_when_all_are(
    start: Start, service: Service, secret: Secret
) -> None:
    slack = Slack("r", "C0123456789", secret("t", "xoxb-1"), url=f"{service.url}/slack")
    colours, actions = [], []
    for receivers in ({"slack": (slack,)}, {"pagerduty": (PagerDuty("r", secret("key", KEY), url=service.url),)}):
        harness = start(ALL, **receivers)
        for cause in ("gpu:n1.0", "gpu:n2.0"):
            act(harness, "opened", cause, "fleetpulse")
        act(harness, "acknowledged", "gpu:n1.0", "ada", **owned("ada"))
        act(harness, "commented", "gpu:n1.0", "ada", "looking")
        act(harness, "acknowledged", "gpu:n2.0", "ada", **owned("ada"))
        act(harness, "commented", "gpu:n2.0", "ada", "looking")
        colours += [body["attachments"][0]["color"] for body in service.bodies("/slack/chat.update")][-4:]
        actions += [body["event_action"] for body in service.bodies("/v2/enqueue")]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert actions == ["trigger", "trigger", "acknowledge"]


def test_many_changes_of_persons_at_once_are_one_message_for_each_kind(start: Start, service: Service) -> None:
    harness = start(ALL, webhooks=hook(service))
    for number in range(30):
        harness.write_change("opened", f"gpu:n{number}.0")
    send(harness)
    service.received.clear()
    harness.actor = "ada"
    for number in range(20):
        harness.write_change("acknowledged", f"gpu:n{number}.0", **owned("ada"))
    send(harness)
    (one,) = events(service)
    assert one["type"] == "incident.acknowledged"
    assert one["data"]["change"][-1] == "and 10 more changes"
    assert (len(one["data"]["changes"]), len(one["data"]["change"])) == (10, 11)
    assert harness.database is not None
    query = "SELECT DISTINCT state FROM outbox WHERE kind = 'update'"
    assert harness.database.cursor().execute(query).fetchall() == [("delivered",)]


# --- what a group pages for ---------------------------------------------------------------------------


def summaries(service: Service) -> list[str]:
    return [body["payload"]["summary"] for body in service.bodies("/v2/enqueue") if "payload" in body]


def replies(service: Service) -> list[tuple[str, bool]]:
    """Returns the text of each reply, and whether it is shown in the channel."""
    bodies = service.bodies("/slack/chat.post")
    return [(body["text"], body.get("reply_broadcast", False)) for body in bodies if "thread_ts" in body]


def both(service: Service, secret: Secret) -> list[dict[str, Any]]:
    slack = Slack("r", "C0123456789", secret("t", "xoxb-1"), url=f"{service.url}/slack")
    return [{"slack": (slack,)}, {"pagerduty": (PagerDuty("r", secret("key", KEY), url=service.url),)}]


def test_a_group_says_first_what_is_new(start: Start, service: Service, secret: Secret) -> None:
    """What notifies people names the new alert, the worst one of several; then the group."""
    expected = [
        "gpu:n2.0 fell off the bus; 2 alerts firing (alertname=SilentDataCorruption)",
        "gpu:n4.0 fell off the bus and 1 more; 4 alerts firing (alertname=SilentDataCorruption)",
    ]
    for receivers in both(service, secret):
        service.received.clear()
        harness = start(ALL, **receivers)
        act(harness, "opened", "gpu:n1.0", "fleetpulse", summary="gpu:n1.0 fell off the bus")
        act(harness, "opened", "gpu:n2.0", "fleetpulse", summary="gpu:n2.0 fell off the bus")
        harness.write_change("opened", "gpu:n3.0", summary="gpu:n3.0 is slow", severity="ticket")
        act(harness, "opened", "gpu:n4.0", "fleetpulse", summary="gpu:n4.0 fell off the bus")
        if "slack" in receivers:
            edits = [body["text"] for body in service.bodies("/slack/chat.update")]
            assert edits == [f"critical: {one}" for one in expected]
            assert replies(service) == [(f"New alerts added: {one}", True) for one in expected]
        else:
            assert summaries(service) == ["gpu:n1.0 fell off the bus", *expected]


def test_a_group_says_whose_acknowledgement_ended(start: Start, service: Service, secret: Secret) -> None:
    ended = "gpu:n2.0 is wrong (acknowledgement of ada ended); 2 alerts firing (alertname=SilentDataCorruption)"
    for receivers in both(service, secret):
        harness = start(ALL, **receivers)
        for number in (1, 2):
            act(harness, "opened", f"gpu:n{number}.0", "fleetpulse", summary=f"gpu:n{number}.0 is wrong")
        act(harness, "acknowledged", "gpu:n2.0", "ada", **owned("ada"))
        why = "acknowledgement of ada ended"
        act(harness, "acknowledgement_expired", "gpu:n2.0", "fleetpulse", why, state="open", life=Life())
        if "slack" in receivers:
            assert replies(service)[-1:] == [(f"Acknowledgement expired: {ended}", True)]
        else:
            assert summaries(service)[-1:] == [ended]


def test_what_ends_in_a_group_is_not_called_new(start: Start, service: Service, secret: Secret) -> None:
    (slack, _) = both(service, secret)
    harness = start(ALL, **slack)
    for number in (1, 2, 3):
        act(harness, "opened", f"gpu:n{number}.0", "fleetpulse", summary=f"gpu:n{number}.0 is wrong")
    act(harness, "resolved", "gpu:n2.0", "fleetpulse", state="resolved", resolved=harness.now)
    assert replies(service)[-1:] == [("Some alerts resolved: 2 alerts firing (alertname=SilentDataCorruption)", False)]


def test_a_pager_that_is_told_a_group_again_has_a_title_that_says_what_fires(
    start: Start, service: Service, secret: Secret
) -> None:
    (_, pager) = both(service, secret)
    harness = start(ALL, **pager)
    for number in (1, 2, 3):
        act(harness, "opened", f"gpu:n{number}.0", "fleetpulse", summary=f"gpu:n{number}.0 is wrong")
    act(harness, "resolved", "gpu:n2.0", "fleetpulse", state="resolved", resolved=harness.now)
    assert summaries(service)[-1] == "gpu:n1.0 is wrong; 2 alerts firing (alertname=SilentDataCorruption)"


@pytest.mark.parametrize("group_by", [None, ALL])
def test_a_raised_severity_is_called_so_and_is_shown_in_the_channel(
    start: Start, service: Service, secret: Secret, group_by: tuple[str, ...] | None
) -> None:
    (slack, _) = both(service, secret)
    harness = start(group_by, **slack)
    act(harness, "opened", "gpu:n1.0", "fleetpulse", summary="GPU 0 of n1: slow", severity="ticket")
    act(harness, "severity_raised", "gpu:n1.0", "fleetpulse", "from ticket to page", severity="page")
    assert replies(service)[-1:] == [("Severity raised: from ticket to page (GPU 0 of n1: slow)", True)]


def test_an_alert_that_goes_on_in_another_group_says_so(start: Start, service: Service, secret: Secret) -> None:
    (slack, _) = both(service, secret)
    harness = start(ONE, **slack)
    act(harness, "opened", "gpu:n1.0", "fleetpulse", summary="GPU 0 of n1: slow", severity="ticket")
    act(harness, "severity_raised", "gpu:n1.0", "fleetpulse", "from ticket to page", severity="page")
    assert replies(service) == [("Resolved: severity raised from ticket to page", False)]


def test_the_end_of_some_alerts_of_a_group_is_no_event_of_an_opening(start: Start, service: Service) -> None:
    """Its type was `incident.opened`. What pages again beside it names the type."""
    harness = start(ALL, webhooks=hook(service))
    for cause in ("gpu:n1.0", "gpu:n2.0", "gpu:n3.0"):
        harness.write_change("opened", cause)
    send(harness)
    harness.resolve("gpu:n1.0")
    send(harness)
    harness.write_change("worsened", "gpu:n3.0")
    harness.resolve("gpu:n2.0")
    send(harness)
    assert [(one["type"], one["data"]["status"], len(one["data"]["alerts"])) for one in events(service)] == [
        ("incident.opened", "firing", 3),
        ("incident.updated", "firing", 3),
        ("incident.worsened", "firing", 2),
    ]
