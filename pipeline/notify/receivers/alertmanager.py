"""Push into Alertmanagers: POST /api/v2/alerts at every change, and all firing alerts again at an interval.

Each URL is a separate endpoint, so that every replica gets every alert. The label set is the identity of an alert;
`endsAt` lies three intervals ahead, so that alerts end by themselves if we do.
"""

from __future__ import annotations

import json
import logging
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.addresses import hide_address
from pipeline.config.receivers import Alertmanager, ReceiverConfig, parse_duration
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, iso
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
from pipeline.notify.receivers import PIPELINE, Endpoint, Message, check_auth, cut, read_auth

log = logging.getLogger("fleetpulse.notify")
INTERVALS_AHEAD = 3
"""`endsAt` of a firing alert, in resend intervals. Chosen: two lost resends end no alert."""
BATCH_ALERTS = 500
"""Alerts of one request (0.2 MB). Chosen: 5,000 alerts took Alertmanager 0.13 s, so 500 never reach its timeout."""
SPLIT = (400, 422)
"""Statuses of a batch with a bad alert: 422 stored nothing, 400 stored the good ones. Then each half is sent alone."""
MAX_READ_BYTES, MAX_SILENCES = 4 << 20, 50
"""Bytes and silences that are read back at a time. Chosen: 2,000 suppressed alerts."""
EMPTY = (b"", b"{}", b"[]", b"null", b'""')
"""Bodies that say nothing."""
ACKNOWLEDGED = "Acknowledged in Fleetpulse: "
"""Begin of the comment of the silences that acknowledgements make."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class AlertmanagerEndpoint(Endpoint):
    """One Alertmanager."""

    groups = False
    parallel = 8

    def __init__(self, receiver: Alertmanager, url: str, name: str) -> None:
        super().__init__(receiver, name)
        self._receiver, self._url = receiver, url.rstrip("/")
        self.resend_s = parse_duration(receiver.resend_interval)
        self._silence_s = parse_duration(receiver.ack_as_silence)
        self._refused: set[str] = set()

    def reports(self, kind: str) -> bool:
        """Reports acknowledgements if they are to be silences."""
        return kind == "acknowledged" and self._silence_s > 0

    def check_settings(self) -> None:
        """Raises ConfigError on a bad URL, or keys that do not go together."""
        if "/api/v" in self._url:
            where = f"[[{self._receiver.section}]] {self.receiver}: urls"
            raise ConfigError(
                f"{where}: {hide_address(self._url)!r} has the path of the API; expected the address before /api"
            )
        check_receiver(self._target(""))
        check_auth(self._receiver)

    def check(self) -> None:
        """Raises ConfigError on a bad URL or an unreadable secret."""
        super().check()
        read_auth(self._receiver)

    def send(self, message: Message, call: Call) -> PostResult:
        """Pushes the alerts of a change; an acknowledgement becomes a silence, before an alert that has one already.
        What is acknowledged no longer, or ends, ends its silence."""
        try:
            if message.kind == "update":
                return self._silence(message, call)
            is_owned = message.kind == "firing" and _incident_of(message).get("state") == "acknowledged"
            silenced = self._silence(message, call) if is_owned and self._silence_s else None
            refused, result = self._push(message.alerts, message.time, call)
            if refused:
                return PostResult("retry", f"{result.text}: {len(refused)} alerts refused")
            if result.outcome != "delivered":
                return result
            has_silence = self._silence_s > 0 and message.has_fired and not is_owned
            return self._end_silences(message, call) if has_silence else silenced or result
        except ConfigError as error:  # a secret that was readable at the start
            return PostResult("retry", str(error))

    def resend(self, alerts: Sequence[Mapping[str, Any]], now: int, call: Call) -> PostResult:
        """Pushes all alerts; without one, its health check says whether it works. One that is refused is logged once;
        the others are accepted."""
        try:
            if not alerts:
                return self._read_status(call)
            refused, result = self._push(alerts, now, call)
        except ConfigError as error:
            return PostResult("retry", str(error))
        for alert in refused:
            fingerprint = str(alert["labels"].get("incident"))
            if fingerprint not in self._refused and len(self._refused) < MAX_SILENCES:
                self._refused.add(fingerprint)
                log.error("receiver %s: alert of %s refused: %s", self.name, fingerprint, result.text)
        return PostResult("delivered", result.text) if refused and len(refused) < len(alerts) else result

    def probe(self, call: Call) -> PostResult | None:
        """Reads /api/v2/status, which only an Alertmanager has."""
        return self._read_status(call)

    def _read_status(self, call: Call) -> PostResult:
        return _classify(self._request(call, "/api/v2/status"), _is_status, "JSON with cluster and versionInfo")

    def read_silences(self, alerts: Sequence[Mapping[str, Any]], now: int, call: Call) -> dict[str, str] | None:
        """Returns incident -> author, end and reason of its silence here, or that its alert is inhibited; None if it
        does not say. A silence that is not answered is the last one asked for."""
        sites = {str(a["labels"].get("site", "")) for a in alerts}
        found: dict[str, str] = {}
        known: dict[str, str] = {}
        for site in sorted(sites):
            wanted = urllib.parse.quote(f'site="{site}"')
            path = f"/api/v2/alerts?active=false&unprocessed=false&silenced=true&inhibited=true&filter={wanted}"
            rows = _parse_rows(self._request(call, path))
            if rows is None:
                return None
            for row in rows:
                status, incident = _part(row, "status"), str(_part(row, "labels").get("incident", ""))
                by = status.get("silencedBy")
                for silence in map(str, by[:1] if isinstance(by, list) else ()):
                    if silence not in known and len(known) < MAX_SILENCES and "" not in known.values():
                        known[silence] = self._describe_silence(silence, call)
                    found[incident] = known.get(silence) or "silenced"
                if incident not in found and status.get("inhibitedBy"):
                    found[incident] = "inhibited by another alert"
        return found

    def _describe_silence(self, silence: str, call: Call) -> str:
        """Returns who silenced until when, and why; empty without an answer."""
        answer = self._request(call, f"/api/v2/silence/{urllib.parse.quote(silence, safe='')}")
        row = _parse(answer)
        if not isinstance(row, dict):
            return "silenced" if answer.status else ""
        by, until, why = (cut(str(row.get(key, "")), 200) for key in ("createdBy", "endsAt", "comment"))
        return f"silenced by {by} until {until[:19]}Z: {why}"

    def renew_silences(self, messages: Sequence[Message], now: int, call: Call) -> None:
        """Makes silences again that are not there, also not as expired: the Alertmanager lost its disk. One that a
        person ended there stays ended. It stops at the first that is not answered."""
        for message in messages:
            result = self._silence(message, call, renewed=now)
            if result.outcome != "delivered":
                log.warning("receiver %s: silence of %s not renewed: %s", self.name, message.thread, result.text)
                return

    def _silence(self, message: Message, call: Call, renewed: int | None = None) -> PostResult:
        """Creates a silence for the incident, unless this message already did, or the acknowledgement has expired.
        Its length counts from the time of the message. It is for the severity that was acknowledged alone: a higher one
        pages also if the silence could not be ended.

        renewed: when a silence that this message made is made again (UTC us), which needs the list of silences.
        """
        now = message.time if renewed is None else renewed
        known, labels = _incident_of(message), message.main["labels"]
        actor = str(known.get("acknowledged_by") or message.change.get("actor", PIPELINE))
        until = iso(message.time + int(self._silence_s * SECOND))
        until = min(until, str(known.get("acknowledged_until") or until))
        if until <= iso(now):
            return PostResult("delivered", "the acknowledgement has expired")
        comment = cut(f"{ACKNOWLEDGED}{message.change.get('comment', '')} ({message.id})", 1000)
        rows = _parse_rows(self._list_silences(message, call))
        if rows is None and renewed is not None:
            return PostResult("retry", "its silences cannot be read")
        if rows is not None and any(row.get("comment") == comment for row in rows):
            return PostResult("delivered", "HTTP 200")
        matchers = [
            {"name": name, "value": str(labels[name]), "isRegex": False, "isEqual": True}
            for name in ("incident", "severity")
        ]
        made = {"matchers": matchers, "startsAt": iso(now), "endsAt": until, "createdBy": actor}
        answer = self._request(call, "/api/v2/silences", {**made, "comment": comment})
        return _classify(answer, _is_silence, "JSON with silenceID")

    def _list_silences(self, message: Message, call: Call) -> Answer:
        """Returns the answer with all silences of an incident, also those that have ended."""
        wanted = urllib.parse.quote(f'incident="{message.main["labels"]["incident"]}"')
        return self._request(call, f"/api/v2/silences?filter={wanted}")

    def _end_silences(self, message: Message, call: Call) -> PostResult:
        """Ends the silences of the acknowledgements of an incident, after its alerts were pushed; those of persons
        stay."""
        answer = self._list_silences(message, call)
        rows = _parse_rows(answer)
        if rows is None:
            return _classify(answer, lambda _: False, "a JSON list")
        for row in rows:
            is_over = _part(row, "status").get("state") == "expired"
            if is_over or not str(row.get("comment", "")).startswith(ACKNOWLEDGED):
                continue
            path = f"/api/v2/silence/{urllib.parse.quote(str(row.get('id', '')), safe='')}"
            ended = classify_answer(answer := self._request(call, path, method="DELETE"))
            if ended.outcome != "delivered" and answer.status != 404:  # 404: it is gone
                return replace(ended, text=f"{ended.text}: the silence of an acknowledgement was not ended")
        return PostResult("delivered", "HTTP 200")

    def _push(
        self, alerts: Sequence[Mapping[str, Any]], now: int, call: Call
    ) -> tuple[list[Mapping[str, Any]], PostResult]:
        """Returns the alerts that were refused alone, and the last result that was not a success, if there is one."""
        refused: list[Mapping[str, Any]] = []
        result = PostResult("delivered", "HTTP 200")
        for batch in _batches(alerts):
            waiting = [batch]
            while waiting:
                part = waiting.pop()
                answer = self._request(call, "/api/v2/alerts", [self._make_alert(alert, now) for alert in part])
                if answer.status in SPLIT and len(part) > 1:
                    waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
                    continue
                one = _classify(answer, _is_accepted, "200 without a body")
                if one.outcome != "delivered":
                    result = one
                    if answer.status not in SPLIT:
                        return [], one
                    refused += part
        return refused, result

    def _make_alert(self, alert: Mapping[str, Any], now: int) -> dict[str, Any]:
        """Returns an alert as /api/v2/alerts takes it: no empty labels, a valid URL or none."""
        firing = alert["status"] == "firing"
        ends = iso(now + int(INTERVALS_AHEAD * self.resend_s * SECOND)) if firing else alert["endsAt"]
        made = {
            "labels": {k: str(v) for k, v in alert["labels"].items() if _NAME.fullmatch(k) and str(v)},
            "annotations": {k: str(v) for k, v in alert["annotations"].items() if _NAME.fullmatch(k) and str(v)},
            "startsAt": alert["startsAt"],
            "endsAt": ends,
        }
        url = str(alert.get("generatorURL", ""))
        return {**made, "generatorURL": url} if re.match(r"https?://[^/\s]", url) else made

    def _target(self, path: str) -> Target:
        one = self._receiver
        return Target(one.section, one.name, self._url + path, one.allow_http, one.allow_private, "urls")

    def _request(self, call: Call, path: str, body: Any = None, method: str = "GET") -> Answer:
        """Returns the answer to a request without a body, or to a POST with one."""
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        method = method if data is None else "POST"
        most = MAX_READ_BYTES if data is None else 4096
        return call(Request(self._target(path), data, read_auth(self._receiver), method, most))


def build(receiver: ReceiverConfig) -> Sequence[Endpoint]:
    """Returns one endpoint per Alertmanager: NAME, or NAME.1, NAME.2 and so on."""
    assert isinstance(receiver, Alertmanager)
    several = len(receiver.urls) > 1
    return [
        AlertmanagerEndpoint(receiver, url, f"{receiver.name}.{i}" if several else receiver.name)
        for i, url in enumerate(receiver.urls, 1)
    ]


def _incident_of(message: Message) -> Mapping[str, Any]:
    """Returns the incident as it was when the message was made; empty for messages that an older version wrote."""
    found = message.change.get("incident")
    return found if isinstance(found, Mapping) else {}


def _batches(alerts: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    for start in range(0, len(alerts), BATCH_ALERTS):
        yield alerts[start : start + BATCH_ALERTS]


def _classify(answer: Answer, is_own: Callable[[Answer], bool], expected: str) -> PostResult:
    """Returns the result of a request. is_own: whether an answer of 2xx is that of an Alertmanager."""
    result = classify_answer(answer)
    if result.outcome == "delivered" and not is_own(answer):
        return refuse_unexpected(answer, f"{expected} of an Alertmanager")
    return result


def _is_accepted(answer: Answer) -> bool:
    """Returns whether alerts were accepted: 0.25 and 0.34 answer 200 without a body, others maybe with empty JSON."""
    return answer.status == 200 and answer.body.strip() in EMPTY


def _is_status(answer: Answer) -> bool:
    """Returns whether an answer has two of the fields that are required in the status of API v2."""
    found = _parse(answer)
    return isinstance(found, dict) and all(isinstance(found.get(key), dict) for key in ("cluster", "versionInfo"))


def _is_silence(answer: Answer) -> bool:
    found = _parse(answer)
    return isinstance(found, dict) and isinstance(found.get("silenceID"), str)


def _parse(answer: Answer) -> Any:
    """Returns the JSON of a successful answer, None if it is none."""
    if answer.status != 200:
        return None
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def _parse_rows(answer: Answer) -> list[dict[str, Any]] | None:
    """Returns the objects in the list of a successful answer, None if it is none."""
    found = _parse(answer)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else None


def _part(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object of a key, empty if it is missing, null or no object."""
    found = row.get(key)
    return found if isinstance(found, dict) else {}
