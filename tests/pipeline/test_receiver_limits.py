"""Sizes that receivers refuse, counted in bytes as they are sent, and answers that are not those of their service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.config.receivers import Alertmanager, Notify, ReceiverConfig, Webhook
from pipeline.config.sections import Config
from pipeline.model.records import SECOND
from pipeline.notify.receivers import build_receiver, cut_bytes, encode_json, make_title
from pipeline.notify.receivers.pagerduty import MAX_ENDED
from pipeline.notify.receivers.webhook import MAX_EVENT_BYTES, make_cloud_event, make_event
from tests.pipeline.notifier_harness import NotifierHarness
from tests.pipeline.receiver_servers import SERVICES, Service
from tests.pipeline.test_receivers import (
    CALL,
    Build,
    Secret,
    alert,
    message,
    pagerduty,
    secret,
    service,
    slack,
    slack_webhook,
    teams,
)

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


def alertmanager(service: Service, secret: Secret) -> ReceiverConfig:
    return Alertmanager("r", (service.url,), ack_as_silence="15m")


LOGIN = "<html><body>SECRET: please log in</body></html>"
STRANGE: list[tuple[int, Any]] = [(200, LOGIN), (202, LOGIN), (200, {"status": "ok"}), (201, "[1]"), (204, "hello")]
KINDS: dict[str, Build] = {
    "pagerduty": pagerduty,
    "slack": slack,
    "slack webhook": slack_webhook,
    "alertmanagers": alertmanager,
}


def answer_all(monkeypatch: pytest.MonkeyPatch, status: int, text: Any) -> None:
    """Makes one server answer at every path."""
    for path in SERVICES:
        if path != "/hook":
            monkeypatch.setitem(SERVICES, path, lambda *_: (status, text))


@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("status", "text"), STRANGE)
def test_a_message_that_another_server_answers_is_not_delivered(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch, build: Build, status: int, text: Any
) -> None:
    endpoint = build_receiver(build(service, secret))[0]
    for kind in ("firing", "update", "resolved"):
        assert endpoint.send(message(kind), CALL).outcome == "delivered"
    answer_all(monkeypatch, status, text)
    for kind in ("firing", "update", "resolved"):
        result = endpoint.send(message(kind), CALL)
        assert result.outcome == "retry", kind
        assert result.text.startswith(f"HTTP {status}: unexpected answer, ")
        assert "SECRET" not in result.text
        if text == LOGIN:
            assert "an HTML or XML page; expected " in result.text
    probed = endpoint.probe(CALL)
    assert probed is not None
    assert probed.outcome == "retry"


def test_pagerduty_is_sent_an_end_once_also_after_many_messages_that_were_withdrawn(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that never came back filled what is remembered, and a limit of one request let no page through again."""
    one = build_receiver(pagerduty(service, secret))[0]
    works, allowed = SERVICES["/v2/enqueue"], [0]

    def limit(*given: Any) -> Any:
        allowed[0] -= 1
        return works(*given) if allowed[0] >= 0 else (429, "")

    monkeypatch.setitem(SERVICES, "/v2/enqueue", limit)
    for number in range(MAX_ENDED + 1):
        allowed[0] = 1
        assert one.send(message(event="worsened", number=number), CALL).limited
    service.received.clear()
    allowed[0] = 1
    assert one.send(message(event="worsened", number=MAX_ENDED), CALL).outcome == "delivered"
    assert [body["event_action"] for body in service.bodies("/v2/enqueue")] == ["trigger"]


def test_a_page_of_html_is_no_answer_of_teams(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_all(monkeypatch, 200, LOGIN)
    assert build_receiver(teams(service, secret))[0].send(message(), CALL).outcome == "retry"
    answer_all(monkeypatch, 200, "1")  # what the connectors before workflows answered
    assert build_receiver(teams(service, secret))[0].send(message(), CALL).outcome == "delivered"


@pytest.mark.parametrize("kind", ["pagerduty", "slack", "alertmanagers"])
def test_pages_wait_while_a_login_page_answers_and_the_other_receivers_are_told(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, kind: str
) -> None:
    one: Any = {"slack": slack_webhook}.get(kind, KINDS[kind])(service, secret)
    told: Any = Webhook("told", f"{service.url}/hook")
    harness = NotifierHarness(tmp_path, [], Notify(webhooks=(told,), **{kind: (one,)}))  # type: ignore[arg-type]
    whole = dict(SERVICES)
    answer_all(monkeypatch, 200, LOGIN)
    harness.write_change("opened")

    def run(seconds: int) -> list[str]:
        for _ in range(seconds):
            harness.send_due(1, "r")
            harness.notifier.send_watchdog("r")
            harness.send_due(0, "told")
        bodies = [b for b in service.bodies("/hook") if b["alerts"][0]["labels"]["alertname"] == "ReceiverDown"]
        return [body["status"] for body in bodies]

    assert run(400) == ["firing"]
    assert "r: accepts no alerts since" in str(harness.notifier.describe_trouble())
    (row,) = [r for r in harness.notifier.list_receivers({}) if r["name"] == "r"]
    assert (row["state"], row["delivered"]) == ("down", None)
    for path, judge in whole.items():
        monkeypatch.setitem(SERVICES, path, judge)
    assert run(6) == ["firing", "resolved"]
    assert {state for _, state, _ in harness.rows()} == {"delivered"}
    harness.close()


def test_the_health_check_and_the_test_of_an_alertmanager_tell_it_from_a_login_page(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.commands import notify

    config = Config(notify=Notify(alertmanagers=(Alertmanager("r", (service.url,)),)))
    for status, text, state, code in ((None, "", "ok", 0), (200, LOGIN, "fail", 1), (200, {"status": "ok"}, "fail", 1)):
        if status is not None:
            answer_all(monkeypatch, status, text)
        checks = notify.check_receivers(config)
        assert isinstance(checks, list)
        assert [c.state for c in checks] == [state]
        rows, _, found = notify.run_test(config, "r", "info", lambda _: None)
        assert found == code
        assert ("unexpected answer" in rows[-1]["result"]) == bool(code)


def test_an_alertmanager_for_which_there_is_no_alert_is_asked_whether_it_works(
    service: Service, secret: Secret, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    harness = NotifierHarness(tmp_path, [], Notify(alertmanagers=(Alertmanager("r", (service.url,)),)))
    harness.alive = False  # no Watchdog
    harness.notifier.send_watchdog("r")
    assert [path for path, *_ in service.received] == ["/api/v2/status"]
    assert harness.notifier.list_receivers({})[0]["state"] == "ok"
    answer_all(monkeypatch, 200, LOGIN)
    for _ in range(3):
        harness.now += 61 * SECOND
        harness.notifier.send_watchdog("r")
    assert harness.notifier.list_receivers({})[0]["state"] == "down"
    nowhere = build_receiver(Alertmanager("r", ("http://127.0.0.1:9",)))[0]
    assert nowhere.resend([], 0, CALL).outcome == "retry"
    harness.close()


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


def test_notify_test_says_once_why_there_was_no_answer(service: Service) -> None:
    from pipeline.commands import notify

    config = Config(notify=Notify(webhooks=(Webhook("r", f"{service.url}/hook"),)))
    service.behave = ["text"]
    (row,), _, code = notify.run_test(config, "r", "info", lambda _: None)
    assert (code, row["status"], row["answer"]) == (3, None, "")
    assert "no valid HTTP" in row["result"]
