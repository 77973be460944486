"""Held messages: groups and inhibition, with the meanings of Alertmanager 0.34.

Messages that a route groups, or that a rule may inhibit, are `held` in the outbox, in the transaction of their
incident. The thread of their receiver decides about them. A group and the message made of it are one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.ledger import Payload
from pipeline.model.records import SECOND, iso
from pipeline.notify.routes import Labels, Rules

GROUP_PREFIX = "grp-"


@dataclass(slots=True)
class Group:
    """The alerts of one route with equal `group_by` labels, and what of them was sent last.

    alerts:  fingerprint -> the alert, with its `incident` and whether it was `acknowledged`.
    firing, resolved: fingerprints in the last message.   acknowledged: whether that was said of all that fire.
    flush_at, sent_at: next tick and last message (UTC us; 0: none).
    """

    id: str
    key: str
    labels: dict[str, str]
    flush_at: int
    alerts: dict[str, dict[str, Any]] = field(default_factory=dict)
    firing: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    acknowledged: bool = False
    sent_at: int = 0

    def add_alert(self, alert: Mapping[str, Any], incident: str, acknowledged: bool) -> None:
        """Adds an alert, or its new state."""
        self.alerts[alert["fingerprint"]] = {**alert, "incident": incident, "acknowledged": acknowledged}

    def flush(self, now: int, repeat_s: float, is_inhibited: Callable[[Mapping[str, Any]], Any]) -> tuple[str, Any]:
        """Returns why a message is due and its alerts; ("", []) if none is. Alerts that ended leave the group.

        The reasons and their order are those of Alertmanager's deduplication.
        """
        shown = [a for fp, a in self.alerts.items() if not is_inhibited(a) or (_ended(a) and fp in self.firing)]
        firing = [a["fingerprint"] for a in shown if not _ended(a)]
        resolved = [a["fingerprint"] for a in shown if _ended(a)]
        reason = self._find_reason(firing, resolved, now, repeat_s) if shown else ""
        self.alerts = {fp: a for fp, a in self.alerts.items() if not _ended(a)}
        if reason:
            self.firing, self.resolved, self.sent_at = firing, resolved, now
            self.acknowledged = False
        return reason, shown if reason else []

    def _find_reason(self, firing: Sequence[str], resolved: Sequence[str], now: int, repeat_s: float) -> str:
        if not self.sent_at:
            return "first notification" if firing else ""
        if not set(firing) <= set(self.firing):
            return "new alerts added" if self.firing else "first notification"
        if not firing:
            return "all alerts resolved" if self.firing else ""
        if not set(resolved) <= set(self.resolved):
            return "some alerts resolved"
        return "repeat interval elapsed" if now - self.sent_at > repeat_s * SECOND else ""

    def is_newly_acknowledged(self) -> bool:
        """Returns whether all alerts that fire are acknowledged, and no message said so yet; and remembers it."""
        firing = [a for a in self.alerts.values() if a["fingerprint"] in self.firing and not _ended(a)]
        found = bool(firing) and all(a["acknowledged"] for a in firing) and not self.acknowledged
        self.acknowledged = self.acknowledged or found
        return found


def _ended(alert: Mapping[str, Any]) -> bool:
    return bool(alert["status"] == "resolved")


class Store(Protocol):
    """The part of the store that groups need."""

    def transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """See `Database.transaction`."""
        ...

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """See `Database.cursor`."""
        ...


_HELD = """
SELECT id, incident, kind, payload, epoch_us(created) FROM outbox WHERE receiver = $1 AND state = 'held'
ORDER BY created, incident, number LIMIT 5000
"""
_GROUPS = "SELECT state FROM notify_groups WHERE receiver = $1 ORDER BY id"
_RELEASED = """
SELECT DISTINCT incident FROM outbox WHERE receiver = $1 AND kind = 'firing' AND state IN ('pending', 'delivered')
AND incident IN (SELECT unnest($2::VARCHAR[]))
"""
_WAITS = "SELECT count(*) FROM outbox WHERE receiver = $1 AND incident = $2 AND state = 'pending'"
_NEVER_SENT = """
UPDATE outbox SET state = 'muted', answer = 'ended before its group was sent'
WHERE receiver = $1 AND part_of = $2 AND state = 'grouped' AND incident IN (SELECT unnest($3::VARCHAR[]))
"""
Settlement = tuple[str, Literal["pending", "grouped", "muted"], str]
"""Message, its new state, and the group or the reason."""
Part = tuple[Any, Mapping[str, Any]]
"""A row of the outbox and its parsed body."""


MakeBody = Callable[[Sequence[Mapping[str, Any]], str, Mapping[str, str], str], dict[str, Any]]
"""Makes a body of version 4 of alerts, groupKey, group labels and reason."""


class Firing(NamedTuple):
    """The alerts that fire: incident -> labels, and incident -> the storm that represents it."""

    labels: Mapping[str, Labels]
    storms: Mapping[str, str]


class HeldMessages:
    """Decides about the held messages of one receiver, in its thread.

    load_firing: returns all alerts that fire, which may inhibit others.
    """

    def __init__(
        self,
        store: Store,
        receiver: str,
        rules: Rules,
        load_firing: Callable[[duckdb.DuckDBPyConnection], Firing],
        make_body: MakeBody,
    ) -> None:
        self._store, self._receiver, self._rules = store, receiver, rules
        self._load_firing, self._make_body = load_firing, make_body
        self._groups: dict[str, Group] | None = None
        self._firing = Firing({}, {})

    def release(self, now: int) -> bool:
        """Releases the messages that are due, in one transaction. Returns whether anything is still held or grouped."""
        with contextlib.closing(self._store.cursor()) as cursor:
            rows = cursor.execute(_HELD, [self._receiver]).fetchall()
            if self._groups is None:
                found = [json.loads(state) for (state,) in cursor.execute(_GROUPS, [self._receiver]).fetchall()]
                self._groups = {one["key"]: Group(**one) for one in found}
            due = [group for group in self._groups.values() if group.flush_at <= now]
            if not rows and not due:
                return bool(self._groups)
            self._firing = self._load_firing(cursor) if self._rules.inhibitions else Firing({}, {})
            parts = [(row, json.loads(row[3])) for row in rows]
            single = [(row, body) for row, body in parts if not _is_grouped(body)]
            settled = self._settle_single(cursor, single) if single else []
        self._write(settled, [(row, body) for row, body in parts if _is_grouped(body)], now)
        return True

    def _settle_single(self, cursor: duckdb.DuckDBPyConnection, rows: Sequence[Part]) -> list[Settlement]:
        """Returns the new states of messages that only inhibition holds back."""
        by_incident: dict[str, list[Part]] = {}
        for row, body in rows:
            by_incident.setdefault(row[1], []).append((row, body))
        known = {i for (i,) in cursor.execute(_RELEASED, [self._receiver, list(by_incident)]).fetchall()}
        settled: list[Settlement] = []
        for incident, messages in by_incident.items():
            source = self._find_source(incident, messages[-1][1]["alerts"][-1]["labels"])
            ended = incident in self._firing.storms or any(row[2] == "resolved" for row, _ in messages)
            if source is None and ended and incident not in known:  # both ended together
                source = "an alert that ended before it"
            if source is None:
                settled += [(row[0], "pending", "") for row, _ in messages]
            elif incident in known:
                settled += _settle_known(messages, source, ended)
            elif ended:
                settled += [(row[0], "muted", f"inhibited by {source}") for row, _ in messages]
        return settled

    def _find_source(self, incident: str, labels: Labels) -> str | None:
        """Returns what inhibits an alert: the storm that represents it, or an incident by a rule; None if nothing."""
        return self._firing.storms.get(incident) or self._rules.find_source(labels, self._firing.labels)

    def _write(self, settled: list[Settlement], grouped: Sequence[Part], now: int) -> None:
        assert self._groups is not None
        try:
            with self._store.transaction() as connection:
                touched = self._collect(grouped)
                settled += [(row[0], "grouped", group.id) for row, group in touched]
                _settle(connection, settled, now)
                changed = {group.id: group for _, group in touched}
                for group in [g for g in self._groups.values() if g.flush_at <= now]:
                    self._flush(connection, group, now)
                    changed[group.id] = group
                for group in changed.values():
                    if group.is_newly_acknowledged():
                        self._add_message(
                            connection, group, list(group.alerts.values()), "unknown", "acknowledged", now
                        )
                _save(connection, self._receiver, changed.values())
            self._groups = {key: group for key, group in self._groups.items() if group.alerts}
        except BaseException:
            self._groups = None  # read again: the transaction kept nothing
            raise

    def _collect(self, rows: Sequence[Part]) -> list[tuple[Any, Group]]:
        """Adds alerts to their groups; a new group is flushed after group_wait."""
        assert self._groups is not None
        touched = []
        for row, body in rows:
            key, alert, change = body["groupKey"], body["alerts"][-1], body["fleetpulse"]
            group = self._groups.get(key)
            if group is None:
                node = self._rules.routes.get(change["route"])
                due = row[4] + int((node.wait_s if node is not None else 0.0) * SECOND)
                group = Group(name_group(self._receiver, key), key, dict(body["groupLabels"]), due)
                self._groups[key] = group
            group.add_alert(alert, row[1], (change.get("incident") or {}).get("state") == "acknowledged")
            touched.append((row, group))
        return touched

    def _flush(self, connection: duckdb.DuckDBPyConnection, group: Group, now: int) -> None:
        """Writes the message of a group, if one is due, and plans the next tick."""
        node = self._rules.routes.get(group.key.rpartition(":{")[0])
        repeat, interval = (node.repeat_s, node.interval_s) if node else (float("inf"), 1.0)
        if connection.execute(_WAITS, [self._receiver, group.id]).fetchone() != (0,):
            repeat = float("inf")  # what waits for its receiver is not repeated
        ended = [a["incident"] for a in group.alerts.values() if _ended(a)]
        reason, alerts = group.flush(now, repeat, lambda a: self._find_source(a["incident"], a["labels"]))
        if reason:
            ended_all = all(map(_ended, alerts))
            self._add_message(connection, group, alerts, reason, "resolved" if ended_all else "opened", now)
        elif ended:
            connection.execute(_NEVER_SENT, [self._receiver, group.id, ended])
        group.flush_at = max(group.flush_at + int(interval * SECOND), now + SECOND)

    def _add_message(
        self,
        connection: duckdb.DuckDBPyConnection,
        group: Group,
        alerts: Sequence[Mapping[str, Any]],
        reason: str,
        event: str,
        now: int,
    ) -> None:
        body = self._make_body(alerts, group.key, group.labels, reason)
        body["fleetpulse"] = {"event": event, "incidents": sorted({a["incident"] for a in alerts}), "time": iso(now)}
        kind: Any = {"acknowledged": "update", "resolved": "resolved"}.get(event, "firing")
        text = json.dumps(body, separators=(",", ":"))
        ledger.write_changes(connection, [], [], [Payload(group.id, self._receiver, kind, text, now)], now)


def _settle_known(messages: Sequence[Part], source: str, ended: bool) -> Iterator[Settlement]:
    """Yields the new states of messages about an inhibited alert that the receiver has: only what pages again waits,
    and is never sent if it ended or a person acknowledged it by then."""
    acknowledged = max((n for n, (_, body) in enumerate(messages) if _event_of(body) == "acknowledged"), default=-1)
    for number, (row, body) in enumerate(messages):
        if row[2] != "firing" or len(body["alerts"]) > 1:
            yield row[0], "pending", ""
        elif ended or number < acknowledged:
            yield row[0], "muted", f"inhibited by {source}"


def _event_of(body: Mapping[str, Any]) -> str:
    return str(body.get("fleetpulse", {}).get("event", ""))


def _is_grouped(body: Mapping[str, Any]) -> bool:
    return "route" in body.get("fleetpulse", {})


def name_group(receiver: str, key: str) -> str:
    """Returns the id of a group: the same for its whole life, and again for a later one of the same labels."""
    return f"{GROUP_PREFIX}{hashlib.sha256(f'{receiver} {key}'.encode()).hexdigest()[:16]}"


def _settle(connection: duckdb.DuckDBPyConnection, settled: Sequence[Settlement], now: int) -> None:
    if not settled:
        return
    ids, states, reasons = map(list, zip(*settled, strict=True))
    connection.execute(
        """UPDATE outbox SET state = n.state, answer = CASE WHEN n.state = 'muted' THEN n.reason ELSE answer END,
                  part_of = CASE WHEN n.state = 'grouped' THEN n.reason END,
                  next_attempt = make_timestamptz($4::BIGINT)
           FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS state, unnest($3::VARCHAR[]) AS reason) n
           WHERE outbox.id = n.id""",
        [ids, states, reasons, now],
    )


def _save(connection: duckdb.DuckDBPyConnection, receiver: str, groups: Iterable[Group]) -> None:
    """Stores groups; one without alerts is deleted."""
    for group in groups:
        if not group.alerts:
            connection.execute("DELETE FROM notify_groups WHERE receiver = $1 AND id = $2", [receiver, group.id])
            continue
        state = json.dumps({name: getattr(group, name) for name in Group.__slots__})
        connection.execute("INSERT OR REPLACE INTO notify_groups VALUES ($1, $2, $3)", [receiver, group.id, state])
