"""What receivers missed while they, or their routes, were not configured: found once, when the notifier starts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.ledger import NOT_CONFIGURED, Payload
from pipeline.model.records import Incident, iso
from pipeline.notify.alertmanager import RECEIVER_PREFIX, PayloadPlanner, compute_fingerprint
from pipeline.notify.groups import GROUP_PREFIX

_NEWEST = """
SELECT incident, receiver, arg_max(kind, number) = 'firing' AS fires, max(number) AS number FROM outbox
WHERE kind <> 'update' AND state <> 'muted' AND NOT (state = 'dead' AND answer = $1) AND NOT starts_with(incident, $2)
GROUP BY ALL
"""
_TOLD = f"""
SELECT n.incident, n.receiver, o.payload, EXISTS (
    SELECT 1 FROM outbox u WHERE u.incident = n.incident AND u.receiver = n.receiver AND u.number > n.number
    AND u.kind = 'update' AND u.payload ->> '$.fleetpulse.event' = 'acknowledged'
    AND NOT (u.state = 'dead' AND u.answer = $1)),
    o.state = 'dead' AND starts_with(o.answer, $1)
FROM ({_NEWEST}) n JOIN outbox o USING (incident, receiver, number)
WHERE n.fires AND (n.incident IN (SELECT id FROM incidents) OR starts_with(n.incident, $3))
"""
"""The newest message of each receiver about an incident, if it fires and was, or may still be, sent; whether the
receiver got its acknowledgement since; and whether the receiver was removed after it was tried, so that
it is unknown whether it arrived."""
_STATES = """
SELECT incident, arg_max(kind, (created, number)) FROM outbox WHERE starts_with(incident, $1) GROUP BY incident
"""


def plan_missed(
    connection: duckdb.DuckDBPyConnection, planner: PayloadPlanner, receivers: Collection[str], now: int
) -> list[Payload]:
    """Returns the messages that receivers were not sent: pages that fire, and the ends of those that do not."""
    told: dict[str, dict[str, Any]] = defaultdict(dict)
    query = [NOT_CONFIGURED, GROUP_PREFIX, RECEIVER_PREFIX]
    acknowledged: dict[str, set[str]] = defaultdict(set)
    unsure: dict[str, set[str]] = defaultdict(set)
    for incident, receiver, text, is_acknowledged, is_unsure in connection.execute(_TOLD, query).fetchall():
        told[incident][receiver] = json.loads(text)
        unsure[incident] |= {receiver} if is_unsure else set()
        acknowledged[incident] |= {receiver} if is_acknowledged else set()
    open_incidents = {one.id: one for one in ledger.load_open_incidents(connection)}
    planner.label_all(open_incidents.values())  # one query finds all places
    found: list[Payload] = []
    for one in open_incidents.values():
        sent = told.get(one.id, {})
        again = {name for name in unsure[one.id] if _fires_same(planner, one, sent[name])}
        found += planner.plan_unsent(one, sent.keys() - again, now)
    states = dict(connection.execute(_STATES, [RECEIVER_PREFIX]).fetchall())
    for id_, bodies in told.items():
        incident = open_incidents.get(id_) or ledger.load_incident(connection, id_)
        if incident is not None:
            sent = {name: body["alerts"][-1] for name, body in bodies.items()}
            before = {name: bodies[name]["alerts"][:-1] for name in unsure[id_]}
            found += planner.plan_missed(incident, sent, acknowledged[id_], now, before)
        elif id_ in states and (id_.removeprefix(RECEIVER_PREFIX) not in receivers or states[id_] == "resolved"):
            found += [_end_report(id_, name, bodies[name], now) for name in sorted(bodies.keys() & set(receivers))]
    return found


def _fires_same(planner: PayloadPlanner, incident: Incident, body: Mapping[str, Any]) -> bool:
    """Returns whether an open incident still has the alert of a message: else its end comes with what it is now."""
    same = compute_fingerprint(planner.label(incident)) == body["alerts"][-1]["fingerprint"]
    return same and not incident.life.silenced_by


def _end_report(id_: str, receiver: str, body: Mapping[str, Any], now: int) -> Payload:
    """Returns the end of a report that a receiver accepts no alerts: it is removed, or it accepted them since."""
    ended = [{**alert, "status": "resolved", "endsAt": iso(now)} for alert in body["alerts"]]
    made = {**body, "status": "resolved", "notification_reason": "all alerts resolved", "alerts": ended}
    return Payload(id_, receiver, "resolved", json.dumps(made), now)
