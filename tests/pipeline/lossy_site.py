"""A notifier with one webhook that loses what it is sent, and threads that act within its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.receivers import InhibitRule, Notify, Route, Webhook
from pipeline.model.records import Life
from pipeline.notify.dead_messages import replay_payloads
from tests.pipeline.notifier_harness import NotifierHarness, Receiver

A, B, C = "gpu:n1.0", "gpu:n2.0", "gpu:n3.0"
GROUPED = Route("hook", group_by=("alertname",), group_wait="0s", group_interval="1m")
C_OVER_ALL = (InhibitRule(('cause="gpu:n3.0"',), ('cause!="gpu:n3.0"',)),)
STEPS = (None, "_read_arrived", "release")
SEVERITIES = {"page": "critical", "ticket": "warning"}


class Hooked(NotifierHarness):
    """A notifier with one webhook, of which the test loses messages."""

    def __init__(self, folder: Path, receiver: Receiver, route: Route | None, rules: Sequence[InhibitRule]) -> None:
        self.receiver, self.refused = receiver, list[tuple[str, Any]]()
        hook = Webhook("hook", f"http://127.0.0.1:{receiver.server_port}/")
        self.with_hook = Notify(webhooks=(hook,), route=route, inhibit_rules=tuple(rules))
        super().__init__(folder, [], self.with_hook)

    def turn(self, cause: str, **more: Any) -> None:
        """It opens, ends or returns."""
        known = self.incidents.get(cause)
        if known is not None and known.resolved is None:
            self.resolve(cause)
        else:
            kind = "opened" if known is None else "reopened"
            self.write_change(kind, cause, resolved=None, state="open", life=Life(), **more)

    def open_ticket(self, cause: str) -> None:
        self.turn(cause, severity="ticket")

    def raise_severity(self, cause: str) -> None:
        self.write_change("severity_raised", cause, severity="page")

    def acknowledge(self, cause: str) -> None:
        self.write_change("acknowledged", cause, state="acknowledged", life=Life(acknowledged_by="ann"))

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
        self.refused += self.receiver.posts[before:]
        del self.receiver.posts[before:]

    def take_and_lose(self) -> None:
        """All that is due is taken, but refused, and dead."""
        before = len(self.refused)
        self.lose()
        self.receiver.posts += self.refused[before:]

    def act_in_round(self, step: str | None, act: Callable[[], object]) -> None:
        """Another thread acts, in the next round of the notifier's thread: after it `_read_arrived`, before it decides,
        or after its `release`, before it sends; None: before the round."""
        if step is None:
            act()
            return
        held = self.notifier._held["hook"]
        real = getattr(held, step)

        def interrupted(*given: Any) -> Any:
            delattr(held, step)
            done = real(*given)
            act()
            return done

        setattr(held, step, interrupted)
        self.notifier._holding["hook"] = True
        self.send_due(0, "hook")

    def configure(self, is_configured: bool) -> None:
        """The receiver is removed from the configuration, or is back."""
        self.notify = self.with_hook if is_configured else Notify()
        self.restart()

    def replay(self, step: str | None = None) -> list[str]:
        """Sends all dead messages again, as the pipeline does."""
        assert self.database is not None
        store, found = self.database, list[str]()
        self.act_in_round(
            step,
            lambda: found.extend(replay_payloads(store, [], "hook", "ada", self.now, self.notifier.holding)),
        )
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


def check_keys(site: Hooked) -> None:
    """A message sent again with its idempotency key is the same."""
    said: dict[str, Any] = {}
    for key, body in [*site.refused, *site.receiver.posts]:
        assert said.setdefault(key, body) == body, key


Make = Callable[..., Hooked]
"""Makes one of a route and rules; the fixture `hooked`."""
