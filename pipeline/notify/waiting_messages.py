"""What waits for a receiver that is down, judged again before it is sent: what people get when it is back is true then.

What fires is sent once, with its present text. What ended, or a silence ended, is only ended: the receiver may have
taken its page without an answer. What a person acknowledged does not page any more. A message keeps its key, since a
receiver that took it may know it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.changes import REPEATED
from pipeline.incidents.ledger import ACKNOWLEDGED_AWAY
from pipeline.model.records import Incident, iso
from pipeline.notify.alertmanager import EXTENSION, find_common
from pipeline.notify.delivery import ReceiverHealth
from pipeline.notify.groups import GROUP_PREFIX
from pipeline.notify.held_messages import Store
from pipeline.notify.receivers import Endpoint

MOST = 500
"""Incidents and groups in one transaction: 0.1 s of CPU, for which the engine's writes wait. Chosen."""
ENDED_AWAY = "ended before it arrived"
REPLACED_AWAY = "replaced by a later message before it arrived"
Alert = dict[str, Any]
Renew = Callable[[Incident, Mapping[str, Any]], Alert]
"""Returns an alert that fires with the texts of its incident as it is now."""
_STATES = """
SELECT o.incident, bit_xor(hash(o.id, o.kind)), any_value(hash(i.state, i.summary, i.updated, i.severity, i.life))
FROM outbox o LEFT JOIN incidents i ON i.id = o.incident WHERE o.receiver = $1 AND o.state = 'pending' GROUP BY ALL
"""
_ROWS = """
SELECT incident, id, number, kind, payload, epoch_us(created), answer <> '' OR attempts > 0 FROM outbox
WHERE receiver = $1 AND state = 'pending' AND incident IN (SELECT unnest($2::VARCHAR[])) ORDER BY incident, number
"""
_HAVE = f"""
SELECT incident FROM outbox WHERE receiver = $1 AND kind <> 'update' AND part_of IS NULL
AND (state = 'delivered' OR (state = 'muted' AND answer = '{ACKNOWLEDGED_AWAY}'))
AND incident IN (SELECT unnest($2::VARCHAR[])) GROUP BY incident HAVING arg_max(kind, number) = 'firing'
"""
_JUDGED = """
UPDATE outbox SET state = CASE WHEN n.reason = '' THEN state ELSE 'muted' END,
    answer = CASE WHEN n.reason = '' THEN answer ELSE n.reason END,
    kind = CASE WHEN n.kind = '' THEN outbox.kind ELSE n.kind END,
    payload = CASE WHEN n.body = '' THEN payload ELSE n.body END,
    created = least(created, make_timestamptz(n.since))
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS reason, unnest($3::VARCHAR[]) AS kind,
             unnest($4::VARCHAR[]) AS body, unnest($5::BIGINT[]) AS since) n
WHERE outbox.id = n.id AND outbox.state = 'pending'
"""
_PARTS = """
UPDATE outbox SET state = 'muted', answer = n.reason
FROM (SELECT unnest($1::VARCHAR[]) AS message, unnest($2::VARCHAR[]) AS incident, unnest($3::VARCHAR[]) AS reason) n
WHERE outbox.part_of = n.message AND outbox.state = 'grouped' AND n.incident IN ('', outbox.incident)
"""


