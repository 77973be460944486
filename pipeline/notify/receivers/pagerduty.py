"""PagerDuty: Events API v2 (trigger, acknowledge, resolve), and its signed webhook v3 to us.

The dedup_key is the incident, or the group of alerts, so that one incident here is one there for its whole life.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.receivers import PagerDuty, ReceiverConfig
from pipeline.model.errors import ConfigError
from pipeline.notify.delivery import (
    Answer,
    Call,
    PostResult,
    Request,
    Target,
    check_receiver,
    classify_answer,
    refuse_unexpected,
)
from pipeline.notify.receivers import (
    MAX_LISTED,
    Endpoint,
    InboundEvent,
    Message,
    cut,
    describe_change,
    make_lines,
    make_template,
    make_title,
    read_secret,
    render_text,
)

HOSTS = {"us": "https://events.pagerduty.com", "eu": "https://events.eu.pagerduty.com"}
MAX_SUMMARY, MAX_BYTES, ROUTING_KEY = 1024, 512_000, 32
"""Characters of `summary`, bytes of a body, characters of a routing key: limits of Events API v2."""
SEVERITY = {"critical": "critical", "warning": "warning", "info": "info"}
PAGES_AGAIN = ("acknowledgement_expired", "worsened")
"""Changes that end an acknowledgement here, as a higher severity also does. A trigger of an alert that is acknowledged
there notifies no one, so the alert is resolved before. An escalation is not among them: an alert that is not
acknowledged there is at some level of an escalation policy, which would begin again at its first."""
MAX_ENDED = 100
"""Newest messages whose end is remembered while their trigger waits for a limit. Chosen: each is on its way or the next
one; without it an end is sent twice."""
MAX_ID = 100
"""Longest id of an event of the webhook (characters), which is in our history. Chosen: PagerDuty's have 26 or 36."""
HEALTH_KEY = "fleetpulse-health-check"
"""dedup_key of the health check: to resolve a key that was never triggered changes nothing."""
SIGNATURE_PREFIX = "v1="
PREFIX = "pagerduty:"
"""Before the name of a person of PagerDuty, which is not one of our users."""


class PagerDutyEndpoint(Endpoint):
    """One service of PagerDuty."""

    parallel = 8
    owns_groups = True

    def __init__(self, receiver: PagerDuty) -> None:
        super().__init__(receiver)
        self._receiver = receiver
        self._title = make_template(receiver.title, receiver.section, receiver.name, "title")
        # messages whose resolve was accepted, and whose trigger was limited; some are withdrawn and never come back
        self._ended = deque[str](maxlen=MAX_ENDED)

    def reports(self, kind: str) -> bool:
        """Reports acknowledgements."""
        return kind == "acknowledged"

    def check_settings(self) -> None:
        """Raises ConfigError on a bad URL."""
        check_receiver(self._target())

    def check(self) -> None:
        """Raises ConfigError on a bad URL, or a routing key of the wrong form."""
        super().check()
        self._read_key()
        if (path := self._receiver.webhook_secret_file) is not None:
            read_secret(self._receiver.section, self.name, "webhook_secret_file", path)

    def send(self, message: Message, call: Call) -> PostResult:
        """Sends one event. An acknowledgement is not sent back to the PagerDuty in which it was made."""
        if message.kind == "update" and message.change.get("receiver") == self.name:
            return PostResult("delivered", "made in PagerDuty, not sent back")
        action = {"firing": "trigger", "resolved": "resolve"}.get(message.kind, "acknowledge")
        if message.kind == "firing" and message.is_resolved:
            action = "resolve"
        event: dict[str, Any] = {"event_action": action, "dedup_key": message.thread}
        was_acknowledged = message.follows_update  # PagerDuty is sent no other updates
        pages_again = message.event in PAGES_AGAIN or (message.event == "escalated" and was_acknowledged)
        pages_again = pages_again or message.change.get("acknowledgement_ended") is True
        resolves_first = action == "trigger" and pages_again and message.has_fired
        if resolves_first and message.id not in self._ended:
            ended = self._post({**event, "event_action": "resolve"}, call)
            if ended.outcome != "delivered":
                return ended
        if action == "trigger":
            event |= self._make_trigger(message)
        result = self._post(event, call)
        if resolves_first:  # not resolved again, else a limit of one request at a time would let it through never
            with contextlib.suppress(ValueError):
                self._ended.remove(message.id)
            if result.limited:
                self._ended.append(message.id)
        return result

    def probe(self, call: Call) -> PostResult | None:
        """Resolves a key that was never triggered: PagerDuty checks the key and changes nothing."""
        return self._post({"event_action": "resolve", "dedup_key": HEALTH_KEY}, call)

    def read_webhook(self, signature: str, body: bytes) -> InboundEvent:
        """Returns the event of PagerDuty's webhook. Raises KeyError without a secret, PermissionError on a wrong
        signature, ValueError if it is no event."""
        one = self._receiver
        if one.webhook_secret_file is None:
            raise KeyError(one.name)
        secrets = read_secret(one.section, one.name, "webhook_secret_file", one.webhook_secret_file).split()
        if not verify_signature(secrets, signature, body):
            raise PermissionError("wrong signature")
        return parse_event(body)

    def _make_trigger(self, message: Message) -> dict[str, Any]:
        main = message.main
        labels, link = main["labels"], str(main.get("generatorURL", ""))
        title = cut(render_text(self._title, message, make_title(message, leads=True)), MAX_SUMMARY)
        made: dict[str, Any] = {
            "payload": {
                "summary": title,
                "source": labels.get("node") or labels.get("entity", "fleetpulse"),
                "severity": SEVERITY.get(labels.get("severity", ""), "info"),
                "timestamp": main["startsAt"],
                "component": labels.get("entity", ""),
                "group": labels.get("cause", ""),
                "class": labels.get("alertname", ""),
                "custom_details": _make_details(message),
            },
            "client": "Fleetpulse",
        }
        if re.match(r"https?://", link):
            made |= {"client_url": link, "links": [{"href": link, "text": "Incident in Fleetpulse"}]}
        return made

    def _post(self, event: Mapping[str, Any], call: Call) -> PostResult:
        try:
            body = _encode({"routing_key": self._read_key(), **event})
            return _classify(call(Request(self._target(), body)))
        except ConfigError as error:  # a secret that was readable at the start
            return PostResult("retry", str(error))

    def _read_key(self) -> str:
        one = self._receiver
        key = read_secret(one.section, one.name, "routing_key_file", one.routing_key_file)
        if len(key) != ROUTING_KEY or not key.isalnum():
            raise ConfigError(
                f"[[{one.section}]] {one.name}: routing_key_file: expected {ROUTING_KEY} letters and digits"
            )
        return key

    def _target(self) -> Target:
        one = self._receiver
        url = f"{(one.url or HOSTS[one.region]).rstrip('/')}/v2/enqueue"
        return Target(one.section, one.name, url, one.allow_http, one.allow_private)


