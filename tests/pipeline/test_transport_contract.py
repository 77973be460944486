"""The contract of ingest with every transport. A new transport adds one fixture class to SOURCES."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from kafka import TopicPartition

from agents.node.spool.spool import Spool
from pipeline.model.errors import GapError, Retryable
from pipeline.transport import Message, Partition, Transport, kafka_clients, wire
from pipeline.transport.kafka import KafkaTransport
from pipeline.transport.spool import SpoolTransport
from tests.kafka_broker import Address
from tests.kafka_clients import admin_of, kafka_of, make_topic

pytestmark = pytest.mark.walk

T = TypeVar("T")


class Source(Protocol):
    """The senders of a transport under test: nodes that send, and a way to lose their first messages."""

    def send(self, node: str, bodies: list[bytes]) -> None: ...
    def delete_first(self, node: str) -> None: ...
    def holds(self, partition: Partition, node: str) -> bool: ...
    def transport(self) -> Transport: ...
    def close(self) -> None: ...


class SpoolSource:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spools: dict[str, Spool] = {}

    def send(self, node: str, bodies: list[bytes]) -> None:
        if node not in self.spools:
            self.spools[node] = Spool(
                self.folder, node, "telemetry.v1", max_bytes=8000, segment_bytes=1000, free_bytes=0
            )
        self.spools[node].append_many(bodies, wire.TELEMETRY_KIND, 0)
        self.spools[node].sync()

    def delete_first(self, node: str) -> None:
        while not self.spools[node].dropped:
            self.send(node, [bytes(100)])

    def holds(self, partition: Partition, node: str) -> bool:
        return partition.name == node

    def transport(self) -> Transport:
        return SpoolTransport(self.folder)

    def close(self) -> None:
        for spool in self.spools.values():
            spool.close()


class KafkaSource:
    """A separate topic on a real broker."""

    def __init__(self, address: Address) -> None:
        self.address, self.topic = address, f"contract-{secrets.token_hex(4)}"
        self.numbers: dict[str, int] = {}
        self.sequence = 0
        make_topic(address, self.topic, 3)
        self.producer = kafka_clients.create_producer(kafka_of(address), "contract")

    def send(self, node: str, bodies: list[bytes]) -> None:
        sent = []
        for body in bodies:
            message = wire.seal(body, wire.TELEMETRY_KIND, bytes(16), self.sequence, 0, False)
            self.sequence += 1
            sent.append(self.producer.send(self.topic, message, key=node.encode()))
        for future in sent:
            self.numbers[node] = future.get(timeout=20).partition

    def delete_first(self, node: str) -> None:
        self.send(node, [b"later"])
        with admin_of(self.address) as admin:
            admin.delete_records({TopicPartition(self.topic, self.numbers[node]): 1})

    def holds(self, partition: Partition, node: str) -> bool:
        return partition.name == str(self.numbers[node])

    def transport(self) -> Transport:
        return RetryingTransport(KafkaTransport(kafka_of(self.address), read=[self.topic]))

    def close(self) -> None:
        self.producer.close()
        with admin_of(self.address) as admin:
            admin.delete_topics([self.topic])


class RetryingTransport:
    """A transport whose caller tries again, as ingest does, while it is unknown whether there is more."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        return retry(lambda: self.inner.bounds(partition))

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        return retry(lambda: self.inner.read(partition, offset, max_messages, max_bytes))


def retry(ask: Callable[[], T], seconds: float = 20.0) -> T:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(Retryable):
            return ask()
    return ask()


def spool_source(request: pytest.FixtureRequest) -> Source:
    return SpoolSource(request.getfixturevalue("tmp_path"))


def kafka_source(request: pytest.FixtureRequest) -> Source:
    return KafkaSource(request.getfixturevalue("kafka"))


SOURCES: Sequence[Any] = (
    pytest.param(spool_source, id="spool"),
    pytest.param(kafka_source, id="kafka", marks=pytest.mark.kafka),
)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    made: Source = request.param(request)
    yield made
    made.close()


@pytest.fixture
def transport(source: Source) -> Iterator[Transport]:
    made = source.transport()
    yield made
    made.close()


def partition_of(source: Source, transport: Transport, node: str) -> Partition:
    """Returns the partition with the messages of `node`."""
    return next(p for p in transport.partitions() if source.holds(p, node))


