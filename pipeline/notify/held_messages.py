"""Held messages: groups and inhibition, with the meanings of Alertmanager 0.34.

Messages that a route groups, or that a rule may inhibit, are `held` in the outbox, in the transaction of their
incident. The thread of their receiver decides about them. A group and the message made of it are one transaction.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.ledger import Payload
from pipeline.model.records import SECOND, iso
from pipeline.notify.inhibited_messages import Decision, HeldMessage, Settlement, Situation, decide
from pipeline.notify.open_alerts import HeldBack, OpenAlertReader, OpenAlerts
from pipeline.notify.routes import Labels, Rules

GROUP_PREFIX = "grp-"
MOST = 2000
"""Incidents whose messages are decided about at a time; the next ones follow half a second later, so that what is held
for long delays nothing behind it. Chosen: it bounds what is read."""


@dataclass(slots=True)
class Group:
    """The alerts of one route with equal `group_by` labels, and what of them was sent last.

    alerts:  fingerprint -> the alert, with its `incident`, whether it was `acknowledged`, whether a message fired it
             (`sent`), and the number of its first row of the outbox (`since`).
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

    def add_alert(self, alert: Mapping[str, Any], incident: str, acknowledged: bool, number: int) -> None:
        """Adds an alert, or its new state. number: that of its row."""
        known = self.alerts.get(alert["fingerprint"], {})
        kept = {"sent": bool(known) and self.has_sent(known), "since": known.get("since", 0) if known else number}
        self.alerts[alert["fingerprint"]] = {**alert, "incident": incident, "acknowledged": acknowledged, **kept}

    def has_sent(self, alert: Mapping[str, Any]) -> bool:
        """Returns whether a message fired an alert of the group: its end is due. The last message need not show it: an
        inhibition may hide it. Groups that an older version stored know only the last message."""
        return bool(alert.get("sent")) or alert["fingerprint"] in self.firing

    def flush(self, now: int, repeat_s: float, is_hidden: Callable[[Mapping[str, Any]], Any]) -> tuple[str, Any]:
        """Returns why a message is due and its alerts; ("", []) if none is. Alerts that ended leave the group; the end
        of one that never fired in a message is in none.

        The reasons and their order are those of Alertmanager's deduplication, which knows no acknowledgement.
        """
        shown = [a for a in self.alerts.values() if (self.has_sent(a) if _ended(a) else not is_hidden(a))]
        firing = [a["fingerprint"] for a in shown if not _ended(a)]
        resolved = [a["fingerprint"] for a in shown if _ended(a)]
        reason = self._find_reason(firing, resolved, now, repeat_s) if shown else ""
        self.alerts = {fp: a for fp, a in self.alerts.items() if not _ended(a)}
        if reason:
            self.firing, self.resolved, self.sent_at = firing, resolved, now
            self.acknowledged = False
            for alert in shown:
                alert["sent"] = True
        return reason, shown if reason else []

    def _find_reason(self, firing: Sequence[str], resolved: Sequence[str], now: int, repeat_s: float) -> str:
        if not self.sent_at:
            return "first notification" if firing else ""
        if not set(firing) <= set(self.firing):
            return "new alerts added" if self.firing else "first notification"
        if not firing:
            return "all alerts resolved" if resolved else ""
        if not set(resolved) <= set(self.resolved):
            return "some alerts resolved"
        if self.lost_its_owner(firing):
            return "acknowledgement ended"
        return "repeat interval elapsed" if now - self.sent_at > repeat_s * SECOND else ""

    def lost_its_owner(self, firing: Iterable[str]) -> bool:
        """Returns whether its alerts were said to be acknowledged, and one of those that fire now is not."""
        return self.acknowledged and not all(self.alerts[one]["acknowledged"] for one in firing)

    def list_newly_acknowledged(self) -> list[dict[str, Any]]:
        """Returns the alerts that fire in the last message if all are acknowledged and no message said so yet; and
        remembers it."""
        firing = [a for a in self.alerts.values() if a["fingerprint"] in self.firing and not _ended(a)]
        if self.acknowledged or not all(a["acknowledged"] for a in firing):
            return []
        self.acknowledged = bool(firing)
        return firing


