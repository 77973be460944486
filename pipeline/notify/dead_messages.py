"""Dead messages that a person sends again, so that their receiver ends with the truth.

A receiver may have accepted later messages of the same incident or group. A dead one below them would take them back:
what it fired would fire for ever, and what it ended would seem to be over. So the newest state is sent again in its
place, as a new message, since receivers may drop a key that they know.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.ledger import Payload
from pipeline.model.records import iso
from pipeline.notify import held_rows
from pipeline.notify.alertmanager import EXTENSION, make_body
from pipeline.notify.held_messages import Store

AT_A_TIME = 100
"""Incidents and groups of one transaction: 10 ms of CPU each, in which nothing else is written. Chosen."""
_THREADS = """
SELECT receiver, incident, min(number) FROM outbox
WHERE state = 'dead' AND (receiver = $2 OR list_contains($1::VARCHAR[], id)
    OR id IN (SELECT part_of FROM outbox WHERE list_contains($1::VARCHAR[], id)))
AND (part_of IS NULL OR part_of NOT IN (SELECT id FROM outbox WHERE state = 'dead'))
GROUP BY ALL ORDER BY ALL
"""
_ROWS = """
SELECT id, kind, state = 'dead', payload, part_of IS NOT NULL AND state <> 'dead' FROM outbox
WHERE receiver = $1 AND incident = $2 AND number >= $3
AND (state IN ('pending', 'delivered', 'grouped') OR (state = 'held' AND kind = 'resolved')
    OR (state = 'dead' AND (part_of IS NULL OR part_of NOT IN (SELECT id FROM outbox WHERE state = 'dead'))))
ORDER BY number
"""
_SEND = """
UPDATE outbox SET state = 'pending', attempts = 0, answer = concat('sent again by ', $2), part_of = NULL,
    created = make_timestamptz($3::BIGINT), next_attempt = make_timestamptz($3::BIGINT)
WHERE list_contains($1::VARCHAR[], id)
"""
_SEND_PARTS = """
UPDATE outbox SET state = 'grouped' WHERE state = 'dead' AND list_contains($1::VARCHAR[], part_of) RETURNING id
"""
_REPLACE = "UPDATE outbox SET state = 'muted', answer = $2 WHERE list_contains($1::VARCHAR[], id)"
_REPLACE_PARTS = """
UPDATE outbox SET state = CASE WHEN $3 = '' THEN 'muted' ELSE 'grouped' END, answer = $2,
    part_of = CASE WHEN $3 = '' THEN part_of ELSE $3 END
WHERE state = 'dead' AND list_contains($1::VARCHAR[], part_of) RETURNING id
"""


@dataclass(frozen=True, slots=True)
class _Row:
    """A message of an incident or a group for one receiver. is_said: whether a message of a group says it."""

    id: str
    kind: Literal["firing", "resolved", "update"]
    is_dead: bool
    text: str
    is_said: bool

    @property
    def body(self) -> dict[str, Any]:
        """What it says."""
        found: dict[str, Any] = json.loads(self.text)
        return found


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of the dead messages of a thread. sent: by themselves.  newest: the state that is sent after them,
    as a new message."""

    sent: Sequence[_Row] = ()
    newest: tuple[Literal["firing", "resolved"], dict[str, Any]] | None = None


def replay_payloads(store: Store, ids: Sequence[str], receiver: str | None, user: str, time: int) -> list[str]:
    """Sends dead messages again, or in their place the newest state of their incident or group; returns their ids.

    All dead ones of an incident or group go together. What a message of a group says is sent again by that message.
    """
    with contextlib.closing(store.cursor()) as cursor:
        threads = cursor.execute(_THREADS, [list(ids), receiver]).fetchall()
    done: list[str] = []
    for first in range(0, len(threads), AT_A_TIME):
        with store.transaction() as connection:
            for name, thread, number in threads[first : first + AT_A_TIME]:
                done += _replay_thread(connection, name, thread, number, user, time)
    return done


def _replay_thread(
    connection: duckdb.DuckDBPyConnection, receiver: str, thread: str, first: int, user: str, time: int
) -> list[str]:
    """Sends the dead messages of an incident or a group again, from a number on; returns their ids."""
    rows = [_Row(*row) for row in connection.execute(_ROWS, [receiver, thread, first]).fetchall()]
    plan = _plan(rows, bool(held_rows.find_firing(connection, receiver, [thread])), time)
    sent = [row.id for row in plan.sent]
    replaced = [row.id for row in rows if row.is_dead and row.id not in sent]
    connection.execute(_SEND, [sent, user, time])
    parts = connection.execute(_SEND_PARTS, [sent]).fetchall()
    new, answer = "", "replaced by a later message"
    if plan.newest is not None:
        kind, body = plan.newest
        text = json.dumps(body, separators=(",", ":"))
        # as of a group: an end is written also where the newest message is an end
        payload = Payload(thread, receiver, kind, text, time, of_group=True)
        (new,) = ledger.write_payloads(connection, [payload])
        answer = f"{answer}, which was sent again by {user}"
    connection.execute(_REPLACE, [replaced, answer])
    parts += connection.execute(_REPLACE_PARTS, [replaced, answer, new]).fetchall()
    return [*sent, *replaced, *(id_ for (id_,) in parts)]


def _plan(rows: Sequence[_Row], fires: bool, time: int) -> _Plan:
    """Returns what is sent of the messages of a thread from its first dead one on. fires: whether it is an incident
    that fires now."""
    if any(row.is_said for row in rows):
        return _Plan()  # a group goes on with it
    states = [row for row in rows if row.kind != "update"]
    last = states[-1] if states else None
    if last is None or all(row.is_dead for row in states):
        sent = list(states)
        while fires and sent and sent[-1].kind == "resolved":
            sent.pop()  # it returned while its receiver was not configured
        behind = rows[rows.index(last) + 1 :] if last else rows
        return _Plan([*sent, *(row for row in behind if row.is_dead)])
    updates = [row for row in rows[rows.index(last) + 1 :] if row.is_dead]
    dead = [row for row in states if row.is_dead]
    if not dead:
        return _Plan(updates)
    if last.kind == "firing":
        return _Plan(updates, ("firing", _merge(states, time)))
    pages = [row for row in dead if row.kind == "firing"][-1:]
    return _Plan([*pages, *updates], ("resolved", _merge(states, time)))


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