def read_all(transport: Transport, partition: Partition, count: int, size: int) -> list[bytes]:
    offset, end = transport.bounds(partition)
    found: list[bytes] = []
    while offset < end:
        messages = transport.read(partition, offset, count, size)
        assert 1 <= len(messages) <= count
        assert [m.offset for m in messages] == list(range(offset, offset + len(messages)))
        assert {m.partition for m in messages} == {partition}
        found += [m.value[wire.ENVELOPE_BYTES :] for m in messages]
        offset += len(messages)
    return found


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 1 << 20), (3, 500), (1000, 1), (1000, 1 << 20)])
def test_messages_arrive_once_in_order_for_any_size_of_a_read(
    source: Source, transport: Transport, count: int, size: int
) -> None:
    bodies = [b"%d" % i * (1 + i % 40) for i in range(50)]
    source.send("n1", bodies)
    assert read_all(transport, partition_of(source, transport, "n1"), count, size) == bodies


def test_a_read_from_any_offset_begins_there(source: Source, transport: Transport) -> None:
    source.send("n1", [b"%d" % i for i in range(40)])
    partition = partition_of(source, transport, "n1")
    first, _ = transport.bounds(partition)
    for at in (39, 0, 17, 18, 3, 39, 20):
        message = transport.read(partition, first + at, 1, 1 << 20)[0]
        assert message.value[wire.ENVELOPE_BYTES :] == b"%d" % at


def test_at_the_end_there_is_nothing_until_something_is_sent(source: Source, transport: Transport) -> None:
    source.send("n1", [b"a"])
    partition = partition_of(source, transport, "n1")
    end = transport.bounds(partition)[1]
    assert transport.read(partition, end, 10, 1000) == []
    source.send("n1", [b"b"])
    assert transport.bounds(partition)[1] == end + 1
    assert [m.offset for m in transport.read(partition, end, 10, 1000)] == [end]


def test_a_reader_that_follows_the_writer_sees_every_message_once(source: Source, transport: Transport) -> None:
    source.send("n1", [b"0"])
    partition = partition_of(source, transport, "n1")
    offset, found = transport.bounds(partition)[0], []
    for i in range(1, 60):
        source.send("n1", [b"%d" % i] * (i % 3))
        while messages := transport.read(partition, offset, 100, 1 << 20):
            found += [m.offset for m in messages]
            offset = found[-1] + 1
    end = transport.bounds(partition)[1]
    while offset < end:  # the data may arrive a moment later over the network
        found += [m.offset for m in transport.read(partition, offset, 100, 1 << 20)]
        offset = found[-1] + 1
    assert found == list(range(found[0], end))


def test_a_new_sender_appears_and_known_partitions_stay_unchanged(source: Source, transport: Transport) -> None:
    source.send("n1", [b"a"])
    before = transport.partitions()
    source.send("n2", [b"b"])
    after = transport.partitions()
    assert set(before) <= set(after)
    assert after == transport.partitions()


def test_a_lost_offset_raises_a_gap_with_the_next_offset(source: Source, transport: Transport) -> None:
    source.send("n1", [b"first"])
    partition = partition_of(source, transport, "n1")
    first = transport.bounds(partition)[0]
    source.delete_first("n1")
    with pytest.raises(GapError) as caught:
        transport.read(partition, first, 10, 1 << 20)
    gap = caught.value
    assert (gap.topic, gap.partition, gap.first) == (partition.topic, partition.name, first)
    assert first < gap.next_offset <= transport.bounds(partition)[1]
    assert transport.read(partition, gap.next_offset, 1, 1000)[0].offset == gap.next_offset


def test_a_second_transport_continues_from_a_stored_offset(source: Source, transport: Transport) -> None:
    source.send("n1", [b"%d" % i for i in range(10)])
    partition = partition_of(source, transport, "n1")
    middle = transport.bounds(partition)[0] + 6
    transport.commit_offset(partition, middle)
    transport.close()
    second = source.transport()
    assert partition in second.partitions()
    assert [m.value[wire.ENVELOPE_BYTES :] for m in second.read(partition, middle, 10, 1000)] == [
        b"6",
        b"7",
        b"8",
        b"9",
    ]
    second.close()


def test_the_transport_can_be_checked_and_closed_twice(source: Source, transport: Transport) -> None:
    source.send("n1", [b"a"])
    assert transport.partitions()
    assert transport.find_problem() is None
    transport.close()
    transport.close()
