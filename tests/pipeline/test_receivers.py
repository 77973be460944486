"""The contract of every receiver, and the shapes and limits of each service, against servers that enforce them."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier

from pipeline.config.receivers import Apprise, PagerDuty, ReceiverConfig, Slack, Teams, Webhook
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, iso
from pipeline.notify import delivery, template_checks
from pipeline.notify.alertmanager import compute_fingerprint, make_body
from pipeline.notify.receivers import Endpoint, Message, Template, build_receiver
from pipeline.notify.receivers.pagerduty import parse_event, verify_signature
from tests.pipeline.receiver_servers import BEHAVIOURS, Service, measure, serve, stop

NOW = 1_790_000_000 * SECOND
KEY = "0123456789abcdef0123456789ABCDEF"
SIGNING = "whsec_" + base64.b64encode(b"k" * 32).decode()


@pytest.fixture
def service() -> Iterator[Service]:
    made, thread = serve()
    yield made
    stop(made, thread)


@pytest.fixture
def secret(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text + "\n")
        path.chmod(0o600)
        return path

    return write


Secret = Callable[[str, str], Path]


def pagerduty(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    return PagerDuty("r", secret("key", KEY), url=service.url, **more)


def slack(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    token = secret("token", "xoxb-token")
    return Slack("r", "C0123456789", token, url=f"{service.url}/slack", **more)


def slack_webhook(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    return Slack("r", url_file=secret("url", f"{service.url}/services/T/B/x"), **more)


def teams(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    return Teams("r", secret("url", f"{service.url}/workflows/1"), **more)


def version_4(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    return Webhook("r", f"{service.url}/hook", health_url=f"{service.url}/health", **more)


def event(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    return Webhook("r", f"{service.url}/hook", "event", signing_secret_file=secret("sign", SIGNING), **more)


def cloud_event(service: Service, secret: Secret, **more: Any) -> ReceiverConfig:
    return Webhook("r", f"{service.url}/hook", "cloudevents", token_file=secret("bearer", "T0"), **more)


Build = Callable[..., ReceiverConfig]
ALL: tuple[Build, ...] = (pagerduty, slack, slack_webhook, teams, version_4, event, cloud_event)


@pytest.fixture(params=ALL, ids=lambda build: build.__name__)
def endpoint(request: pytest.FixtureRequest, service: Service, secret: Secret) -> Endpoint:
    """Each kind of receiver in turn."""
    return build_receiver(request.param(service, secret))[0]


def alert(number: int = 0, status: str = "firing", **more: str) -> dict[str, Any]:
    labels = {"alertname": "LinkDegraded", "severity": "critical", "entity": f"nic:n{number}.m", "cause": "leaf:l0"}
    labels |= {"detector": "link", "incident": f"inc-{number}", "site": "fra1", **more}
    return {
        "status": status,
        "labels": labels,
        "annotations": {"summary": f"Port m of n{number}: 1 flap", "description": "1 entity affected"},
        "startsAt": iso(NOW),
        "endsAt": "0001-01-01T00:00:00Z" if status == "firing" else iso(NOW),
        "generatorURL": "https://fleet.example/incident?id=inc-0",
        "fingerprint": compute_fingerprint(labels),
    }


def message(kind: str = "firing", alerts: Any = None, number: int = 1, reference: str = "", **change: Any) -> Message:
    alerts = alerts or [alert(status="resolved" if kind == "resolved" else "firing")]
    body = make_body(alerts, {"incident": "inc-0"}, "r", "https://fleet.example", "first notification")
    event = {"firing": "opened", "resolved": "resolved", "update": "acknowledged"}[kind]
    extra = {"event": event, "actor": "fleetpulse", "comment": "", "time": iso(NOW), "incident": {"id": "inc-0"}}
    body["fleetpulse"] = {**extra, **change}
    return Message(f"inc-0.{number}.r", "inc-0", kind, body, reference, NOW)


CALL = functools.partial(delivery.exchange, timeout_s=5.0)


# --- the contract of every receiver -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["firing", "update", "resolved"])
def test_every_receiver_accepts_every_kind_of_message(endpoint: Endpoint, service: Service, kind: str) -> None:
    first = endpoint.send(message(), CALL)
    result = endpoint.send(message(kind, number=2, reference=first.reference), CALL)
    assert (result.outcome, service.refused) == ("delivered", [])


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("how", [b for b in BEHAVIOURS if b not in ("hang", "trickle")])
def test_every_receiver_retries_every_failure_and_repeats_nothing_of_it(
    endpoint: Endpoint, service: Service, how: str
) -> None:
    service.behave = [how]
    result = endpoint.send(message(), CALL)
    assert result.outcome == "retry"
    assert "SECRET" not in result.text
    assert result.retry_after_s == (7.0 if how.isdecimal() else 0.0)
    assert service.received == [], "no redirect is followed"
    assert endpoint.send(message(), CALL).outcome == "delivered"


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("how", ["hang", "trickle"])
def test_every_receiver_gives_up_in_time(endpoint: Endpoint, service: Service, how: str) -> None:
    service.behave = [how]
    call = functools.partial(delivery.exchange, timeout_s=0.3)
    results = []
    assert measure(lambda: results.append(endpoint.send(message(), call))) < 3
    assert (results[0].outcome, results[0].text) == ("retry", "no answer within 0.3 s")


def test_every_receiver_sends_the_same_key_at_every_attempt(endpoint: Endpoint, service: Service) -> None:
    for _ in range(2):
        endpoint.send(message(), CALL)
    keys = [find_key(headers, json.loads(body)) for _, headers, body, _ in service.received]
    assert len(keys) == 2
    assert len(set(keys)) == 1, keys


def find_key(headers: dict[str, str], body: Any) -> str:
    """Returns that by which a receiver recognizes a repeated message."""
    if "dedup_key" in body:
        return str((body["dedup_key"], body["event_action"]))
    if "metadata" in body:
        return str(body["metadata"]["event_payload"]["key"])
    return headers.get("idempotency-key") or str(body["attachments"])


def test_every_receiver_takes_a_message_of_an_older_version(endpoint: Endpoint, service: Service) -> None:
    plain = message()
    body = {key: value for key, value in plain.body.items() if key != "fleetpulse"}
    assert endpoint.send(dataclasses.replace(plain, body=body), CALL).outcome == "delivered"


@pytest.mark.sample(every=3)
def test_every_receiver_takes_a_storm_in_one_message(endpoint: Endpoint, service: Service) -> None:
    alerts = [alert(i, rack=f"r{i % 9}") for i in range(5000)]
    assert endpoint.send(message(alerts=alerts), CALL).outcome == "delivered"
    assert service.refused == []


HOSTILE = "<!channel> *x* [a](http://evil) | ` & \x00 \u202e " + "ä" * 5000


def test_every_receiver_takes_hostile_names(endpoint: Endpoint, service: Service) -> None:
    one = alert(entity=f"job:{HOSTILE}", cause=f"job:{HOSTILE}")
    one["annotations"] = {"summary": HOSTILE, "description": HOSTILE}
    one["generatorURL"] = "javascript:alert(1)"
    result = endpoint.send(message(alerts=[one], comment=HOSTILE, actor="<@U1>"), CALL)
    assert (result.outcome, service.refused) == ("delivered", [])


def test_every_health_check_shows_nobody_anything_and_fails_with_its_receiver(
    endpoint: Endpoint, service: Service
) -> None:
    result = endpoint.probe(CALL)
    shown = [body for path, _, body, _ in service.received if b"text" in body or b"trigger" in body]
    assert shown == []
    if result is None:
        assert endpoint.kind in ("teams", "webhooks")
        return
    assert result.outcome == "delivered"
    service.behave = ["403"]
    failed = endpoint.probe(CALL)
    assert failed is not None
    assert failed.outcome == "retry"


def test_a_secret_that_disappears_is_a_failed_attempt_that_names_the_key(service: Service, secret: Secret) -> None:
    for build, key in ((pagerduty, "key"), (slack, "token"), (teams, "url"), (event, "sign"), (cloud_event, "bearer")):
        one = build_receiver(build(service, secret))[0]
        path = secret(key, "")
        path.unlink()
        result = one.send(message(), CALL)
        assert result.outcome == "retry"
        assert "cannot be read" in result.text


def test_secrets_are_in_no_error(service: Service, tmp_path: Path, secret: Secret) -> None:
    wrong = (
        PagerDuty("r", secret("a", "SECRET")),
        Teams("r", secret("b", "http://SECRET.example/x")),
        Teams("r", secret("c", "https://10.0.0.1/SECRET")),
        Teams("r", secret("d", "https://user:SECRET@x.example/")),
        Slack("r", url_file=secret("e", "ftp://SECRET")),
        Webhook("r", url_file=secret("f", "https://x.example/SECRET a")),
        Webhook("r", "https://x.example", signing_secret_file=secret("g", "whsec_SECRET")),
        Webhook("r", "https://x.example", headers_file=secret("h", "SECRET")),
    )
    for one in wrong:
        with pytest.raises(ConfigError) as refused:
            build_receiver(one)
        assert "SECRET" not in str(refused.value), one


# --- one service each -------------------------------------------------------------------------------------------------


def test_pagerduty_has_one_alert_for_the_life_of_an_incident(service: Service, secret: Secret) -> None:
    one = build_receiver(pagerduty(service, secret))[0]
    acts = (("firing", "fleetpulse", ""), ("update", "ada", ""), ("update", "pagerduty:Bo", "r"), ("resolved", "", ""))
    for kind, actor, receiver in acts:
        one.send(message(kind, actor=actor, receiver=receiver), CALL)
    events = service.bodies("/v2/enqueue")
    assert [e["event_action"] for e in events] == ["trigger", "acknowledge", "resolve"], "Bo's is not sent back"
    one.send(message("update", actor="pagerduty:Bo", receiver="another"), CALL)
    assert service.bodies("/v2/enqueue")[-1]["event_action"] == "acknowledge", "made in another PagerDuty"
    assert {e["dedup_key"] for e in events} == {"inc-0"}
    assert {e["routing_key"] for e in events} == {KEY}
    payload = events[0]["payload"]
    assert (payload["severity"], payload["class"], payload["component"]) == ("critical", "LinkDegraded", "nic:n0.m")
    assert payload["summary"] == "Port m of n0: 1 flap"
    assert events[0]["links"] == [{"href": "https://fleet.example/incident?id=inc-0", "text": "Incident in Fleetpulse"}]


@pytest.mark.parametrize("change", ["acknowledgement_expired", "worsened"])
def test_pagerduty_pages_again_for_an_alert_that_may_be_acknowledged_there(
    service: Service, secret: Secret, change: str
) -> None:
    one = build_receiver(pagerduty(service, secret))[0]
    assert one.send(message(event=change), CALL).outcome == "delivered"
    events = service.bodies("/v2/enqueue")
    assert [(e["event_action"], e["dedup_key"]) for e in events] == [("resolve", "inc-0"), ("trigger", "inc-0")]


@pytest.mark.slow
def test_pagerduty_says_what_was_left_out_of_a_long_event(service: Service, secret: Secret) -> None:
    one = build_receiver(pagerduty(service, secret))[0]
    one.send(message(alerts=[alert(i) for i in range(9000)]), CALL)
    (event,) = service.bodies("/v2/enqueue")
    assert event["payload"]["custom_details"]["alerts"][-1] == "and 8990 more, left out"


def webhook_v3(kind: str = "incident.acknowledged", agent: str = "user_reference", **data: Any) -> bytes:
    """Returns an event as PagerDuty's documentation of webhook v3 shows it."""
    return json.dumps(
        {
            "event": {
                "id": "01BU6L2V3D7QFWPQ9U1J5F4DWA",
                "event_type": kind,
                "resource_type": "incident",
                "occurred_at": "2026-10-02T18:45:22.169Z",
                "agent": {"html_url": "https://x", "id": "PLH1HKV", "summary": "Ada Lovelace", "type": agent},
                "client": None,
                "data": {"id": "PGR0VU2", "type": "incident", "number": 2, "incident_key": "inc-0", **data},
            }
        }
    ).encode()


