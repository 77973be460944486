"""Webhooks: Alertmanager's body of version 4, our own event, or a CloudEvent; signed as Standard Webhooks if wanted."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.receivers import ReceiverConfig, Webhook
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, iso
from pipeline.notify.delivery import Call, PostResult, Request, Target, check_networks, check_receiver, classify_answer
from pipeline.notify.receivers import (
    QUIET,
    Endpoint,
    Message,
    check_auth,
    cut,
    cut_bytes,
    describe_change,
    encode_json,
    make_title,
    read_auth,
    read_secret,
)

MAX_EVENT_BYTES = 20_000
"""Longest event (bytes): Standard Webhooks 1.0 advises payloads below 20 kB."""
MAX_TEXT_BYTES = (2000, 500)
"""Longest text of an event that is too long (bytes), first and last try. Chosen: seven of the last fit for certain."""
SECRET_PREFIX, SECRET_BYTES = "whsec_", (24, 64)  # Standard Webhooks 1.0


class WebhookEndpoint(Endpoint):
    """One URL."""

    watchdog = True
    parallel = 8

    def __init__(self, receiver: Webhook) -> None:
        super().__init__(receiver)
        self._receiver = receiver

    def reports(self, kind: str) -> bool:
        """Reports every change but new titles, except in Alertmanager's format, which has no field for them."""
        return self._receiver.format != "alertmanager" and kind not in QUIET

    def check_settings(self) -> None:
        """Raises ConfigError on a bad URL, or keys that do not go together."""
        check_networks(self._receiver)
        if self._receiver.url_file is None:
            check_receiver(self._target())
        if self._receiver.health_url:
            check_receiver(self._health_target())
        check_auth(self._receiver)

    def check(self) -> None:
        """Raises ConfigError on a bad URL, an unreadable secret or a secret of the wrong form."""
        super().check()
        check_receiver(self._target())
        self._headers(b"", "check", 0)

    def send(self, message: Message, call: Call) -> PostResult:
        """Posts the message in the configured format."""
        try:
            body = self._make_body(message)
            headers = self._headers(body, message.id, message.time)
            return classify_answer(call(Request(self._target(), body, headers)))
        except ConfigError as error:  # a secret that was readable at the start
            return PostResult("retry", str(error))

    def probe(self, call: Call) -> PostResult | None:
        """Reads `health_url`, if there is one; a webhook alone has no health check."""
        if not self._receiver.health_url:
            return None
        return classify_answer(call(Request(self._health_target(), method="GET", headers=read_auth(self._receiver))))

    def _target(self) -> Target:
        one = self._receiver
        if one.url_file is None:
            return Target(one.section, one.name, one.url, one.allow_http, one.allow_private)
        url = read_secret(one.section, one.name, "url_file", one.url_file)
        return Target(one.section, one.name, url, one.allow_http, one.allow_private, "url_file")

    def _health_target(self) -> Target:
        one = self._receiver
        return Target(one.section, one.name, one.health_url, one.allow_http, one.allow_private, "health_url")

    def _headers(self, body: bytes, id_: str, now: int) -> dict[str, str]:
        one = self._receiver
        found = {**read_auth(one), "Idempotency-Key": id_}
        if one.format == "cloudevents":
            found["Content-Type"] = "application/cloudevents+json; charset=utf-8"
        if one.signing_secret_file is not None:
            text = read_secret(one.section, one.name, "signing_secret_file", one.signing_secret_file)
            keys = [decode_secret(line, f"[[{one.section}]] {one.name}") for line in text.split()]
            found |= sign(keys, id_, now // SECOND, body)
        return found

    def _make_body(self, message: Message) -> bytes:
        if self._receiver.format == "event":
            return encode_json(make_event(message))
        if self._receiver.format == "cloudevents":
            return encode_json(make_cloud_event(message))
        body = make_version_4(message, self.receiver, self._receiver.max_alerts)
        return json.dumps(body, separators=(",", ":")).encode()


def build(receiver: ReceiverConfig) -> Sequence[Endpoint]:
    """Returns the endpoint of a webhook."""
    assert isinstance(receiver, Webhook)
    return [WebhookEndpoint(receiver)]


def make_version_4(message: Message, receiver: str, most: int) -> dict[str, Any]:
    """Returns the body of version 4 with at most `most` alerts (0: all)."""
    body = {key: value for key, value in message.body.items() if key != "fleetpulse"}
    body["receiver"] = receiver
    if most and len(message.alerts) > most:
        body["alerts"] = list(message.alerts)[:most]
        body["truncatedAlerts"] = int(body.get("truncatedAlerts", 0)) + len(message.alerts) - most
    return body


def make_event(message: Message) -> dict[str, Any]:
    """Returns {type, timestamp, data} as Standard Webhooks describes it, below MAX_EVENT_BYTES."""
    return _add_data({"type": _type_of(message), "timestamp": _time_of(message)}, message)


def make_cloud_event(message: Message) -> dict[str, Any]:
    """Returns a CloudEvent 1.0 in structured mode, below MAX_EVENT_BYTES. id: the same at every attempt."""
    labels = message.main["labels"]
    attributes = {
        "specversion": "1.0",
        "id": message.id,
        "source": f"/fleetpulse/{labels.get('site', 'local')}",
        "type": f"io.fleetpulse.{_type_of(message)}",
        "subject": message.thread,
        "time": _time_of(message),
        "datacontenttype": "application/json",
    }
    return _add_data(attributes, message)


def _type_of(message: Message) -> str:
    subject = "watchdog" if message.main["labels"].get("detector") == "watchdog" else "incident"
    event = message.event
    if event == "opened" and message.body.get("notification_reason") == "some alerts resolved":
        event = message.change.get("news", {}).get("event", "updated")  # nothing opened; something may page again
    return f"{subject}.{event}"


def _time_of(message: Message) -> str:
    return str(message.change.get("time") or iso(message.time))


def _add_data(envelope: Mapping[str, Any], message: Message) -> dict[str, Any]:
    """Returns an envelope with its data, together below MAX_EVENT_BYTES."""
    most = MAX_EVENT_BYTES - len(encode_json({**envelope, "data": ""}))
    return {**envelope, "data": _shorten(_make_data(message), most)}


def _make_data(message: Message) -> dict[str, Any]:
    """Returns incident, alerts and change."""
    return {
        "incident": message.thread,
        "status": message.body["status"],
        "title": make_title(message),
        "url": message.main.get("generatorURL", ""),
        "change": describe_change(message),
        "actor": message.change.get("actor", ""),
        "comment": cut(str(message.change.get("comment", "")), 2000),
        "detail": message.change.get("incident"),
        "alerts": list(message.alerts),
        "truncated_alerts": int(message.body.get("truncatedAlerts", 0)),
        **({"changes": message.change["changes"]} if message.change.get("changes") else {}),
    }


def _shorten(data: dict[str, Any], most: int) -> dict[str, Any]:
    """Returns data of at most `most` bytes: members but the first are left out, then long texts are cut, then alerts
    are left out from the end, and counted, then the incident's detail."""
    if len(encode_json(data)) > most and isinstance(data["detail"], dict):
        members = data["detail"].get("members", [])
        data["detail"] = {**data["detail"], "members": members[:50], "members_total": len(members)}
    for text_bytes, fewest in ((MAX_TEXT_BYTES[0], 1), (MAX_TEXT_BYTES[1], 0)):
        if len(encode_json(data)) > most:
            data = cut_bytes(data, text_bytes)
        while len(encode_json(data)) > most and len(data["alerts"]) > fewest:
            kept = data["alerts"][: len(data["alerts"]) // 2]
            data["truncated_alerts"] += len(data["alerts"]) - len(kept)
            data["alerts"] = kept
    return data if len(encode_json(data)) <= most else {**data, "detail": None}


def decode_secret(text: str, where: str) -> bytes:
    """Returns the key of a `whsec_` secret. Raises ConfigError without showing it."""
    wrong = f"{where}: signing_secret_file: expected whsec_ and 24 to 64 bytes as base64, one secret a line"
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(wrong) from None
    if not text.startswith(SECRET_PREFIX) or not SECRET_BYTES[0] <= len(key) <= SECRET_BYTES[1]:
        raise ConfigError(wrong)
    return key


def sign(keys: Sequence[bytes], id_: str, seconds: int, body: bytes) -> dict[str, str]:
    """Returns the headers of Standard Webhooks 1.0: one signature per key, so that keys can be rotated."""
    text = f"{id_}.{seconds}.".encode() + body
    made = [base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode() for key in keys]
    return {
        "webhook-id": id_,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(f"v1,{one}" for one in made),
    }
