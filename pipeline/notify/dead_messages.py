"""Dead messages that a person sends again, so that their receiver ends with the truth.

A receiver may have accepted later messages of the same incident or group. A dead one below them would take them back:
what it fired would fire for ever, and what it ended would seem to be over. So the newest state is sent again in its
place, as a new message, since receivers may drop a key that they know. Where routes or inhibition decide about
messages, they decide again about what fires: what would be sent by itself is held first, as a new message, since it may
get another text, and what waits already counts as said later. What was sent before and is over is not held: its
receiver may have taken it although it refused it, so its last page and its end are sent.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.ledger import Payload
from pipeline.model.records import iso
from pipeline.notify import held_rows
from pipeline.notify.alertmanager import EXTENSION, RECEIVER_PREFIX, make_body
from pipeline.notify.groups import GROUP_PREFIX
from pipeline.notify.held_messages import Store
from pipeline.notify.retention import EXPIRED

AT_A_TIME = 100
"""Incidents and groups of one transaction: 25 to 50 ms of CPU, in which nothing else is written. Chosen."""
_THREADS = """
SELECT receiver, incident, min(number) FROM outbox
WHERE state = 'dead' AND (receiver = $2 OR list_contains($1::VARCHAR[], id)
    OR id IN (SELECT part_of FROM outbox WHERE list_contains($1::VARCHAR[], id)))
AND (part_of IS NULL OR part_of NOT IN (SELECT id FROM outbox WHERE state = 'dead'))
GROUP BY ALL ORDER BY ALL
"""
_ROWS = f"""
SELECT o.receiver, o.incident, o.id, o.number, o.kind, o.state, o.payload,
    o.part_of IS NOT NULL AND o.state NOT IN ('dead', 'muted'),
    o.attempts > 0 OR starts_with(o.answer, '{EXPIRED}')
FROM outbox o JOIN (SELECT unnest($1::VARCHAR[]) AS receiver, unnest($2::VARCHAR[]) AS incident,
                           unnest($3::INTEGER[]) AS first) t
    ON o.receiver = t.receiver AND o.incident = t.incident AND o.number >= t.first
WHERE o.state IN ('pending', 'delivered', 'grouped', 'held') OR (o.state = 'muted' AND o.kind <> 'firing')
    OR (o.state = 'dead' AND (o.part_of IS NULL OR o.part_of NOT IN (SELECT id FROM outbox WHERE state = 'dead')))
ORDER BY o.number
"""
_SEND = """
UPDATE outbox SET state = 'pending', attempts = least(attempts, 1), answer = concat('sent again by ', $2),
    part_of = NULL, created = make_timestamptz($3::BIGINT), next_attempt = make_timestamptz($3::BIGINT)
WHERE list_contains($1::VARCHAR[], id)
"""
_SEND_PARTS = """
UPDATE outbox SET state = 'grouped' WHERE state = 'dead' AND list_contains($1::VARCHAR[], part_of) RETURNING id
"""
_REPLACED = """
(SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS answer, unnest($3::VARCHAR[]) AS message)
"""
_REPLACE = f"UPDATE outbox SET state = 'muted', answer = n.answer FROM {_REPLACED} n WHERE outbox.id = n.id"
_REPLACE_PARTS = f"""
UPDATE outbox SET state = CASE WHEN n.message = '' THEN 'muted' ELSE 'grouped' END, answer = n.answer,
    part_of = CASE WHEN n.message = '' THEN part_of ELSE n.message END
