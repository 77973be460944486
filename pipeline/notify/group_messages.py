"""Messages of groups, as rows of the outbox: the alerts with the texts of now, and what happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from pipeline.incidents.ledger import Payload
from pipeline.model.records import iso
from pipeline.notify.groups import Group, GroupAlert
from pipeline.notify.newest_texts import Renew

MakeBody = Callable[[Sequence[Mapping[str, Any]], str, Mapping[str, str], str], dict[str, Any]]
"""Makes a body of version 4 of alerts, groupKey, group labels and reason."""
KINDS: Mapping[str, Literal["update", "resolved"]] = {"acknowledged": "update", "resolved": "resolved"}


@dataclass(slots=True)
class GroupMessage:
    """A message of a group, with the alerts that it is about. id: once it is written."""

    group: Group
    alerts: Sequence[GroupAlert]
    reason: str
    event: str
    pages_again: bool = False
    id: str = ""

    @property
    def kind(self) -> Literal["firing", "update", "resolved"]:
        """Its kind in the outbox."""
        return KINDS.get(self.event, "firing")


def make_payloads(
    connection: duckdb.DuckDBPyConnection,
    messages: Sequence[GroupMessage],
    receiver: str,
    now: int,
    make_body: MakeBody,
    renew: Renew,
) -> list[Payload]:
    """Returns the rows of messages, in their order."""
    alerts = iter(renew(connection, [one.body for message in messages for one in message.alerts])) if messages else None
    found = []
    for message in messages:
        assert alerts is not None
        group = message.group
        body = make_body([next(alerts) for _ in message.alerts], group.key, group.labels, message.reason)
        incidents = sorted({one.incident for one in message.alerts})
        said = {"event": message.event, "incidents": incidents, "time": iso(now)}
        body["fleetpulse"] = {**said, "acknowledgement_ended": True} if message.pages_again else said
        text = json.dumps(body, separators=(",", ":"))
        found.append(Payload(group.id, receiver, message.kind, text, now, of_group=True))
    return found
