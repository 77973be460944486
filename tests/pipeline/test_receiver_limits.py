"""Sizes that receivers refuse, counted in bytes as they are sent, and answers that are not those of their service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.config.receivers import Notify
from pipeline.config.sections import Config
from pipeline.notify.receivers import build_receiver, cut_bytes, encode_json, make_title
from pipeline.notify.receivers.webhook import MAX_EVENT_BYTES, make_cloud_event, make_event
from tests.pipeline.receiver_servers import SERVICES, Service
from tests.pipeline.test_receivers import CALL, Secret, alert, message, pagerduty, secret, service, slack_webhook, teams

__all__ = ["secret", "service"]
TEXTS = {
    "ascii": "x" * 4096,
    "cjk": "\u6e29" * 4096,
    "emoji": "\U0001f525" * 4096,
    "quotes": '"\\' * 2048,
    "control": "\x01" * 4096,
    "half of a pair": "\ud800" * 4096,
    "long": "\u6e29" * 20_000,
}


def long_message(text: str, number: int = 1, kind: str = "firing") -> Any:
    alerts = [alert(i) for i in range(number)]
    for one in alerts:
        one["annotations"] = dict.fromkeys(("summary", "description", "impact", "suggested_action"), text)
    members = [f"gpu:n{i}.0" for i in range(5000)]
    return message(kind, alerts=alerts, comment=text, actor=text[:1000], incident={"summary": text, "members": members})


@pytest.mark.parametrize("number", [1, 500])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_event_is_below_20_kb_as_it_is_sent_whatever_its_texts_are(text: str, number: int) -> None:
    for make in (make_event, make_cloud_event):
        body = encode_json(make(long_message(text, number)))
        assert len(body) < MAX_EVENT_BYTES
        data = json.loads(body)["data"]
        assert len(data["alerts"]) + data["truncated_alerts"] == number
        assert data["alerts"], "the first alert is there, with cut texts"
        assert data["title"].endswith("…") or number > 1
        assert data["detail"] is None or data["detail"]["members_total"] == 5000


def test_an_event_that_fits_is_sent_whole_and_not_escaped() -> None:
    body = encode_json(make_event(message(alerts=[alert(site="K\u00f6ln \U0001f525")])))
    assert "Köln 🔥".encode() in body
    assert json.loads(body)["data"]["truncated_alerts"] == 0


def test_a_text_is_cut_by_the_bytes_of_its_json() -> None:
    for text in TEXTS.values():
        for most in (10, 11, 12, 500):
            assert most - 9 <= len(encode_json(cut_bytes(text, most))) - 2 <= most
    assert cut_bytes({"a": ["short", 1, None]}, 10) == {"a": ["short", 1, None]}


@pytest.mark.parametrize("text", [*TEXTS.values(), "*" * 4096, "\U0001f525" * 1000, "\x01\n" * 2000])
def test_teams_gets_a_card_that_it_accepts_whatever_its_texts_are(service: Service, secret: Secret, text: str) -> None:
    assert build_receiver(teams(service, secret))[0].send(long_message(text), CALL).outcome == "delivered"
    labels = dict.fromkeys(("severity", "site", "cause", "detector"), text[:4096].replace("\ud800", ""))
    assert (
        build_receiver(teams(service, secret))[0].send(message(alerts=[alert(**labels)]), CALL).outcome == "delivered"
    )


@pytest.mark.parametrize("summary", ["", "  "])
def test_an_alert_without_a_title_is_named_by_its_kind(service: Service, secret: Secret, summary: str) -> None:
    one = alert()
    one["annotations"]["summary"] = summary
    assert make_title(message(alerts=[one])) == "LinkDegraded"
    assert build_receiver(pagerduty(service, secret))[0].send(message(alerts=[one]), CALL).outcome == "delivered"


ANSWERS: list[tuple[int, Any]] = [
    (200, "ok"),
    (200, "<html>login"),
    (202, ""),
    (400, "Bad Request"),
    (202, {}),
    (202, "[]"),
]


@pytest.mark.parametrize(("status", "text"), ANSWERS)
def test_a_health_check_does_not_take_another_service_for_slack_or_pagerduty(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch, status: int, text: Any
) -> None:
    for path in ("/services/", "/v2/enqueue"):
        monkeypatch.setitem(SERVICES, path, lambda *_: (status, text))
    for build in (slack_webhook, pagerduty):
        result = build_receiver(build(service, secret))[0].probe(CALL)
        assert result is not None
        assert result.outcome == "retry"
        assert result.text.startswith(f"HTTP {status}")
        assert "unexpected answer" in result.text or (status == 400 and build is pagerduty)
        assert "login" not in result.text


@pytest.mark.parametrize("word", ["no_text", "invalid_payload", "missing_text_or_fallback_or_attachments"])
def test_a_webhook_of_slack_that_refuses_an_empty_message_works(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setitem(SERVICES, "/services/", lambda *_: (400, word))
    result = build_receiver(slack_webhook(service, secret))[0].probe(CALL)
    assert result is not None
    assert result.outcome == "delivered"


@pytest.mark.parametrize("kind", ["slack", "pagerduty"])
def test_notify_test_fails_where_another_service_accepts_the_message(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from pipeline.commands import notify

    one: Any = (slack_webhook if kind == "slack" else pagerduty)(service, secret)
    config = Config(notify=Notify(**{kind: (one,)}))  # type: ignore[arg-type]
    rows, _, code = notify.run_test(config, "r", "info", lambda _: None)
    assert (code, {row["result"] for row in rows}) == (0, {"ok"})
    for path in ("/services/", "/v2/enqueue"):
        monkeypatch.setitem(SERVICES, path, lambda *_: (202, "SECRET"))
    rows, _, code = notify.run_test(config, "r", "info", lambda _: None)
    assert code == 1
    assert "unexpected answer" in rows[-1]["result"]
    assert "SECRET" not in rows[-1]["result"]