FROM {_REPLACED} n WHERE outbox.part_of = n.id AND outbox.state = 'dead' RETURNING outbox.id
"""
_MOVE = """
UPDATE outbox SET number = n.place
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::INTEGER[]) AS place) n WHERE outbox.id = n.id
"""
Kind = Literal["firing", "resolved", "update"]
Thread = tuple[str, str]
"""Receiver, and incident or group."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A message of an incident or a group for one receiver.

    is_said:  whether a message of a group says it.   was_sent: whether nothing held it back, so that it was sent, or
              waited for its receiver for a week.
    """

    id: str
    number: int
    kind: Kind
    state: str
    text: str
    is_said: bool
    was_sent: bool

    @property
    def body(self) -> dict[str, Any]:
        """What it says."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def is_dead(self) -> bool:
        """Whether it is dead."""
        return self.state == "dead"

    @property
    def is_held(self) -> bool:
        """Whether routes or inhibition have still to decide about it."""
        return self.state == "held"

    @property
    def acknowledges(self) -> bool:
        """Whether it is the acknowledgement of an alert that fires."""
        return self.kind == "update" and self.body.get(EXTENSION, {}).get("event") == "acknowledged"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of the dead messages of a thread; those that are not sent are replaced.

    sent:  by themselves.   newest: new messages that are sent after them.   place: number of the first of these, among
           those of the thread; None: after all others.   is_over: whether nothing of it may wait.
    """

    sent: Sequence[_Row] = ()
    newest: Sequence[tuple[Kind, dict[str, Any]]] = ()
    place: int | None = None
    is_over: bool = False

    @property
    def repeats(self) -> bool:
        """Whether the new messages only say again what fires: they may wait, an end in them may not."""
        return bool(self.newest) and [a["status"] for a in self.newest[0][1]["alerts"]] == ["firing"]


@dataclass(slots=True)
class _Changes:
    """What one transaction changes. replaced: (id, thread).   new: (message, thread, place)."""

    sent: list[str] = field(default_factory=list)
    replaced: list[tuple[str, Thread]] = field(default_factory=list)
    new: list[tuple[Payload, Thread, int | None]] = field(default_factory=list)

    def add(self, thread: Thread, rows: Sequence[_Row], plan: _Plan, holds: bool, time: int) -> None:
        """Adds what becomes of a thread."""
        waits = holds and not plan.is_over
        sent = [] if waits else [row.id for row in plan.sent]
        self.sent += sent
        self.replaced += [(row.id, thread) for row in rows if row.is_dead and row.id not in sent]
        for row in plan.sent if waits else ():
            payload = Payload(thread[1], thread[0], row.kind, row.text, time, "held", of_group=True)
            self.new.append((payload, thread, row.number))
        if_new: Literal["held", "pending"] = "held" if waits and plan.repeats else "pending"
        for at, (kind, body) in enumerate(plan.newest):
            text = json.dumps(body, separators=(",", ":"))
            # as of a group: an end is written also where the newest message is an end
            payload = Payload(thread[1], thread[0], kind, text, time, if_new, of_group=True)
            self.new.append((payload, thread, None if at else plan.place))


def replay_payloads(
    store: Store, ids: Sequence[str], receiver: str | None, user: str, time: int, holding: Collection[str] = ()
) -> list[str]:
    """Sends dead messages again, or in their place the newest state of their incident or group; returns their ids.

    All dead ones of an incident or group go together. What a message of a group says is sent again by that message.
    holding: the receivers about whose messages routes or inhibition decide.
    """
    with contextlib.closing(store.cursor()) as cursor:
        threads = cursor.execute(_THREADS, [list(ids), receiver]).fetchall()
    done: list[str] = []
    for first in range(0, len(threads), AT_A_TIME):
        with store.transaction() as connection:
            changes = _plan_all(connection, threads[first : first + AT_A_TIME], holding, time)
            done += _write(connection, changes, user, time)
    return done


def _plan_all(
    connection: duckdb.DuckDBPyConnection, threads: Sequence[tuple[str, str, int]], holding: Collection[str], time: int
) -> _Changes:
    """Plans what becomes of threads (receiver, incident or group, number of its first dead message)."""
    rows: dict[Thread, list[_Row]] = defaultdict(list)
    for name, thread, *row in connection.execute(_ROWS, list(map(list, zip(*threads, strict=True)))).fetchall():
        rows[name, thread].append(_Row(*row))
    fires: Mapping[str, Collection[str]] = {
        name: held_rows.find_firing(connection, name, [thread for other, thread, _ in threads if other == name])
        for name in {name for name, _, _ in threads}
    }
    changes = _Changes()
    for name, thread, _ in threads:
        found, is_incident = rows[name, thread], not thread.startswith((GROUP_PREFIX, RECEIVER_PREFIX))
        holds = any(row.is_held for row in found) or (name in holding and is_incident)
        changes.add((name, thread), found, _plan(found, thread in fires[name], holds, time), holds, time)
    return changes


def _write(connection: duckdb.DuckDBPyConnection, changes: _Changes, user: str, time: int) -> list[str]:
    """Writes what becomes of dead messages; returns their ids, with those of what messages of groups say."""
    connection.execute(_SEND, [changes.sent, user, time])
    parts = connection.execute(_SEND_PARTS, [changes.sent]).fetchall()
    made: dict[Thread, str] = {}
    ids = ledger.write_payloads(connection, [payload for payload, _, _ in changes.new])
    for id_, (_, thread, _) in zip(ids, changes.new, strict=True):
        made.setdefault(thread, id_)
    moved = [(id_, place) for id_, (_, _, place) in zip(ids, changes.new, strict=True) if place is not None]
    if moved:
        connection.execute(_MOVE, [list(column) for column in zip(*moved, strict=True)])
    if changes.replaced:
        later = "replaced by a later message"
        again = f"{later}, which was sent again by {user}"
        rows = [(id_, again if thread in made else later, made.get(thread, "")) for id_, thread in changes.replaced]
        columns = [list(column) for column in zip(*rows, strict=True)]
        connection.execute(_REPLACE, columns)
        parts += connection.execute(_REPLACE_PARTS, columns).fetchall()
    return [*changes.sent, *(id_ for id_, _ in changes.replaced), *(id_ for (id_,) in parts)]


def _plan(rows: Sequence[_Row], fires: bool, holds: bool, time: int) -> _Plan:
    """Returns the messages to send of a thread from its first dead one on.

    fires: whether it is an incident that fires now.   holds: whether routes or inhibition decide about it.
    """
    if any(row.is_said for row in rows):
        return _Plan()  # a group goes on with it
    states = [row for row in rows if row.kind != "update" and row.state != "muted"]
    accepted = [row for row in states if not row.is_dead and not row.is_held]
    if not accepted and (holds or all(row.is_dead for row in states)):
        return _plan_unsent(rows, states, fires, holds, time)
    last = states[-1]
    if accepted and any(row.is_held and row.kind == "firing" for row in states):
        return _plan_before_held(rows, states, accepted[-1], time)
    behind = rows[rows.index(last) + 1 :]
    updates = [row for row in behind if row.is_dead]
    dead = [row for row in states if row.is_dead]
    if not dead:
        return _Plan(updates)
    if last.kind == "firing":
        taken = [row for row in behind if row.acknowledges][-1:]
        return _Plan(updates, [("firing", _merge(states, time)), *(("update", row.body) for row in taken)])
    return _plan_end(states, updates, holds, time)


def _plan_end(states: Sequence[_Row], updates: Sequence[_Row], holds: bool, time: int) -> _Plan:
    """Returns the messages to send of a thread that is over: its last dead page, and the end of all after it. A page
    that was held back when it died is not: it ended first."""
    pages = [row for row in states if row.is_dead and row.kind == "firing" and (row.was_sent or not holds)]
    return _Plan([*pages[-1:], *updates], [("resolved", _merge(states, time))], is_over=True)


def _plan_unsent(rows: Sequence[_Row], states: Sequence[_Row], fires: bool, holds: bool, time: int) -> _Plan:
    """Returns the messages to send of a thread of which none was accepted since: all as they are, and again that a
    person acknowledged it, which its receiver could not know of an alert that it did not have. Where routes or
    inhibition decide, what was sent before and is over is sent as its last page and the end."""
    behind = rows[rows.index(states[-1]) + 1 :] if states else rows
    sent = list(states)
    while fires and sent and sent[-1].is_dead and sent[-1].kind == "resolved":
        sent.pop()  # it returned while its receiver was not configured
    ends = [row for row in behind if row.kind == "resolved" and not fires]  # never sent, as the page was not
    known = [*states, *ends[-1:]]
    if holds and not fires and known and known[-1].kind == "resolved" and any(row.was_sent for row in states):
        return _plan_end(known, [row for row in behind if row.is_dead and row not in ends], holds, time)
    taken = [row for row in behind if row.acknowledges][-1:] if sent and sent[-1].kind == "firing" else []
    again = [row for row in behind if row.is_dead or (row in taken and row.state in ("delivered", "muted"))]
    return _Plan([*(row for row in sent if row.is_dead), *ends[-1:], *again])


def _plan_before_held(rows: Sequence[_Row], states: Sequence[_Row], last: _Row, time: int) -> _Plan:
    """Returns the messages to send of a thread of which a newer one that fires is held, and will say what fires. last:
    the newest message that was accepted: what died after it is held with the newer one, of what died before it only
    ends are sent that no message said since."""
    sent = [row for row in rows if row.is_dead and row.number > last.number]
    before = [row for row in states if row.number <= last.number]
    lost: dict[str, int] = {}  # fingerprint -> number of the message that ended it
    for row in before:
        for alert in row.body["alerts"]:
            lost.pop(alert["fingerprint"], None)
            if row.is_dead and alert["status"] == "resolved":
                lost[alert["fingerprint"]] = row.number
    if not lost:
        return _Plan(sent)
    made = _merge(before, time)
    made[EXTENSION].pop("acknowledgement_ended", None)  # the held message pages, once it may
    return _Plan(sent, [(last.kind, made)], max(lost.values()))


def _merge(rows: Sequence[_Row], time: int) -> dict[str, Any]:
    """Returns the newest message with the ends of all that the messages before it fired: it may be that its receiver
    got only some of them."""
    bodies = [row.body for row in rows]
    newest = bodies[-1]
    alerts: dict[str, Any] = {}
    for alert in (alert for body in bodies for alert in body["alerts"]):
        alerts.pop(alert["fingerprint"], None)
        alerts[alert["fingerprint"]] = alert
    named = {alert["fingerprint"] for alert in newest["alerts"]}
    ends = newest["status"] == "resolved"
    found = [
        alert if alert["status"] == "resolved" or not ends else {**alert, "status": "resolved", "endsAt": iso(time)}
        for name, alert in alerts.items()
        if ends or name in named or alert["status"] == "resolved"
    ]
    group, url, key = newest["groupLabels"], newest["externalURL"], newest["groupKey"]
    made = make_body(found, group, newest["receiver"], url, newest["notification_reason"], key)
    said = dict(newest.get(EXTENSION, {}))
    said.pop("acknowledgement_ended", None)  # a page that was accepted is no news
    if any(row.is_dead and row.body.get(EXTENSION, {}).get("acknowledgement_ended") for row in rows):
        said["acknowledgement_ended"] = True
    if "incidents" in said:
        said["incidents"] = sorted({alert["labels"]["incident"] for alert in found})
    return {**newest, **made, EXTENSION: said}
