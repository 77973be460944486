"""Dead messages sent again: their receiver, also one that drops keys that it knows, ends with what fires."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Notify, Route, Webhook
from pipeline.model.records import Life
from pipeline.notify.dead_messages import replay_payloads
from tests.pipeline.notifier_harness import NotifierHarness, Receiver

A, B, C = "gpu:n1.0", "gpu:n2.0", "gpu:n3.0"
GROUPED = Route("hook", group_by=("alertname",), group_wait="0s", group_interval="1m")
SEVERITIES = {"page": "critical", "ticket": "warning"}


class Hooked(NotifierHarness):
    """A notifier with one webhook, of which the test loses messages."""

    def __init__(self, folder: Path, receiver: Receiver, route: Route | None) -> None:
        self.receiver = receiver
        self.with_hook = Notify(webhooks=(Webhook("hook", f"http://127.0.0.1:{receiver.server_port}/"),), route=route)
        super().__init__(folder, [], self.with_hook)

    def turn(self, cause: str, **more: Any) -> None:
        """It opens, ends or returns."""
        known = self.incidents.get(cause)
        if known is not None and known.resolved is None:
            self.resolve(cause)
        else:
            kind = "opened" if known is None else "reopened"
            self.write_change(kind, cause, resolved=None, state="open", life=Life(), **more)

    def deliver(self) -> None:
        """All that is due is accepted."""
        for seconds in (0, 35, 35):
            while self.send_due(seconds, "hook"):
                seconds = 0

    def lose(self) -> None:
        """All that is due is refused, and dead."""
        assert self.database is not None
        before = len(self.receiver.posts)
        for seconds in (0, 35, 35):
            self.receiver.statuses = [400] * 50
            self.send_due(seconds, "hook")
            with self.database.transaction() as connection:
                connection.execute("UPDATE outbox SET state = 'dead' WHERE state = 'pending'")
                connection.execute("UPDATE outbox SET state = 'dead' WHERE state = 'grouped'")
            self.notifier.health["hook"].record_success()
        self.receiver.statuses = []
        del self.receiver.posts[before:]

    def configure(self, is_configured: bool) -> None:
        """The receiver is removed from the configuration, or is back."""
        self.notify = self.with_hook if is_configured else Notify()
        self.restart()

    def replay(self) -> list[str]:
        """Sends all dead messages again, as the pipeline does."""
        assert self.database is not None
        found = replay_payloads(self.database, [], "hook", "ada", self.now)
        self.notifier.write_missed()
        self.deliver()
        return found

    def count(self, state: str) -> int:
        return [row[1] for row in self.rows()].count(state)

    def shown(self, drops: bool = True) -> set[tuple[str, str]]:
        """What fires at the receiver. drops: whether it drops messages with a key that it knows."""
        firing: dict[str, tuple[str, str]] = {}
        keys = set()
        for key, body in self.receiver.posts:
            for alert in body["alerts"] if key not in keys or not drops else ():
                labels = alert["labels"]
                firing.pop(alert["fingerprint"], None)
                if alert["status"] == "firing":
                    firing[alert["fingerprint"]] = labels["cause"], labels["severity"]
            keys.add(key)
        return set(firing.values())

    def true(self) -> set[tuple[str, str]]:
        return {(cause, SEVERITIES[i.severity]) for cause, i in self.incidents.items() if i.resolved is None}


@pytest.fixture
def hooked(tmp_path: Path, receiver: Receiver) -> Any:
    made: list[Hooked] = []

    def make(route: Route | None = None) -> Hooked:
        made.append(Hooked(tmp_path, receiver, route))
        return made[-1]

    yield make
    for one in made:
        one.close()


Make = Callable[..., Hooked]


def test_a_page_that_ended_and_fires_again_is_sent_again_as_it_fires_now(hooked: Make, receiver: Receiver) -> None:
    site = hooked()
    site.turn(A)
    site.lose()
    for _ in range(2):
        site.turn(A)
        site.deliver()
    assert site.replay() == [f"inc-{A}.1.hook"]
    assert [body["status"] for _, body in receiver.posts] == ["resolved", "firing", "firing"]
    assert len({key for key, _ in receiver.posts}) == 3
    assert (site.shown(), site.count("dead")) == (site.true(), 0)
    assert site.replay() == [], "once"


def test_old_labels_of_a_page_do_not_fire_for_ever(hooked: Make) -> None:
    site = hooked()
    site.turn(A, severity="ticket")
    site.lose()
    site.write_change("severity_raised", A, severity="page")
    site.deliver()
    site.replay()
    assert site.shown() == {(A, "critical")}
    site.turn(A)
    site.deliver()
    assert site.shown() == set()


def test_what_a_lost_message_ended_ends_with_the_next_state(hooked: Make) -> None:
    site = hooked()
    site.turn(A, severity="ticket")
    site.deliver()
    site.write_change("severity_raised", A, severity="page")
    site.lose()
    site.turn(A)
    site.deliver()
    assert site.shown() == {(A, "warning")}
    site.replay()
    assert site.shown() == set()


def test_an_alert_that_a_group_ended_meanwhile_does_not_fire_again(hooked: Make, receiver: Receiver) -> None:
    site = hooked(GROUPED)
    site.turn(A)
    site.turn(B)
    site.lose()
    site.turn(A)
    site.deliver()
    assert len(site.replay()) == 3, "the message, and both rows that it says"
    assert [a["status"] for a in receiver.posts[-1][1]["alerts"]] == ["resolved", "firing"]
    assert (site.shown(), site.count("dead"), site.count("grouped")) == (site.true(), 0, 0)


def test_an_end_from_before_a_receiver_was_configured_again_ends_no_page_that_fires(
    hooked: Make, receiver: Receiver
) -> None:
    site = hooked()
    site.turn(A)
    site.deliver()
    site.turn(A)
    site.configure(False)
    site.turn(A)
    site.configure(True)
    site.deliver()
    assert site.count("dead") == 1
    site.replay()
    assert (site.shown(), site.count("dead")) == ({(A, "critical")}, 0)
    assert [body["status"] for _, body in receiver.posts] == ["firing"], "it never seemed to be over"


def test_a_page_that_ended_while_its_receiver_was_not_configured_is_ended(hooked: Make, receiver: Receiver) -> None:
    site = hooked()
    site.turn(A)
    site.configure(False)
    site.turn(A)
    site.configure(True)
    site.replay()
    assert [body["status"] for _, body in receiver.posts] == ["firing", "resolved"]


@pytest.mark.sample(every=10)
@pytest.mark.parametrize("route", [None, GROUPED])
@pytest.mark.parametrize("seed", range(1, 11))
def test_whatever_was_lost_the_receiver_has_the_truth_afterwards(hooked: Make, route: Any, seed: int) -> None:
    chosen = random.Random(seed)
    site = hooked(route)
    for _ in range(25):
        act = chosen.choice(("turn", "turn", "turn", "worse", "deliver", "lose", "lose", "remove", "replay"))
        cause = chosen.choice((A, B, C))
        known = site.incidents.get(cause)
        if act == "remove":
            site.configure(site.notify != site.with_hook)
        elif act == "turn":
            site.turn(cause)
        elif act == "worse" and known is not None and known.resolved is None:
            worse: Any = {"page": "ticket", "ticket": "page"}[known.severity]
            site.write_change("updated", cause, severity=worse)
        elif site.notify == site.with_hook and act in ("deliver", "lose"):
            getattr(site, act)()
        elif site.notify == site.with_hook and act == "replay":
            check_replay(site)
    site.configure(True)
    check_replay(site)


def check_replay(site: Hooked) -> None:
    """What was lost is sent again after all else was accepted: then receivers have the truth."""
    site.deliver()
    site.replay()
    site.deliver()
    assert (site.shown(), site.shown(drops=False), site.count("dead")) == (site.true(), site.true(), 0)
