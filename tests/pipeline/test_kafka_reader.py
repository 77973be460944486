"""KafkaTransport with client errors: it recovers, and loses none of the messages it has fetched."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pipeline.model.errors import GapError, Retryable
from pipeline.model.records import TELEMETRY
from pipeline.transport import Partition
from pipeline.transport.kafka import KafkaTransport
from tests.kafka_broker import Broker
from tests.kafka_clients import make_topics, untidy_refusals, write

PATIENCE_S = 40.0


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
