"""A receiver that limits its rate: it is asked once per pause, in order, and nobody else is paged while it accepts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.model.records import SECOND
from pipeline.notify.delivery import PostResult, classify_status
from pipeline.notify.periodic import WATCHDOG_INTERVAL_S
from pipeline.notify.receivers import build_receiver
from pipeline.notify.sending import OrderedSender
from tests.pipeline.notifier_harness import START, Killed, NotifierHarness, Receiver, cut_at
from tests.pipeline.receiver_servers import SERVICES, Service
from tests.pipeline.test_receivers import CALL, Build, Secret, message, pagerduty, secret, service, slack

__all__ = ["secret", "service"]
STEP_S = 0.25


class Limiter(Receiver):
    """Accepts one message per `every` seconds of the clock of the test, nothing with `shut`; `says` to others."""

    every, shut, tokens, most = 1.0, False, 1.0, 1.0
    says = 429

    def __init__(self) -> None:
        super().__init__()
        self.retry_after = "1"
        self.read_now: Callable[[], int] = lambda: START
        self.filled = START
        self.log: list[tuple[float, int, str]] = []  # seconds since START, status, cause
        self.lock = threading.Lock()

    def choose_status(self, cause: str) -> int:
        with self.lock:
            now = self.read_now()
            self.tokens = min(self.most, self.tokens + (now - self.filled) / SECOND / self.every)
            self.filled = now
            status = self.says if self.shut or self.tokens < 1 or cause in self.refuses else 200
            self.tokens -= status == 200
            self.log.append(((now - START) / SECOND, status, cause))
            return status

    def accepted(self) -> list[str]:
        return [cause for _, status, cause in self.log if status == 200]

    def refused(self) -> list[float]:
        return [time for time, status, _ in self.log if status == self.says]


class Site:
    """A limiter, one that gets the notices about it, and the notifier of both."""

    def __init__(self, folder: Path, limiter: Limiter, told: Receiver) -> None:
        self.limiter, self.told = limiter, told
        self.harness = NotifierHarness(folder, [f"http://127.0.0.1:{one.server_port}/" for one in (limiter, told)])
        limiter.read_now = lambda: self.harness.now

    def open(self, number: int, severity: str = "page") -> None:
        """That many incidents open, a millisecond apart."""
        for i in range(number):
            self.harness.now += 1000
            self.harness.write_change("opened", f"gpu:{severity}{i:03d}.0", severity=severity, opened=self.harness.now)

    def run(self, seconds: float, step: float = STEP_S) -> list[str]:
        """Lets time pass, and returns the notices about the limiter."""
        for _ in range(round(seconds / step)):
            self.harness.now += int(step * SECOND)
            while self.harness.send_due(0, "r0"):  # as the thread does, which looks again after it sent something
                pass
        while self.harness.send_due(0, "r1"):
            pass
        return self.reports()

    def reports(self) -> list[str]:
        return [b["status"] for _, b in self.told.posts if b["alerts"][0]["labels"]["alertname"] == "ReceiverDown"]

    def waiting(self) -> int:
        assert self.harness.database is not None
        query = "SELECT count(*) FROM outbox WHERE receiver = 'r0' AND state = 'pending'"
        return int(self.harness.database.cursor().execute(query).fetchall()[0][0])


@pytest.fixture
def site(tmp_path: Path, receivers: Callable[..., Receiver]) -> Iterator[Site]:
    limiter = receivers(Limiter)
    assert isinstance(limiter, Limiter)
    made = Site(tmp_path, limiter, receivers())
    yield made
    made.harness.close()


def causes(number: int, severity: str = "page") -> list[str]:
    return [f"gpu:{severity}{i:03d}.0" for i in range(number)]


@pytest.mark.parametrize("says", [429, 503])
def test_a_backlog_goes_at_the_rate_of_the_limiter_in_order_and_nobody_is_paged(site: Site, says: int) -> None:
    site.limiter.says = says
    site.open(21)
    assert site.run(22) == []
    assert site.limiter.accepted() == causes(21), "one per second, the oldest page first"
    assert len(site.limiter.refused()) <= 20, "one question per pause"
    assert site.harness.notifier.describe_trouble() is None
    assert {row for row in site.harness.rows() if row[1] == "pending"} == set()
    assert {attempts for _, _, attempts in site.harness.rows()} == {1}, "the limit is no refusal of a message"


def test_nothing_is_sent_before_retry_after_and_a_new_page_goes_before_the_tickets(site: Site) -> None:
    site.limiter.every, site.limiter.retry_after = 20.0, "20"
    site.open(10, "ticket")
    site.run(1)
    assert [status for _, status, _ in site.limiter.log] == [200, 429]
    site.open(3)
    site.run(18)
    assert len(site.limiter.log) == 2, "what arrives during the pause starts no request"
    site.run(65)
    assert site.limiter.accepted() == ["gpu:ticket000.0", *causes(3), "gpu:ticket001.0"]
    asked = [time for time, _, _ in site.limiter.log]
    pauses = [b - a for (a, s, _), (b, _, _) in itertools.pairwise(site.limiter.log) if s == 429]
    assert len(asked) <= 10
    assert all(19.999 < pause < 20.6 for pause in pauses), pauses


def test_a_limiter_that_accepts_one_message_per_30_seconds_is_not_reported(site: Site) -> None:
    site.limiter.every, site.limiter.retry_after = 30.0, "30"
    site.open(6)
    assert site.run(155, 0.5) == []
    assert site.limiter.accepted() == causes(6)
    assert len(site.limiter.refused()) <= 6


@pytest.mark.parametrize(
    ("every", "retry_after"),
    [(10.0, ""), pytest.param(5.0, "1", marks=pytest.mark.slow), pytest.param(29.0, "", marks=pytest.mark.slow)],
)
def test_a_page_waits_for_no_ticket_behind_a_limit_longer_than_its_pauses(
    site: Site, every: float, retry_after: str
) -> None:
    site.limiter.every, site.limiter.retry_after = every, retry_after
    site.open(4, "ticket")
    site.run(1, 0.5)
    site.open(3)
    for number in range(8):  # tickets arrive faster than the limiter accepts messages
        site.harness.write_change("opened", f"gpu:new{number}.0", severity="ticket", opened=site.harness.now)
        site.run(every / 2, 0.5)
    assert site.limiter.accepted()[1:4] == causes(3)
    assert {attempts for _, state, attempts in site.harness.rows() if state == "delivered"} == {1}
    in_pauses = sum(b - a < 0.1 for a, b in itertools.pairwise(site.limiter.refused()))
    assert in_pauses <= len(site.limiter.accepted()), "one request in a pause, now and then"


@pytest.mark.slow
def test_a_limiter_that_accepts_too_seldom_is_reported_once_and_until_its_queue_is_empty(site: Site) -> None:
    site.limiter.every = 45.0
    site.open(6)
    assert site.run(200, 1) == ["firing"]
    site.limiter.every = 1.0
    site.run(10)
    assert site.waiting() == 0
    assert site.run(65, 1) == ["firing", "resolved"]


@pytest.mark.parametrize(
    ("says", "retry_after", "most", "late"),
    [
        (429, "", 61, 5.5),
        pytest.param(429, "1", 61, 1.5, marks=pytest.mark.slow),
        (429, "20", 61, 20.5),
        pytest.param(429, "7200", 61, 300.5, marks=pytest.mark.slow),
        (503, "7200", 61, 60.5),
    ],
)
def test_a_limiter_that_refuses_everything_is_reported_and_gets_everything_when_it_accepts(
    site: Site, says: int, retry_after: str, most: float, late: float
) -> None:
    site.limiter.shut, site.limiter.retry_after, site.limiter.most, site.limiter.says = True, retry_after, 100.0, says
    site.open(8, "ticket")
    site.open(8)
    assert site.run(29, 1) == []
    assert site.run(most - 29, 1) == ["firing"]
    assert "r0: accepts no alerts since" in str(site.harness.notifier.describe_trouble())
    said = {429: "limits the rate", 503: "asks to wait"}[says]
    assert said in str(site.harness.notifier.describe_trouble())
    assert site.run(150, 1) == ["firing"]
    if retry_after == "":
        assert len(site.limiter.log) < 55, "without the header a pause grows to 5 s"
    site.limiter.shut, site.limiter.tokens, before = False, 100.0, (site.harness.now - START) / SECOND
    site.run(late)
    accepted = [(time, cause) for time, status, cause in site.limiter.log if status == 200]
    assert site.waiting() == 0
    assert accepted[0][0] - before <= late
    assert accepted[-1][0] - accepted[0][0] <= 5
    assert [cause for _, cause in accepted[1:]] == [
        c for c in [*causes(8), *causes(8, "ticket")] if c != accepted[0][1]
    ]
    assert site.run(65, 1) == ["firing", "resolved"]
    assert site.harness.notifier.describe_trouble() is None


def test_one_message_that_is_always_limited_hides_no_other_and_is_tried_as_planned(site: Site) -> None:
    site.limiter.most, site.limiter.tokens = 100.0, 100.0
    site.limiter.refuses["gpu:page000.0"] = 429
    site.open(3)
    site.open(3, "ticket")
    site.run(10)
    assert sorted(site.limiter.accepted()) == sorted([*causes(3)[1:], *causes(3, "ticket")])
    assert site.run(100, 1) == ["firing"], "a message that is refused three times while others are accepted"
    for number in range(10):
        site.harness.write_change("opened", f"gpu:m{number}.0")
        site.run(4, 1)
    assert site.limiter.accepted()[-10:] == [f"gpu:m{number}.0" for number in range(10)]
    row = [row for row in site.harness.rows() if row[1] == "pending" and row[0] == "firing"]
    assert [attempts >= 3 for _, _, attempts in row] == [True]
    site.limiter.refuses = {}
    for _ in range(10):
        site.run(1, 1)
        site.harness.now += 60 * SECOND
    assert site.reports() == ["firing", "resolved"]


@pytest.mark.parametrize(("retry_after", "first"), [("300", 301), ("20", 21), ("", 4)])
def test_a_message_that_alone_is_limited_holds_others_for_one_long_pause_once(
    site: Site, retry_after: str, first: int
) -> None:
    site.limiter.most, site.limiter.tokens, site.limiter.retry_after = 1000.0, 1000.0, retry_after
    site.limiter.refuses["gpu:page000.0"] = 429
    site.open(3)
    site.run(first, 1)
    assert site.limiter.accepted() == causes(3)[1:]
    for number in range(20):
        site.harness.write_change("opened", f"gpu:m{number}.0")
        site.run(4, 1)
        assert site.limiter.accepted()[-1] == f"gpu:m{number}.0", "the pause is about a message that is known"


def test_a_message_that_a_person_ended_during_its_check_leaves_no_pause(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.limiter.most, site.limiter.tokens, site.limiter.retry_after = 1000.0, 1000.0, "300"
    site.limiter.refuses["gpu:page000.0"] = 429
    site.open(3)

    def withdraw(store: Any, ids: list[str]) -> dict[str, str]:
        with store.transaction() as connection:
            connection.execute("UPDATE outbox SET state = 'dead' WHERE list_contains($1::VARCHAR[], id)", [ids])
        return {}

    monkeypatch.setattr("pipeline.notify.retries.load_states", withdraw)
    site.run(301, 1)
    assert site.limiter.accepted() == causes(3)[1:]


def test_several_messages_on_their_way_stop_at_the_first_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderedSender, "compute_width", lambda self: 8)
    site.limiter.tokens = site.limiter.most = 20.0
    site.open(60)
    site.run(STEP_S)
    assert len(site.limiter.accepted()) == 20
    assert 1 <= len(site.limiter.refused()) <= 8
    before = len(site.limiter.log)
    site.run(10)
    assert len(site.limiter.accepted()) >= 29
    assert len(site.limiter.log) - before <= 21, "then one after another, as the limiter accepts them"


def test_a_limited_watchdog_alone_reports_nobody_and_none_is_sent_during_a_pause(site: Site) -> None:
    site.limiter.shut, site.limiter.retry_after = True, "10"
    site.harness.notifier.send_watchdog("r0")
    assert site.run(120, 1) == []
    site.harness.now += WATCHDOG_INTERVAL_S * SECOND
    site.open(1)
    site.harness.send_due(0, "r0")
    before = len(site.limiter.log)
    site.harness.notifier.send_watchdog("r0")
    assert len(site.limiter.log) == before
    site.harness.now += 10 * SECOND
    site.harness.notifier.send_watchdog("r0")
    assert site.limiter.log[-1][2] == "site:here"


def test_setting_the_clock_back_ends_a_pause(site: Site) -> None:
    site.limiter.shut, site.limiter.retry_after = True, "300"
    site.open(1)
    site.run(1)
    site.limiter.shut = False
    site.harness.now -= 3600 * SECOND
    site.limiter.tokens, site.limiter.filled = 1.0, site.harness.now
    assert site.run(1) == []
    assert site.waiting() == 0


def test_a_failure_counts_as_before_between_limits(site: Site) -> None:
    """A receiver that is away after a limit is down after three failures; a limit while it is down is no return."""
    site.limiter.tokens, site.limiter.most = 0.0, 0.0
    site.open(2)
    site.run(2)
    notifier = site.harness.notifier
    for _ in range(3):
        notifier.health["r0"].record_failure(site.harness.now, "ConnectionRefusedError", 0)
    assert notifier.health["r0"].is_down
    site.run(20)
    assert notifier.health["r0"].is_down, "nothing was accepted"
    site.limiter.most = 100.0
    site.run(10)
    assert site.waiting() == 0
    assert not notifier.health["r0"].is_down


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("step", range(12))
def test_a_kill_at_any_commit_of_a_limited_queue_loses_no_page_and_repeats_only_the_same_key(
    site: Site, step: int
) -> None:
    site.open(3)
    cut_at(site.harness, step)
    for _ in range(60):
        try:
            site.run(STEP_S)
        except Killed:
            site.harness.restart()
    keys = [key for key, _ in site.limiter.posts]
    assert list(dict.fromkeys(keys)) == [f"inc-{cause}.1.r0" for cause in causes(3)]
    assert site.waiting() == 0
    assert list(dict.fromkeys(site.limiter.accepted())) == causes(3)


@pytest.mark.parametrize("retry_after", ["", "0", "soon"])
def test_a_receiver_that_answers_503_without_saying_when_to_come_back_fails(site: Site, retry_after: str) -> None:
    site.limiter.says, site.limiter.shut, site.limiter.retry_after = 503, True, retry_after
    site.open(3)
    assert site.run(40, 1) == ["firing"]
    assert site.harness.notifier.health["r0"].is_down


def test_a_message_that_alone_is_answered_503_holds_others_for_three_minutes_at_most(site: Site) -> None:
    site.limiter.most, site.limiter.tokens, site.limiter.retry_after = 100.0, 100.0, "7200"
    site.limiter.refuses["gpu:page000.0"] = site.limiter.says = 503
    site.open(3)
    site.run(181, 1)
    assert site.limiter.accepted() == causes(3)[1:]


def test_only_a_limit_of_the_rate_pauses_a_receiver() -> None:
    assert classify_status(429, "7").limited
    assert classify_status(429).limited
    assert classify_status(503, "7") == PostResult("retry", "HTTP 503: the receiver asks to wait", 7.0, limited=True)
    assert classify_status(503, "3600").retry_after_s == 60
    assert not classify_status(503).limited
    assert not classify_status(502, "7").limited


TWICE: list[tuple[Build, str, str, tuple[int, Any]]] = [
    (slack, "/slack/", "acknowledgement_expired", (429, {"ok": False, "error": "ratelimited"})),
    (slack, "/slack/", "acknowledgement_expired", (200, {"ok": False, "error": "ratelimited"})),
    (pagerduty, "/v2/enqueue", "worsened", (429, "")),
]


@pytest.mark.parametrize(("build", "path", "event", "limit"), TWICE)
def test_a_message_of_two_requests_gets_through_a_limit_of_one_at_a_time(
    service: Service,
    secret: Secret,
    monkeypatch: pytest.MonkeyPatch,
    build: Build,
    path: str,
    event: str,
    limit: tuple[int, Any],
) -> None:
    """An edit and its reply, an end and its trigger: an accepted message is not sent again after the pause."""
    one = build_receiver(build(service, secret))[0]
    first = one.send(message(), CALL)
    real: Any = SERVICES[path]
    left = [1]

    def judge(*about: Any) -> tuple[int, Any]:
        left[0] -= 1
        made: tuple[int, Any] = real(*about) if left[0] >= 0 else limit
        return made

    monkeypatch.setitem(SERVICES, path, judge)
    again = message("firing", reference=first.reference, event=event)
    limited = one.send(again, CALL)
    assert (limited.outcome, limited.limited) == ("retry", True)
    left[0] = 1
    assert one.send(again, CALL).outcome == "delivered"
    assert len(service.received) == 3
    left[0] = 2
    assert one.send(again, CALL).outcome == "delivered"
    assert len(service.received) == 5, "a message that is sent again is sent whole"
