"""Receivers that refuse, fail and recover: missed alerts are delivered, and other receivers are notified."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.model.records import SECOND
from pipeline.notify import outbox
from pipeline.notify.dead_messages import replay_payloads
from pipeline.notify.retention import RETENTION_S
from pipeline.notify.retries import RETRY_S
from tests.pipeline.notifier_harness import Killed, NotifierHarness, Receiver, cut_at
from tests.until import until


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("status", [302, 307, 400, 401, 403, 404, 410, 413])
def test_a_refused_page_arrives_when_the_receiver_is_repaired(
    harness: NotifierHarness, receiver: Receiver, status: int
) -> None:
    receiver.statuses = [status] * 5
    harness.write_change("opened")
    harness.resolve()
    for _ in range(7):
        harness.send_due(5)
    assert receiver.alerts[-2:] == [("firing", "gpu:n1.0"), ("resolved", "gpu:n1.0")]
    assert [row[:2] for row in harness.rows()] == [("firing", "delivered"), ("resolved", "delivered")]


@pytest.mark.slow
def test_a_failed_receiver_is_probed_every_five_seconds_and_later_every_thirty(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    receiver.refuses["gpu:n1.0"] = 410
    harness.write_change("opened")
    posts = [second for second in range(1200) if harness.send_due(1)]
    gaps = [b - a for a, b in itertools.pairwise(posts)]
    assert gaps[:2] == [1, 5]
    assert set(gaps[3:100]) == {5}
    assert set(gaps[-15:]) == {30}
    assert harness.rows() == [("firing", "pending", 3)], "a probe does not count as an attempt of the message"


@pytest.mark.slow
def test_a_recovered_receiver_gets_all_alerts_immediately_with_the_oldest_page_first(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    receiver.statuses = [503] * 40
    for i, severity in enumerate(("ticket", "page", "page", "ticket", "page")):
        harness.write_change("opened", f"gpu:n{i}.0", severity=severity)
        harness.send_due(7)
    while receiver.statuses:
        harness.send_due(1)
    before = len(receiver.posts)
    for _ in range(35):
        if harness.send_due(1) and len(receiver.posts) > before:
            break
    while harness.send_due():
        pass
    causes = [cause for _, cause in receiver.alerts[before:]]
    assert sorted(causes) == [f"gpu:n{i}.0" for i in range(5)], "within the second of its first response"
    assert [c for c in causes[1:] if c in ("gpu:n1.0", "gpu:n2.0", "gpu:n4.0")] == sorted(
        c for c in causes[1:] if c in ("gpu:n1.0", "gpu:n2.0", "gpu:n4.0")
    )


def test_one_message_that_is_always_refused_does_not_hide_the_recovery_of_the_receiver(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    receiver.refuses["gpu:n1.0"] = 400
    receiver.statuses = [503] * 4
    harness.write_change("opened")
    harness.write_change("opened", "gpu:n2.0")
    for _ in range(30):
        harness.send_due(1)
    assert ("firing", "gpu:n2.0") in receiver.alerts
    assert not harness.notifier.health["r0"].is_down


def test_a_new_receiver_gets_what_fires_and_the_others_nothing_again(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    old, new = receivers(), receivers()
    urls = [f"http://127.0.0.1:{r.server_port}/" for r in (old, new)]
    harness = NotifierHarness(tmp_path, urls[:1])
    harness.write_change("opened")
    harness.write_change("opened", "gpu:n2.0")
    harness.write_change("opened", "gpu:n3.0")
    harness.write_change("acknowledged", "gpu:n3.0", state="acknowledged")
    harness.resolve("gpu:n2.0")
    while harness.send_due(5):
        pass
    before = len(old.posts)
    harness.urls = urls
    for _ in range(2):
        harness.restart()
        harness.notifier.load_state()
        harness.notifier.write_missed()
        harness.send_due(5, "r0")
        harness.send_due(0, "r1")
    assert new.alerts == [("firing", "gpu:n1.0")]
    assert len(old.posts) == before
    harness.resolve()
    harness.send_due(5, "r1")
    assert new.alerts[-1] == ("resolved", "gpu:n1.0")
    harness.close()


def test_a_new_receiver_gets_what_fires_also_if_the_store_fails_at_the_start(
    tmp_path: Path, receivers: Callable[[], Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "POLL_S", 0.01)
    monkeypatch.setattr(outbox, "FAULT_PAUSE_S", 0.01)
    old, new = receivers(), receivers()
    urls = [f"http://127.0.0.1:{r.server_port}/" for r in (old, new)]
    harness = NotifierHarness(tmp_path, urls[:1])
    harness.write_change("opened")
    harness.send_due(5)
    harness.urls = urls
    harness.restart()
    assert harness.database is not None
    harness.database.connection.execute("ALTER TABLE outbox RENAME TO away")
    stop = threading.Event()
    thread = threading.Thread(target=harness.notifier.run, args=(stop,))
    thread.start()
    try:
        until(lambda: "outbox: " in str(harness.notifier.describe_trouble()))
        with harness.database.transaction() as connection:
            connection.execute("ALTER TABLE away RENAME TO outbox")
        until(lambda: ("firing", "gpu:n1.0") in new.alerts)
    finally:
        stop.set()
        thread.join(10)
    assert old.alerts.count(("firing", "gpu:n1.0")) == 1
    harness.close()


def test_a_restart_probes_a_failed_receiver_immediately(harness: NotifierHarness, receiver: Receiver) -> None:
    receiver.statuses = [410] * 3
    harness.write_change("opened")
    for _ in range(3):
        harness.send_due(10)
    harness.restart()
    harness.notifier.load_state()
    assert harness.send_due() == 1
    assert receiver.alerts[-1] == ("firing", "gpu:n1.0")
    assert harness.rows()[0][1] == "delivered"


@pytest.mark.slow
def test_a_receiver_that_was_down_before_a_restart_stays_reported_until_it_accepts_an_alert(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    broken, whole = receivers(), receivers()
    harness = NotifierHarness(tmp_path, [f"http://127.0.0.1:{r.server_port}/" for r in (broken, whole)])

    def run_both(steps: int) -> list[str]:
        for _ in range(steps):
            harness.send_due(5, "r0")
            harness.send_due(0, "r1")
        return [b["status"] for _, b in whole.posts if b["alerts"][0]["labels"]["alertname"] == "ReceiverDown"]

    broken.statuses = [429] * 1000
    for number in range(9):  # probes take turns, so that none of them has many attempts
        harness.write_change("opened", f"gpu:n{number}.0")
    assert run_both(60) == ["firing"]
    harness.database.connection.execute("UPDATE outbox SET attempts = 1 WHERE receiver = 'r0'")  # type: ignore[union-attr]
    harness.restart()
    harness.notifier.load_state()
    assert run_both(3) == ["firing"]
    broken.statuses = []
    assert run_both(20) == ["firing", "resolved"]
    assert len({key for key, _ in whole.posts}) == len(whole.posts)


class Pair:
    """A receiver that refuses, one that gets the notice, and restarts in between."""

    def __init__(self, folder: Path, refuses: Receiver, told: Receiver) -> None:
        self.told = told
        urls = [f"http://127.0.0.1:{one.server_port}/" for one in (refuses, told)]
        self.harness = NotifierHarness(folder, urls)

    def run(self, seconds: int, restart: bool = False) -> list[tuple[str, str]]:
        """Returns the notices about the receiver, with its keys."""
        if restart:
            self.harness.restart()
        for _ in range(seconds):
            self.harness.now += SECOND
            for name in ("r0", "r1"):
                self.harness.notifier.send_watchdog(name)
                self.harness.notifier.send_due(name)
        down = [(k, b) for k, b in self.told.posts if b["alerts"][0]["labels"]["alertname"] == "ReceiverDown"]
        return [(body["status"], key) for key, body in down]


FIRING, RESOLVED = ("firing", "receiver-r0.1.r1"), ("resolved", "receiver-r0.2.r1")


def test_what_was_refused_before_a_restart_is_reported_until_it_is_accepted(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    refuses = receivers()
    pair = Pair(tmp_path, refuses, receivers())
    refuses.refuses["gpu:bad.0"] = 302
    pair.harness.write_change("opened", "gpu:bad.0")
    pair.run(5)
    pair.harness.write_change("opened", "gpu:ok.0")
    assert pair.run(40) == [FIRING]
    for number in range(2):
        assert pair.run(2, restart=True) == [FIRING]
        assert "1 alert refused: HTTP 302" in str(pair.harness.notifier.describe_trouble())
        pair.harness.write_change("opened", f"gpu:m{number}.0")
        assert pair.run(9) == [FIRING], "it accepts others"
    refuses.refuses = {}
    pair.harness.now += 25_000 * SECOND  # longer than the longest delay
    assert pair.run(5) == [FIRING, RESOLVED]
    pair.harness.close()


def test_a_receiver_that_failed_only_its_watchdog_is_reported_over_a_restart(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    refuses = receivers()
    pair = Pair(tmp_path, refuses, receivers())
    refuses.statuses = [302] * 5
    pair.harness.notifier.health["r0"].record_failure(pair.harness.now, "HTTP 302", 0)
    pair.harness.notifier.health["r0"].record_failure(pair.harness.now, "HTTP 302", 0)
    assert pair.run(40) == [FIRING]
    refuses.statuses = [302]
    assert pair.run(20, restart=True) == [FIRING], "no message waits, and the Watchdog is refused"
    pair.harness.now -= 3600 * SECOND
    assert pair.run(1) == [FIRING], "also if the clock is set back"
    pair.harness.now += 3600 * SECOND
    assert pair.run(1, restart=True) == [FIRING, RESOLVED], "the Watchdog is accepted"
    pair.harness.close()


def test_a_dropped_message_is_reported_over_a_restart(harness: NotifierHarness, receiver: Receiver) -> None:
    refuse_until_dead(harness, receiver)
    harness.restart()
    harness.notifier.health["r0"].record_success()
    assert harness.notifier.describe_trouble() == "receiver r0: 1 alert refused: HTTP 413, 9 times"
    harness.send_due(3600)
    assert harness.notifier.describe_trouble() is None


@pytest.mark.slow
def test_a_refused_page_is_reported_by_readiness_and_to_the_other_receivers(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    broken, whole = receivers(), receivers()
    harness = NotifierHarness(tmp_path, [f"http://127.0.0.1:{r.server_port}/" for r in (broken, whole)])
    broken.statuses = [302] * 12
    harness.write_change("opened")
    for _ in range(40):
        harness.send_due(1, "r0")
        harness.send_due(0, "r1")
    assert "receiver r0: accepts no alerts since" in str(harness.notifier.describe_trouble())
    assert "redirect" in str(harness.notifier.describe_trouble())
    down = whole.posts[-1][1]["alerts"][0]
    assert (down["labels"]["alertname"], down["labels"]["severity"]) == ("ReceiverDown", "critical")
    assert down["labels"]["receiver"] == "r0"
    harness.restart()
    harness.notifier.load_state()
    for _ in range(40):
        harness.send_due(1, "r0")
        harness.send_due(0, "r1")
    up = whole.posts[-1][1]["alerts"][0]
    assert (up["status"], up["fingerprint"], up["startsAt"]) == ("resolved", down["fingerprint"], down["startsAt"])
    assert harness.notifier.describe_trouble() is None
    assert broken.alerts[-1] == ("firing", "gpu:n1.0")
    harness.close()


def refuse_until_dead(harness: NotifierHarness, receiver: Receiver) -> None:
    """A page is refused as often as it is tried."""
    receiver.refuses["gpu:n1.0"] = 413
    harness.write_change("opened")
    for _ in range(len(RETRY_S) + 1):
        harness.notifier.health["r0"].record_success()
        harness.send_due(1.2 * RETRY_S[-1])


def test_a_dropped_message_is_reported_for_an_hour(harness: NotifierHarness, receiver: Receiver) -> None:
    refuse_until_dead(harness, receiver)
    assert harness.rows() == [("firing", "dead", 9)]
    harness.notifier.health["r0"].record_success()
    assert harness.notifier.describe_trouble() == "receiver r0: 1 alert refused: HTTP 413, 9 times"
    harness.send_due(3600)
    assert harness.notifier.describe_trouble() is None


def test_a_refused_message_that_expires_is_reported_no_longer(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    refuses, other = receivers(), receivers()
    harness = NotifierHarness(tmp_path, [f"http://127.0.0.1:{one.server_port}/" for one in (refuses, other)])
    refuses.refuses["gpu:n1.0"] = 503
    harness.write_change("opened")
    for _ in range(3):
        harness.send_due(10)
    assert harness.notifier.describe_trouble() is not None
    harness.pass_time(RETENTION_S + 60)
    harness.notifier._clean_outbox()
    harness.write_change("opened", "gpu:n2.0")  # after the refused one was dropped: the receiver works
    for _ in range(3):
        harness.send_due(60)
        harness.send_due(0, "r1")
    assert refuses.alerts[-1] == ("firing", "gpu:n2.0")
    assert harness.notifier.describe_trouble() is None
    reports = [body["status"] for _, body in other.posts if body["alerts"][0]["labels"]["detector"] != "sdc"]
    assert reports[-1] == "resolved"
    harness.close()


def test_a_dead_message_that_was_replaced_is_reported_no_longer(harness: NotifierHarness, receiver: Receiver) -> None:
    refuse_until_dead(harness, receiver)
    harness.notifier.health["r0"].record_success()
    assert "refused: HTTP 413, 9 times" in str(harness.notifier.describe_trouble())
    receiver.refuses = {}
    harness.resolve()
    harness.write_change("reopened")
    while harness.send_due(1):  # the newest page is accepted, so that the dead one is replaced
        pass
    assert [row[:2] for row in harness.rows()] == [
        ("firing", "dead"),
        ("resolved", "delivered"),
        ("firing", "delivered"),
    ]
    assert harness.database is not None
    assert replay_payloads(harness.database, [], "r0", "ada", harness.now)
    assert harness.rows()[0][1] == "muted"
    harness.send_due(1)
    assert receiver.alerts[-1] == ("firing", "gpu:n1.0")
    assert harness.notifier.describe_trouble() is None


def test_the_resolve_of_a_delivered_alert_is_kept_for_a_receiver_longer_than_a_week(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    harness.write_change("opened")
    harness.send_due()
    harness.resolve()
    harness.write_change("opened", "gpu:n2.0")
    receiver.statuses = [503] * 4
    for _ in range(3):
        harness.send_due(10)
    harness.pass_time(RETENTION_S + 60)
    stop = threading.Event()
    stop.set()
    harness.notifier.run(stop)
    assert [row[:2] for row in harness.rows()] == [("firing", "delivered"), ("resolved", "pending"), ("firing", "dead")]
    harness.send_due()
    assert receiver.alerts[-1] == ("resolved", "gpu:n1.0")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("step", range(10))
def test_a_kill_at_any_commit_loses_no_page_and_repeats_only_the_same_key(
    harness: NotifierHarness, receiver: Receiver, step: int
) -> None:
    """The process ends before or after each transaction of the notifier; the receiver fails in between."""
    receiver.statuses = [503, 503, 503]
    harness.write_change("opened")
    cut_at(harness, step)
    for second in range(60):
        try:
            if second == 40:
                harness.resolve()
            harness.send_due(1)
        except Killed:
            harness.restart()
            harness.notifier.load_state()
    delivered = dict.fromkeys((key, body["status"]) for key, body in receiver.posts[3:])
    assert list(delivered) == [("inc-gpu:n1.0.1.r0", "firing"), ("inc-gpu:n1.0.2.r0", "resolved")]
    assert [row[:2] for row in harness.rows()] == [("firing", "delivered"), ("resolved", "delivered")]


@pytest.mark.parametrize(("minutes", "most"), [(3, 8), (30, 33), pytest.param(180, 33, marks=pytest.mark.slow)])
def test_after_an_outage_everything_due_arrives_within_five_seconds_of_the_first_response(
    harness: NotifierHarness, receiver: Receiver, minutes: int, most: int
) -> None:
    receiver.statuses = [503] * 10_000
    for minute in range(minutes):
        harness.write_change("opened", f"gpu:n{minute:03d}.0", severity="page" if minute % 3 else "ticket")
        for _ in range(12):
            harness.send_due(5)
    receiver.statuses = []
    away, arrived = len(receiver.posts), list[tuple[int, str]]()
    for second in range(40):
        before = len(receiver.posts)
        harness.send_due(1)
        arrived += [(second, cause) for _, cause in receiver.alerts[before:]]
    assert len(receiver.posts) - away == len(arrived) == minutes
    assert arrived[0][0] <= most, "the next probe: 5 s, or 30 s after ten minutes"
    assert arrived[-1][0] - arrived[0][0] <= 5
    pages = [cause for _, cause in arrived[1:] if int(cause[5:8]) % 3]
    assert pages == sorted(pages), "the oldest page first; the first message is the probe"
