"""Alerts in Alertmanager's webhook format (payload version 4): one alert per incident, one payload per receiver.

Labels are the identity of an alert and do not change while it fires; everything else is in the annotations. An alert is
sent when an incident opens, reopens or first reaches a severity that is sent. If its labels change, one body resolves
the old alert and fires the new one. FORMATS has one line per payload format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config.sections import Webhook
from pipeline.incidents.cases import Change, detector_family
from pipeline.incidents.ledger import Payload
from pipeline.model.records import Incident, iso

STILL_FIRING = "0001-01-01T00:00:00Z"
"""`endsAt` of every firing alert: Go's zero time, as Alertmanager sends it."""
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
class AlertSource:
    """Site and dashboard address in every request body."""

    site: str
    external_url: str = ""


RECEIVER_PREFIX = "receiver-"
"""Prefix of the label `incident` of alerts about a failing receiver."""
Alert = dict[str, Any]


def make_labels(incident: Incident, site: str) -> dict[str, str]:
    """Returns the labels, which are the identity of the alert."""
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


def make_alert(incident: Incident, site: str, external_url: str, ended: int | None = None) -> Alert:
    """Returns one alert; with `ended` a resolved one. It never ends before it starts, which Alertmanager refuses."""
    own = make_labels(incident, site)
    link = f"{external_url}/incident?id={incident.id}" if external_url else ""
    notes = {
        "summary": incident.summary,
        "description": _describe(incident),
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
        "fingerprint": compute_fingerprint(own),
    }


def make_body(alerts: Sequence[Alert], group: str, receiver: str, external_url: str, reason: str) -> dict[str, Any]:
    """Returns the request body with all alerts of one incident; it fires while one of them does."""
    return {
        "version": "4",
        "groupKey": f'{{}}:{{incident="{group}"}}',
        "truncatedAlerts": 0,
        "status": "firing" if any(a["status"] == "firing" for a in alerts) else "resolved",
        "receiver": receiver,
        "groupLabels": {"incident": group},
        "commonLabels": _common_items([a["labels"] for a in alerts]),
        "commonAnnotations": _common_items([a["annotations"] for a in alerts]),
        "externalURL": external_url,
        "notification_reason": reason,
        "alerts": list(alerts),
    }


def make_watchdog(site: str, started: int, receiver: str, external_url: str) -> dict[str, Any]:
    """Returns the Watchdog alert, which always fires while the pipeline works; its absence is the alarm."""
    entity = f"site:{site}"
    own = {"alertname": WATCHDOG, "severity": "none", "entity": entity, "cause": entity, "detector": "watchdog"}
    own |= {"incident": "watchdog", "site": site}
    one = {
        "status": "firing",
        "labels": own,
        "annotations": {"summary": f"Watchdog of {entity}: always firing; its absence is the alarm"},
        "startsAt": iso(started),
        "endsAt": STILL_FIRING,
        "generatorURL": external_url,
        "fingerprint": compute_fingerprint(own),
    }
    return make_body([one], "watchdog", receiver, external_url, "repeat interval elapsed")


def make_receiver_down(
    source: AlertSource, failing: str, text: str, receiver: str, since: int, ended: int | None
) -> dict[str, Any]:
    """Returns the body that reports to `receiver` that `failing` accepts no alerts, or accepts them again since
    `ended`."""
    entity, incident = f"site:{source.site}", f"{RECEIVER_PREFIX}{failing}"
    own = {"alertname": "ReceiverDown", "severity": "critical", "entity": entity, "cause": entity}
    own |= {"detector": "notifier", "incident": incident, "receiver": failing, "site": source.site}
    one = {
        "status": "firing" if ended is None else "resolved",
        "labels": own,
        "annotations": {"summary": f"Receiver {failing} accepts no alerts", "description": f"Last answer: {text}"},
        "startsAt": iso(since),
        "endsAt": STILL_FIRING if ended is None else iso(ended),
        "generatorURL": source.external_url,
        "fingerprint": compute_fingerprint(own),
    }
    reason = "first notification" if ended is None else "all alerts resolved"
    return make_body([one], incident, receiver, source.external_url, reason)


def compute_fingerprint(own: Mapping[str, str]) -> str:
    """Returns 16 hex digits: FNV-1a over the sorted labels, as `LabelsToSignature` of prometheus/common."""
    text = b"".join(part.encode() + b"\xff" for name in sorted(own) for part in (name, own[name]))
    return f"{hash_fnv1a(text):016x}"


def hash_fnv1a(data: bytes) -> int:
    """Returns the 64-bit FNV-1a hash; basis and prime from draft-eastlake-fnv."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _common_items(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {k: v for k, v in tables[0].items() if all(t.get(k) == v for t in tables)}


def _describe(incident: Incident) -> str:
    number = len(incident.members)
    since = f"{number} {'entity' if number == 1 else 'entities'} affected since {iso(incident.onset)}"
    return f"{since}, suspected cause {incident.cause}: {_list_members(incident.members)}"


def _list_members(members: Sequence[str], most: int = 10) -> str:
    """Returns the first members, and the number of the others."""
    rest = len(members) - most
    return ", ".join(members[:most]) + (f" and {rest} more" if rest > 0 else "")


def _make_alertmanager_body(
    change: Change, was_sent: bool, receiver: Webhook, source: AlertSource
) -> dict[str, Any] | None:
    """Returns the body (version 4); None if the change is not reported to this receiver."""
    now, before = change.incident, change.before
    if now.resolved is not None:
        alerts, reason = [_alert(now, source, now.resolved)], "all alerts resolved"
    elif before is None or not was_sent or change.kind == "reopened":
        alerts, reason = [_alert(now, source)], "first notification"
    elif make_labels(before, source.site) != make_labels(now, source.site):
        alerts, reason = [_alert(before, source, change.time), _alert(now, source)], "new alerts added"
    else:
        return None
    return make_body(alerts, now.id, receiver.name, source.external_url, reason)


def _alert(incident: Incident, source: AlertSource, ended: int | None = None) -> Alert:
    return make_alert(incident, source.site, source.external_url, ended)


Format = Callable[[Change, bool, Webhook, AlertSource], dict[str, Any] | None]
FORMATS: Mapping[str, Format] = {"alertmanager": _make_alertmanager_body}


def make_payloads(change: Change, receivers: Sequence[Webhook], source: AlertSource, now: int) -> list[Payload]:
    """Returns the payloads of one change for all receivers, to be sent from `now` on."""
    incident, before = change.incident, change.before
    if change.kind in ("acknowledged", "commented", "retitled"):
        return []
    found = []
    for receiver in receivers:
        if incident.resolved is None and not _is_sent(incident, receiver):
            continue
        was_sent = before is not None and _is_sent(before, receiver)
        body = FORMATS[receiver.format](change, was_sent, receiver, source)
        if body is not None:
            kind: Literal["firing", "resolved"] = "firing" if incident.resolved is None else "resolved"
            found.append(Payload(incident.id, receiver.name, kind, json.dumps(body, separators=(",", ":")), now))
    return found


def _is_sent(incident: Incident, receiver: Webhook) -> bool:
    return incident.severity != "watch" or receiver.send_watch