def test_the_signature_of_pagerdutys_webhook_is_checked_for_every_secret() -> None:
    body = webhook_v3()
    good = [f"v1={hmac.new(key, body, hashlib.sha256).hexdigest()}" for key in (b"old", b"new")]
    assert verify_signature(["new"], ",".join(good), body)
    assert verify_signature(["old", "new"], good[1], body)
    for header in ("", good[0], "v1=", good[1].upper(), good[1].replace("v1", "v2"), "v1=é"):
        assert not verify_signature(["new"], header, body)
    assert not verify_signature(["new"], good[1], body + b" ")


def test_pagerdutys_webhook_names_the_incident_and_the_person() -> None:
    found = parse_event(webhook_v3())
    assert (found.kind, found.incident, found.person) == ("acknowledged", "inc-0", "pagerduty:Ada Lovelace")
    assert parse_event(webhook_v3(agent="service_reference")).person == "", "our own acknowledgement that comes back"
    assert parse_event(b'{"event": {"id": "1", "event_type": "pagey.ping", "data": {}}}').kind == "ping"
    deep = b"[" * 100_000
    for text in (b"", b"[]", b"{}", b'{"event": 1}', b"\xff", b'{"event": {"event_type": "x"}}', b"null", deep):
        with pytest.raises(ValueError, match=r"not an event|Expecting|codec"):
            parse_event(text)


