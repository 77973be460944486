"""Held messages of one receiver: which of them are sent, alone or in groups, with the meanings of Alertmanager 0.34.

Messages that a route groups, or that a rule may inhibit, are `held` in the outbox, in the transaction of their
incident. The thread of their receiver decides about all rows of an incident together, from those that the receiver has
of it: what was sent alone goes on alone, what a group said goes on in that group, and only what it never got
follows the routes of today. So a change of routes moves nothing that fires.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import duckdb

from pipeline.incidents import ledger
from pipeline.incidents.ledger import Payload
from pipeline.model.records import SECOND
from pipeline.notify import held_rows
from pipeline.notify.group_messages import GroupMessage, MakeBody, make_payloads
from pipeline.notify.groups import SAID_AGAIN, Group, GroupAlert, Groups, have_owners, name_group, read_group
from pipeline.notify.inhibited_messages import Decision, HeldMessage, Settlement, Situation, decide, keep_firing
from pipeline.notify.newest_texts import Renew
from pipeline.notify.open_alerts import OpenAlertReader, OpenAlerts
from pipeline.notify.routes import Labels, RouteNode, Rules, show_labels

MOST = 1000
"""Incidents that are decided about in one transaction, and groups that are flushed in one: the first pages leave before
the last of a storm is decided about, and the engine's writes wait for a fraction of a second. Chosen."""
REPLACED = "replaced by a later message"
NEVER_SENT = "ended before it was sent"
NO_ROUTE = "no route leads to it any more"
NOT_ALL = "not all alerts of its group are acknowledged"
NOT_ALONE = "its group has other alerts, or it has ended"


class Store(Protocol):
    """The part of the store that groups need."""

    def transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """See `Database.transaction`."""
        ...

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """See `Database.cursor`."""
        ...


