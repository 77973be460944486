"""What a Prometheus webhook receiver gets: Alertmanager's payload, version 4, with one alert per incident.

Pure: an incident in, a dict out. Labels are the identity of an alert and hold nothing that changes while it fires;
everything else is in the annotations.

Which receivers hear of a change, and what: one line per payload format in FORMATS.

Pure. A trigger is told when an incident opens, returns or becomes worth telling; a changed label set ends the old alert
and fires the new one in the same body, so that no receiver sees them apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config.sections import Webhook
from pipeline.incidents.cases import Change
from pipeline.incidents.causes import detector_family
from pipeline.incidents.ledger import Payload
from pipeline.model.records import Incident, iso

STILL_FIRING = "0001-01-01T00:00:00Z"
"""`endsAt` of every firing alert: Go's zero time, which receivers of Alertmanager look for."""
SEVERITY = {"page": "critical", "ticket": "warning", "watch": "info"}
ALERT_NAMES = {
    "coolant": "CoolantFault",
    "generic": "Anomaly",
    "link": "LinkDegraded",
    "memory": "MemoryFault",
    "power": "PowerFault",
    "sdc": "SilentDataCorruption",
    "straggler": "Straggler",
    "telemetry": "TelemetryGap",
    "thermal": "ThermalFault",
}
WATCHDOG = "Watchdog"


@dataclass(frozen=True, slots=True)
class Sender:
    """What every body says of where it comes from."""

    site: str
    external_url: str = ""


RECEIVER = "receiver-"
"""Beginning of the label `incident` where a receiver of alerts is what fails."""
Alert = dict[str, Any]


def labels(incident: Incident, site: str) -> dict[str, str]:
    """The alert's identity."""
    family = detector_family(incident.detector)
    found = {
        "alertname": ALERT_NAMES.get(family) or "".join(word.capitalize() for word in incident.detector.split("_")),
        "severity": SEVERITY[incident.severity],
        "entity": incident.entity,
        "cause": incident.cause,
        "detector": incident.detector,
        "incident": incident.id,
        "site": site,
    }
    return {**found, "simulated": "true"} if incident.simulated else found


def alert(incident: Incident, site: str, external_url: str, ended: int | None = None) -> Alert:
    """One alert, resolved if it has an end: none before its beginning, which Alertmanager refuses."""
    own = labels(incident, site)
    link = f"{external_url}/incident?id={incident.id}" if external_url else ""
    notes = {
        "summary": incident.summary,
        "description": f"{len(incident.members)} in trouble since {iso(incident.onset)}: {_some(incident.members)}",
        "dashboard_url": link,
    }
    if incident.confidence is not None:
        notes["confidence"] = f"{incident.confidence:.2f}"
    return {
        "status": "firing" if ended is None else "resolved",
        "labels": own,
        "annotations": {name: text for name, text in notes.items() if text},
        "startsAt": iso(incident.opened),
        "endsAt": STILL_FIRING if ended is None else iso(max(ended, incident.opened)),
        "generatorURL": link,
        "fingerprint": fingerprint(own),
    }


def payload(alerts: Sequence[Alert], group: str, receiver: str, external_url: str, reason: str) -> dict[str, Any]:
    """The whole body: all alerts of one incident. It fires while one of them does."""
    return {
        "version": "4",
        "groupKey": f'{{}}:{{incident="{group}"}}',
        "truncatedAlerts": 0,
        "status": "firing" if any(a["status"] == "firing" for a in alerts) else "resolved",
        "receiver": receiver,
        "groupLabels": {"incident": group},
        "commonLabels": _common([a["labels"] for a in alerts]),
        "commonAnnotations": _common([a["annotations"] for a in alerts]),
        "externalURL": external_url,
        "notification_reason": reason,
        "alerts": list(alerts),
    }


