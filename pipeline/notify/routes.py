"""Routes, groups and inhibition with the names and meanings of Alertmanager 0.34.

Messages that a route groups, or that a rule may inhibit, are `held` in the outbox, in the transaction of their
incident. The thread of their receiver decides about them. A group and the message made of it are one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import duckdb

from pipeline.config.receivers import InhibitRule, Notify, Route, parse_duration
from pipeline.config.settings import build_section
from pipeline.incidents import ledger
from pipeline.incidents.ledger import Payload
from pipeline.model.errors import ConfigError
from pipeline.model.matcher_text import quote_value, unquote_value
from pipeline.model.records import SECOND, iso

GROUP_PREFIX = "grp-"
EACH = ("...",)
"""`group_by` that groups nothing."""
_MATCHER = re.compile(
    r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*"|[^\s,{}"]*)\s*(?:,|$)', re.ASCII
)
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label; a label that is missing is empty."""

    name: str
    operator: str
    value: str
    pattern: re.Pattern[str] | None = None

    def holds(self, labels: Labels) -> bool:
        """Returns whether the labels match; regular expressions match the whole value."""
        found = labels.get(self.name, "")
        if self.pattern is not None:
            return (self.pattern.fullmatch(found) is not None) == (self.operator == "=~")
        return (found == self.value) == (self.operator == "=")

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{quote_value(self.value)}"


def parse_matchers(texts: Iterable[str], where: str) -> tuple[Matcher, ...]:
    """Returns the matchers of texts such as `severity="critical"` or `{rack=~"r1.*", node!="n7"}`, sorted by name.

    Raises ConfigError.
    """
    found: list[Matcher] = []
    for text in texts:
        inner, at = text.strip(), 0
        if inner.startswith("{") and inner.endswith("}"):
            inner = inner[1:-1].strip()
        while at < len(inner):
            one = _MATCHER.match(inner, at)
            if one is None:
                raise ConfigError(f'{where} {text!r}: expected matchers such as severity="critical" or rack=~"r1.*"')
            name, operator, value = one.groups()
            value = unquote_value(value)
            try:
                pattern = re.compile(value) if "~" in operator else None
            except re.error as error:
                raise ConfigError(f"{where} {text!r}: not a regular expression: {error}") from error
            found.append(Matcher(name, operator, value, pattern))
            at = one.end()
    return tuple(sorted(found, key=lambda m: (m.name, m.value, m.operator)))


def match_all(matchers: Sequence[Matcher], labels: Labels) -> bool:
    """Returns whether all matchers hold."""
    return all(matcher.holds(labels) for matcher in matchers)


# --- the tree -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouteNode:
    """A route with what it inherits. key: path of matchers, as in Alertmanager's `groupKey`."""

    key: str
    receiver: str
    matchers: tuple[Matcher, ...]
    group_by: tuple[str, ...]
    wait_s: float
    interval_s: float
    repeat_s: float
    continues: bool
    children: tuple[RouteNode, ...] = ()

    def match(self, labels: Labels) -> list[RouteNode]:
        """Returns the routes of an alert, deepest first match; more than one only with `continue`."""
        if not match_all(self.matchers, labels):
            return []
        found: list[RouteNode] = []
        for child in self.children:
            below = child.match(labels)
            found += below
            if below and not child.continues:
                break
        return found or [self]

    def walk(self, depth: int = 0) -> Iterable[tuple[int, RouteNode]]:
        """Yields (depth, route) of this route and all below it."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def group_labels(self, labels: Labels) -> dict[str, str]:
        """Returns the labels that name the group of an alert."""
        names = sorted(labels) if self.group_by == EACH else sorted(self.group_by)
        return {name: labels[name] for name in names if name in labels}

    def group_key(self, labels: Labels) -> str:
        """Returns Alertmanager's `groupKey`."""
        shown = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in self.group_labels(labels).items())
        return f"{self.key}:{{{shown}}}"


def build_tree(notify: Notify) -> RouteNode | None:
    """Returns the routes of [notify.route], None if there are none. Raises ConfigError."""
    if notify.route is None:
        return None
    if notify.route.matchers:
        raise ConfigError("[notify.route] matchers: the first route gets every alert; expected none")
    if not notify.route.receiver:
        raise ConfigError("[notify.route] receiver: missing; expected the name of a receiver")
    known = {one.name for one in notify.receivers}
    top = RouteNode("{}", "", (), (), 30.0, 300.0, 14_400.0, False)  # Alertmanager's defaults (s)
    return _build_node(notify.route, "notify.route", top, known, top=True)


