"""Firing alerts do not end at an Alertmanager while a limit of the rate pauses the messages to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.receivers import Alertmanager, Notify
from pipeline.model.records import SECOND, iso
from tests.pipeline.notifier_harness import NotifierHarness
from tests.pipeline.receiver_servers import Service
from tests.pipeline.test_receivers import service

__all__ = ["service"]
INTERVAL_S = 15


@pytest.fixture
def harness(tmp_path: Path, service: Service) -> Iterator[NotifierHarness]:
    receiver = Alertmanager("am", (service.url,), resend_interval=f"{INTERVAL_S}s")
    made = NotifierHarness(tmp_path, [], Notify(alertmanagers=(receiver,)))
    yield made
    made.close()


def step(harness: NotifierHarness, seconds: float) -> None:
    harness.send_due(seconds, "am")
    harness.notifier.send_watchdog("am")


def read_end(service: Service) -> str:
    """Returns when the Alertmanager will end the page, by the newest push that it accepted."""
    pushed = [a for body in service.bodies("/api/v2/alerts") for a in body if a["labels"].get("cause") == "gpu:n1.0"]
    return str(pushed[-1]["endsAt"])


@pytest.mark.parametrize("limits", [1, 2], ids=["one limited push", "and a limited push after it"])
def test_a_long_pause_after_one_limit_ends_no_firing_alert(
    harness: NotifierHarness, service: Service, limits: int
) -> None:
    harness.write_change("opened")
    step(harness, 1)
    service.retry_after, service.behave = "300", ["429"] * limits
    ends = []
    for _ in range(100):
        step(harness, 3)
        ends.append((read_end(service), iso(harness.now)))
    assert [now for end, now in ends if end <= now] == []
    assert service.behave == []


def test_a_pause_keeps_resends_back_that_are_not_needed_yet(harness: NotifierHarness, service: Service) -> None:
    harness.write_change("opened")
    step(harness, 1)
    service.retry_after, service.behave = "20", ["429"]
    step(harness, INTERVAL_S)
    before = len(service.received)
    step(harness, 12)
    assert len(service.received) == before
    step(harness, 8)
    assert len(service.received) > before


def test_a_push_that_is_accepted_in_a_pause_ends_it(harness: NotifierHarness, service: Service) -> None:
    harness.write_change("opened")
    step(harness, 1)
    service.retry_after, service.behave = "300", ["429", "429"]
    harness.write_change("opened", "gpu:n2.0")
    for _ in range(20):
        step(harness, 3)
    causes = {a["labels"].get("cause") for body in service.bodies("/api/v2/alerts") for a in body}
    assert "gpu:n2.0" in causes
    assert service.behave == []


def test_setting_the_clock_back_delays_a_resend_by_one_interval_at_most(
    harness: NotifierHarness, service: Service
) -> None:
    harness.write_change("opened")
    step(harness, 1)
    before = len(service.received)
    harness.now -= 3600 * SECOND
    step(harness, 0)
    step(harness, INTERVAL_S)
    assert len(service.received) > before
