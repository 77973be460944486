"""What no template of a receiver can do, found before the first page: calls, and other templates."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

_CALLS = (nodes.Call, nodes.CallBlock)
_OTHERS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_TEXT = "gpu:n1.0"
_TIME = "2026-01-01T00:00:00Z"


def find_forbidden(template: nodes.Template) -> str | None:
    """Returns what fails wherever it is rendered, with its line; None if nothing does."""
    for one in template.find_all(_CALLS):
        return f"line {one.lineno}: calls a function, method or macro; expected filters, such as title|upper"
    for one in template.find_all(_OTHERS):
        return f"line {one.lineno}: names another template; there is none, expected its text"
    return None


def make_sample() -> dict[str, Any]:
    """Returns what a template gets, with values of the kinds that real messages have."""
    labels = dict.fromkeys(("alertname", "severity", "entity", "cause", "detector", "incident", "site", "node"), _TEXT)
    times = {"startsAt": _TIME, "endsAt": _TIME, "generatorURL": "", "fingerprint": "0" * 16}
    alert = {"status": "firing", "labels": labels, "annotations": {"summary": _TEXT}, **times}
    incident = {
        **dict.fromkeys(("id", "cause", "severity", "state", "summary", "detector", "entity"), _TEXT),
        **dict.fromkeys(("opened", "onset"), _TIME),
        "members": [_TEXT],
        "confidence": 0.5,
    }
    change = {"event": "opened", "actor": _TEXT, "comment": _TEXT, "time": _TIME, "incident": incident}
    body = {"version": "4", "status": "firing", "receiver": _TEXT, "groupKey": _TEXT, "truncatedAlerts": 0}
    common = {"groupLabels": labels, "commonLabels": labels, "commonAnnotations": alert["annotations"]}
    more = {"externalURL": "", "notification_reason": _TEXT, "fleetpulse": change}
    return {**body, **common, **more, "alerts": [alert, alert], "event": "opened", "title": _TEXT, "change": change}
