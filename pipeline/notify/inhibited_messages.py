"""What becomes of the held messages of one incident that no route groups: sent, held further, or never sent.

A receiver has an alert if the newest message that it was sent fires. What it does not have waits while something
inhibits it, or a person acknowledged it since; then the newest state is sent, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.incidents.desk import ACTOR
from pipeline.incidents.ledger import Payload

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A held row of the outbox.

    text:    its body.   alert: the newest one in it.   replaces: whether it ends an alert and fires this one, since the
             labels of the incident changed.   event: what happened.   is_owned: whether the incident is acknowledged.
    actor:   who did it.
    created: UTC us.
    """

    id: str
    incident: str
    kind: str
    text: str
    created: int
    number: int
    alert: dict[str, Any]
    replaces: bool
    event: str
    is_owned: bool
    actor: str = ""

    @property
    def is_acknowledgement(self) -> bool:
        """Whether it says that a person acknowledged the incident, and nothing else."""
        return self.kind == "update" and self.event in ("", "acknowledged")  # empty: of an older version

    @property
    def is_of_person(self) -> bool:
        """Whether a person made the change."""
        return self.actor not in ("", ACTOR)

    @property
    def body(self) -> Body:
        """The whole body: many thousand rows may be held, so only their alerts are kept parsed."""
        parsed: Body = json.loads(self.text)
        return parsed

    @property
    def fingerprint(self) -> str:
        """The identity of its alert."""
        return str(self.alert["fingerprint"])

    @property
    def fingerprints(self) -> set[str]:
        """The identities of all its alerts."""
        return {str(alert["fingerprint"]) for alert in self.body["alerts"]}

    @property
    def has_ended(self) -> bool:
        """Whether it ends its alert."""
        return self.kind == "resolved"


def parse_held(id_: str, incident: str, kind: str, text: str, created: int, number: int) -> HeldMessage:
    """Returns a held row."""
    body = json.loads(text)
    alerts, said = body["alerts"], body.get("fleetpulse", {})
    is_owned = (said.get("incident") or {}).get("state") == "acknowledged"
    replaces = kind == "firing" and len(alerts) > 1
    return HeldMessage(
        *(id_, incident, kind, text, created, number, alerts[-1], replaces, str(said.get("event", "")), is_owned),
        str(said.get("actor") or ""),
    )


@dataclass(frozen=True, slots=True)
class Settlement:
    """The new state of a message. reason: why it is never sent, or the message of a group that says it.

    kind, body: sent in place of it; empty: unchanged.
    """

    id: str
    state: Literal["pending", "grouped", "muted"]
    reason: str = ""
    kind: str = ""
    body: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides about the messages of an incident.

    has:    whether the receiver has its alert.   inhibitor: what inhibits it; empty: nothing.
    owner:  who acknowledged it while it was inhibited; empty: no one.   storm: whether a storm represents it.
    """

    has: bool
    inhibitor: str = ""
    owner: str = ""
    storm: bool = False

    @property
    def reason(self) -> str:
        """Why a message is not sent."""
        if self.inhibitor:
            return f"inhibited by {self.inhibitor}"
        return f"acknowledged by {self.owner}" if self.owner else "replaced by a later message"


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the messages of an incident. held: a new message that is held further, if an alert was ended and
    the one that replaces it must wait."""

    settled: list[Settlement]
    held: Payload | None = None


def decide(messages: Sequence[HeldMessage], situation: Situation, receiver: str, now: int) -> Decision:
    """Returns the outcome of the messages of one incident, in their order. The rest is held further."""
    newest = [number for number, one in enumerate(messages) if one.kind != "update"]
    fires = newest[-1] if newest and messages[newest[-1]].kind == "firing" else -1
    ended = bool(newest) and fires < 0
    if not situation.has:
        return Decision(list(_settle_unknown(messages, situation, fires, ended)))
    if (situation.inhibitor or ended) and any(one.replaces for one in messages):
        return _end_old_alert(messages, situation, fires, receiver, now)
    return Decision(list(_settle_known(messages, situation, fires)))