def test_slack_edits_one_message_and_adds_changes_to_its_thread(service: Service, secret: Secret) -> None:
    one = build_receiver(slack(service, secret))[0]
    posted = one.send(message(), CALL)
    assert posted.reference == "C0123456789:1700000000.000001"
    for kind, more in (("update", {"actor": "ada", "comment": "on it"}), ("resolved", {"comment": "no findings"})):
        result = one.send(message(kind, reference=posted.reference, **more), CALL)
        assert (result.outcome, result.reference) == ("delivered", posted.reference)
    methods = [path.rpartition("/")[2] for path, *_ in service.received]
    assert methods == ["chat.postMessage", "chat.update", "chat.postMessage", "chat.update", "chat.postMessage"]
    edits = service.bodies("/slack/chat.update")
    assert {e["ts"] for e in edits} == {"1700000000.000001"}
    assert edits[-1]["attachments"][0]["color"] == "#009E73"
    assert edits[-1]["text"].startswith("RESOLVED: ")
    replies = [b["text"] for b in service.bodies("/slack/chat.post") if "thread_ts" in b]
    assert replies == ["Acknowledged by ada: on it", "Resolved: no findings"]


def test_a_reply_in_slack_says_what_happened_and_a_mere_update_only_edits(service: Service, secret: Secret) -> None:
    one = build_receiver(slack(service, secret))[0]
    reference = one.send(message(), CALL).reference
    one.send(message("update", reference=reference, event="updated"), CALL)
    one.send(message(reference=reference, event="worsened"), CALL)
    one.send(message("update", reference=reference, event="updated", actor="ada", comment="both ends"), CALL)
    assert len(service.bodies("/slack/chat.update")) == 3
    replies = [b["text"] for b in service.bodies("/slack/chat.post") if "thread_ts" in b]
    assert replies == ["Worsened: Port m of n0: 1 flap", "Updated by ada: both ends"]


