"""Payloads for receivers: the body of version 4, and the contract that every payload format keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Webhook
from pipeline.incidents.changes import Change
from pipeline.incidents.ledger import Payload
from pipeline.model.records import SECOND, Incident, iso
from pipeline.notify import alertmanager
from pipeline.notify.alertmanager import AlertSource, PayloadPlanner
from pipeline.notify.receivers import Message, build_endpoints
from pipeline.notify.receivers.webhook import make_version_4
from pipeline.notify.routes import Rules

START = 1_790_000_000 * SECOND
SENDER = AlertSource("fra1", "https://fleet.example")
GOLDEN = Path(__file__).parent / "golden" / "alertmanager.json"


def incident(**more: Any) -> Incident:
    plain = Incident(
        id="inc-3f9a00112233",
        cause="port:n1.mlx5_0",
        opened=START + 60 * SECOND,
        onset=START,
        severity="page",
        summary="port:n1.mlx5_0 lost 3 frames in 10^6",
        detector="link_flap",
        entity="port:n1.mlx5_0",
        members=("port:n1.mlx5_0", "rank:81.8"),
    )
    return dataclasses.replace(plain, **more)


def change(kind: Any, now: Incident, before: Incident | None = None) -> Change:
    return Change(kind, now, START + 300 * SECOND, "fleetpulse", before=before)


def hook(name: str = "ops", **more: Any) -> Webhook:
    return Webhook(name, "https://hook.example/a", **more)


def make_payloads(what: Change, receivers: list[Webhook], source: AlertSource, now: int) -> list[Payload]:
    """Returns the payloads that a new notifier makes of one change."""
    planner = PayloadPlanner(build_endpoints(receivers), Rules(None, ()), source, lambda entity: {}, lambda ids: {})
    return planner.plan([what], now)


def alerts_of(what: Change, receiver: Webhook | None = None) -> list[dict[str, Any]]:
    """Returns the bodies that a webhook sends."""
    payloads = make_payloads(what, [receiver or hook()], SENDER, START)
    return [make_version_4(Message(p.receiver, p.incident, p.kind, json.loads(p.body)), "ops", 0) for p in payloads]


def test_the_body_of_version_4_equals_the_golden_file() -> None:
    (body,) = alerts_of(change("opened", incident(simulated=True)))
    assert body == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    ("text", "value"), [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)]
)
def test_the_hash_matches_the_published_fnv_1a_test_vectors(text: str, value: int) -> None:
    assert alertmanager.hash_fnv1a(text.encode()) == value


def test_a_fingerprint_is_16_digits_of_the_sorted_labels() -> None:
    assert alertmanager.compute_fingerprint({"b": "2", "a": "1"}) == alertmanager.compute_fingerprint(
        {"a": "1", "b": "2"}
    )
    assert (
        alertmanager.compute_fingerprint({"a": "1"})
        == f"{alertmanager.hash_fnv1a(b'a' + bytes([255]) + b'1' + bytes([255])):016x}"
    )
    assert alertmanager.compute_fingerprint({"a": "1b"}) != alertmanager.compute_fingerprint({"a": "1", "b": ""})


@pytest.mark.parametrize(
    ("detector", "name"),
    [
        ("link", "LinkDegraded"),
        ("link_flap", "LinkDegraded"),
        ("straggler", "Straggler"),
        ("sdc", "SilentDataCorruption"),
        ("coolant", "CoolantFault"),
        ("my_own", "MyOwn"),
    ],
)
def test_the_alert_is_named_after_the_detector(detector: str, name: str) -> None:
    assert alertmanager.make_labels(incident(detector=detector), "fra1")["alertname"] == name


def test_a_resolved_alert_has_the_labels_of_the_firing_one_and_an_end() -> None:
    (firing,) = alerts_of(change("opened", incident()))
    (resolved,) = alerts_of(change("resolved", incident(resolved=START + 900 * SECOND, state="resolved"), incident()))
    assert (firing["status"], resolved["status"]) == ("firing", "resolved")
    assert firing["groupKey"] == resolved["groupKey"]
    assert resolved["notification_reason"] == "all alerts resolved"
    (was,), (now,) = firing["alerts"], resolved["alerts"]
    assert was["fingerprint"] == now["fingerprint"]
    assert was["startsAt"] == now["startsAt"]
    assert (was["endsAt"], now["endsAt"]) == ("0001-01-01T00:00:00Z", "2026-09-21T14:28:20.000000Z")


def test_an_alert_that_ended_before_it_was_visible_does_not_end_before_it_starts() -> None:
    """After an outage; Alertmanager refuses an alert that ends before it starts."""
    over = incident(opened=START + 5000 * SECOND, resolved=START + 900 * SECOND, state="resolved")
    (resolved,) = alerts_of(change("resolved", over, incident()))
    (alert,) = resolved["alerts"]
    assert (alert["startsAt"], alert["endsAt"]) == (iso(over.opened), iso(over.opened))


def test_a_new_label_set_ends_the_old_alert_and_fires_again_in_one_body() -> None:
    (body,) = alerts_of(change("cause_changed", incident(cause="leaf:l0"), incident()))
    old, new = body["alerts"]
    assert (old["status"], new["status"], body["status"]) == ("resolved", "firing", "firing")
    assert (old["labels"]["cause"], new["labels"]["cause"]) == ("port:n1.mlx5_0", "leaf:l0")
    assert old["fingerprint"] != new["fingerprint"]
    assert "cause" not in body["commonLabels"]


def test_new_members_alone_send_nothing() -> None:
    assert alerts_of(change("updated", incident(members=("a:1", "b:2", "c:3")), incident())) == []


def test_a_long_list_of_members_is_truncated_and_counted() -> None:
    (body,) = alerts_of(change("opened", incident(members=tuple(f"gpu:n1.{i}" for i in range(500)))))
    assert body["alerts"][0]["annotations"]["description"].endswith("GPU 9 of n1 and 490 more")


def test_all_values_of_labels_and_annotations_are_text() -> None:
    (body,) = alerts_of(change("opened", incident(confidence=0.9, simulated=True)))
    tables = [body["groupLabels"], body["commonLabels"], body["commonAnnotations"]]
    tables += [a[key] for a in body["alerts"] for key in ("labels", "annotations")]
    assert all(isinstance(v, str) and v for table in tables for v in table.values())


def test_labels_of_many_incidents_take_one_query_and_keep_the_place_that_was_sent() -> None:
    asked: list[list[str]] = []

    def read_sent(ids: Sequence[str]) -> dict[str, dict[str, str]]:
        asked.append(list(ids))
        return {"inc-0": {"entity": "port:n0.mlx5_0", "rack": "before", "severity": "critical"}}

    found = [incident(id=f"inc-{i}", entity=f"port:n{i}.mlx5_0") for i in range(300)]
    planner = PayloadPlanner(
        build_endpoints([hook()]), Rules(None, ()), SENDER, lambda entity: {"rack": "now"}, read_sent
    )
    labels = planner.label_all(found)
    assert [labels[f"inc-{i}"]["rack"] for i in (0, 1, 299)] == ["before", "now", "now"]
    assert planner.label_all(found) == labels
    assert asked == [[i.id for i in found]], "what is known is not read again"
    assert planner.label(incident(id="inc-new"), is_new=True)["rack"] == "now"
    assert len(asked) == 1


def test_the_watchdog_always_fires_with_the_site() -> None:
    body = alertmanager.make_watchdog(AlertSource("fra1"), START, "ops")
    (alert,) = body["alerts"]
    labels = alert["labels"]
    assert (labels["alertname"], labels["severity"], labels["entity"], labels["cause"]) == (
        "Watchdog",
        "none",
        "site:fra1",
        "site:fra1",
    )
    assert (body["status"], alert["status"]) == ("firing", "firing")


# --- the contract of every format -------------------------------------------------------------------------------------


@pytest.fixture(params=["alertmanager", "cloudevents", "event"])
def receiver(request: pytest.FixtureRequest) -> Webhook:
    return hook(format=request.param)


@pytest.mark.parametrize("severity", ["ticket", "page"])
def test_every_format_sends_opening_reopening_and_end(receiver: Webhook, severity: Any) -> None:
    now = incident(severity=severity)
    over = dataclasses.replace(now, resolved=START, state="resolved")
    for what, kind in (
        (change("opened", now), "firing"),
        (change("reopened", now, over), "firing"),
        (change("resolved", over, now), "resolved"),
    ):
        (payload,) = make_payloads(what, [receiver], SENDER, START)
        assert (payload.kind, payload.incident, payload.receiver) == (kind, now.id, receiver.name)
        assert isinstance(json.loads(payload.body), dict)


def test_every_format_skips_watches_unless_configured(receiver: Webhook) -> None:
    watch = incident(severity="watch")
    assert make_payloads(change("opened", watch), [receiver], SENDER, START) == []
    asked = dataclasses.replace(receiver, send_watch=True)
    assert len(make_payloads(change("opened", watch), [asked], SENDER, START)) == 1
    (first,) = make_payloads(change("severity_raised", incident(), watch), [receiver], SENDER, START)
    assert first.kind == "firing"


def test_no_format_sends_a_new_title_alone_and_alertmanagers_sends_no_notes(receiver: Webhook) -> None:
    for kind in ("acknowledged", "commented", "retitled"):
        found = make_payloads(change(kind, incident(), incident()), [receiver], SENDER, START)
        wanted = [] if kind == "retitled" or receiver.format == "alertmanager" else ["update"]
        assert [payload.kind for payload in found] == wanted


def test_every_format_is_deterministic(receiver: Webhook) -> None:
    what = change("opened", incident())
    assert make_payloads(what, [receiver], SENDER, START) == make_payloads(what, [receiver], SENDER, START)