def _settle_unknown(
    messages: Sequence[HeldMessage], situation: Situation, fires: int, ended: bool
) -> Iterator[Settlement]:
    """Yields the new states of messages about an alert that the receiver does not have."""
    if fires < 0 and not ended:
        yield from (Settlement(one.id, "muted", "its alert was not sent") for one in messages)
        return
    if ended or situation.storm or situation.owner:
        reason = situation.reason if situation.inhibitor or situation.owner else "ended before it was sent"
        yield from (Settlement(one.id, "muted", reason) for one in messages)
        return
    for number, one in enumerate(messages):
        if number < fires:
            yield Settlement(one.id, "muted", situation.reason)
        elif not situation.inhibitor:
            yield keep_firing(one)


def _settle_known(messages: Sequence[HeldMessage], situation: Situation, fires: int) -> Iterator[Settlement]:
    """Yields the new states of messages about an alert that the receiver has: only what pages again waits while it is
    inhibited, and is never sent if it ended, or if a person acknowledged it by then."""
    held = bool(situation.inhibitor or situation.owner) or fires < 0
    has = True
    over: set[str] = set()  # fingerprints that ended, or were not sent after an end
    for number, one in enumerate(messages):
        if one.has_ended and not has and one.fingerprints <= over:
            yield Settlement(one.id, "muted", "ended before it was sent")
        elif not held or one.kind != "firing" or one.replaces:
            has = one.kind == "firing" or (has and not one.has_ended)
            over = over | one.fingerprints if one.has_ended else over - {one.fingerprint}
            yield Settlement(one.id, "pending")
        elif number < fires or fires < 0 or situation.storm or situation.owner:
            over |= set() if has else {one.fingerprint}
            yield Settlement(one.id, "muted", situation.reason)


def _end_old_alert(
    messages: Sequence[HeldMessage], situation: Situation, fires: int, receiver: str, now: int
) -> Decision:
    """Returns the end of the alert that the receiver has, whose labels changed while it is inhibited; the newest state
    of the incident is held in place of all later messages."""
    at = next(number for number, one in enumerate(messages) if one.replaces)
    first = messages[at]
    settled = [Settlement(one.id, "muted", situation.reason) for number, one in enumerate(messages) if number != at]
    said = dict(first.body.get("fleetpulse", {}))
    if situation.inhibitor:
        said |= {"event": "inhibited", "actor": "fleetpulse", "comment": situation.reason}
    text = _make_text(first.body, first.body["alerts"][:1], "resolved", said)
    settled.append(Settlement(first.id, "pending", "", "resolved", text))
    if fires < 0 or situation.storm or situation.owner:
        return Decision(settled)
    newest = messages[fires]
    text = _make_text(newest.body, newest.body["alerts"][-1:], "firing", newest.body.get("fleetpulse", {}))
    return Decision(settled, Payload(first.incident, receiver, "firing", text, now, "held"))


def keep_firing(message: HeldMessage) -> Settlement:
    """Returns a message for a receiver that has no alert of the incident: without the end of an old one."""
    if not message.replaces:
        return Settlement(message.id, "pending")
    text = _make_text(message.body, message.body["alerts"][-1:], "firing", message.body.get("fleetpulse", {}))
    return Settlement(message.id, "pending", "", "firing", text)


def _make_text(body: Body, alerts: Sequence[Body], status: str, said: Body) -> str:
    """Returns the stored body with only some of its alerts."""
    reason = "all alerts resolved" if status == "resolved" else "first notification"
    shared = {"commonLabels": alerts[0]["labels"], "commonAnnotations": alerts[0]["annotations"]}
    made = {**body, "status": status, "notification_reason": reason, **shared, "alerts": alerts, "fleetpulse": said}
    return json.dumps(made, separators=(",", ":"))