def _build_node(route: Route, where: str, above: RouteNode, known: set[str], top: bool = False) -> RouteNode:
    matchers = parse_matchers(route.matchers, f"[{where}] matchers")
    receiver = route.receiver or above.receiver
    if receiver not in known:
        raise ConfigError(f"[{where}] receiver = {receiver!r}: not a receiver; known: {', '.join(sorted(known))}")
    wait = above.wait_s if route.group_wait is None else parse_duration(route.group_wait)
    interval = above.interval_s if route.group_interval is None else parse_duration(route.group_interval)
    repeat = above.repeat_s if route.repeat_interval is None else parse_duration(route.repeat_interval)
    key = above.key if top else f"{above.key}/{{{','.join(map(str, matchers))}}}"
    group_by = above.group_by if route.group_by is None else route.group_by
    node = RouteNode(key, receiver, matchers, group_by, wait, interval, repeat, route.continue_)
    children = []
    for number, table in enumerate(route.routes):
        below = f"{where}.routes[{number}]"
        children.append(_build_node(build_section(Route, table, "configuration", below), below, node, known))
    return replace(node, children=tuple(children))


@dataclass(frozen=True, slots=True)
class Inhibition:
    """One inhibition rule."""

    source: tuple[Matcher, ...]
    target: tuple[Matcher, ...]
    equal: tuple[str, ...]

    def find_source(self, labels: Labels, firing: Mapping[str, Labels]) -> str | None:
        """Returns the incident that inhibits an alert. What matches both sides is inhibited only by what does not."""
        if not match_all(self.target, labels):
            return None
        both = match_all(self.source, labels)
        for incident, other in firing.items():
            if not match_all(self.source, other) or (both and match_all(self.target, other)):
                continue
            if all(other.get(name, "") == labels.get(name, "") for name in self.equal):
                return incident
        return None


def build_inhibitions(rules: Sequence[InhibitRule]) -> tuple[Inhibition, ...]:
    """Returns the rules of [[notify.inhibit_rules]]. Raises ConfigError."""
    where = "[[notify.inhibit_rules]]"
    found = []
    for rule in rules:
        source = parse_matchers(rule.source_matchers, f"{where} source_matchers")
        target = parse_matchers(rule.target_matchers, f"{where} target_matchers")
        if not source or not target:
            raise ConfigError(f"{where}: source_matchers and target_matchers: expected at least one matcher each")
        found.append(Inhibition(source, target, rule.equal))
    return tuple(found)


# --- groups ---------------------------------------------------------------------------------------


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
        reason = self._find_reason(firing, resolved, now, repeat_s)
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


@dataclass(frozen=True, slots=True)
class Rules:
    """The routes by key, and the rules of inhibition."""

    top: RouteNode | None
    inhibitions: tuple[Inhibition, ...]

    @property
    def routes(self) -> dict[str, RouteNode]:
        """Key -> route."""
        return {} if self.top is None else {node.key: node for _, node in self.top.walk()}

    @property
    def hold(self) -> bool:
        """Whether messages may be held."""
        return self.top is not None or bool(self.inhibitions)

    def is_target(self, labels: Labels) -> bool:
        """Returns whether a rule may inhibit an alert."""
        return any(match_all(rule.target, labels) for rule in self.inhibitions)

    def find_source(self, labels: Labels, firing: Mapping[str, Labels]) -> str | None:
        """Returns the incident that inhibits an alert, None if none does."""
        return next((found for rule in self.inhibitions if (found := rule.find_source(labels, firing))), None)


def build_rules(notify: Notify) -> Rules:
    """Returns routes and inhibition of the configuration. Raises ConfigError."""
    return Rules(build_tree(notify), build_inhibitions(notify.inhibit_rules))


MakeBody = Callable[[Sequence[Mapping[str, Any]], str, Mapping[str, str], str], dict[str, Any]]
"""Makes a body of version 4 of alerts, groupKey, group labels and reason."""


class HeldMessages:
    """Decides about the held messages of one receiver, in its thread.

    load_firing: returns incident -> labels of all alerts that fire, which may inhibit others.
    """

    def __init__(
        self,
        store: Store,
        receiver: str,
        rules: Rules,
        load_firing: Callable[[duckdb.DuckDBPyConnection], Mapping[str, Labels]],
        make_body: MakeBody,
    ) -> None:
        self._store, self._receiver, self._rules = store, receiver, rules
        self._load_firing, self._make_body = load_firing, make_body
        self._groups: dict[str, Group] | None = None
        self._firing: Mapping[str, Labels] = {}

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
            self._firing = self._load_firing(cursor) if self._rules.inhibitions else {}
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
            source = self._rules.find_source(messages[-1][1]["alerts"][-1]["labels"], self._firing)
            ended = any(row[2] == "resolved" for row, _ in messages)
            if source is None and ended and incident not in known:  # both ended together
                source = "an alert that ended before it"
            if source is None or incident in known:
                settled += [(row[0], "pending", "") for row, _ in messages]
            elif ended:
                settled += [(row[0], "muted", f"inhibited by {source}") for row, _ in messages]
        return settled

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
        reason, alerts = group.flush(now, repeat, lambda a: self._rules.find_source(a["labels"], self._firing))
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