def _classify(answer: Answer) -> PostResult:
    """Returns the result of an event: Events API v2 answers 202 and JSON with `status` success and a `message`."""
    result = classify_answer(answer)
    if result.outcome != "delivered":
        return result
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        body = None
    is_own = isinstance(body, dict) and body.get("status") == "success" and isinstance(body.get("message"), str)
    if answer.status == 202 and is_own:
        return result
    return refuse_unexpected(answer, "202 and the JSON of PagerDuty with status success")


def build(receiver: ReceiverConfig) -> Sequence[Endpoint]:
    """Returns the endpoint of a service."""
    assert isinstance(receiver, PagerDuty)
    return [PagerDutyEndpoint(receiver)]


def _make_details(message: Message) -> dict[str, Any]:
    """Returns what a responder reads first: what, where, and which alerts."""
    alerts = [
        {**a["labels"], "status": a["status"], "summary": a["annotations"].get("summary", "")} for a in message.alerts
    ]
    return {
        "description": "\n".join(make_lines(message)),
        "labels": dict(message.main["labels"]),
        "annotations": dict(message.main["annotations"]),
        "changes": describe_change(message),
        "alerts": alerts,
    }


def _encode(event: Mapping[str, Any]) -> bytes:
    """Returns the body; without the alerts, then without custom_details, if it is too long for PagerDuty."""
    body = json.dumps(event, separators=(",", ":")).encode()
    if len(body) <= MAX_BYTES:
        return body
    payload = dict(event["payload"])
    details = dict(payload["custom_details"])
    details["alerts"] = [*details["alerts"][:MAX_LISTED], f"and {len(details['alerts']) - MAX_LISTED} more, left out"]
    for shorter in (details, {"note": f"left out: the event had {len(body)} bytes, at most {MAX_BYTES} are allowed"}):
        body = json.dumps({**event, "payload": {**payload, "custom_details": shorter}}, separators=(",", ":")).encode()
        if len(body) <= MAX_BYTES:
            break
    return body


# --- the webhook v3 to us -------------------------------------------------------------------------


def verify_signature(secrets: Sequence[str], header: str, body: bytes) -> bool:
    """Returns whether one of the signatures of `X-PagerDuty-Signature` is of one of the secrets."""
    given = [part.strip() for part in header.split(",")]
    made = [SIGNATURE_PREFIX + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest() for secret in secrets]
    matches = [hmac.compare_digest(one.encode(), other.encode()) for one in made for other in given]
    return any(matches)  # all are compared, so that the time reveals nothing


def parse_event(body: bytes) -> InboundEvent:
    """Returns the event of a webhook v3. Raises ValueError if it is none."""
    try:
        event = json.loads(body)["event"]
        id_, kind, data = _read_id(event["id"]), _read_text(event["event_type"], 100), event.get("data") or {}
        if kind == "pagey.ping":
            return InboundEvent(id_, "ping", "", "", "")
        agent = event.get("agent") or {}
        key = data.get("incident_key") or (data.get("incident") or {}).get("incident_key") or ""
        incident = _read_text(key, 255)  # the longest of PagerDuty
        person = PREFIX + _read_text(agent.get("summary") or agent.get("id") or "unknown", 100)
        if agent.get("type") not in ("user_reference", "user"):
            person = ""
        said = _read_text(data.get("content") or "", 2000)
        return InboundEvent(id_, kind.removeprefix("incident."), incident, person, said)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an event of PagerDuty's webhook v3: {type(error).__name__}") from error


def _read_id(value: Any) -> str:
    """Returns the id of an event. Raises ValueError if it is none: a shortened one could be that of another event."""
    id_ = str(value)
    if not 0 < len(id_) <= MAX_ID or not id_.isprintable():
        raise ValueError(f"not an event of PagerDuty's webhook v3: id: expected 1 to {MAX_ID} printable characters")
    return id_


def _read_text(value: Any, most: int) -> str:
    """Returns a text of at most `most` characters; half of a surrogate pair, which no UTF-8 has, is a question mark."""
    return cut(str(value).encode(errors="replace").decode(), most)