def watchdog(site: str, started: int, receiver: str, external_url: str) -> dict[str, Any]:
    """The alert that always fires while the pipeline works: whoever misses it knows that nobody watches."""
    entity = f"site:{site}"
    own = {"alertname": WATCHDOG, "severity": "none", "entity": entity, "cause": entity, "detector": "watchdog"}
    own |= {"incident": "watchdog", "site": site}
    one = {
        "status": "firing",
        "labels": own,
        "annotations": {"summary": f"Fleetpulse watches {entity}. This alert always fires; its absence is the alarm."},
        "startsAt": iso(started),
        "endsAt": STILL_FIRING,
        "generatorURL": external_url,
        "fingerprint": fingerprint(own),
    }
    return payload([one], "watchdog", receiver, external_url, "repeat interval elapsed")


def receiver_down(
    sender: Sender, failing: str, told: str, receiver: str, since: int, ended: int | None
) -> dict[str, Any]:
    """The body that tells `receiver` that another one, `failing`, accepts no alerts, or does so again since `ended`."""
    entity, incident = f"site:{sender.site}", f"{RECEIVER}{failing}"
    own = {"alertname": "ReceiverDown", "severity": "critical", "entity": entity, "cause": entity}
    own |= {"detector": "notifier", "incident": incident, "receiver": failing, "site": sender.site}
    one = {
        "status": "firing" if ended is None else "resolved",
        "labels": own,
        "annotations": {"summary": f"Receiver {failing} accepts no alerts", "description": f"Last answer: {told}"},
        "startsAt": iso(since),
        "endsAt": STILL_FIRING if ended is None else iso(ended),
        "generatorURL": sender.external_url,
        "fingerprint": fingerprint(own),
    }
    reason = "first notification" if ended is None else "all alerts resolved"
    return payload([one], incident, receiver, sender.external_url, reason)


def fingerprint(own: Mapping[str, str]) -> str:
    """16 hex digits: FNV-1a over the sorted labels, as `LabelsToSignature` of prometheus/common computes it."""
    text = b"".join(part.encode() + b"\xff" for name in sorted(own) for part in (name, own[name]))
    return f"{fnv1a(text):016x}"


def fnv1a(data: bytes) -> int:
    """FNV-1a, 64 bits; basis and prime from Fowler, Noll and Vo (draft-eastlake-fnv)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _common(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {k: v for k, v in tables[0].items() if all(t.get(k) == v for t in tables)}


def _some(members: Sequence[str], most: int = 10) -> str:
    """The first members; a whole row of racks would not fit into a message."""
    rest = len(members) - most
    return ", ".join(members[:most]) + (f" and {rest} more" if rest > 0 else "")


def _alertmanager(change: Change, told_before: bool, receiver: Webhook, sender: Sender) -> dict[str, Any] | None:
    """The body of version 4; None if there is nothing that this receiver has to hear."""
    now, before = change.incident, change.before
    if now.resolved is not None:
        alerts, reason = [_alert(now, sender, now.resolved)], "all alerts resolved"
    elif before is None or not told_before or change.kind == "reopened":
        alerts, reason = [_alert(now, sender)], "first notification"
    elif labels(before, sender.site) != labels(now, sender.site):
        alerts, reason = [_alert(before, sender, change.time), _alert(now, sender)], "new alerts added"
    else:
        return None
    return payload(alerts, now.id, receiver.name, sender.external_url, reason)


def _alert(incident: Incident, sender: Sender, ended: int | None = None) -> Alert:
    return alert(incident, sender.site, sender.external_url, ended)


Format = Callable[[Change, bool, Webhook, Sender], dict[str, Any] | None]
FORMATS: Mapping[str, Format] = {"alertmanager": _alertmanager}


def payloads_of(change: Change, receivers: Sequence[Webhook], sender: Sender, now: int) -> list[Payload]:
    """What the receivers are told of one change, to be sent from `now` on."""
    incident, before = change.incident, change.before
    if change.kind in ("acknowledged", "commented", "retitled"):
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
