"""Groups of alerts of one receiver: what messages said of them, and what the next message says.

A stored group has what its messages fired and did not end yet. What waits for its next message is in memory only: the
held rows of the outbox say it again after a restart. Reasons and times are those of Alertmanager 0.34.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.records import SECOND, iso
from pipeline.notify.alertmanager import ALERT_FIELDS

GROUP_PREFIX = "grp-"
SAID_AGAIN: Mapping[str, str] = {
    "opened": "first notification",
    "acknowledgement_expired": "acknowledgement ended",
    "worsened": "worsened",
    "escalated": "escalated",
}
"""Events for which a group says again what it said, with the reason of the message. Alertmanager knows none of them.
What was said is opened again only where the message never arrived: its receiver was not configured any more."""


@dataclass(slots=True)
class GroupAlert:
    """An alert of a group.

    body: as in messages.   number: of the newest row about it.   said: number up to which messages said it; 0: none.
    again: the event of SAID_AGAIN that no message said yet; empty: none.
    """

    body: dict[str, Any]
    incident: str
    acknowledged: bool = False
    number: int = 0
    said: int = 0
    again: str = ""

    @property
    def fingerprint(self) -> str:
        """The identity of the alert."""
        return str(self.body["fingerprint"])

    @property
    def has_ended(self) -> bool:
        """Whether it fires no more."""
        return bool(self.body["status"] == "resolved")

    def end(self, now: int) -> None:
        """Ends it, unless it has ended."""
        if not self.has_ended:
            self.body = {**self.body, "status": "resolved", "endsAt": iso(now)}


Alerts = dict[str, GroupAlert]
"""By fingerprint."""
News = tuple[GroupAlert, str]
"""An alert that a message pages for, and its event of SAID_AGAIN; empty: it is new."""


def have_owners(alerts: Iterable[GroupAlert]) -> bool:
    """Returns whether all of the alerts that fire are acknowledged."""
    return all(one.acknowledged or one.has_ended for one in alerts)


@dataclass(slots=True)
class Group:
    """The alerts of one route with equal `group_by` labels.

    alerts:  what messages fired and did not end yet.   waiting: what no message said yet; it fires.
    firing, resolved: fingerprints in the last message.   acknowledged: whether that was said of all that fire.
    flush_at, sent_at: next tick and last message (UTC us; 0: none).
    """

    id: str
    key: str
    labels: dict[str, str]
    flush_at: int
    alerts: Alerts = field(default_factory=dict)
    firing: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    acknowledged: bool = False
    sent_at: int = 0
    waiting: Alerts = field(default_factory=dict)

    def flush(
        self, now: int, repeat_s: float, is_hidden: Callable[[GroupAlert], bool]
    ) -> tuple[str, Sequence[GroupAlert], Sequence[News]]:
        """Returns why a message is due, its alerts, and its news; ("", [], []) if none is due. What it ends leaves the
        group.

        is_hidden: whether an alert that fires is in no message now.
        """
        everything = {**self.alerts, **self.waiting}
        shown = [one for one in everything.values() if one.has_ended or not is_hidden(one)]
        firing = [one.fingerprint for one in shown if not one.has_ended]
        resolved = [one.fingerprint for one in shown if one.has_ended]
        reason = self._find_reason(shown, firing, resolved)
        if not reason and firing and now - self.sent_at > repeat_s * SECOND:
            reason = "repeat interval elapsed"
        if not reason:
            return "", [], []
        news = self._find_news(reason, shown)
        self.firing, self.resolved, self.sent_at, self.acknowledged = firing, resolved, now, False
        for one in shown:
            one.said, one.again = one.number, ""
        self.alerts = {name: one for name, one in everything.items() if one.said and not one.has_ended}
        self.waiting = {name: one for name, one in self.waiting.items() if not one.said}
        return reason, shown, news

    def _find_reason(self, shown: Sequence[GroupAlert], firing: Sequence[str], resolved: Sequence[str]) -> str:
        """Returns the first reason for a message before its repetition; the order is that of Alertmanager."""
        if not set(firing) <= set(self.firing):
            return "new alerts added" if self.firing else "first notification"
        if not firing:
            return "all alerts resolved" if resolved else ""
        if resolved:  # what ended is in one message, so none of them was said before
            return "some alerts resolved"
        if self.acknowledged and not have_owners(shown):
            return "acknowledgement ended"
        return next((SAID_AGAIN[one.again] for one in shown if one.again), "")

    def _find_news(self, reason: str, shown: Sequence[GroupAlert]) -> list[News]:
        """Returns the alerts that page with the next message: those that no message fired, or whose event of SAID_AGAIN
        none said; else, if the acknowledgement of the group ended, those without one."""
        firing = [one for one in shown if not one.has_ended]
        news = [(one, one.again) for one in firing if one.again or one.fingerprint not in self.firing]
        if not news and reason == SAID_AGAIN["acknowledgement_expired"]:
            return [(one, "acknowledgement_expired") for one in firing if not one.acknowledged]
        return news

    def list_firing(self) -> Sequence[GroupAlert]:
        """Returns the alerts of the last message that still fire."""
        said = [self.alerts[name] for name in self.firing if name in self.alerts]
        return [one for one in said if not one.has_ended]

    def list_newly_acknowledged(self) -> Sequence[GroupAlert]:
        """Returns the alerts that fire in the last message if all are acknowledged and no message said so yet; and
        remembers it."""
        if not self.becomes_acknowledged():
            return []
        firing = self.list_firing()
        self.acknowledged = bool(firing)
        return firing

    def becomes_acknowledged(self) -> bool:
        """Returns whether all alerts that fire in the last message are acknowledged, and no message said so yet."""
        return not self.acknowledged and have_owners(self.list_firing())

    def as_text(self) -> str:
        """Returns it as it is stored, in a form that older versions read too: they ask whether an alert was `sent`."""
        alerts = {
            name: {**one.body, **{own: getattr(one, own) for own in _OWN}, "sent": True}
            for name, one in self.alerts.items()
        }
        table = {name: getattr(self, name) for name in self.__slots__ if name != "waiting"}
        return json.dumps({**table, "alerts": alerts}, separators=(",", ":"))


_OWN = ("incident", "acknowledged", "number", "said", "again")


def read_group(text: str) -> Group:
    """Returns a stored group. One of an older version also has alerts that no message said, and no numbers of rows."""
    table = json.loads(text)
    alerts = {
        name: {"number": 1, "said": 1, "again": "", **one}
        for name, one in table.pop("alerts").items()
        if one.pop("sent", False) or name in table["firing"]
    }
    said = {
        name: GroupAlert({field_: one[field_] for field_ in ALERT_FIELDS}, **{own: one[own] for own in _OWN})
        for name, one in alerts.items()
    }
    return Group(**table, alerts=said)


def name_group(receiver: str, key: str) -> str:
    """Returns the id of a group: the same for its whole life, and again for a later one of the same labels, so that the
    end of one and the begin of the next arrive in order."""
    return f"{GROUP_PREFIX}{hashlib.sha256(f'{receiver} {key}'.encode()).hexdigest()[:16]}"


class Groups:
    """The groups of one receiver, by key."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.by_key = {group.key: group for group in groups}
        self._places: dict[str, set[tuple[str, str]]] = defaultdict(set)  # incident -> (key, fingerprint), or more
        for group in self.by_key.values():
            for name, alert in group.alerts.items():
                self._places[alert.incident].add((group.key, name))

    def find_said(self, incident: str) -> list[tuple[Group, GroupAlert]]:
        """Returns the alerts of an incident that messages fired, and did not end yet, with their groups."""
        found = [(group, group.alerts.get(name)) for group, name in self._list_places(incident)]
        return [(group, alert) for group, alert in found if alert is not None and alert.incident == incident]

    def find_waiting(self, incident: str) -> list[GroupAlert]:
        """Returns the alerts of an incident that wait for their first message."""
        found = [group.waiting.get(name) for group, name in self._list_places(incident)]
        return [alert for alert in found if alert is not None and alert.incident == incident]

    def add_waiting(self, group: Group, alert: GroupAlert) -> None:
        """Adds an alert that the next message of a group fires."""
        self.by_key[group.key] = group
        group.waiting[alert.fingerprint] = alert
        self._places[alert.incident].add((group.key, alert.fingerprint))

    def withdraw(self, incident: str) -> None:
        """Removes the alerts of an incident that wait for their first message."""
        for group, name in self._list_places(incident):
            group.waiting.pop(name, None)
        self.forget(incident)

    def list_due(self, now: int) -> list[Group]:
        """Returns the groups whose tick has come, the oldest first."""
        return sorted((g for g in self.by_key.values() if g.flush_at <= now), key=lambda group: group.flush_at)

    def remove_empty(self) -> list[Group]:
        """Removes the groups that have no alert, and returns them."""
        empty = [group for group in self.by_key.values() if not group.alerts and not group.waiting]
        for group in empty:
            del self.by_key[group.key]
        return empty

    def forget(self, incident: str) -> None:
        """Forgets an incident of which no group has an alert."""
        if not self.find_said(incident) and not self.find_waiting(incident):
            self._places.pop(incident, None)

    def _list_places(self, incident: str) -> Iterator[tuple[Group, str]]:
        for key, name in sorted(self._places.get(incident, ())):
            if key in self.by_key:
                yield self.by_key[key], name
