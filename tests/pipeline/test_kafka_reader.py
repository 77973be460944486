"""KafkaTransport with client errors: it recovers, and loses none of the messages it has fetched."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from kafka import TopicPartition
from kafka.errors import CorruptRecordError, UnsupportedCodecError

from pipeline.model.errors import GapError, Retryable
from pipeline.model.records import TELEMETRY
from pipeline.transport import Message, Partition, broker_watch, topics
from pipeline.transport.broker_watch import BrokerWatch
from pipeline.transport.kafka import HELD_MS, LONG_POLL_MS, KafkaTransport, PartitionBuffer
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import make_topics, untidy_refusals, write
from tests.pipeline.kafka_pipeline import wait_until

PATIENCE_S = 40.0
PLACE = TopicPartition(TELEMETRY, 3)


def read_all(transport: KafkaTransport, done: Callable[[list[bytes]], bool]) -> tuple[list[bytes], list[int]]:
    """Returns (values, lost offsets) of telemetry.v1, by partition as they arrive."""
    values: list[bytes] = []
    gone: list[int] = []
    at: dict[Partition, int] = {}
    end = time.monotonic() + PATIENCE_S
    while not done(values):
        assert time.monotonic() < end, f"{len(values)} values within {PATIENCE_S} s"
        for partition in transport.partitions():
            try:
                found = transport.read(partition, at.setdefault(partition, 0), 64, 20_000)
            except Retryable:
                continue
            except GapError as gap:
                gone += range(gap.first, gap.next_offset)
                at[partition] = gap.next_offset
                continue
            at[partition] += len(found)
            values += [message.value for message in found]
    return values, gone


def test_an_unexpected_error_while_watching_the_brokers_is_visible_and_the_checks_go_on(
    kafka: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no consumer group, and so no listener whose failure a client could hide; this is the rest of it."""
    monkeypatch.setattr(broker_watch, "CHECK_EVERY_S", 0.1)
    check = BrokerWatch._check_topics
    failures = [RuntimeError("a bug")] * 2

    def fail(self: BrokerWatch, admin: object) -> None:
        if failures:
            raise failures.pop()
        check(self, admin)

    monkeypatch.setattr(BrokerWatch, "_check_topics", fail)
    watch = BrokerWatch(make_topics(kafka), (), topics.READ)
    wait_until(lambda: "RuntimeError: a bug" in str(watch.current_problem()), PATIENCE_S, "the error is reported")
    wait_until(lambda: watch.current_problem() is None, PATIENCE_S, "a later check succeeds")
    assert watch.is_answering
    watch.close()


def test_the_reader_joins_no_consumer_group(kafka: Address) -> None:
    transport = KafkaTransport(make_topics(kafka))
    wait_until(transport.partitions, PATIENCE_S, "the first answer")
    assert transport._consumer.config["group_id"] is None
    assert not transport._consumer.config["enable_auto_commit"]
    transport.close()


def test_a_request_of_an_idle_reader_is_held_longer_and_a_record_ends_it(kafka: Address) -> None:
    """So the loop may pause: the record is here after it, and no partition waits behind one without records."""
    transport = KafkaTransport(make_topics(kafka))
    wait_until(transport.partitions, PATIENCE_S, "the first answer")
    held = transport._consumer._fetcher.config
    assert held["fetch_max_wait_ms"] == LONG_POLL_MS
    wait_until(lambda: read_once(transport) == [] and held["fetch_max_wait_ms"] == HELD_MS, PATIENCE_S, "idle")
    write(kafka, TELEMETRY, [b"a"])
    wait_until(lambda: read_once(transport) == [b"a"], PATIENCE_S, "the record")
    transport.close()


def read_once(transport: KafkaTransport) -> list[bytes]:
    """Returns the values of telemetry.v1 that one pass over all partitions gives, from their start."""
    found = []
    for partition in transport.partitions():
        with suppress(Retryable):
            found += [message.value for message in transport.read(partition, 0, 64, 20_000)]
    return found


@pytest.mark.slow
@pytest.mark.refusals
def test_a_reader_whose_broker_stopped_before_its_first_read_continues_when_it_is_back(own_broker: Broker) -> None:
    kafka = make_topics(own_broker)
    write(own_broker, TELEMETRY, [b"a", b"b", b"c"])
    with untidy_refusals():
        transport = KafkaTransport(kafka)
        partitions = transport.partitions()
        own_broker.kill()
        for partition in partitions:
            try:
                assert transport.read(partition, 0, 10, 1000) == []
            except Retryable:
                continue
        own_broker.start()
        values, _ = read_all(transport, lambda values: len(values) >= 3)
        assert values == [b"a", b"b", b"c"]
        transport.close()


@pytest.mark.slow
def test_only_the_damaged_message_is_lost_and_none_of_the_fetched_ones(own_broker: Broker) -> None:
    kafka = make_topics(own_broker)
    names = [b"%04d" % i + bytes(300) for i in range(400)]
    write(own_broker, TELEMETRY, names, batch_size=1)
    for key in ("n1", "n2", "n3"):
        write(own_broker, TELEMETRY, [b"other" + bytes(300)] * 300, key=key, batch_size=1)
    own_broker.stop()
    for segment in own_broker.log_dirs.glob(f"{TELEMETRY}-*/*.log"):
        data = bytearray(segment.read_bytes())
        if (at := data.find(b"0390" + bytes(300))) >= 0:
            data[at + 50] ^= 0xFF
            segment.write_bytes(data)
    own_broker.start()
    transport = KafkaTransport(kafka)
    values, gone = read_all(transport, lambda values: len(values) >= 400 + 900 - 1)
    assert sorted(value for value in values if value[:1] == b"0") == [name for i, name in enumerate(names) if i != 390]
    assert len(gone) == 1
    transport.close()


class FailingClient:
    """A client whose polls raise; `closed` once it is dropped."""

    def __init__(self, error: Exception) -> None:
        self.error, self.closed = error, False

    def hold_requests(self, wait_ms: int) -> None:
        """Requests are not sent."""

    def pause(self, tp: TopicPartition) -> None:
        """Nothing is fetched."""

    def poll(self, wait_ms: int) -> dict[TopicPartition, list[Message]]:
        raise self.error

    def close(self, **how: object) -> None:
        self.closed = True


def poll_once(error: Exception) -> tuple[KafkaTransport, FailingClient]:
    """A transport without brokers, after one poll that raised; an error that the transport raises is left."""
    transport, client = object.__new__(KafkaTransport), FailingClient(error)
    transport._monotonic, transport._client = time.monotonic, client
    transport._buffers = {PLACE: PartitionBuffer(Partition(TELEMETRY, "3", "id"))}
    with suppress(Retryable):
        transport._poll(0)
    return transport, client


def test_a_client_that_fails_in_an_unknown_way_is_dropped_and_created_again() -> None:
    transport, client = poll_once(AssertionError("a state that cannot be"))
    assert (client.closed, transport._client, transport._buffers) == (True, None, {})


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        (None, "damaged on the broker: wrong checksum"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "unreadable: malformed records"),
        (UnsupportedCodecError("Libraries for lz4 compression codec not found"), "lz4 compression codec not found"),
    ],
)
def test_what_cannot_be_read_is_a_gap_of_its_partition_with_its_cause(why: Exception | None, cause: str) -> None:
    error = CorruptRecordError(f"Record batch for partition {PLACE} at offset 1")
    error.__cause__ = why
    transport, client = poll_once(error)
    buffer = transport._buffers[PLACE]
    assert (client.closed, buffer.paused, buffer.stuck) == (False, True, True)
    assert buffer.damage.endswith(cause)
