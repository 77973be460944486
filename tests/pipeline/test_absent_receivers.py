"""What a receiver that was away gets when it returns: what is true then, the oldest page first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Alertmanager, InhibitRule, Notify, PagerDuty, Route, Webhook
from pipeline.config.sections import Incidents
from pipeline.incidents.ledger import Payload, write_payloads
from pipeline.incidents.matchers import parse_matchers
from pipeline.model.records import SECOND, Caller, Life
from pipeline.notify.alertmanager import AlertSource, make_receiver_down
from pipeline.notify.delivery import Answer, Request
from tests.pipeline.living import HOUR, LivingSite
from tests.pipeline.notifier_harness import NotifierHarness, Receiver
from tests.pipeline.test_receivers import Secret, secret

__all__ = ["secret"]
ANN = Caller("ann", "operator", "10.0.0.7")
INHIBIT = InhibitRule(('alertname="CoolantFault"',), ('alertname="ThermalFault"',), ("loop",))
GROUPED = Route("hook", group_by=("alertname",), group_wait="0s", group_interval="1m")
AWAY_MINUTES = 30
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inhibit": {"inhibit_rules": (INHIBIT,)},
    "grouped": {"route": GROUPED},
    "each": {"route": replace(GROUPED, group_by=("...",))},
}
Act = Callable[[LivingSite, str], None]


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow) if n in ("inhibit", "each") else n for n in SETTINGS])
def site(request: pytest.FixtureRequest, tmp_path: Path, receiver: Receiver) -> Iterator[LivingSite]:
    """A site whose only receiver has just gone away, with one page that it was not sent."""
    hook = Webhook("hook", f"http://127.0.0.1:{receiver.server_port}/")
    made = LivingSite(
        tmp_path / "away.duckdb", Incidents(acknowledge_hours=1), webhooks=(hook,), **SETTINGS[request.param]
    )
    receiver.statuses = [503] * 1000
    yield made
    made.database.close()


def let_pass(site: LivingSite, seconds: int, step: int = 30) -> None:
    """Lets time pass, with findings each minute, while the notifier works."""
    for _ in range(0, seconds, step):
        site.now += step * SECOND
        site.step()
        site.notifier.send_due("hook")


def come_back(site: LivingSite, receiver: Receiver, seconds: int = 120) -> list[tuple[str, str, str]]:
    """Returns (status, incident, title) of each alert that arrives once the receiver answers."""
    receiver.statuses = []
    receiver.posts.clear()
    let_pass(site, seconds)
    return list_alerts(receiver)


def list_alerts(receiver: Receiver) -> list[tuple[str, str, str]]:
    alerts = [a for _, body in receiver.posts for a in body["alerts"]]
    return [(a["status"], a["labels"]["incident"], a["annotations"]["summary"]) for a in alerts]


def silence(site: LivingSite, page: str) -> None:
    site.people.add_silence("silence", parse_matchers([f"incident={page}"]), None, site.now + 9 * HOUR, "x", ANN)


def acknowledge(site: LivingSite, page: str) -> None:
    site.people.acknowledge(page, ANN, "mine", hours=9)


def resolve(site: LivingSite, page: str) -> None:
    site.clear("host:a")
    site.people.resolve(page, ANN, "a false alarm")


def end_by_itself(site: LivingSite, page: str) -> None:
    site.clear("host:a")
    let_pass(site, 11 * 60, 60)
    assert site.state(page) == "resolved"


def merge(site: LivingSite, page: str) -> None:
    site.people.merge(site.incident_of("host:b"), [page], ANN, "one cause")


@pytest.mark.parametrize("act", [silence, resolve, end_by_itself, merge])
def test_a_page_that_is_over_before_it_arrived_is_only_ended(site: LivingSite, receiver: Receiver, act: Act) -> None:
    page, other = site.report("host:a"), site.report("host:b")
    let_pass(site, AWAY_MINUTES * 60, 120)
    act(site, page)
    let_pass(site, 120, 60)
    got = come_back(site, receiver)
    assert [status for status, incident, _ in got if incident == page] == ["resolved"]
    assert "firing" in [status for status, incident, _ in got if incident == other]


def test_a_page_that_a_person_acknowledged_before_it_arrived_is_not_sent(site: LivingSite, receiver: Receiver) -> None:
    page = site.report("host:a")
    let_pass(site, AWAY_MINUTES * 60, 120)
    acknowledge(site, page)
    other = site.report("disk:b", detector="full")
    got = come_back(site, receiver)
    assert [incident for _, incident, _ in got] == [other]
    site.clear("host:a", "disk:b")
    let_pass(site, 13 * 60, 60)
    ends = {incident for status, incident, _ in list_alerts(receiver)[len(got) :] if status == "resolved"}
    assert ends == {page, other}, "the receiver may have taken it without an answer"


def test_what_was_acknowledged_before_it_arrived_pages_when_that_expires(site: LivingSite, receiver: Receiver) -> None:
    page = site.report("host:a")
    let_pass(site, AWAY_MINUTES * 60, 120)
    site.people.acknowledge(page, ANN, "mine")
    assert come_back(site, receiver) == []
    let_pass(site, 3660, 60)
    assert ("firing", page) in {(status, incident) for status, incident, _ in list_alerts(receiver)}


def test_what_still_fires_is_sent_once_with_the_text_of_now(site: LivingSite, receiver: Receiver) -> None:
    page = site.report("host:a")
    first = site.notifier
    let_pass(site, 60)
    (key,) = {key for key, body in receiver.posts if body["alerts"][0]["labels"]["incident"] == page}
    let_pass(site, AWAY_MINUTES * 60, 120)
    known = site.active["hot", "host:a"]
    site.active["hot", "host:a"] = replace(known, summary="host:a: 97 °C, hotter than ever", score=9.0)
    let_pass(site, 60)
    assert site.notifier is first
    got = come_back(site, receiver)
    assert got == [("firing", page, "host:a: 97 °C, hotter than ever")]
    assert [sent for sent, _ in receiver.posts] == [key], "a receiver that took it without an answer knows the key"


# --- one receiver, change by change -----------------------------------------------------------------------------------


class Remote:
    """Answers for all receivers. is_up: whether it accepts anything."""

    def __init__(self) -> None:
        self.is_up, self.bodies = False, list[Any]()

    def __call__(self, request: Request, **_: Any) -> Answer:
        if not self.is_up:
            return Answer(503)
        if request.body is None:
            return Answer(200, body=b"[]")
        self.bodies.append(json.loads(request.body))
        if request.target.url.endswith("/enqueue"):
            return Answer(202, body=b'{"status": "success", "message": "Event processed"}')
        return Answer(200, body=b'{"silenceID": "s0"}' if request.target.url.endswith("/silences") else b"")


@pytest.fixture
def remote() -> Remote:
    return Remote()


def make_harness(tmp_path: Path, remote: Remote, receiver: Any) -> NotifierHarness:
    field = {Webhook: "webhooks", PagerDuty: "pagerduty", Alertmanager: "alertmanagers"}[type(receiver)]
    made = NotifierHarness(tmp_path, [], Notify(**{field: (receiver,)}))
    made.notifier._call = remote  # type: ignore[assignment]
    return made


def fail(harness: NotifierHarness, name: str, times: int = 4) -> None:
    """Lets the receiver refuse what waits until it counts as down."""
    for _ in range(times):
        harness.send_due(30, name)
    assert harness.notifier.health[name].is_down


def recover(harness: NotifierHarness, name: str, remote: Remote) -> list[Any]:
    """Returns what arrives when the receiver answers again."""
    remote.is_up, remote.bodies = True, []
    harness.send_due(300, name)
    while harness.send_due(1, name):
        assert len(remote.bodies) < 100
    return remote.bodies


def pager(secret: Secret) -> PagerDuty:
    return PagerDuty("r", secret("key", "R" * 32), url="http://127.0.0.1:1")


def test_a_page_whose_labels_changed_is_sent_once_and_before_younger_ones(tmp_path: Path, remote: Remote) -> None:
    harness = make_harness(tmp_path, remote, Webhook("r", "http://127.0.0.1:1/"))
    harness.write_change("opened", "gpu:n1.0")
    fail(harness, "r")
    harness.write_change("opened", "gpu:n2.0")
    harness.write_change("opened", "gpu:n3.0", severity="ticket")
    harness.send_due(30, "r")
    harness.write_change("severity_raised", "gpu:n3.0", severity="page")
    harness.write_change("cause_changed", "gpu:n1.0", entity="node:n1", summary="the node")
    got = recover(harness, "r", remote)
    told = [(b["alerts"][-1]["labels"]["cause"], [a["status"] for a in b["alerts"]], b["status"]) for b in got]
    assert sorted(told[1:] + told[:1])[0] == ("gpu:n1.0", ["resolved", "firing"], "firing"), "it may have the old one"
    assert sorted(cause for cause, _, _ in told) == ["gpu:n1.0", "gpu:n2.0", "gpu:n3.0"]
    assert [cause for cause, _, _ in told[1:]] == sorted(cause for cause, _, _ in told[1:]), "after the probe by age"
    (raised,) = [statuses for cause, statuses, _ in told if cause == "gpu:n3.0"]
    assert raised == ["firing"], "it was never sent with the old labels"
    assert got[[t[0] for t in told].index("gpu:n1.0")]["commonAnnotations"].get("summary") is None
    harness.close()


def test_what_a_receiver_has_goes_on_in_order_without_pages_that_are_over(tmp_path: Path, remote: Remote) -> None:
    harness = make_harness(tmp_path, remote, Webhook("r", "http://127.0.0.1:1/"))
    remote.is_up = True
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        harness.write_change("opened", cause)
        harness.send_due(1, "r")
    remote.is_up = False
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        harness.write_change("worsened", cause)
    fail(harness, "r")
    harness.resolve("gpu:n1.0")
    harness.resolve("gpu:n2.0")
    harness.write_change("reopened", "gpu:n2.0", resolved=None, state="open", summary="again")
    got = recover(harness, "r", remote)
    told = [(b["alerts"][-1]["labels"]["cause"], b["status"]) for b in got]
    assert [status for cause, status in told if cause == "gpu:n1.0"] == ["resolved"]
    assert [status for cause, status in told if cause == "gpu:n2.0"][-2:] == ["resolved", "firing"]
    assert got[-1]["alerts"][0]["annotations"]["summary"] == "again"
    harness.close()


def test_pagerduty_calls_nobody_for_what_a_colleague_took_until_that_expires(
    tmp_path: Path, remote: Remote, secret: Secret
) -> None:
    harness = make_harness(tmp_path, remote, pager(secret))
    harness.write_change("opened")
    fail(harness, "r")
    harness.write_change("acknowledged", state="acknowledged", life=Life(acknowledged_by="ann"))
    harness.write_change("acknowledged", state="acknowledged", life=Life(acknowledged_by="bob"))
    assert [event["event_action"] for event in recover(harness, "r", remote)] == ["acknowledge"]
    remote.bodies = []
    harness.write_change("acknowledgement_expired", state="open", life=Life())
    harness.send_due(1, "r")
    assert [event["event_action"] for event in remote.bodies] == ["resolve", "trigger"], "it may have been taken"
    harness.resolve()
    harness.send_due(1, "r")
    assert remote.bodies[-1]["event_action"] == "resolve"
    harness.close()


def test_pagerduty_is_called_again_for_what_expired_while_it_was_away(
    tmp_path: Path, remote: Remote, secret: Secret
) -> None:
    harness = make_harness(tmp_path, remote, pager(secret))
    harness.write_change("opened")
    fail(harness, "r")
    harness.write_change("acknowledged", state="acknowledged", life=Life(acknowledged_by="ann"))
    harness.write_change("acknowledgement_expired", state="open", life=Life())
    harness.write_change("cause_changed", entity="node:n1", summary="the node")
    events = recover(harness, "r", remote)
    assert [event["event_action"] for event in events] == ["trigger"]
    assert events[0]["payload"]["summary"] == "the node"
    harness.close()


def test_an_alertmanager_mirrors_also_what_was_acknowledged_while_it_was_away(tmp_path: Path, remote: Remote) -> None:
    push = Alertmanager("r", ("http://127.0.0.1:1",), ack_as_silence="15m", allow_http=True)
    harness = make_harness(tmp_path, remote, push)
    harness.write_change("opened")
    fail(harness, "r")
    harness.write_change("acknowledged", state="acknowledged", life=Life(acknowledged_by="ann"))
    got = recover(harness, "r", remote)
    kinds = ["silence" if isinstance(body, dict) else "alerts" for body in got]
    assert kinds[:2] == ["silence", "alerts"], "silenced before it could notify"
    harness.close()


def test_a_receiver_that_was_reported_and_works_again_is_only_ended(tmp_path: Path, remote: Remote) -> None:
    harness = make_harness(tmp_path, remote, Webhook("r", "http://127.0.0.1:1/"))
    assert harness.database is not None
    for kind in ("firing", "resolved"):
        body = make_receiver_down(AlertSource("here"), "slack", "HTTP 500", "r", 1, None if kind == "firing" else 2)
        made = Payload("receiver-slack", "r", kind, json.dumps(body), harness.now)  # type: ignore[arg-type]
        with harness.database.transaction() as connection:
            write_payloads(connection, [made])
        if kind == "firing":
            fail(harness, "r")
    assert [body["status"] for body in recover(harness, "r", remote)] == ["resolved"]
    harness.close()
