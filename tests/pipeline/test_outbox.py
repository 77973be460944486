"""The notifier with failing real receivers, and across a kill -9."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.receivers import Notify, Webhook
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND
from pipeline.notify import outbox
from pipeline.notify.outbox import Notifier
from pipeline.notify.periodic import WATCHDOG_INTERVAL_S
from pipeline.notify.retention import RETENTION_S
from pipeline.notify.retries import RETRY_S
from tests.pipeline.notifier_harness import START, NotifierHarness, Receiver
from tests.until import until

ROOT = Path(__file__).resolve().parents[2]


def test_an_alert_is_delivered_once_and_then_its_resolve(harness: NotifierHarness, receiver: Receiver) -> None:
    harness.write_change("opened")
    assert harness.send_due() == 1
    assert harness.send_due() == 0
    harness.resolve()
    harness.send_due()
    assert receiver.alerts == [("firing", "gpu:n1.0"), ("resolved", "gpu:n1.0")]
    assert [key for key, _ in receiver.posts] == ["inc-gpu:n1.0.1.r0", "inc-gpu:n1.0.2.r0"]
    assert harness.rows() == [("firing", "delivered", 1), ("resolved", "delivered", 1)]


@pytest.mark.slow
def test_retry_after_is_respected(harness: NotifierHarness, receiver: Receiver) -> None:
    receiver.statuses = [502, 502, 502]
    harness.write_change("opened")
    harness.send_due()
    waits = []
    for _ in range(3):
        seconds = 0
        while harness.send_due(1) == 0:
            seconds += 1
        waits.append(seconds + 1)
    assert waits == [300, 300, 300], "the receiver asked for five minutes with Retry-After"
    assert len({key for key, _ in receiver.posts}) == 1
    assert harness.rows() == [("firing", "delivered", 4)]


@pytest.mark.parametrize("later", [30, 200, None])
def test_retry_after_holds_a_page_until_another_is_accepted_and_five_minutes_at_most(
    harness: NotifierHarness, receiver: Receiver, later: int | None
) -> None:
    receiver.statuses, receiver.retry_after = [502], "7200"
    harness.write_change("opened")
    harness.send_due()
    assert harness.send_due(20) == 0, "it is respected"
    waited = 20
    while harness.rows()[0][1] == "pending":
        waited += 1
        if waited == later:
            harness.write_change("opened", "gpu:n2.0")
        harness.send_due(1)
        assert waited <= 301
    assert waited == (300 if later is None else later + 1), "due with the next pass after the other page"
    assert {row for row in harness.rows() if row[2] == 2} == {("firing", "delivered", 2)}


def test_a_message_that_is_refused_with_retry_after_is_retried_as_planned_while_others_are_accepted(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    receiver.refuses["gpu:n1.0"], receiver.retry_after = 502, "300"
    harness.write_change("opened")
    tried = []
    for second in range(100):
        if second % 2:
            harness.write_change("opened", f"gpu:m{second}.0")
        before = len(receiver.posts)
        harness.send_due(1)
        tried += [second for _, cause in receiver.alerts[before:] if cause == "gpu:n1.0"]
    assert len(tried) == 4, tried
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert all(planned <= gap <= planned + 2 for gap, planned in zip(gaps, RETRY_S, strict=False)), gaps


def test_a_page_waits_for_one_ticket_at_most_and_an_incident_keeps_its_order(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    """One ticket of thirty becomes a page while others are sent, after a page that opened."""
    real, seen = harness.notifier._call, set[int]()

    def call(request: Any, **more: Any) -> Any:
        at = len(receiver.posts)
        if at in (3, 10) and at not in seen:
            seen.add(at)
            new: dict[str, Any] = {"kind": "opened", "cause": "gpu:page.0"}
            harness.write_change(**(new if at == 3 else {"kind": "worsened", "cause": "gpu:t25.0"}))
            harness.notifier.wake()
        return real(request, **more)

    for number in range(30):
        harness.write_change("opened", f"gpu:t{number:02}.0", severity="ticket")
    harness.notifier._call = call  # type: ignore[assignment]
    while harness.send_due():
        pass
    causes = [cause for _, cause in receiver.alerts]
    assert causes[4] == "gpu:page.0", "the fourth ticket was on its way"
    assert [n for n, cause in enumerate(causes) if cause == "gpu:t25.0"] == [11, 12]
    assert [key for key, body in receiver.posts[11:13]] == ["inc-gpu:t25.0.1.r0", "inc-gpu:t25.0.2.r0"]
    tickets = [cause for cause in causes if cause not in ("gpu:page.0", "gpu:t25.0")]
    assert tickets == [f"gpu:t{number:02}.0" for number in range(30) if number != 25]
    assert {state for _, state, _ in harness.rows()} == {"delivered"}


def test_setting_the_clock_back_delays_no_alert_and_no_watchdog(harness: NotifierHarness, receiver: Receiver) -> None:
    receiver.statuses = [500] * 4
    harness.write_change("opened")
    for _ in range(4):
        harness.send_due(10)
    harness.notifier.send_watchdog("r0")
    assert harness.send_due(-2 * 3600) == 1
    assert harness.rows()[0][1] == "delivered"
    heard = len(receiver.posts)
    harness.now += WATCHDOG_INTERVAL_S * SECOND
    harness.notifier.send_watchdog("r0")
    assert len(receiver.posts) == heard + 1


def test_a_new_payload_is_sent_without_waiting_for_the_next_poll(
    harness: NotifierHarness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "POLL_S", 60.0)
    stop = threading.Event()
    runner = threading.Thread(target=harness.notifier.run, args=(stop,))
    runner.start()
    try:
        assert receiver.arrived.wait(5), "the Watchdog, so that the thread waits now"
        receiver.arrived.clear()
        harness.write_change("opened")
        harness.notifier.wake()
        assert receiver.arrived.wait(5)
    finally:
        stop.set()
        runner.join(10)
    assert not runner.is_alive()


def test_delays_follow_the_schedule_with_jitter_from_two_minutes_on(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    receiver.refuses["gpu:n1.0"] = 503
    harness.write_change("opened")
    waits = []
    for _ in RETRY_S:
        harness.notifier.health["r0"].record_success()  # it accepts other messages
        assert harness.send_due() == 1
        assert harness.database is not None
        due = harness.database.cursor().execute("SELECT epoch_us(next_attempt) FROM outbox").fetchall()[0][0]
        waits.append((due - harness.now) / SECOND)
        harness.now = due
    assert waits[:3] == [1, 5, 30]
    for wait, planned in zip(waits[3:], RETRY_S[3:], strict=True):
        assert 0.9 * planned <= wait <= 1.1 * planned
        assert wait != planned
    assert harness.send_due() == 1
    assert harness.rows() == [("firing", "dead", 9)]
    assert harness.send_due(1e6) == 0
    assert harness.read_answer() == "HTTP 503, 9 times"


def test_the_resolve_waits_until_the_trigger_is_delivered(harness: NotifierHarness, receiver: Receiver) -> None:
    receiver.statuses = [503]
    harness.write_change("opened")
    harness.resolve()
    harness.write_change("opened", "gpu:n2.0")
    harness.send_due()
    assert receiver.alerts == [("firing", "gpu:n1.0"), ("firing", "gpu:n2.0")], "another incident does not wait"
    harness.send_due(301)
    harness.send_due()
    assert receiver.alerts[2:] == [("firing", "gpu:n1.0"), ("resolved", "gpu:n1.0")]


def test_a_hanging_receiver_thread_is_reported(running: NotifierHarness, receiver: Receiver) -> None:
    running.broken = ""
    until(lambda: receiver.posts and running.notifier.describe_trouble() is None)
    running.hang.clear()
    running.now += WATCHDOG_INTERVAL_S * SECOND
    until(lambda: running.hung)
    running.monotonic += 61
    assert running.notifier.describe_trouble() == "receiver r0: thread has not responded for 61 s in Watchdog"
    running.hang.set()
    until(lambda: running.notifier.describe_trouble() is None)


def test_one_receiver_does_not_wait_for_another(tmp_path: Path, receiver: Receiver) -> None:
    harness = NotifierHarness(tmp_path, ["http://127.0.0.1:1/", f"http://127.0.0.1:{receiver.server_port}/"])
    harness.write_change("opened")
    harness.send_due(name="r0")
    harness.send_due(name="r1")
    assert receiver.alerts == [("firing", "gpu:n1.0")]
    assert sorted(row[1] for row in harness.rows()) == ["delivered", "pending"]
    harness.close()


def test_queued_payloads_survive_a_restart(harness: NotifierHarness, receiver: Receiver) -> None:
    harness.write_change("opened")
    harness.restart()
    harness.send_due()
    assert receiver.alerts == [("firing", "gpu:n1.0")]


def test_kill_9_between_enqueue_and_delivery_loses_nothing(harness: NotifierHarness, receiver: Receiver) -> None:
    """The killed process had committed an incident with its alert and stopped in the middle of the post."""
    harness.close()
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pipeline.incidents.changes import Change
        from pipeline.config.receivers import Notify, Webhook
        from pipeline.model.records import Incident
        from pipeline.notify import delivery
        from pipeline.notify.outbox import Notifier
        from pipeline.incidents import ledger
        from pipeline.store.database import Database
        from pathlib import Path
        import socket
        trap = socket.create_server(("127.0.0.1", 0))
        hook = Webhook("r0", f"http://127.0.0.1:{{trap.getsockname()[1]}}/")
        database = Database(Path({str(harness.folder)!r}) / "store.duckdb")
        notifier = Notifier(database, Notify((hook,)), "here", lambda: {START})
        one = Incident("inc-1", "gpu:n1.0", {START}, {START}, "page", "wrong", "sdc", "gpu:n1.0", ("gpu:n1.0",))
        change = Change("opened", one, {START}, "fleetpulse")
        with database.transaction() as connection:
            ledger.write_changes(connection, [], [change], notifier.make_payloads([change], {START}), {START})
        print("committed", flush=True)
        notifier.send_due("r0")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "committed\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    harness.restart()
    assert harness.send_due() == 1
    assert receiver.alerts == [("firing", "gpu:n1.0")]
    assert [key for key, _ in receiver.posts] == ["inc-1.1.r0"]


def test_the_threads_deliver_and_stop_on_request(harness: NotifierHarness, receiver: Receiver) -> None:
    harness.alive = False
    stop = threading.Event()
    thread = threading.Thread(target=harness.notifier.run, args=(stop,))
    thread.start()
    harness.write_change("opened")
    assert receiver.arrived.wait(10)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert receiver.alerts == [("firing", "gpu:n1.0")]


@pytest.fixture
def running(harness: NotifierHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotifierHarness]:
    """A notifier whose threads run, with short pauses."""
    monkeypatch.setattr(outbox, "POLL_S", 0.01)
    monkeypatch.setattr(outbox, "FAULT_PAUSE_S", 0.01)
    harness.broken, stop = "the watchdog is broken", threading.Event()
    thread = threading.Thread(target=harness.notifier.run, args=(stop,))
    thread.start()
    yield harness
    stop.set()
    thread.join(10)


def test_a_fault_of_the_watchdog_is_logged_once_with_its_trace_and_delays_no_alert(
    running: NotifierHarness, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    until(running.notifier.describe_trouble)
    running.write_change("opened")
    until(lambda: receiver.posts)
    assert receiver.alerts == [("firing", "gpu:n1.0")]
    assert running.notifier.describe_trouble() == "receiver r0: Watchdog: RuntimeError: the watchdog is broken"
    running.broken = "another fault"
    until(lambda: len(caplog.records) > 1)
    assert [r.exc_info is not None for r in caplog.records] == [True, True], "two faults, each logged once"
    running.broken = ""
    until(lambda: running.notifier.describe_trouble() is None)
    until(lambda: ("firing", "site:here") in receiver.alerts)


def test_a_fault_of_the_outbox_is_reported_until_it_is_fixed(running: NotifierHarness, receiver: Receiver) -> None:
    running.broken = ""
    until(lambda: receiver.posts and running.notifier.describe_trouble() is None)
    assert running.database is not None
    good = running.database.connection
    with running.database.transaction() as connection:
        connection.execute("ALTER TABLE outbox RENAME TO away")
    until(running.notifier.describe_trouble)
    assert "receiver r0: alerts: CatalogException: " in str(running.notifier.describe_trouble())
    good.execute("ALTER TABLE away RENAME TO outbox")
    running.write_change("opened")
    until(lambda: ("firing", "gpu:n1.0") in receiver.alerts)
    until(lambda: running.notifier.describe_trouble() is None)


def test_the_watchdog_fires_at_the_start_and_every_five_minutes(harness: NotifierHarness, receiver: Receiver) -> None:
    for seconds in (0, 0, WATCHDOG_INTERVAL_S - 1, 1, 1):
        harness.now += seconds * SECOND
        harness.notifier.send_watchdog("r0")
    assert receiver.alerts == [("firing", "site:here")] * 2
    assert len({body["alerts"][0]["startsAt"] for _, body in receiver.posts}) == 1
    assert harness.rows() == [], "a late heartbeat is useless: it is never queued"


def test_the_watchdog_stops_while_the_pipeline_does_not_work(harness: NotifierHarness, receiver: Receiver) -> None:
    harness.alive = False
    harness.notifier.send_watchdog("r0")
    assert receiver.posts == []
    harness.alive = True
    harness.notifier.send_watchdog("r0")
    assert len(receiver.posts) == 1


def test_resolved_alerts_are_deleted_after_a_week_and_open_ones_are_not(harness: NotifierHarness) -> None:
    for cause in ("gpu:n1.0", "gpu:n2.0"):
        harness.write_change("opened", cause)
    harness.resolve("gpu:n1.0")
    harness.send_due()
    harness.send_due()
    assert len(harness.rows()) == 3
    harness.pass_time(RETENTION_S + 60)
    stop = threading.Event()
    stop.set()
    harness.notifier.run(stop)
    assert harness.rows() == [("firing", "delivered", 1)]


def test_payloads_of_a_removed_receiver_are_marked_dead(harness: NotifierHarness) -> None:
    harness.write_change("opened")
    harness.urls = []
    harness.restart()
    stop = threading.Event()
    stop.set()
    harness.notifier.run(stop)
    assert harness.rows() == [("firing", "dead", 0)]
    assert harness.read_answer() == "the receiver is no longer configured"


def test_two_receivers_with_the_same_name_are_refused(harness: NotifierHarness) -> None:
    twice = Notify((Webhook("a", "https://x.example/"), Webhook("a", "https://y.example/")))
    assert harness.database is not None
    with pytest.raises(ConfigError, match="same"):
        Notifier(harness.database, twice, "here", lambda: START)


def test_a_message_that_cannot_be_made_is_reported_no_longer_than_other_refused_ones(
    harness: NotifierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.write_change("opened")
    with monkeypatch.context() as patch:
        patch.setattr(harness.notifier.receivers["r0"], "send", lambda *_: 1 / 0)
        harness.send_due()
    assert harness.rows() == [("firing", "pending", 1)]
    assert harness.notifier.describe_trouble() is None, "reported from the third attempt on"
    harness.send_due(10)
    assert harness.rows() == [("firing", "delivered", 2)]


def test_a_clock_set_forward_ends_no_page_that_waits(harness: NotifierHarness, receiver: Receiver) -> None:
    receiver.statuses = [500]
    harness.write_change("opened")
    harness.send_due()
    harness.now += 8 * 86400 * SECOND
    harness.notifier._clean_outbox()
    assert harness.rows() == [("firing", "pending", 1)]
    harness.pass_time(8 * 86400)
    harness.notifier._clean_outbox()
    assert harness.rows() == [("firing", "dead", 1)]


def test_after_a_restart_no_message_waits_for_longer_than_the_longest_delay(
    harness: NotifierHarness, receiver: Receiver
) -> None:
    receiver.statuses = [500]
    harness.write_change("opened")
    harness.now += 86400 * SECOND  # the clock is ahead for one attempt
    harness.send_due()
    harness.now -= 86400 * SECOND
    assert harness.database is not None
    harness.database.connection.execute("UPDATE outbox SET created = make_timestamptz($1::BIGINT)", [START])
    harness.restart()
    assert harness.send_due() == 1
    assert harness.rows() == [("firing", "delivered", 2)]