def _is_owned(body: Mapping[str, Any]) -> bool:
    return bool((body["fleetpulse"].get("incident") or {}).get("state") == "acknowledged")


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
SELECT id, incident, kind, payload, epoch_us(created), number FROM outbox WHERE receiver = $1 AND state = 'held'
AND incident IN (SELECT incident FROM outbox WHERE receiver = $1 AND state = 'held'
                 GROUP BY incident ORDER BY min(created), incident LIMIT $2 OFFSET $3)
ORDER BY created, incident, number
"""
_STATE = """
SELECT count(DISTINCT incident) FILTER (state = 'held'), count(*), bit_xor(hash(id, state, kind)) FROM outbox
WHERE receiver = $1 AND incident IN (SELECT incident FROM outbox WHERE receiver = $1 AND state = 'held')
"""
"""All of this receiver that decisions depend on: its held messages, and what it was sent of their incidents."""
_GROUPS = "SELECT state FROM notify_groups WHERE receiver = $1 ORDER BY id"
_RELEASED = """
SELECT incident FROM outbox WHERE receiver = $1 AND kind <> 'update' AND state IN ('pending', 'delivered')
AND incident IN (SELECT unnest($2::VARCHAR[])) GROUP BY incident HAVING arg_max(kind, number) = 'firing'
"""
_SENT_ALONE = """
SELECT incident FROM outbox WHERE receiver = $1 AND kind <> 'update' AND state IN ('pending', 'delivered')
AND part_of IS NULL AND incident IN (SELECT unnest($2::VARCHAR[])) GROUP BY incident
HAVING arg_max(kind, number) = 'firing'
"""
_ENDED_ALONE = """
SELECT incident FROM outbox WHERE receiver = $1 AND kind <> 'update' AND incident IN (SELECT unnest($2::VARCHAR[]))
GROUP BY incident
HAVING arg_max(kind, number) = 'resolved' AND arg_max(state, number) IN ('pending', 'delivered')
AND arg_max(coalesce(part_of, ''), number) = ''
"""
"""Incidents whose end was sent alone, since no route leads to their group any more."""
_NEWEST = """
SELECT incident, max(number) FROM outbox WHERE receiver = $1 AND incident IN (SELECT unnest($2::VARCHAR[]))
GROUP BY incident
"""
_WAITS = "SELECT count(*) FROM outbox WHERE receiver = $1 AND incident = $2 AND state = 'pending'"
_NEVER_SENT = """
UPDATE outbox SET state = 'muted', answer = 'ended before its group was sent'
FROM (SELECT unnest($3::VARCHAR[]) AS incident, unnest($4::VARCHAR[]) AS fingerprint, unnest($5::BIGINT[]) AS since) n
WHERE receiver = $1 AND part_of = $2 AND state = 'grouped' AND outbox.incident = n.incident
AND outbox.number >= n.since AND payload ->> '$.alerts[0].fingerprint' = n.fingerprint
"""
MakeBody = Callable[[Sequence[Mapping[str, Any]], str, Mapping[str, str], str], dict[str, Any]]
"""Makes a body of version 4 of alerts, groupKey, group labels and reason."""


class HeldMessages:
    """Decides about the held messages of one receiver, in its thread; again only after something changed."""

    def __init__(
        self,
        store: Store,
        receiver: str,
        rules: Rules,
        open_alerts: OpenAlertReader,
        make_body: MakeBody,
    ) -> None:
        self._store, self._receiver, self._rules = store, receiver, rules
        self._reader, self._make_body = open_alerts, make_body
        self._groups: dict[str, Group] | None = None
        self._alerts = OpenAlerts({}, {})
        self._state: object = None  # of the held messages, as last seen
        self._passed = 0  # incidents whose messages were decided about since the first
        self._undecided = 0  # incidents to be decided about since something changed

    def release(self, now: int) -> bool:
        """Releases the messages that are due, in one transaction. Returns whether anything is still held or grouped."""
        with contextlib.closing(self._store.cursor()) as cursor:
            if self._groups is None:
                found = [json.loads(state) for (state,) in cursor.execute(_GROUPS, [self._receiver]).fetchall()]
                self._groups = {one["key"]: Group(**one) for one in found}
            is_due = any(group.flush_at <= now for group in self._groups.values())
            has_held = self._look_for_changes(cursor, is_due)
            if not is_due and not self._undecided:
                return has_held or bool(self._groups)
            held = self._read_held(cursor) if self._undecided else []
            alerts = self._reader.read(cursor)  # after the rows: a source that was written with its target is in them
            if alerts is not self._alerts:
                self._alerts, self._state = alerts, None
            single = [one for one in held if not _is_grouped(one.body)]
            decisions = self._decide(cursor, single, now) if single else []
        self._write(decisions, [one for one in held if _is_grouped(one.body)], now)
        self._undecided = max(0, self._undecided - len({one.incident for one in held}))
        return True

    def _look_for_changes(self, cursor: duckdb.DuckDBPyConnection, is_due: bool) -> bool:
        """Plans to decide about all that is held if anything changed since; returns whether anything is held."""
        state = cursor.execute(_STATE, [self._receiver]).fetchone()
        number = int(state[0]) if state else 0
        alerts = self._reader.read(cursor) if number or is_due else self._alerts
        if state != self._state or alerts is not self._alerts:
            self._undecided = number
        self._state, self._alerts = state, alerts
        return bool(number)

    def _read_held(self, cursor: duckdb.DuckDBPyConnection) -> list[HeldMessage]:
        """Returns the messages of the next incidents."""
        rows = cursor.execute(_HELD, [self._receiver, MOST, self._passed]).fetchall()
        is_full = len({incident for _, incident, *_ in rows}) == MOST
        self._passed = self._passed + MOST if is_full else 0
        return [
            HeldMessage(id_, incident, kind, json.loads(text), at, number)
            for id_, incident, kind, text, at, number in rows
        ]

    def _decide(
        self, cursor: duckdb.DuckDBPyConnection, held: Sequence[HeldMessage], now: int
    ) -> list[tuple[Sequence[HeldMessage], Decision]]:
        """Returns what becomes of the messages of each incident that no route groups."""
        by_incident: dict[str, list[HeldMessage]] = {}
        for one in held:
            by_incident.setdefault(one.incident, []).append(one)
        known = {i for (i,) in cursor.execute(_RELEASED, [self._receiver, list(by_incident)]).fetchall()}
        found: list[tuple[Sequence[HeldMessage], Decision]] = []
        for incident, messages in by_incident.items():
            messages.sort(key=lambda one: one.number)
            source = self._find_source(incident, messages[-1].body["alerts"][-1]["labels"]) or ""
            back = self._alerts.held_back.get(incident, HeldBack())
            situation = Situation(incident in known, source, back.owner, bool(back.storm))
            found.append((messages, decide(messages, situation, self._receiver, now)))
        return found

    def _find_source(self, incident: str, labels: Labels) -> str | None:
        """Returns what inhibits an alert: the storm that represents it, or an incident by a rule; None if nothing."""
        back = self._alerts.held_back.get(incident, HeldBack())
        return back.storm or back.inhibitor or self._rules.find_source(labels, self._alerts.firing)

    def _write(
        self,
        decisions: Sequence[tuple[Sequence[HeldMessage], Decision]],
        grouped: Sequence[HeldMessage],
        now: int,
    ) -> None:
        assert self._groups is not None
        try:
            with self._store.transaction() as connection:
                settled, changed = self._collect(connection, grouped)
                _settle(connection, [*settled, *self._apply(connection, decisions, now)], now)
                for group in [g for g in self._groups.values() if g.flush_at <= now]:
                    self._flush(connection, group, now)
                    changed[group.id] = group
                for group in changed.values():
                    if said := group.list_newly_acknowledged():
                        self._add_message(connection, group, said, "unknown", "acknowledged", now)
                _save(connection, self._receiver, changed.values())
            self._groups = {key: group for key, group in self._groups.items() if group.alerts}
        except BaseException:
            self._groups = None  # read again: the transaction kept nothing
            raise

    def _apply(
        self,
        connection: duckdb.DuckDBPyConnection,
        decisions: Sequence[tuple[Sequence[HeldMessage], Decision]],
        now: int,
    ) -> Iterator[Settlement]:
        """Yields the settlements of decisions, and adds the messages that are held in place of others."""
        added = {messages[0].incident: one.held for messages, one in decisions if one.held is not None}
        rows = connection.execute(_NEWEST, [self._receiver, list(added)]).fetchall() if added else []
        newest = dict(rows)
        for messages, decision in decisions:
            incident, last = messages[0].incident, messages[-1].number
            if incident in added and newest.get(incident) != last:
                del added[incident]  # a message was written since they were read: decided again next time, with it
                continue
            yield from decision.settled
        if added:
            ledger.write_changes(connection, [], [], list(added.values()), now)

    def _collect(
        self, connection: duckdb.DuckDBPyConnection, rows: Sequence[HeldMessage]
    ) -> tuple[list[Settlement], dict[str, Group]]:
        """Adds alerts to their groups; returns what becomes of the rows, and the groups that changed, by id.

        An end belongs to all groups that have the alert: routes may have changed since, and two may lead here. What was
        sent alone, before there were routes, stays alone until its end, or until a rule inhibits it.
        """
        assert self._groups is not None
        incidents = list({one.incident for one in rows})
        found_alone = connection.execute(_SENT_ALONE, [self._receiver, incidents]).fetchall() if rows else []
        alone, passed = {incident for (incident,) in found_alone}, set[tuple[str, str, int]]()
        having: dict[str, list[Group]] = {}
        for group in self._groups.values() if rows else ():
            for fingerprint in group.alerts:
                having.setdefault(fingerprint, []).append(group)
        settled: list[Settlement] = []
        changed: dict[str, Group] = {}
        for one in rows:
            alert, change = one.body["alerts"][-1], (one.incident, one.kind, one.created)
            known = having.setdefault(alert["fingerprint"], [])
            if is_alone := change in passed or self._stays_alone(one, alert, alone):
                settled.append(self._send_alone(one, is_first=change not in passed))
                passed.add(change)
            groups = known if _ended(alert) else []
            if not groups and not is_alone:
                groups = [self._find_group(one)]
                known += groups if not _ended(alert) and groups[0] not in known else []
            for group in groups:
                group.add_alert(alert, one.incident, _is_owned(one.body), one.number)
                changed[group.id] = group
            if not is_alone:
                own = next((group for group in groups if group.has_sent(alert)), groups[0])
                settled.append(Settlement(one.id, "grouped", own.id))
        return settled, changed

    def _send_alone(self, one: HeldMessage, is_first: bool) -> Settlement:
        """Returns a row as it is sent without routes; a second one, made for another route, is not sent."""
        if not is_first:
            return Settlement(one.id, "muted", "was sent alone")
        body = self._make_body(one.body["alerts"], "", {"incident": one.incident}, one.body["notification_reason"])
        said = {key: value for key, value in one.body["fleetpulse"].items() if key != "route"}
        text = json.dumps({**body, "fleetpulse": said}, separators=(",", ":"))
        return Settlement(one.id, "pending", kind=one.kind, body=text)

    def _stays_alone(self, one: HeldMessage, alert: Mapping[str, Any], alone: set[str]) -> bool:
        """Returns whether a row is sent as the alert before it was, not in a group; its end is the last."""
        if one.incident not in alone:
            return False
        if _ended(alert):
            alone.discard(one.incident)
            return True
        return self._find_source(one.incident, alert["labels"]) is None

    def _find_group(self, one: HeldMessage) -> Group:
        """Returns the group of a row; a new one is flushed after group_wait."""
        assert self._groups is not None
        key = one.body["groupKey"]
        group = self._groups.get(key)
        if group is None:
            node = self._rules.routes.get(one.body["fleetpulse"]["route"])
            due = one.created + int((node.wait_s if node is not None else 0.0) * SECOND)
            group = Group(name_group(self._receiver, key), key, dict(one.body["groupLabels"]), due)
            self._groups[key] = group
        return group

    def _flush(self, connection: duckdb.DuckDBPyConnection, group: Group, now: int) -> None:
        """Writes the message of a group, if one is due, and plans the next tick."""
        node = self._rules.routes.get(group.key.rpartition(":{")[0])
        repeat, interval = (node.repeat_s, node.interval_s) if node else (float("inf"), 1.0)
        if connection.execute(_WAITS, [self._receiver, group.id]).fetchone() != (0,):
            repeat = float("inf")  # what waits for its receiver is not repeated
        self._end_what_was_led_away(connection, group, now)
        never = [a for a in group.alerts.values() if _ended(a) and not group.has_sent(a)]
        sent = {a["incident"] for a in group.alerts.values() if group.has_sent(a)}
        was_acknowledged = group.acknowledged
        reason, alerts = group.flush(now, repeat, functools.partial(self._is_hidden, sent))
        if reason:
            event = "resolved" if all(map(_ended, alerts)) else "opened"
            pages_again = was_acknowledged and not all(_ended(a) or a["acknowledged"] for a in alerts)
            if pages_again and reason == "acknowledgement ended":
                event = "acknowledgement_expired"
            self._add_message(connection, group, alerts, reason, event, now, pages_again)
        if never:
            rows = [[a["incident"], a["fingerprint"], a.get("since", 0)] for a in never]
            connection.execute(_NEVER_SENT, [self._receiver, group.id, *map(list, zip(*rows, strict=True))])
        group.flush_at = max(group.flush_at + int(interval * SECOND), now + SECOND)

    def _end_what_was_led_away(self, connection: duckdb.DuckDBPyConnection, group: Group, now: int) -> None:
        """Ends the alerts of a group whose end was sent alone: routes have changed since it was in the group."""
        firing = {one["incident"] for one in group.alerts.values() if not _ended(one)}
        found = connection.execute(_ENDED_ALONE, [self._receiver, list(firing)]).fetchall() if firing else []
        ended = {incident for (incident,) in found}
        for alert in group.alerts.values():
            if alert["incident"] in ended:
                alert |= {"status": "resolved", "endsAt": iso(now)}

    def _is_hidden(self, sent: Collection[str], alert: Mapping[str, Any]) -> bool:
        """Returns whether an alert is in no message now: it is inhibited, or a person acknowledged it while it
        was. sent: incidents of which the group was sent an alert."""
        incident = alert["incident"]
        if self._alerts.held_back.get(incident, HeldBack()).owner and incident not in sent:
            return True
        return self._find_source(incident, alert["labels"]) is not None

    def _add_message(
        self,
        connection: duckdb.DuckDBPyConnection,
        group: Group,
        alerts: Sequence[Mapping[str, Any]],
        reason: str,
        event: str,
        now: int,
        pages_again: bool = False,
    ) -> None:
        body = self._make_body(alerts, group.key, group.labels, reason)
        body["fleetpulse"] = {"event": event, "incidents": sorted({a["incident"] for a in alerts}), "time": iso(now)}
        if pages_again:
            body["fleetpulse"]["acknowledgement_ended"] = True
        kind: Any = {"acknowledged": "update", "resolved": "resolved"}.get(event, "firing")
        text = json.dumps(body, separators=(",", ":"))
        ledger.write_changes(connection, [], [], [Payload(group.id, self._receiver, kind, text, now)], now)


def _is_grouped(body: Mapping[str, Any]) -> bool:
    return "route" in body.get("fleetpulse", {})


def name_group(receiver: str, key: str) -> str:
    """Returns the id of a group: the same for its whole life, and again for a later one of the same labels."""
    return f"{GROUP_PREFIX}{hashlib.sha256(f'{receiver} {key}'.encode()).hexdigest()[:16]}"


def _settle(connection: duckdb.DuckDBPyConnection, settled: Sequence[Settlement], now: int) -> None:
    if not settled:
        return
    rows = [(one.id, one.state, one.reason, one.kind, one.body) for one in settled]
    connection.execute(
        """UPDATE outbox SET state = n.state, answer = CASE WHEN n.state = 'muted' THEN n.reason ELSE answer END,
                  part_of = CASE WHEN n.state = 'grouped' THEN n.reason END,
                  kind = CASE WHEN n.kind = '' THEN outbox.kind ELSE n.kind END,
                  payload = CASE WHEN n.body = '' THEN payload ELSE n.body END,
                  next_attempt = make_timestamptz($6::BIGINT)
           FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS state, unnest($3::VARCHAR[]) AS reason,
                        unnest($4::VARCHAR[]) AS kind, unnest($5::VARCHAR[]) AS body) n
           WHERE outbox.id = n.id""",
        [*(list(column) for column in zip(*rows, strict=True)), now],
    )


def _save(connection: duckdb.DuckDBPyConnection, receiver: str, groups: Iterable[Group]) -> None:
    """Stores groups; one without alerts is deleted."""
    for group in groups:
        if not group.alerts:
            connection.execute("DELETE FROM notify_groups WHERE receiver = $1 AND id = $2", [receiver, group.id])
            continue
        state = json.dumps({name: getattr(group, name) for name in Group.__slots__})
        connection.execute("INSERT OR REPLACE INTO notify_groups VALUES ($1, $2, $3)", [receiver, group.id, state])