@dataclass(slots=True)
class _Round:
    """What one transaction changes.

    touched: groups to be stored, by key.   updates: rows that neither fire nor end an alert.
    behind:  incidents of which something that was said elsewhere arrives first -> where they would be said.
    said:    rows that a message of a group said, while another group had them to say -> that group.
    """

    now: int
    settled: list[Settlement] = field(default_factory=list)
    replaced: list[Payload] = field(default_factory=list)
    messages: list[GroupMessage] = field(default_factory=list)
    updates: list[HeldMessage] = field(default_factory=list)
    touched: dict[str, Group] = field(default_factory=dict)
    behind: dict[str, set[str]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def settle(self, decision: Decision) -> None:
        """Settles messages that are sent alone."""
        self.settled += decision.settled
        self.replaced += [] if decision.held is None else [decision.held]

    def mute(self, messages: Iterable[HeldMessage], reason: str) -> None:
        """Never sends these."""
        self.settled += [Settlement(one.id, "muted", reason) for one in messages]

    def say(self, message: GroupMessage) -> None:
        """Adds the message of a group."""
        self.messages.append(message)
        self.touched[message.group.key] = message.group


class HeldMessages:
    """Decides about the held messages of one receiver, in its thread; again only after something changed.

    routed_to:   the receiver that routes name; `receiver` is one of its endpoints.
    owns_groups: whether it is sent an acknowledgement once it is of all alerts of a group.
    """

    def __init__(
        self,
        store: Store,
        receiver: str,
        routed_to: str,
        rules: Rules,
        open_alerts: OpenAlertReader,
        make_body: MakeBody,
        renew: Renew,
        owns_groups: bool,
    ) -> None:
        self._store, self._receiver, self._routed_to = store, receiver, routed_to
        self._rules = rules
        self._routes = [node for node in rules.routes if node.receiver == routed_to]
        self._reader, self._make_body, self._renew = open_alerts, make_body, renew
        self._owns_groups = owns_groups
        self.forget()

    def forget(self) -> None:
        """Forgets all that was read: the next round reads it again."""
        self._groups: Groups | None = None
        self._rows: dict[str, list[HeldMessage]] = {}  # by incident, in their order
        self._undecided: dict[str, None] = {}  # incidents, in order
        self._behind: dict[str, set[str]] = {}  # incidents to be decided about once what was said elsewhere arrived
        self._alerts = OpenAlerts({}, {})
        self._state: object = None

    def release(self, now: int) -> bool:
        """Sends or settles due messages, in one transaction. Returns whether anything is held or in a group."""
        with contextlib.closing(self._store.cursor()) as cursor:
            if self._groups is None:
                self._load_groups(cursor, now)
            assert self._groups is not None
            self._read_rows(cursor)
            if self._rows or self._groups.by_key:
                self._read_alerts(cursor)  # after the rows: a source that was written with its target is in them
            self._read_arrived(cursor)
        if self._undecided or self._groups.list_due(now):
            try:
                with self._store.transaction() as connection:
                    self._read_late_rows(connection)
                    self._decide_and_flush(connection, now)
            except BaseException:
                self.forget()  # the transaction kept nothing
                raise
        return bool(self._rows or self._groups.by_key)

    def _load_groups(self, cursor: duckdb.DuckDBPyConnection, now: int) -> None:
        """Reads the groups. What fires in them although its incident does not, or has other labels by now, has ended
        since; a clock that was ahead must not make them wait."""
        if held_rows.is_outdated(cursor, self._receiver):
            with self._store.transaction() as connection:
                held_rows.renew(connection, self._receiver, REPLACED)
        self._groups = Groups(map(read_group, held_rows.load_groups(cursor, self._receiver)))
        alerts = [alert for group in self._groups.by_key.values() for alert in group.alerts.values()]
        firing = held_rows.find_firing(cursor, self._receiver, {alert.incident for alert in alerts})
        for alert in alerts:
            if firing.get(alert.incident) != alert.fingerprint:
                alert.end(now)
        for group in self._groups.by_key.values():
            latest = now + self._find_interval(group)
            group.flush_at, group.sent_at = min(group.flush_at, latest), min(group.sent_at, now)

    def _read_rows(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Reads the rows that are new, and forgets those that are no longer held."""
        state = held_rows.read_state(cursor, self._receiver)
        if state == self._state:
            return
        held = held_rows.list_ids(cursor, self._receiver)
        known = {one.id for rows in self._rows.values() for one in rows}
        if gone := known - held:
            rest = {i: [one for one in rows if one.id not in gone] for i, rows in self._rows.items()}
            self._rows = {incident: rows for incident, rows in rest.items() if rows}
        for one in held_rows.load_rows(cursor, held - known):
            self._rows.setdefault(one.incident, []).append(one)
            self._undecided[one.incident] = None
        for incident in self._undecided.keys() & self._rows.keys():
            self._rows[incident].sort(key=lambda one: one.number)
        self._state = state

    def _read_late_rows(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Reads the rows that were written before the transaction began, so that all rows of an incident are decided
        about together: rows sent again may be older than held ones, and another row may take the place of all."""
        if held_rows.read_state(connection, self._receiver) != self._state:
            self._read_rows(connection)
            with contextlib.closing(self._store.cursor()) as cursor:
                self._read_alerts(cursor)

    def _read_alerts(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Reads what holds incidents back, and plans to decide again about those of which that changed."""
        before, self._alerts = self._alerts, self._reader.read(cursor)
        if before is not self._alerts:
            changed = [one for one in self._rows if before.find(one) != self._alerts.find(one)]
            self._undecided |= dict.fromkeys(changed)

    def _read_arrived(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Plans to decide about incidents of which what was said elsewhere arrived. It only reads: while their receiver
        is down nothing arrives."""
        self._behind = {one: threads for one, threads in self._behind.items() if one in self._rows}
        if self._behind:
            unsent = held_rows.find_unsent(cursor, self._receiver, list(self._behind))
            arrived = [one for one, threads in self._behind.items() if not unsent.get(one, set()) - threads]
            self._undecided |= dict.fromkeys(arrived)

    def _decide_and_flush(self, connection: duckdb.DuckDBPyConnection, now: int) -> None:
        assert self._groups is not None
        undecided = [one for one in self._undecided if one in self._rows]
        chosen, later = undecided[:MOST], undecided[MOST:]
        this = _Round(now)
        self._decide(connection, chosen, this)
        self._behind = {one: threads for one, threads in self._behind.items() if one not in chosen} | this.behind
        self._flush_due(connection, this)
        self._say_updates(this)
        self._acknowledge(this)
        self._write(connection, this)
        flushed = {alert.incident for message in this.messages for alert in message.alerts}
        self._undecided = dict.fromkeys([*later, *sorted(flushed & self._rows.keys())])

    # --- what becomes of the rows of an incident --------------------------------------------------

    def _decide(self, connection: duckdb.DuckDBPyConnection, incidents: Sequence[str], this: _Round) -> None:
        """Decides about all rows of each incident together."""
        if not incidents:
            return
        assert self._groups is not None
        alone = held_rows.find_sent_alone(connection, self._receiver, incidents)
        unsent = held_rows.find_unsent(connection, self._receiver, incidents)
        for incident in incidents:
            rows = self._rows[incident]
            situation = self._find_situation(incident, incident in alone)
            newest = next((one for one in reversed(rows) if one.kind != "update"), None)
            if not situation.has and self._groups.find_said(incident):
                self._continue_in_groups(rows, newest, situation, this)
                continue
            self._groups.withdraw(incident)
            decision = decide(rows, situation, self._receiver, this.now)
            routes = self._find_routes(rows[-1].alert["labels"])
            is_alone = self._is_sent_alone(rows, routes)
            if situation.has or all(one.state == "muted" for one in decision.settled):
                this.settle(decision)
                self._end_elsewhere(incident, newest, this)
            elif unsent.get(incident, set()) - (threads := self._list_threads(rows, routes, is_alone)):
                this.behind[incident] = threads  # what was said elsewhere arrives first: its end is not the last word
            elif is_alone:
                this.settle(decision)
            else:
                this.settled += [one for one in decision.settled if one.state == "muted"]
                self._join_groups(rows, routes, this)

    def _find_situation(self, incident: str, has: bool) -> Situation:
        back = self._alerts.find(incident)
        return Situation(has, back.inhibitor, back.owner, bool(back.storm))

    def _find_routes(self, labels: Labels) -> list[RouteNode]:
        """Returns the routes that lead an alert to this receiver."""
        return [node for node in self._rules.match(labels) if node.receiver == self._routed_to]

    def _is_sent_alone(self, rows: Sequence[HeldMessage], routes: Sequence[RouteNode]) -> bool:
        """Returns whether no route decides: there are none, or an escalation chose this receiver beside them."""
        events = [one.event for one in rows if one.kind != "update"]
        return self._rules.top is None or (not routes and events[-1:] == ["escalated"])

    def _end_elsewhere(self, incident: str, newest: HeldMessage | None, this: _Round) -> None:
        """Ends in groups what ended alone."""
        assert self._groups is not None
        for group, alert in self._groups.find_said(incident) if newest is not None and newest.has_ended else ():
            alert.end(this.now)
            this.touched[group.key] = group

    def _list_threads(self, rows: Sequence[HeldMessage], routes: Sequence[RouteNode], is_alone: bool) -> set[str]:
        """Returns how an incident would reach the receiver: alone, or in groups."""
        labels = rows[-1].alert["labels"]
        return {rows[0].incident} if is_alone else {name_group(self._receiver, one.group_key(labels)) for one in routes}

    def _join_groups(self, rows: Sequence[HeldMessage], routes: Sequence[RouteNode], this: _Round) -> None:
        """Lets an alert wait for the next message of the group of each route; a new group waits for group_wait."""
        assert self._groups is not None
        newest = next(one for one in reversed(rows) if one.kind != "update")
        if not routes:
            this.mute([one for one in rows if one.number >= newest.number], NO_ROUTE)
        for node in routes:
            key, labels = node.group_key(newest.alert["labels"]), node.group_labels(newest.alert["labels"])
            group, due = self._groups.by_key.get(key), min(newest.created, this.now) + int(node.wait_s * SECOND)
            if group is None:
                group = Group(name_group(self._receiver, key), key, labels, due)
            if not group.alerts:
                group.flush_at = min(group.flush_at, due)
            if newest.fingerprint not in group.alerts:
                alert = GroupAlert(newest.alert, newest.incident, rows[-1].is_owned, rows[-1].number)
                self._groups.add_waiting(group, alert)

    def _continue_in_groups(
        self, rows: Sequence[HeldMessage], newest: HeldMessage | None, situation: Situation, this: _Round
    ) -> None:
        """Renews what groups said of an incident: it ends, fires on, or with other labels joins the groups of today.
        An incident has one alert at a time, so that its newest state ends all others."""
        assert self._groups is not None
        incident, by_alert = rows[0].incident, {one.fingerprint: one for one in rows if one.kind != "update"}
        self._groups.withdraw(incident)
        for group, alert in self._groups.find_said(incident):
            this.touched[group.key] = group
            _renew(alert, by_alert.get(alert.fingerprint), newest, this.now)
            if rows[-1].number >= alert.number:
                alert.number, alert.acknowledged = rows[-1].number, rows[-1].is_owned
            if situation.owner or situation.storm:
                alert.again = ""
        if newest is not None and not newest.has_ended and not situation.inhibitor and not situation.owner:
            routes = self._find_routes(newest.alert["labels"])
            keys = {node.group_key(newest.alert["labels"]) for node in routes}
            saying = {g.key for g, one in self._groups.find_said(incident) if one.fingerprint == newest.fingerprint}
            if routes and (not saying or saying & keys):  # else routes have changed since it was said
                self._join_groups(rows, routes, this)
        self._settle_said(rows, by_alert, newest, situation, this)

    def _settle_said(
        self,
        rows: Sequence[HeldMessage],
        by_alert: Mapping[str, HeldMessage],
        newest: HeldMessage | None,
        situation: Situation,
        this: _Round,
    ) -> None:
        """Settles those rows of an incident in groups that no message will say; the others wait for it. What a message
        said already, while the group of another route had it to say, is a part of that message: it was not muted."""
        assert self._groups is not None
        groups = self._groups.find_said(rows[0].incident)
        this.said |= {
            row.id: group.id
            for row in rows
            for group, alert in groups
            if row.kind == "firing" and row.fingerprint == alert.fingerprint and row.number <= alert.said
        }
        found = [alert for _, alert in groups]
        said, again = {alert.fingerprint for alert in found}, {alert.fingerprint for alert in found if alert.again}
        waits = bool(self._groups.find_waiting(rows[0].incident))
        for one in rows:
            known = one.fingerprint in said
            if one.kind == "update":
                this.updates += [] if waits else [one]
            elif by_alert[one.fingerprint] is not one or not (one.has_ended or one is newest):
                this.mute([one], REPLACED)
            elif one.has_ended:
                this.mute([] if known else [one], NEVER_SENT)
            elif (situation.owner or situation.storm) and not waits:
                this.mute([one], situation.reason)
            elif known and one.fingerprint not in again and not waits:
                this.mute([one], "its group fires")
            elif not known and not waits and not situation.inhibitor and self._rules.top is None:
                this.settled.append(keep_firing(one))
            elif not known and not waits and not situation.inhibitor:
                this.mute([one], NO_ROUTE)

    # --- messages of groups -----------------------------------------------------------------------

    def _flush_due(self, connection: duckdb.DuckDBPyConnection, this: _Round) -> None:
        """Makes the messages of the groups whose tick has come, and plans the next tick."""
        assert self._groups is not None
        due = self._groups.list_due(this.now)[:MOST]
        waiting = held_rows.find_pending(connection, self._receiver, [group.id for group in due])
        for group in due:
            if group.id in waiting:
                group.sent_at = this.now  # it is repeated some time after it arrived
            was_acknowledged = group.acknowledged
            reason, alerts, news = group.flush(this.now, self._find_repeat(group, this.now), self._is_hidden)
            group.flush_at = max(group.flush_at + self._find_interval(group), this.now + SECOND)
            if reason:
                pages_again = was_acknowledged and not have_owners(alerts)
                event = next((event for event, text in SAID_AGAIN.items() if text == reason), "opened")
                event = "resolved" if all(one.has_ended for one in alerts) else event
                this.say(GroupMessage(group, alerts, reason, event, pages_again, news))

    def _find_interval(self, group: Group) -> int:
        """Returns the interval of a group (us). No route may lead to it any more. Routes with the same matchers and the
        same receiver have the same key: the alerts say by which of them they are in the group; an earlier sibling
        without `continue` gets all of them."""
        key = group.key.removesuffix(f":{show_labels(group.labels)}")
        nodes = [node for node in self._routes if node.key == key]
        alerts = [*group.alerts.values(), *group.waiting.values()] if len(nodes) > 1 else ()
        labels = [one.body["labels"] for one in alerts]
        making = [node for one in labels for node in self._find_routes(one) if node.group_key(one) == group.key]
        return int(min((node.interval_s for node in making or nodes), default=1.0) * SECOND)

    def _find_repeat(self, group: Group, now: int) -> float:
        """Returns after how many s a group is repeated: as those of today's routes say that put what fires into it, or
        lead it here if none does. The route that made it may be there, but lead its alerts elsewhere."""
        first = min((node.repeat_s for node in self._routes), default=float("inf"))
        if now - group.sent_at <= first * SECOND:
            return float("inf")
        firing = [one for one in group.alerts.values() if not one.has_ended and not self._is_hidden(one)]
        found = list[RouteNode]()
        for labels in (one.body["labels"] for one in firing):
            routes = self._find_routes(labels)
            found += [node for node in routes if node.group_key(labels) == group.key] or routes
        return min((node.repeat_s for node in found), default=float("inf"))

    def _is_hidden(self, alert: GroupAlert) -> bool:
        return bool(self._alerts.find(alert.incident).inhibitor)

    def _say_updates(self, this: _Round) -> None:
        """Says at once what happened to an alert of a group; in a group of several only what persons did, as changes of
        the pipeline may be many, and one kind of it in one message. An acknowledgement that makes a group acknowledged
        is said by `_acknowledge`."""
        assert self._groups is not None
        firing, together = dict[str, dict[str, GroupAlert]](), dict[tuple[str, str], GroupMessage]()
        completed = {key for key, group in this.touched.items() if group.becomes_acknowledged()}
        for row in this.updates:
            for group, alert in self._groups.find_said(row.incident):
                if group.key not in firing:
                    firing[group.key] = {one.fingerprint: one for one in group.list_firing()}
                shown, event = firing[group.key], row.event or "acknowledged"
                if alert.fingerprint not in shown or not (row.is_of_person or len(shown) == 1):
                    continue
                if row.is_acknowledgement and (self._owns_groups or group.key in completed):
                    continue
                known = together.get((group.key, event))
                if known is not None and len(shown) > 1:
                    known.rows = [*known.rows, row]
                    continue
                together[group.key, event] = made = GroupMessage(group, [*shown.values()], "unknown", event, rows=[row])
                this.say(made)

    def _acknowledge(self, this: _Round) -> None:
        """Says of the groups that changed whether all that fires in them is acknowledged, as soon as it is."""
        for group in list(this.touched.values()):
            if said := group.list_newly_acknowledged():
                this.say(GroupMessage(group, said, "unknown", "acknowledged"))

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, connection: duckdb.DuckDBPyConnection, this: _Round) -> None:
        assert self._groups is not None
        settled = {one.id for one in this.settled}
        for message in this.messages:
            message.rows = message.rows or [row for row in self._list_said(message) if row.id not in settled]
        said = make_payloads(connection, this.messages, self._receiver, this.now, self._make_body, self._renew)
        ids = ledger.write_payloads(connection, [*this.replaced, *said])
        for message, id_ in zip(this.messages, ids[len(this.replaced) :], strict=True):
            message.id = id_
        parts = self._settle_parts(this)
        held_rows.settle(connection, [*this.settled, *parts], this.now)
        muted = {one.id for one in this.settled if one.state == "muted"}
        held_rows.join_said(connection, self._receiver, {row: g for row, g in this.said.items() if row in muted})
        empty = self._groups.remove_empty()
        kept = [group for group in this.touched.values() if group.alerts]
        held_rows.save_groups(connection, self._receiver, {group.id: group.as_text() for group in kept})
        held_rows.delete_groups(connection, self._receiver, [group.id for group in empty])

    def _settle_parts(self, this: _Round) -> list[Settlement]:
        """Returns what becomes of the rows that messages of groups say: each is a part of the message that says it
        last."""
        found: dict[str, Settlement] = {}
        for message in this.messages:
            for row in message.rows:
                if row.kind == "update" or self._is_said(row):
                    found[row.id] = Settlement(row.id, "grouped", message.id)
        rest = [row for row in this.updates if row.id not in found]
        muted = [Settlement(row.id, "muted", NOT_ALL if row.is_acknowledgement else NOT_ALONE) for row in rest]
        for incident in {a.incident for message in this.messages for a in message.alerts}:
            assert self._groups is not None
            self._groups.forget(incident)
        return [*found.values(), *muted]

    def _list_said(self, message: GroupMessage) -> list[HeldMessage]:
        """Returns the rows that a message of a group says, in their order."""
        said = {alert.fingerprint: alert for alert in message.alerts}
        incidents = sorted({alert.incident for alert in message.alerts})
        rows = [row for one in incidents for row in self._rows.get(one, ()) if row.fingerprint in said]
        if message.kind == "update":
            return [row for row in rows if row.is_acknowledgement]
        return [row for row in rows if row.kind != "update" and said[row.fingerprint].has_ended == row.has_ended]

    def _is_said(self, row: HeldMessage) -> bool:
        """Returns whether all groups that have the alert of a row said what the row says."""
        assert self._groups is not None
        said = [a for _, a in self._groups.find_said(row.incident) if a.fingerprint == row.fingerprint]
        if row.has_ended:
            return not said
        waits = any(a.fingerprint == row.fingerprint for a in self._groups.find_waiting(row.incident))
        return not waits and all(alert.said >= row.number for alert in said)


def _renew(alert: GroupAlert, row: HeldMessage | None, newest: HeldMessage | None, now: int) -> None:
    """Brings an alert that a group said up to date. row: the newest row of the alert.  newest: that of its incident."""
    if newest is None or newest.number < alert.number:
        return  # it was acknowledged, or it was said already what replaced another alert
    if row is None or (row is not newest and not row.has_ended):
        alert.end(now)
        return
    alert.body = row.alert
    if row.event in SAID_AGAIN and not row.has_ended and row.number > alert.said:
        alert.again = row.event