@pytest.mark.parametrize(
    ("change", "shown"), [("acknowledgement_expired", True), ("escalated", True), ("split", False)]
)
def test_slack_shows_in_the_channel_what_pages_again(
    service: Service, secret: Secret, change: str, shown: bool
) -> None:
    one = build_receiver(slack(service, secret))[0]
    reference = one.send(message(), CALL).reference
    one.send(message(reference=reference, event=change), CALL)
    (reply,) = [b for b in service.bodies("/slack/chat.post") if "thread_ts" in b]
    assert reply.get("reply_broadcast", False) is shown


def test_slack_says_that_a_silence_ended_an_alert_and_not_that_it_is_resolved(service: Service, secret: Secret) -> None:
    one = build_receiver(slack(service, secret))[0]
    reference = one.send(message(), CALL).reference
    one.send(message("resolved", reference=reference, event="silenced", comment="silence s1 of ann: paste"), CALL)
    (edit,) = service.bodies("/slack/chat.update")
    assert (edit["text"].split(":")[0], edit["attachments"][0]["color"]) == ("SILENCED", "#999999")
    assert service.bodies("/slack/chat.post")[-1]["text"] == "Silenced: silence s1 of ann: paste"


def test_slack_posts_a_new_message_where_the_old_one_was_deleted(service: Service, secret: Secret) -> None:
    one = build_receiver(slack(service, secret))[0]
    result = one.send(message("resolved", reference="C0123456789:1.1"), CALL)
    assert (result.outcome, result.reference) == ("delivered", "C0123456789:1700000000.000001")


