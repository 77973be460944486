"""Copies of dead letters: a missing topic is reported with the fix, once each time it begins to fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from pipeline.config.sections import Kafka
from pipeline.model.records import TELEMETRY
from pipeline.transport import Message, Partition, topics
from pipeline.transport import dead_letter_topics as copying
from pipeline.transport.dead_letter_topics import PAUSE_S, DeadLetterTopics
from tests.kafka_broker import Address, reserve_port
from tests.kafka_clients import SECONDS, delete_topics, make_topic, make_topics, read

COPIES = topics.dead_letter_topic(TELEMETRY)
LETTER = Message(Partition(TELEMETRY, "0", "x"), 7, b"garbage")
Made = Callable[[Kafka], DeadLetterTopics]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_copies(clock: Clock) -> Iterator[Made]:
    made: list[DeadLetterTopics] = []

    def make(kafka: Kafka) -> DeadLetterTopics:
        made.append(DeadLetterTopics(kafka, clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_until_arrived(kafka: Address, count: int, retry: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while len(read(kafka, COPIES)) < count:
        assert time.monotonic() < end, f"no {count} copies within {SECONDS} s"
        retry()
        time.sleep(0.05)


def wait_until_counted(one: DeadLetterTopics, skipped: int) -> None:
    end = time.monotonic() + SECONDS
    while one.skipped < skipped:
        assert time.monotonic() < end, f"{one.skipped} missing copies counted; expected {skipped}"
        time.sleep(0.01)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the variable part of our log lines."""
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("fleetpulse")]
    return [line.split("the table dead_letter has them: ")[1] for line in lines]


def test_a_missing_topic_is_reported_with_the_fix_and_again_after_it_had_worked(
    kafka: Address, make_copies: Made, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "TOPIC_WAIT_S", 1.0)
    one = make_copies(make_topics(kafka))
    delete_topics(kafka, [COPIES])
    message = f"topic {COPIES}: does not exist: run `fleetpulse init`"

    def again() -> None:
        clock.now += PAUSE_S
        one.send(LETTER, "garbage")

    for count in range(3):
        again()
        wait_until_counted(one, count + 1)
    assert messages(caplog) == [message]
    make_topic(kafka, COPIES)
    wait_until_arrived(kafka, 1, again)
    delete_topics(kafka, [COPIES])
    other = make_copies(one._kafka)  # the first client still uses its topic for minutes
    other.send(LETTER, "garbage")
    wait_until_counted(other, 1)
    assert messages(caplog) == [message, message]


def test_a_failure_is_reported_again_when_copies_arrived_in_between(caplog: pytest.LogCaptureFixture) -> None:
    one = DeadLetterTopics(Kafka())
    for came in (False, False, True, True, False, False):
        if came:
            one._count_delivered(0)
        else:
            one._count_failed(0, "the disk is full")
    assert len(caplog.records) == 2
    assert all("the disk is full" in record.getMessage() for record in caplog.records)
    assert one.skipped == 4


@pytest.mark.refusals
def test_unreachable_brokers_are_not_reported_as_a_missing_topic(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "TOPIC_WAIT_S", 0.5)
    with reserve_port() as port:
        one = DeadLetterTopics(Kafka(f"127.0.0.1:{port.getsockname()[1]}"))
        one.send(LETTER, "garbage")
        wait_until_counted(one, 1)
        one.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("fleetpulse")]
    assert f"topic {COPIES}: no broker responds in time" in message


def test_a_password_file_that_is_being_replaced_raises_no_error(
    make_copies: Made, caplog: pytest.LogCaptureFixture
) -> None:
    one = make_copies(Kafka(security_protocol="SASL_SSL", username="u"))
    one.send(LETTER, "garbage")
    wait_until_counted(one, 1)
    (record,) = caplog.records
    assert "expected username and password_file" in record.getMessage()


@pytest.mark.refusals
def test_a_slow_broker_delays_no_ingest_and_copies_wait_for_it_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "TOPIC_WAIT_S", 2.0)
    with reserve_port() as port:
        one = DeadLetterTopics(Kafka(f"127.0.0.1:{port.getsockname()[1]}"))
        large = LETTER._replace(value=bytes(copying.WAITING_BYTES // 2))
        began = time.monotonic()
        for letter in (large, large, LETTER):
            one.send(letter, "garbage")
        assert time.monotonic() - began < 0.5
        assert one.skipped == 1
        wait_until_counted(one, 3)  # the thread waits for no broker any more when the test ends
        one.close()
