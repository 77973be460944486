"""Which receivers hear of a change, and what: one line per payload format in FORMATS.

Pure. A trigger is told when an incident opens, returns or becomes worth telling; a changed label set ends the old alert
and fires the new one in the same body, so that no receiver sees them apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pipeline.cases import Change
from pipeline.config.sections import Webhook
from pipeline.model.records import Incident
from pipeline.respond import alertmanager
from pipeline.respond.alertmanager import Sender
from pipeline.store.ledger import Payload


def _alertmanager(change: Change, told_before: bool, receiver: Webhook, sender: Sender) -> dict[str, Any] | None:
    """The body of version 4; None if there is nothing that this receiver has to hear."""
    now, before = change.incident, change.before
    if now.resolved is not None:
        alerts, reason = [_alert(now, sender, now.resolved)], "all alerts resolved"
    elif before is None or not told_before or change.kind == "reopened":
        alerts, reason = [_alert(now, sender)], "first notification"
    elif alertmanager.labels(before, sender.site) != alertmanager.labels(now, sender.site):
        alerts, reason = [_alert(before, sender, change.time), _alert(now, sender)], "new alerts added"
    else:
        return None
    return alertmanager.payload(alerts, now.id, receiver.name, sender.external_url, reason)


def _alert(incident: Incident, sender: Sender, ended: int | None = None) -> alertmanager.Alert:
    return alertmanager.alert(incident, sender.site, sender.external_url, ended)


Format = Callable[[Change, bool, Webhook, Sender], dict[str, Any] | None]
FORMATS: Mapping[str, Format] = {"alertmanager": _alertmanager}


def payloads_of(change: Change, receivers: Sequence[Webhook], sender: Sender, now: int) -> list[Payload]:
    """What the receivers are told of one change, to be sent from `now` on."""
    incident, before = change.incident, change.before
    if change.kind in ("acknowledged", "commented"):
        return []
    found = []
    for receiver in receivers:
        if incident.resolved is None and not _worth(incident, receiver):
            continue
        told_before = before is not None and _worth(before, receiver)
        body = FORMATS[receiver.format](change, told_before, receiver, sender)
        if body is not None:
            kind: Literal["firing", "resolved"] = "firing" if incident.resolved is None else "resolved"
            found.append(Payload(incident.id, receiver.name, kind, json.dumps(body, separators=(",", ":")), now))
    return found


def _worth(incident: Incident, receiver: Webhook) -> bool:
    return incident.severity != "watch" or receiver.send_watch
