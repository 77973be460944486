"""`fleetpulse notify` and `fleetpulse routes`: messages, a marked test, dead messages, routes of alerts.

The receivers' part of `fleetpulse doctor` is here too, since it sends what a test would not show.
"""

from __future__ import annotations

import argparse
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.commands.checks import Check
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import ConfigError, FleetpulseError, MissingCopy, Unreachable, UsageError
from pipeline.model.records import iso
from pipeline.notify import delivery
from pipeline.notify.alertmanager import STILL_FIRING, compute_fingerprint, make_body
from pipeline.notify.receivers import TEST, Endpoint, Message, build_receiver
from pipeline.notify.routes import RouteNode, Rules, build_rules
from pipeline.runtime.credentials import list_handed_out
from pipeline.runtime.guides import guide

Rows = list[dict[str, Any]]
LISTED = ("id", "receiver", "kind", "state", "attempts", "created", "answer")
RECEIVERS = ("name", "kind", "state", "delivered", "pending", "held", "dead", "answer")
TESTED = ("receiver", "step", "result", "status", "answer")
ROUTED = ("receiver", "route", "group", "group_wait", "group_interval", "repeat_interval", "inhibits")
SHOWN = ("route", "receiver", "group_by", "group_wait", "group_interval", "repeat_interval", "continue")
SHOWN_BYTES = 300
"""Bytes of a receiver's answer that a test prints. Chosen: error messages are shorter."""


def run_notify(
    config: Config, given: argparse.Namespace, say: Callable[[str], None]
) -> tuple[Rows, Sequence[str], int]:
    """Runs one verb and returns rows, columns and the exit code."""
    verb = given.verb or "list"
    if verb == "test":
        return run_test(config, given.name, given.severity, say)
    if verb == "receivers":
        return list(_get(config, "/api/v1/receivers")["receivers"]), RECEIVERS, 0
    if verb == "replay":
        receiver = given.receiver
        if bool(given.ids) == bool(receiver):
            raise UsageError("notify replay: expected ids of dead messages, or --receiver NAME for all of it")
        body = {"ids": given.ids, "receiver": receiver}
        done = client.post(config, "/api/v1/notifications/replay", body)
        say(f"{done['replayed']} messages are sent again")
        unknown = sorted(set(given.ids or ()) - {row["id"] for row in done["notifications"]})
        for id_ in unknown:
            say(f"{id_}: no dead message has this id; expected one of `fleetpulse notify list --state dead`")
        return list(done["notifications"]), LISTED, 1 if unknown else 0
    query = urllib.parse.urlencode({k: v for k in ("state", "incident") if (v := getattr(given, k, None))})
    found = list(_get(config, f"/api/v1/notifications?{query}")["notifications"])
    return found, choose_columns(found), 0