def test_slacks_errors_in_an_answer_of_200_are_failures(service: Service, secret: Secret, tmp_path: Path) -> None:
    one = build_receiver(slack(service, secret))[0]
    secret("token", "revoked")
    result = one.send(message(), CALL)
    assert (result.outcome, result.text) == ("retry", "Slack: invalid_auth")


def test_a_webhook_of_our_event_is_verified_by_standard_webhooks(service: Service, secret: Secret) -> None:
    newer = "whsec_" + base64.b64encode(b"n" * 24).decode()
    signing = secret("two", f"{SIGNING}\n{newer}")
    for form in ("alertmanager", "event", "cloudevents"):
        one = build_receiver(Webhook("r", f"{service.url}/hook", form, signing_secret_file=signing))[0]  # type: ignore[arg-type]
        now = time.time_ns() // 1000
        assert one.send(dataclasses.replace(message(), time=now), CALL).outcome == "delivered"
        _, headers, body, _ = service.received[-1]
        for key in (SIGNING, newer):
            assert Verifier(key).verify(body.decode(), headers) == json.loads(body)
        with pytest.raises(Exception, match="signature"):
            Verifier("whsec_" + base64.b64encode(b"x" * 24).decode()).verify(body.decode(), headers)
        assert headers["webhook-id"] == "inc-0.1.r"


def test_an_event_is_below_20_kb_and_counts_what_it_leaves_out(service: Service, secret: Secret) -> None:
    one = build_receiver(event(service, secret))[0]
    members = [f"gpu:n{i}.0" for i in range(5000)]
    one.send(message(alerts=[alert(i) for i in range(500)], incident={"members": members}), CALL)
    _, _, body, _ = service.received[-1]
    assert len(body) < 20_000
    data = json.loads(body)["data"]
    assert len(data["alerts"]) + data["truncated_alerts"] == 500
    assert data["detail"]["members_total"] == 5000
    assert json.loads(body)["type"] == "incident.opened"


def test_a_cloud_event_has_the_attributes_of_version_1(service: Service, secret: Secret) -> None:
    build_receiver(cloud_event(service, secret))[0].send(message("update", actor="ada"), CALL)
    _, headers, body, _ = service.received[-1]
    assert headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    assert headers["authorization"] == "Bearer T0"
    found = json.loads(body)
    assert {k: found[k] for k in ("specversion", "id", "source", "type", "subject", "datacontenttype")} == {
        "specversion": "1.0",
        "id": "inc-0.1.r",
        "source": "/fleetpulse/fra1",
        "type": "io.fleetpulse.incident.acknowledged",
        "subject": "inc-0",
        "datacontenttype": "application/json",
    }


