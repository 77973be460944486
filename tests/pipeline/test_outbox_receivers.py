"""Receivers that refuse, go down and come back: what they missed arrives, and others hear of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.model.records import SECOND
from pipeline.notify.outbox import RETENTION_S, RETRY_S
from tests.pipeline.outbox_line import Desk, Receiver


@pytest.mark.parametrize("status", [302, 307, 400, 401, 403, 404, 410, 413])
def test_a_page_that_was_refused_arrives_when_the_receiver_is_mended(
    desk: Desk, receiver: Receiver, status: int
) -> None:
    receiver.script = [status] * 5
    desk.change("opened")
    desk.end()
    for _ in range(7):
        desk.step(5)
    assert receiver.alerts[-2:] == [("firing", "gpu:n1.0"), ("resolved", "gpu:n1.0")]
    assert [row[:2] for row in desk.rows()] == [("firing", "delivered"), ("resolved", "delivered")]


def test_a_receiver_that_is_down_is_probed_every_five_seconds_and_later_every_thirty(
    desk: Desk, receiver: Receiver
) -> None:
    receiver.refuses["gpu:n1.0"] = 410
    desk.change("opened")
    posts = [second for second in range(1200) if desk.step(1)]
    gaps = [b - a for a, b in itertools.pairwise(posts)]
    assert gaps[:2] == [1, 5]
    assert set(gaps[3:100]) == {5}
    assert set(gaps[-15:]) == {30}
    assert desk.rows() == [("firing", "pending", 3)], "a probe is no attempt of the message's schedule"


def test_a_receiver_that_recovers_gets_everything_at_once_the_oldest_page_first(desk: Desk, receiver: Receiver) -> None:
    receiver.script = [503] * 40
    for i, severity in enumerate(("ticket", "page", "page", "ticket", "page")):
        desk.change("opened", f"gpu:n{i}.0", severity=severity)
        desk.step(7)
    while receiver.script:
        desk.step(1)
    before = len(receiver.got)
    for _ in range(35):
        if desk.step(1) and len(receiver.got) > before:
            break
    while desk.step():
        pass
    causes = [cause for _, cause in receiver.alerts[before:]]
    assert sorted(causes) == [f"gpu:n{i}.0" for i in range(5)], "within the second in which it responded"
    assert [c for c in causes[1:] if c in ("gpu:n1.0", "gpu:n2.0", "gpu:n4.0")] == sorted(
        c for c in causes[1:] if c in ("gpu:n1.0", "gpu:n2.0", "gpu:n4.0")
    )


def test_one_message_that_is_always_refused_does_not_hide_that_the_receiver_is_back(
    desk: Desk, receiver: Receiver
) -> None:
    receiver.refuses["gpu:n1.0"] = 400
    receiver.script = [503] * 4
    desk.change("opened")
    desk.change("opened", "gpu:n2.0")
    for _ in range(30):
        desk.step(1)
    assert ("firing", "gpu:n2.0") in receiver.alerts
    assert not desk.notifier.health["r0"].is_down


def test_a_restart_probes_a_receiver_that_was_down_at_once(desk: Desk, receiver: Receiver) -> None:
    receiver.script = [410] * 3
    desk.change("opened")
    for _ in range(3):
        desk.step(10)
    desk.restart()
    desk.notifier.load_state()
    assert desk.step() == 1
    assert receiver.alerts[-1] == ("firing", "gpu:n1.0")
    assert desk.rows()[0][1] == "delivered"


def test_a_refused_page_is_reported_by_readiness_and_to_the_other_receivers(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    broken, whole = receivers(), receivers()
    desk = Desk(tmp_path, [f"http://127.0.0.1:{r.server_port}/" for r in (broken, whole)])
    broken.script = [302] * 12
    desk.change("opened")
    for _ in range(40):
        desk.step(1, "r0")
        desk.step(0, "r1")
    assert "receiver r0: accepts no alerts since" in str(desk.notifier.describe_trouble())
    assert "redirect" in str(desk.notifier.describe_trouble())
    down = whole.got[-1][1]["alerts"][0]
    assert (down["labels"]["alertname"], down["labels"]["severity"]) == ("ReceiverDown", "critical")
    assert down["labels"]["receiver"] == "r0"
    desk.restart()
    desk.notifier.load_state()
    for _ in range(40):
        desk.step(1, "r0")
        desk.step(0, "r1")
    up = whole.got[-1][1]["alerts"][0]
    assert (up["status"], up["fingerprint"], up["startsAt"]) == ("resolved", down["fingerprint"], down["startsAt"])
    assert desk.notifier.describe_trouble() is None
    assert broken.alerts[-1] == ("firing", "gpu:n1.0")
    desk.close()


def test_a_message_that_was_given_up_is_reported_for_an_hour(desk: Desk, receiver: Receiver) -> None:
    receiver.refuses["gpu:n1.0"] = 413
    desk.change("opened")
    for _ in range(len(RETRY_S) + 1):
        desk.notifier.health["r0"].record_success()
        desk.step(1.2 * RETRY_S[-1])
    assert desk.rows() == [("firing", "dead", 9)]
    desk.notifier.health["r0"].record_success()
    assert desk.notifier.describe_trouble() == "receiver r0: 1 alert refused: HTTP 413, 9 times"
    desk.step(3600)
    assert desk.notifier.describe_trouble() is None


def test_the_end_of_what_a_receiver_was_sent_waits_for_it_longer_than_a_week(desk: Desk, receiver: Receiver) -> None:
    desk.change("opened")
    desk.step()
    desk.end()
    desk.change("opened", "gpu:n2.0")
    receiver.script = [503] * 4
    for _ in range(3):
        desk.step(10)
    desk.now += (RETENTION_S + 60) * SECOND
    stop = threading.Event()
    stop.set()
    desk.notifier.run(stop)
    assert [row[:2] for row in desk.rows()] == [("firing", "delivered"), ("resolved", "pending"), ("firing", "dead")]
    desk.step()
    assert receiver.alerts[-1] == ("resolved", "gpu:n1.0")