def choose_columns(rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Returns the columns of a list of messages: the author of a silence at its receiver only if there is one."""
    return (*LISTED, "remote") if any(row.get("remote") for row in rows) else LISTED


def _get(config: Config, path: str) -> Any:
    status, answer = client.get(config, path)
    if status != 200:
        raise client.make_error(status, answer, path)
    return answer


# --- a marked test --------------------------------------------------------------------------------


def run_test(config: Config, name: str, severity: str, say: Callable[[str], None]) -> tuple[Rows, Sequence[str], int]:
    """Sends a marked alert and its end to one receiver; returns what the receiver answered to each request."""
    found = {one.name: one for one in config.notify.receivers}
    if name not in found:
        known = ", ".join(sorted(found)) or "none is configured"
        raise UsageError(f"notify test: no receiver {name!r}; known: {known}")
    rows: Rows = []
    code = 0
    now = time.time_ns() // 1000
    for endpoint in build_receiver(found[name]):
        reference = ""
        for kind in ("firing", "resolved"):
            answers: list[delivery.Answer] = []
            message = make_test_message(config, endpoint, kind, severity, now, reference)
            result = endpoint.send(message, _record(answers))
            reference = result.reference or reference
            rows += _describe_answers(endpoint.name, kind, result, answers)
            if result.outcome != "delivered":
                code = max(code, 3 if answers and not answers[-1].status else 1)
                break
    say("the test is marked [test] and was resolved immediately" if code == 0 else "the test was not accepted")
    return rows, TESTED, code


def make_test_message(
    config: Config, endpoint: Endpoint, kind: str, severity: str, now: int, reference: str = ""
) -> Message:
    """Returns a test alert, or its end, as a message for an endpoint."""
    entity, incident = f"site:{config.site.name}", f"test-{now}"
    labels = {"alertname": "FleetpulseTest", "severity": severity, "entity": entity, "cause": entity}
    labels |= {"detector": TEST, "incident": incident, "site": config.site.name}
    alert = {
        "status": kind,
        "labels": labels,
        "annotations": {
            "summary": f"Test of receiver {endpoint.receiver}: no action needed",
            "description": "Sent by `fleetpulse notify test`. Nothing is wrong.",
        },
        "startsAt": iso(now),
        "endsAt": STILL_FIRING if kind == "firing" else iso(now),
        "generatorURL": config.notify.external_url.rstrip("/"),
        "fingerprint": compute_fingerprint(labels),
    }
    reason = "first notification" if kind == "firing" else "all alerts resolved"
    url = config.notify.external_url.rstrip("/")
    body = make_body([alert], {"incident": incident}, endpoint.receiver, url, reason)
    return Message(f"{incident}.{kind}.{endpoint.name}", incident, kind, body, reference, now)


def _record(answers: list[delivery.Answer]) -> delivery.Call:
    def call(request: delivery.Request) -> delivery.Answer:
        answers.append(delivery.exchange(request))
        return answers[-1]

    return call


def _describe_answers(name: str, step: str, result: delivery.PostResult, answers: Sequence[delivery.Answer]) -> Rows:
    """Returns a row per request; control characters of the answer are not printed."""
    rows: Rows = []
    for answer in answers:
        text = answer.body[:SHOWN_BYTES].decode(errors="replace")
        shown = "".join(c if c.isprintable() else " " for c in text).strip()
        rows.append({"receiver": name, "step": step, "status": answer.status or None, "answer": answer.error or shown})
    if not rows:
        rows.append({"receiver": name, "step": step, "status": None, "answer": ""})
    for row in rows:
        row["result"] = "ok" if row is not rows[-1] else "ok" if result.outcome == "delivered" else result.text
        row["answer"] = "" if row["answer"] == row["result"] else row["answer"]  # without an answer both are the reason
    return rows


# --- routes ---------------------------------------------------------------------------------------


def run_routes(config: Config, given: argparse.Namespace) -> tuple[Rows, Sequence[str]]:
    """Returns the rows of one verb: the routes, or those that an alert with the given labels takes."""
    rules = _build_rules(config)
    if (given.verb or "show") == "show":
        if rules.top is None:
            return [{"route": "(no routes)", "receiver": name, **_timers(None)} for name in _names(config)], SHOWN
        return [_show(node, depth) for depth, node in rules.top.walk()], SHOWN
    labels = _parse_labels(given.labels)
    inhibits = "may be inhibited" if rules.is_target(labels) else ""
    if rules.top is None:
        rows = [{"receiver": name, "route": "(no routes: every receiver)"} for name in _names(config)]
        return [{**row, "group": "", **_timers(None), "inhibits": inhibits} for row in rows], ROUTED
    found = [(node, node.group_key(labels)[len(node.key) + 1 :]) for node in rules.top.match(labels)]
    rows = [{"receiver": node.receiver, "route": node.key, "group": group, **_timers(node)} for node, group in found]
    return [{**row, "inhibits": inhibits} for row in rows], ROUTED


def _build_rules(config: Config) -> Rules:
    try:
        return build_rules(config.notify)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def _names(config: Config) -> list[str]:
    return [one.name for one in config.notify.receivers]


def _show(node: RouteNode, depth: int) -> dict[str, Any]:
    key = node.key.rpartition("/")[2] if depth else node.key
    own = {"route": "  " * depth + key, "receiver": node.receiver, "group_by": " ".join(node.group_by)}
    return {**own, **_timers(node), "continue": node.continues}


def _timers(node: RouteNode | None) -> dict[str, str]:
    if node is None:
        return {"group_wait": "0s", "group_interval": "", "repeat_interval": ""}
    seconds = {"group_wait": node.wait_s, "group_interval": node.interval_s, "repeat_interval": node.repeat_s}
    return {name: _shorten(value) for name, value in seconds.items()}


def _shorten(seconds: float) -> str:
    """Returns a duration in the longest unit that divides it: 5m, 4h."""
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s"


def _parse_labels(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"routes test: {text!r}: expected LABEL=VALUE, such as severity=critical")
        found[name] = value.strip('"')
    return found


# --- doctor ---------------------------------------------------------------------------------------


def check_receivers(config: Config) -> Check | list[Check]:
    """Checks each receiver: its configuration, its own health check, and the pipeline's last message to it. Shown to no
    person."""
    if not config.notify.receivers:
        meaning = "incidents are shown only on the dashboard"
        return Check(
            "receivers", "warn", "none", meaning, f"add [[notify.webhooks]] or another: {guide('receivers.md')}"
        )
    try:
        _build_rules(config)
    except FleetpulseError as error:
        return Check("receivers", "fail", str(error), "the pipeline does not start", "fleetpulse routes show")
    states = _read_states(config)
    return [check for one in config.notify.receivers for check in _check_receiver(one, states)]


def _check_receiver(receiver: Any, states: Mapping[str, Mapping[str, Any]] | None) -> list[Check]:
    try:
        return [_check_endpoint(endpoint, states) for endpoint in build_receiver(receiver)]
    except MissingCopy as error:
        return [_check_copy(f"receiver {receiver.name}", error)]
    except FleetpulseError as error:
        meaning = "alerts cannot be sent to this receiver"
        fix = f"correct [[{receiver.section}]] {receiver.name} ({guide('receivers.md')}): fleetpulse config check"
        return [Check(f"receiver {receiver.name}", "fail", str(error), meaning, fix)]


def _check_copy(name: str, error: MissingCopy) -> Check:
    """Returns that the unit must be started, or what it lacks to start."""
    if error.copy not in list_handed_out():
        return Check(name, "fail", str(error), "the pipeline does not start", guide("security.md", "Secrets"))
    if (unit := error.copy.parent).is_dir():
        return Check(name, "fail", str(error), "its alerts cannot be sent", f"systemctl restart {unit.stem}")
    return Check(name, "warn", str(error), "it was not tried", f"systemctl enable --now {unit.stem}")


def _check_endpoint(endpoint: Endpoint, states: Mapping[str, Mapping[str, Any]] | None) -> Check:
    """Returns what the health check found, else what the last delivery of a running pipeline found."""
    name, fix = f"receiver {endpoint.name}", f"fleetpulse notify test {endpoint.receiver}"
    answers: list[delivery.Answer] = []
    result = endpoint.probe(_record(answers))
    if result is not None and result.outcome != "delivered":
        unreachable = bool(answers) and not answers[-1].status
        return Check(name, "fail", result.text, "it accepts no alerts", fix, unreachable)
    known = (states or {}).get(endpoint.name)
    if known is not None and known["state"] in ("failing", "down"):
        return Check(name, "fail", f"{known['answer']}, since {known['since']}", "it accepts no alerts", fix)
    if known is not None and known["dead"]:
        meaning = "they are dead after nine attempts"
        return Check(name, "warn", f"{known['dead']} dead messages", meaning, "fleetpulse notify list --state dead")
    if result is not None:
        return Check(name, "ok", f"health check: {result.text}")
    if known is not None and known["delivered"]:
        return Check(name, "ok", f"last message accepted {known['delivered']}")
    found = "it has no health check, and no running pipeline has sent it a message yet"
    return Check(name, "info", found, "whether it accepts alerts is unknown", fix)


def _read_states(config: Config) -> Mapping[str, Mapping[str, Any]] | None:
    """Returns the state of each endpoint in a running pipeline, None if none answers."""
    try:
        status, answer = client.get(config, "/api/v1/receivers")
    except Unreachable:
        return None
    return {row["name"]: row for row in answer["receivers"]} if status == 200 else None
