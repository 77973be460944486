"""Record batches of fetch responses: our reader yields what kafka-python's yields, and raises what it raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.record import MemoryRecords
from kafka.record.memory_records import MemoryRecordsBuilder
from kafka.structs import TopicPartition

from pipeline.transport import Partition, record_batches
from pipeline.transport.record_batches import MessageRecords
from pipeline.transport.segments import crc32c
from pipeline.transport.signatures import HEADER

PLACE, PARTITION = TopicPartition("telemetry.v1", 3), Partition("telemetry.v1", "3", "incarnation")
SIGNED, OTHER = [(HEADER, b"s" * 32)], [("traceparent", b"00-1"), (HEADER, None)]
APPENDED_MS = 1_760_000_000_123
NONE, GZIP = 0, 1
Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]
ONE: list[Record] = [(b"n1", b"value", [])]
LONG: list[Record] = [(b"n1", bytes(500), [])]
Outcome = tuple[list[tuple[object, ...]], str, int, int, bool]


def batch(offset: int, records: Sequence[Record], codec: int = NONE, attributes: int = 8, removed: int = 0) -> bytes:
    """A batch as a broker has it, by default with append times. removed: last records that compaction removed."""
    builder = MemoryRecordsBuilder(2, codec, 1 << 20)
    for key, value, headers in records:
        assert builder.append(timestamp=APPENDED_MS - 5000, key=key, value=value, headers=headers) is not None
    builder.close()
    out = bytearray(builder.buffer())
    out[:8] = offset.to_bytes(8, "big")
    out[15] = 7  # leader epoch
    out[22] |= attributes
    out[23:27] = max(0, len(records) - 1 + removed).to_bytes(4, "big")
    out[35:43] = APPENDED_MS.to_bytes(8, "big")
    return seal(out)


def seal(out: bytearray) -> bytes:
    """The batch with the checksum of its content."""
    out[17:21] = crc32c(bytes(out[21:])).to_bytes(4, "big")
    return bytes(out)


def legacy(offset: int) -> bytes:
    """A batch in the format before Kafka 0.11."""
    builder = MemoryRecordsBuilder(1, NONE, 1 << 20, offset=offset)
    assert builder.append(timestamp=APPENDED_MS, key=b"n1", value=b"old") is not None
    builder.close()
    return bytes(builder.buffer())


def take_all(part: Any, describe: Any) -> Outcome:
    """(records, error after them, offset to fetch next, leader epoch, whether it is used up)."""
    found: list[Any] = []
    error = ""
    for _ in range(3):
        try:
            if part.record_iterator is not None:
                found += part.take(10**9)
        except Exception as raised:  # noqa: BLE001 - whatever the library raises
            error = f"{type(raised).__name__}: {raised}"
            break
    return [describe(one) for one in found], error, part.next_fetch_offset, part.leader_epoch, not part


def describe_record(record: Any) -> tuple[object, ...]:
    signature = next((value for name, value in record.headers if name == HEADER), None)
    appended = record.timestamp * 1000 if record.timestamp_type == 1 else 0
    return PARTITION, record.offset, record.value or b"", appended, record.key, signature


def read_both(data: bytes, start: int = 0) -> tuple[Outcome, Outcome]:
    ours = MessageRecords(start, PLACE, MemoryRecords(data), partition_of=lambda _: PARTITION)
    theirs = Fetcher.PartitionRecords(start, PLACE, MemoryRecords(data))
    return take_all(ours, tuple), name_partition(take_all(theirs, describe_record))


def name_partition(outcome: Outcome) -> Outcome:
    """The outcome with an error that names the partition, as ours do."""
    found, error, after, *rest = outcome
    if error and not (error.startswith("CorruptRecordError: ") and str(PLACE) in error):
        text = CorruptRecordError(f"Records of partition {PLACE} at offset {after} cannot be read: {error}")
        error = f"CorruptRecordError: {text}"
    return found, error, after, *rest  # type: ignore[return-value]


def check_same(data: bytes, start: int = 0) -> Outcome:
    ours, theirs = read_both(data, start)
    assert ours == theirs
    return ours


MANY: list[Record] = [
    (None, b"", []),
    (b"", None, []),
    (b"n" * 200, b"v" * 70_000, SIGNED),
    (b"n1", b"x", [(HEADER, None)]),
]
ODD: list[Record] = [(b"n1", b"x", OTHER)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(batch(0, ONE) + batch(1, ONE), id="one record each"),
        pytest.param(batch(0, MANY) + batch(4, ONE), id="null, empty, long and signed"),
        pytest.param(batch(0, ONE, attributes=0), id="times of the sender"),
        pytest.param(batch(0, ONE) + batch(50, ONE) + batch(2**40, ONE), id="offsets that jump"),
        pytest.param(batch(5, ONE) + batch(5, ONE) + batch(1, ONE), id="offsets that go back"),
        pytest.param(batch(0, ONE, removed=3), id="its last records compacted away"),
        pytest.param(batch(0, ONE) + batch(1, [], removed=1) + batch(9, ONE), id="all its records compacted away"),
        pytest.param(batch(0, ONE) + batch(1, LONG, codec=GZIP) + batch(2, ONE), id="compressed in between"),
        pytest.param(batch(0, ONE) + batch(1, ODD) + batch(2, ONE), id="headers of others"),
        pytest.param(batch(0, ONE) + legacy(1) + batch(2, ONE), id="old format in between"),
        pytest.param(batch(0, ONE) + batch(1, ONE, attributes=0x30) + batch(2, ONE), id="end of a transaction"),
        pytest.param(batch(0, ONE) + batch(1, ONE, attributes=0x18), id="in a transaction"),
        pytest.param(batch(0, ONE) + batch(1, MANY)[:-7], id="cut by the broker"),
        pytest.param(batch(0, ONE) + b"\0" * 11, id="cut in the head"),
        pytest.param(batch(0, ONE) + bytes(8) + b"\xff" * 4 + bytes(60), id="negative length"),
        pytest.param(batch(0, ONE) + bytes(11) + b"\x05" + bytes(60), id="length below a head"),
    ],
)
def test_batches_are_read_as_the_library_reads_them(data: bytes) -> None:
    check_same(data)
    check_same(data, start=1)


def test_the_times_keys_and_signatures_of_messages() -> None:
    (message,), error, after, epoch, used_up = check_same(batch(41, [(b"n1", b"value", SIGNED)]), start=41)
    assert message == (PARTITION, 41, b"value", APPENDED_MS * 1000, b"n1", b"s" * 32)
    assert (error, after, epoch, used_up) == ("", 42, 7, True)


def test_a_fetch_within_a_batch_begins_at_its_offset() -> None:
    assert [found[1] for found in check_same(batch(10, MANY), start=12)[0]] == [12, 13]


def test_a_wrong_checksum_stops_after_the_messages_before_it() -> None:
    damaged = bytearray(batch(1, ONE))
    damaged[-3] ^= 1
    found, error, after, _, _ = check_same(batch(0, ONE) + bytes(damaged) + batch(2, ONE))
    assert ([one[1] for one in found], after) == ([0], 1)
    assert "TopicPartition(topic='telemetry.v1', partition=3) at offset 1 failed crc check" in error


def test_a_valid_checksum_does_not_make_records_valid() -> None:
    for at in range(61, 75):
        for value in (0, 1, 0x7F, 0x80, 0xFE, 0xFF):
            changed = bytearray(batch(1, ONE))
            changed[at] = value
            check_same(batch(0, ONE) + seal(changed) + batch(2, ONE))


def test_what_the_library_cannot_read_names_its_partition_after_the_messages_before_it() -> None:
    """The transport then pauses it and reads on after it; the fetcher would ask for ever after any other error."""
    unreadable = bytearray(batch(1, [(b"n1", b"value", [("zz", b"x")])]))
    at = bytes(unreadable).index(b"zz")
    unreadable[at : at + 2] = b"\xff\xfe"
    data = batch(0, ONE) + seal(unreadable) + batch(2, ONE)
    part = MessageRecords(0, PLACE, MemoryRecords(data), partition_of=lambda _: PARTITION)
    assert [message.offset for message in part.take(None)] == [0]
    with pytest.raises(CorruptRecordError, match=re.escape(f"{PLACE} at offset 1 ")) as raised:
        part.take(None)
    assert "UnicodeDecodeError" in str(raised.value)
    codec = bytearray(batch(1, ONE))
    codec[22] |= 7  # attributes: a codec that does not exist
    part = MessageRecords(0, PLACE, MemoryRecords(seal(codec)), partition_of=lambda _: PARTITION)
    with pytest.raises(CorruptRecordError, match=re.escape(str(PLACE))):
        part.take(None)


record = st.tuples(
    st.none() | st.binary(max_size=5),
    st.none() | st.binary(max_size=200),
    st.sampled_from([[], [], SIGNED, OTHER, [("", b"")]]),
)
part = st.builds(
    batch,
    st.integers(0, 2**41),
    st.lists(record, min_size=0, max_size=4),
    st.sampled_from([NONE, NONE, NONE, GZIP]),
    st.sampled_from([8, 8, 8, 0, 0x28]),
    st.integers(0, 2),
)
change = st.tuples(st.integers(0, 1 << 20), st.integers(0, 255), st.booleans())


@given(st.lists(part, max_size=4), st.lists(change, max_size=3), st.integers(0, 10))
@example([batch(0, ONE)], [(57, 0x7F, True)], 0)
@example([batch(0, ONE)], [(23, 0x80, True)], 0)
@example([batch(0, ONE)], [(35, 0xFF, True)], 0)
def test_changed_bytes_are_read_as_the_library_reads_them(
    parts: list[bytes], changes: list[tuple[int, int, bool]], cut: int
) -> None:
    """A change at any byte of any batch, with a wrong or with a valid checksum."""
    changed = [bytearray(one) for one in parts]
    for at, value, sealed in changes if changed else ():
        one = changed[at % len(changed)]
        one[at // len(changed) % len(one)] = value
        if sealed:
            one[:] = seal(one)
    data = b"".join(changed)
    data = data[: len(data) - cut]
    check_same(data)


def test_the_library_reads_what_is_not_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every case here would compare the library with itself."""
    read = Fetcher.PartitionRecords._unpack_records
    asked: list[int] = []
    monkeypatch.setattr(
        Fetcher.PartitionRecords,
        "_unpack_records",
        lambda self, tp, records, *more: asked.append(1) or read(self, tp, records, *more),
    )
    simple = MessageRecords(0, PLACE, MemoryRecords(batch(0, MANY) + batch(4, ONE)), partition_of=lambda _: PARTITION)
    assert ([message.offset for message in simple.take(None)], asked) == ([0, 1, 2, 3, 4], [])
    mixed = batch(0, ONE) + batch(1, LONG, codec=GZIP)
    other = MessageRecords(0, PLACE, MemoryRecords(mixed), partition_of=lambda _: PARTITION)
    assert ([message.offset for message in other.take(None)], asked) == ([0, 1], [1])


def test_the_names_of_kafka_python_that_the_reader_uses() -> None:
    assert hasattr(MemoryRecords(b""), "_buffer")
    assert issubclass(CorruptRecordError, Exception)
    record_batches.compile_loops()