@dataclass(slots=True, eq=False)
class Waiting:
    """A message that waits, and what becomes of it.

    created: UTC us.   was_tried: whether the receiver may have taken it without an answer.   reason: why it is never
    sent; empty: it is.   over: incidents of a group of which it says nothing any more.
    """

    incident: str
    id: str
    number: int
    kind: str
    text: str
    created: int
    was_tried: bool
    reason: str = ""
    over: set[str] = field(default_factory=set)
    body: dict[str, Any] = field(init=False)
    _old: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.body, self._old = json.loads(self.text), (self.kind, self.created)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts that it is about."""
        found: list[Alert] = self.body["alerts"]
        return found

    @property
    def said(self) -> dict[str, Any]:
        """What happened."""
        found: dict[str, Any] = self.body.get(EXTENSION, {})
        return found

    @property
    def pages_again(self) -> bool:
        """Whether it must be heard also where the page was acknowledged."""
        return self.said.get("event") in REPEATED - {"escalated"} or self.said.get("acknowledgement_ended") is True

    def replace_alerts(self, alerts: Sequence[Alert]) -> None:
        """Makes it about other alerts."""
        if alerts == self.alerts:
            return
        status = "firing" if any(one["status"] == "firing" for one in alerts) else "resolved"
        common = {"commonLabels": find_common([one["labels"] for one in alerts])}
        common["commonAnnotations"] = find_common([one["annotations"] for one in alerts])
        self.body = {**self.body, "status": status, **common, "alerts": list(alerts)}
        if status == "resolved":
            self.body["notification_reason"] = "all alerts resolved"
            self.kind = self.kind if self.kind == "update" else "resolved"

    def as_row(self) -> tuple[str, str, str, str, int] | None:
        """Returns its row of _JUDGED; None if nothing of it changed."""
        text = json.dumps(self.body, separators=(",", ":"))
        if not self.reason and text == self.text and (self.kind, self.created) == self._old:
            return None
        return (self.id, self.reason, self.kind, "" if text == self.text else text, self.created)


class WaitingMessages:
    """Judges what waits for one receiver, in its thread."""

    def __init__(self, store: Store, receiver: str, endpoint: Endpoint, renew: Renew) -> None:
        self._store, self._receiver, self._renew = store, receiver, renew
        self._mirrors = endpoint.resend_s > 0  # it is sent all alerts, also of what a person acknowledged
        self._was_down = False
        self._judged: dict[str, object] = {}  # incident or group -> its state when it was judged

    def judge_absent(self, health: ReceiverHealth, now: int) -> None:
        """Judges before each probe of a receiver that is down, and once more when it is back."""
        if self._was_down or (health.is_down and now >= health.next_probe):
            self.judge(now)
        self._was_down = health.is_down

    def judge(self, now: int) -> None:
        """Judges what changed since the last time; groups each time, since they follow several incidents."""
        with contextlib.closing(self._store.cursor()) as cursor:
            rows = cursor.execute(_STATES, [self._receiver]).fetchall()
        states: dict[str, object] = {incident: tuple(state) for incident, *state in rows}
        changed = [
            one for one, state in states.items() if self._judged.get(one) != state or one.startswith(GROUP_PREFIX)
        ]
        for at in range(0, len(changed), MOST):
            with self._store.transaction() as connection:
                self._judge_some(connection, changed[at : at + MOST], now)
        self._judged = states

    def _judge_some(self, connection: duckdb.DuckDBPyConnection, threads: Sequence[str], now: int) -> None:
        have = {one for (one,) in connection.execute(_HAVE, [self._receiver, list(threads)]).fetchall()}
        waiting: dict[str, list[Waiting]] = {}
        for row in connection.execute(_ROWS, [self._receiver, list(threads)]).fetchall():
            waiting.setdefault(row[0], []).append(Waiting(*row))
        every = [one for messages in waiting.values() for one in messages]
        named = {str(alert["labels"].get("incident", "")) for one in every for alert in one.alerts}
        known = {one.id: one for one in ledger.load_incidents(connection, sorted(named))}
        for thread, messages in waiting.items():
            has = thread in have
            if thread.startswith(GROUP_PREFIX):
                self._judge_group(messages, has, known, now)
            else:
                self._judge_incident(messages, has, known.get(thread), now)
        self._write(connection, every)

    def _judge_incident(self, messages: Sequence[Waiting], has: bool, incident: Incident | None, now: int) -> None:
        news = [one for one in messages if one.kind != "update"]
        if not news:
            return
        last, is_owned = news[-1], incident is not None and incident.state == "acknowledged" and not self._mirrors
        if last.kind == "resolved":
            skip([one for one in news[:-1] if one.kind == "firing" or not has], ENDED_AWAY)
            skip([one for one in messages if one.kind == "update" and one.number < last.number and not has], ENDED_AWAY)
        elif has:
            ends = [one.number for one in news if one.kind == "resolved"]
            over = [one for one in news if one.kind == "firing" and one.number < max(ends, default=0)]
            skip([one for one in over if len(one.alerts) == 1], ENDED_AWAY)
        if is_owned and has and last.kind == "firing":
            skip([one for one in news if one.kind == "firing" and len(one.alerts) == 1], ACKNOWLEDGED_AWAY)
        if not has and last.kind == "firing":
            skip([one for one in messages if one.number < last.number], REPLACED_AWAY)
            last.created = min(one.created for one in news)
        ended = find_ended(messages, last, has, now)
        if is_owned and not has and last.kind == "firing":
            self._skip_owned(messages, last, ended)
        elif not last.reason:
            is_known = has or last.kind == "resolved"
            own = last.alerts if is_known else last.alerts[-1:]
            last.replace_alerts([*ended, *(one for one in own if one["fingerprint"] not in _prints(ended))])
            carry_pages(messages, last)
        if incident is not None:
            self._renew_texts(messages, incident)

    def _skip_owned(self, messages: Sequence[Waiting], last: Waiting, ended: Sequence[Alert]) -> None:
        """Leaves only the acknowledgement, for a receiver that took the page without an answer; or the end of alerts
        that the incident has no longer."""
        owned = [one for one in messages if one.kind == "update" and one.said.get("event") == "acknowledged"]
        if ended:
            last.replace_alerts(ended)
        kept = [last] if ended else owned[-1:]
        skip([one for one in messages if one not in kept], ACKNOWLEDGED_AWAY)

    def _judge_group(self, messages: Sequence[Waiting], has: bool, known: Mapping[str, Incident], now: int) -> None:
        """Judges the messages of a group: what ended is left out of them, its end comes with the next message of its
        group, or with the one that waits."""
        news = [one for one in messages if one.kind != "update"]
        if not news:
            return
        last, ended_later = news[-1], set[str]()
        if last.kind == "resolved":
            skip([one for one in messages if one is not last and (one.kind == "firing" or not has)], ENDED_AWAY)
            last.replace_alerts([*find_ended(messages, last, has, now), *last.alerts])
        for one in reversed([one for one in news if not one.reason]):
            if one.kind == "firing":
                self._judge_group_message(one, known, ended_later)
            ended_later |= _prints(a for a in one.alerts if a["status"] == "resolved")
        carry_pages(messages, last)

    def _judge_group_message(self, one: Waiting, known: Mapping[str, Incident], ended_later: Collection[str]) -> None:
        """Leaves out of a message what fires no longer. It is not sent if nothing is left, or if a person acknowledged
        all that is left and it ends nothing."""
        kept, owned = list[Alert](), list[bool]()
        for alert in one.alerts:
            incident = known.get(str(alert["labels"].get("incident", "")))
            if alert["status"] == "resolved" or incident is None:
                kept.append(alert)
                owned += [False] if incident is None else []
            elif incident.resolved is not None or incident.life.silenced_by or alert["fingerprint"] in ended_later:
                one.over.add(incident.id)
            else:
                kept.append(self._renew(incident, alert))
                owned.append(incident.state == "acknowledged")
        if not kept:
            one.reason = ENDED_AWAY
        elif owned and all(owned) and len(owned) == len(kept):
            one.reason = ACKNOWLEDGED_AWAY
        else:
            one.replace_alerts(kept)

    def _renew_texts(self, messages: Sequence[Waiting], incident: Incident) -> None:
        """Gives what fires the texts of now, and the newest page the state of its incident too."""
        if incident.resolved is not None or incident.life.silenced_by:
            return
        for one in (one for one in messages if not one.reason and one.kind != "resolved"):
            alerts = [self._renew(incident, a) if a["status"] == "firing" else a for a in one.alerts]
            one.replace_alerts(alerts)
            if one.kind == "firing" and "incident" in one.said:
                one.body[EXTENSION] = {**one.said, "incident": incident.as_json()}

    def _write(self, connection: duckdb.DuckDBPyConnection, messages: Iterable[Waiting]) -> None:
        rows, parts = list[tuple[Any, ...]](), list[tuple[str, str, str]]()
        for one in messages:
            if (row := one.as_row()) is not None:
                rows.append(row)
            if one.incident.startswith(GROUP_PREFIX):
                parts += [(one.id, "", one.reason)] if one.reason else [(one.id, i, ENDED_AWAY) for i in one.over]
        if rows:
            connection.execute(_JUDGED, [list(column) for column in zip(*rows, strict=True)])
        if parts:
            connection.execute(_PARTS, [list(column) for column in zip(*parts, strict=True)])


def skip(messages: Iterable[Waiting], reason: str) -> None:
    """Never sends these."""
    for one in messages:
        one.reason = one.reason or reason


def find_ended(messages: Sequence[Waiting], last: Waiting, has: bool, now: int) -> list[Alert]:
    """Returns the ends of alerts, other than those of the last message that fire, which the receiver has or may have,
    and of which only messages that are not sent say it."""
    skipped = [one for one in messages if one.reason and one.kind != "update"]
    fired = {a["fingerprint"]: a for one in skipped if one.was_tried for a in one.alerts if a["status"] == "firing"}
    ended = {a["fingerprint"]: a for one in [*skipped, last] for a in one.alerts if a["status"] == "resolved"}
    wanted = fired if not has else {**ended, **fired}
    if last.kind == "resolved":
        own = _prints(last.alerts)
    else:
        own = {last.alerts[-1]["fingerprint"]} | (_prints(last.alerts) if has else set())
    return [
        ended.get(name) or {**alert, "status": "resolved", "endsAt": iso(now)}
        for name, alert in wanted.items()
        if name not in own
    ]


def carry_pages(messages: Iterable[Waiting], last: Waiting) -> None:
    """Lets the last message page again if one that it replaces had to."""
    if last.kind == "firing" and EXTENSION in last.body and any(one.reason and one.pages_again for one in messages):
        last.body[EXTENSION] = {**last.said, "acknowledgement_ended": True}


def _prints(alerts: Iterable[Alert]) -> set[str]:
    return {str(one["fingerprint"]) for one in alerts}
