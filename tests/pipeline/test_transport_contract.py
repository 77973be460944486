"""What ingest may rely on, held against every transport. A transport joins with one fixture class in SOURCES."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from agents.spool import Spool
from pipeline import wire
from pipeline.errors import GapError
from pipeline.transport import Partition, Transport
from pipeline.transport.spool import SpoolTransport


class Source(Protocol):
    """The far side of a transport under test: two nodes that send, and a way to lose what was sent first."""

    def send(self, node: str, bodies: list[bytes]) -> None: ...
    def lose_first(self, node: str) -> None: ...
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

    def lose_first(self, node: str) -> None:
        while not self.spools[node].dropped:
            self.send(node, [bytes(100)])

    def transport(self) -> Transport:
        return SpoolTransport(self.folder)

    def close(self) -> None:
        for spool in self.spools.values():
            spool.close()


SOURCES = (SpoolSource,)


@pytest.fixture(params=SOURCES, ids=lambda s: s.__name__)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    made: Source = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def transport(source: Source) -> Iterator[Transport]:
    made = source.transport()
    yield made
    made.close()


def partition_of(transport: Transport, node: str) -> Partition:
    """The partition that holds what `node` sent."""
    for partition in transport.partitions():
        first, end = transport.bounds(partition)
        if first < end and (partition.name == node or len(transport.partitions()) == 1):
            return partition
    raise AssertionError(f"nothing of {node}")


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


@pytest.mark.parametrize("count", [1, 3, 1000])
@pytest.mark.parametrize("size", [1, 500, 1 << 20])
def test_messages_come_once_in_order_whatever_the_size_of_a_read(
    source: Source, transport: Transport, count: int, size: int
) -> None:
    bodies = [b"%d" % i * (1 + i % 40) for i in range(50)]
    source.send("n1", bodies)
    assert read_all(transport, partition_of(transport, "n1"), count, size) == bodies


def test_a_read_from_any_offset_begins_there(source: Source, transport: Transport) -> None:
    source.send("n1", [b"%d" % i for i in range(40)])
    partition = partition_of(transport, "n1")
    first, _ = transport.bounds(partition)
    for at in (39, 0, 17, 18, 3, 39, 20):
        message = transport.read(partition, first + at, 1, 1 << 20)[0]
        assert message.value[wire.ENVELOPE_BYTES :] == b"%d" % at


def test_at_the_end_there_is_nothing_until_something_is_sent(source: Source, transport: Transport) -> None:
    source.send("n1", [b"a"])
    partition = partition_of(transport, "n1")
    end = transport.bounds(partition)[1]
    assert transport.read(partition, end, 10, 1000) == []
    source.send("n1", [b"b"])
    assert transport.bounds(partition)[1] == end + 1
    assert [m.offset for m in transport.read(partition, end, 10, 1000)] == [end]


def test_a_reader_that_follows_the_writer_sees_every_message_once(source: Source, transport: Transport) -> None:
    source.send("n1", [b"0"])
    partition = partition_of(transport, "n1")
    offset, found = transport.bounds(partition)[0], []
    for i in range(1, 60):
        source.send("n1", [b"%d" % i] * (i % 3))
        while messages := transport.read(partition, offset, 100, 1 << 20):
            found += [m.offset for m in messages]
            offset = found[-1] + 1
    assert found == list(range(found[0], transport.bounds(partition)[1]))


def test_a_new_sender_appears_and_known_partitions_stay_as_they_were(source: Source, transport: Transport) -> None:
    source.send("n1", [b"a"])
    before = transport.partitions()
    source.send("n2", [b"b"])
    after = transport.partitions()
    assert set(before) <= set(after)
    assert after == transport.partitions()


def test_an_offset_that_is_gone_raises_a_gap_that_says_where_to_go_on(source: Source, transport: Transport) -> None:
    source.send("n1", [b"first"])
    partition = partition_of(transport, "n1")
    first = transport.bounds(partition)[0]
    source.lose_first("n1")
    with pytest.raises(GapError) as caught:
        transport.read(partition, first, 10, 1 << 20)
    gap = caught.value
    assert (gap.topic, gap.partition, gap.first) == (partition.topic, partition.name, first)
    assert first < gap.next_offset <= transport.bounds(partition)[1]
    assert transport.read(partition, gap.next_offset, 1, 1000)[0].offset == gap.next_offset


def test_a_second_transport_goes_on_from_a_stored_offset(source: Source, transport: Transport) -> None:
    source.send("n1", [b"%d" % i for i in range(10)])
    partition = partition_of(transport, "n1")
    middle = transport.bounds(partition)[0] + 6
    transport.committed(partition, middle)
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


def test_it_can_be_reached_and_closed_twice(source: Source, transport: Transport) -> None:
    source.send("n1", [b"a"])
    assert transport.reachable() is None
    transport.close()
    transport.close()
