"""Messages of groups, as rows of the outbox: the alerts with the texts of now, and what happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from pipeline.incidents.ledger import Payload
from pipeline.model.records import iso
from pipeline.notify.groups import Group, GroupAlert, News, have_owners
from pipeline.notify.inhibited_messages import HeldMessage
from pipeline.notify.newest_texts import Renew
from pipeline.notify.receivers import rank_alert

MakeBody = Callable[[Sequence[Mapping[str, Any]], str, Mapping[str, str], str], dict[str, Any]]
"""Makes a body of version 4 of alerts, groupKey, group labels and reason."""
MAX_CHANGES = 10
"""Changes of persons that a message of several incidents lists; more are counted. Chosen: as many as a text lists."""


@dataclass(slots=True)
class GroupMessage:
    """A message of a group, with the alerts that it shows.

    news: those that it pages for.   rows: what it says of them, in their order.   id: once it is written.
    """

    group: Group
    alerts: Sequence[GroupAlert]
    reason: str
    event: str
    pages_again: bool = False
    news: Sequence[News] = ()
    rows: Sequence[HeldMessage] = ()
    id: str = ""

    @property
    def kind(self) -> Literal["firing", "update", "resolved"]:
        """Its kind in the outbox."""
        if self.event == "acknowledged" or any(row.kind == "update" for row in self.rows):
            return "update"
        return "resolved" if self.event == "resolved" else "firing"


def make_payloads(
    connection: duckdb.DuckDBPyConnection,
    messages: Sequence[GroupMessage],
    receiver: str,
    now: int,
    make_body: MakeBody,
    renew: Renew,
) -> list[Payload]:
    """Returns the rows of messages, in their order."""
    alerts = iter(renew(connection, [one.body for message in messages for one in message.alerts]) if messages else ())
    found = []
    for message in messages:
        group, shown = message.group, [next(alerts) for _ in message.alerts]
        body = make_body(shown, group.key, group.labels, message.reason)
        body["fleetpulse"] = _describe(message, shown, now)
        text = json.dumps(body, separators=(",", ":"))
        found.append(Payload(group.id, receiver, message.kind, text, now, of_group=True))
    return found


def _describe(message: GroupMessage, shown: Sequence[Mapping[str, Any]], now: int) -> dict[str, Any]:
    """Returns what happened: of one incident as its own message would say it, of several what persons did to each."""
    incidents = sorted({one.incident for one in message.alerts})
    said: dict[str, Any] = {"event": message.event, "incidents": incidents, "time": iso(now)}
    said |= {"acknowledgement_ended": True} if message.pages_again else {}
    if len(incidents) == 1:
        own = message.rows[-1].body.get("fleetpulse", {}) if message.rows else {}
        if message.event == "opened":  # the group is opened by it; its comment is that of its own change
            said["event"] = own.get("event") or message.event
        if message.event == "resolved" and own.get("event") in ("severity_raised", "cause_changed"):
            what = own["event"].replace("_", " ")  # it goes on as another alert
            own = {**own, "comment": f"{what} {own.get('comment', '')}"}
        return {**{name: own[name] for name in ("actor", "comment", "incident", "receiver") if name in own}, **said}
    said["acknowledged"] = have_owners(message.alerts)
    titles = {str(one["labels"].get("incident", "")): one["annotations"].get("summary", "") for one in shown}
    if message.news:
        said |= _describe_news(message, titles)
    done = [row for row in message.rows if row.is_of_person]
    if done:
        said["changes"] = [_describe_row(row, str(titles.get(row.incident, ""))) for row in done[:MAX_CHANGES]]
        said["more_changes"] = len(done) - len(said["changes"])
    return said


def _describe_news(message: GroupMessage, titles: Mapping[str, str]) -> dict[str, Any]:
    """Returns the worst of what a message pages for: its title, its severity, and why it pages again, with the number
    of the others."""
    alert, again = min(message.news, key=lambda one: (rank_alert(one[0].body), one[0].number))
    rows = [row for row in message.rows if row.fingerprint == alert.fingerprint and row.kind != "update"]
    row = next((row for row in reversed(rows) if row.event == (again or row.event)), None)
    comment = "" if row is None else str(row.body.get("fleetpulse", {}).get("comment") or "")
    why = "" if row is None or row.event == "opened" else row.event
    labels = alert.body["labels"]
    worst = {"incident": alert.incident, "event": again or why or "opened", "comment": comment}
    worst |= {"title": titles.get(alert.incident, ""), "severity": labels.get("severity", "none")}
    return {"news": worst, "more_news": len(message.news) - 1}


def _describe_row(row: HeldMessage, title: str) -> dict[str, str]:
    comment = str(row.body.get("fleetpulse", {}).get("comment") or "")
    return {"incident": row.incident, "event": row.event, "actor": row.actor, "comment": comment, "title": title}