def test_basic_and_header_secrets_are_sent(service: Service, secret: Secret) -> None:
    one = Webhook(
        "r",
        f"{service.url}/hook",
        username="ada",
        password_file=secret("pw", "p:w"),
        headers_file=secret("hd", "X-Api-Key: k1\nX-Tenant:t"),
    )
    build_receiver(one)[0].send(message(), CALL)
    _, headers, _, _ = service.received[-1]
    assert headers["authorization"] == "Basic " + base64.b64encode(b"ada:p:w").decode()
    assert (headers["x-api-key"], headers["x-tenant"]) == ("k1", "t")


def test_a_long_body_of_version_4_is_cut_and_counted(service: Service, secret: Secret) -> None:
    build_receiver(version_4(service, secret, max_alerts=2))[0].send(message(alerts=[alert(i) for i in range(9)]), CALL)
    (body,) = service.bodies("/hook")
    assert (len(body["alerts"]), body["truncatedAlerts"]) == (2, 7)
    assert "fleetpulse" not in body


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # apprise imports imghdr
def test_apprise_reaches_a_service_that_it_knows(service: Service, secret: Secret) -> None:
    pytest.importorskip("apprise", reason="the extra 'apprise' is not installed")
    urls = secret("urls", f"# comment\njson://127.0.0.1:{service.server_port}/hook")
    one = build_receiver(Apprise("r", urls))[0]
    assert one.send(message(), CALL).outcome == "delivered"
    body = service.bodies("/hook")[-1]
    assert (body["title"], body["type"]) == ("critical: Port m of n0: 1 flap", "failure")
    service.behave = ["500"]
    assert one.send(message(), CALL).outcome == "retry"
    with pytest.raises(ConfigError, match="line 1: unknown to apprise"):
        build_receiver(Apprise("r", secret("bad", "nosuch://x")))


# --- templates --------------------------------------------------------------------------------------------------------


def titled(service: Service, secret: Secret, title: str) -> str:
    build_receiver(slack(service, secret, title=title))[0].send(message(), CALL)
    return str(service.bodies("/slack/chat.post")[-1]["text"])


def test_a_template_has_the_fields_of_alertmanager(service: Service, secret: Secret) -> None:
    text = "{{ title }} at {{ commonLabels.site | upper }}: {{ alerts | length }} {{ event }} {{ change.actor }}"
    assert titled(service, secret, text) == "critical: Port m of n0: 1 flap at FRA1: 1 opened fleetpulse"


ATTACKS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ alerts.append(1) }}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ range(10**9) }}",
    "{% for a in alerts %}{{ a.labels.update({}) }}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ 2 ** 100000000 }}",
    "{{ missing.field.deeper }}",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_a_template_that_fails_or_reaches_out_is_refused_and_would_send_the_default_text(
    service: Service, secret: Secret, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "missing" not in text:  # another message may have it
        with pytest.raises(ConfigError, match=r"\[\[notify.slack\]\] r: title"):
            build_receiver(slack(service, secret, title=text))
    monkeypatch.setattr(Template, "_try_sample", lambda *_: None)  # whatever the check at the start overlooks
    monkeypatch.setattr(template_checks, "find_forbidden", lambda _: None)
    assert titled(service, secret, text) == "critical: Port m of n0: 1 flap"


@pytest.mark.parametrize("text", ["{{ title", "{% for %}", "{{ title | nosuch }}", "{% include 'x' %}" + "x" * 9000])
def test_a_template_with_a_mistake_ends_the_start(service: Service, secret: Secret, text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[\[notify.slack\]\] r: title"):
        build_receiver(slack(service, secret, title=text))
