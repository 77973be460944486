"""Messages from the record batches of a fetch response, without kafka-python's objects for each batch and record.

A compiled loop finds the records of simple batches: format 2, neither compressed nor control, well-formed, in order.
From the first batch that is anything else, or has a wrong checksum, kafka-python reads on, and raises what it raises.
Agents at 1 Hz leave one record in each batch, for which kafka-python took 14 us; this takes 3.

Only the pipeline reads from Kafka, so only it imports this module: the agents save the compiler's 60 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError
from kafka.record import MemoryRecords
from kafka.structs import TopicPartition
from numpy.typing import NDArray

from pipeline.model.compiling import compiled
from pipeline.transport import Message, Partition
from pipeline.transport.segments import crc32c
from pipeline.transport.signatures import HEADER

APPEND_TIME = 1
"""Timestamp type of a record: the broker's clock, as set by topics.py."""

_LENGTH_AT, _EPOCH_AT, _MAGIC_AT, _CRC_AT, _ATTRIBUTES_AT, _LAST_AT = 8, 12, 16, 17, 21, 23
_MAX_TIMESTAMP_AT, _COUNT_AT, _HEAD = 35, 57, 61
"""Positions in a batch of format 2 (Kafka's DefaultRecordBatch); its checksum covers all from the attributes on."""
_PREFIX = 12  # bytes before those that the length of a batch counts
_UNUSUAL = 0x27  # attributes: compressed, control
_STAMPED_BY_BROKER = 0x08  # attribute: timestamps are append times
_MIN_RECORD = 7  # bytes of a record: each of its fields has at least one
_MAX_TIMESTAMP = 1 << 50  # ms; a larger one is left to kafka-python
_NAME = np.frombuffer(HEADER.encode(), np.uint8)

Bytes = NDArray[np.uint8]
Table = NDArray[np.int64]


class MessageRecords(Fetcher.PartitionRecords):  # type: ignore[misc] # kafka-python ships no types
    """The records of one partition in a fetch response, as messages. partition_of: of the partitions that are read.

    For a consumer that reads uncommitted records and checks checksums, as by default.
    """

    # uses private names, since there is no public way; kafka-python is pinned, and tests check these names

    def __init__(self, *given: Any, partition_of: Callable[[TopicPartition], Partition], **settings: Any) -> None:
        self._partition_of = partition_of
        super().__init__(*given, **settings)

    def _unpack_records(self, tp: TopicPartition, records: MemoryRecords, *deserializers: Any) -> Iterator[Message]:
        """Yields the messages in their order, as the library yields its records.

        Raises CorruptRecordError, which names the partition, at what cannot be read: after any other error the fetcher
        would ask this iterator for ever.
        """
        try:
            yield from self._read_messages(tp, records, *deserializers)
        except Exception as error:
            if isinstance(error, CorruptRecordError) and str(tp) in str(error):
                raise
            # such as a header's name that is not UTF-8, or a codec that is not installed
            raise CorruptRecordError(
                f"Records of partition {tp} at offset {self.next_fetch_offset} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _read_messages(self, tp: TopicPartition, records: MemoryRecords, *deserializers: Any) -> Iterator[Message]:
        data, partition = bytes(records._buffer), self._partition_of(tp)
        found, batches, is_whole = find_records(data)
        sound = _count_sound(data, batches)
        after = next_offset = 0
        if sound:
            _, after, _, self.leader_epoch, next_offset, count = batches[sound - 1]
            self.records_read, self.bytes_read = count, after
            for message in _build_messages(partition, data, found[:count]):
                self.next_fetch_offset = message.offset + 1
                yield message
        if is_whole and sound and sound == len(batches):
            self.next_fetch_offset = next_offset  # compaction may have removed the last records of a batch
            self.drain()
            return
        rest = MemoryRecords(memoryview(data)[after:])
        for record in super()._unpack_records(tp, rest, *deserializers):
            yield _convert_record(partition, record)


def find_records(data: bytes) -> tuple[Table, list[tuple[int, ...]], bool]:
    """(the records of the simple batches at the start of `data`, these batches, whether all complete ones are simple).

    Records: offset, append time (us) or 0, and begin and end of key, value and signature; an end of -1: none.
    Batches: begin, end, checksum, leader epoch, next offset, and number of records up to its end.
    """
    array = np.frombuffer(data, np.uint8)
    batches, records = _count_records(array)
    table, found = np.empty((batches, 6), np.int64), np.empty((records, 8), np.int64)
    filled = _fill_tables(array, _NAME, table, found)
    is_whole = filled == batches and _is_end(array, int(table[-1, 1]) if batches else 0)
    return found, list(map(tuple, table[:filled].tolist())), bool(is_whole)


def _count_sound(data: bytes, batches: Sequence[tuple[int, ...]]) -> int:
    """Number of batches before the first with a wrong checksum."""
    view = memoryview(data)
    for at, (begin, end, checksum, *_) in enumerate(batches):
        if crc32c(view[begin + _ATTRIBUTES_AT : end]) != checksum:
            return at
    return len(batches)


def _build_messages(partition: Partition, data: bytes, found: Table) -> list[Message]:
    return [
        Message(
            partition,
            offset,
            data[value:value_end] if value_end >= 0 else b"",
            appended,
            data[key:key_end] if key_end >= 0 else None,
            data[sign:sign_end] if sign_end >= 0 else None,
        )
        for offset, appended, key, key_end, value, value_end, sign, sign_end in found.tolist()
    ]


def _convert_record(partition: Partition, record: Any) -> Message:
    """The message of a record that the library read."""
    appended = record.timestamp * 1000 if record.timestamp_type == APPEND_TIME else 0
    signature = next((value for name, value in record.headers if name == HEADER), None)
    return Message(partition, record.offset, record.value or b"", appended, record.key, signature)


def compile_loops() -> None:
    """Compiles the loops, or reads what an earlier start compiled."""
    find_records(bytes(_HEAD))


# --- compiled --------------------------------------------------------------------------------------------------------


@compiled
def _read_number(data: Bytes, at: int, size: int) -> Any:
    """An unsigned number, big endian."""
    found: Any = np.int64(0)
    for i in range(at, at + size):
        found = (found << 8) | np.int64(data[i])
    return found


@compiled
def _read_signed(data: Bytes, at: int) -> Any:
    """A signed number of four bytes, big endian."""
    found = _read_number(data, at, 4)
    return found - (1 << 32) if found >= 1 << 31 else found


@compiled
def _is_end(data: Bytes, at: int) -> bool:
    """Whether no complete batch begins at `at`: brokers cut the last one."""
    rest = len(data) - at
    return rest < _PREFIX or _read_signed(data, at + _LENGTH_AT) > rest - _PREFIX


@compiled
def _find_end(data: Bytes, at: int) -> int:
    """End of the batch at `at`; -1 unless it is complete and its head is that of a simple batch."""
    rest = len(data) - at
    if rest < _HEAD:
        return -1
    length = _read_signed(data, at + _LENGTH_AT)
    if length < _HEAD - _PREFIX or length > rest - _PREFIX or data[at + _MAGIC_AT] != 2 or data[at] > 0x3F:
        return -1
    count = _read_signed(data, at + _COUNT_AT)
    if data[at + _ATTRIBUTES_AT + 1] & _UNUSUAL or not 0 < count <= length // _MIN_RECORD:
        return -1
    return int(at + _PREFIX + length)


@compiled
def _count_records(data: Bytes) -> tuple[int, int]:
    """(batches, records) of the batches that may be simple, by their heads."""
    batches = records = 0
    at, end = 0, _find_end(data, 0)
    while end >= 0:
        batches, records = batches + 1, records + _read_signed(data, at + _COUNT_AT)
        at, end = end, _find_end(data, end)
    return batches, records


@compiled
def _fill_tables(data: Bytes, name: Bytes, batches: Table, records: Table) -> int:
    """Fills the tables as `find_records` describes them; returns the number of simple batches."""
    at = used = 0
    before = np.int64(-1)  # offset of the last record
    for b in range(len(batches)):
        end = _find_end(data, at)
        count = _read_signed(data, at + _COUNT_AT)
        first, last = _read_number(data, at, 8), _read_signed(data, at + _LAST_AT)
        stamp = _read_number(data, at + _MAX_TIMESTAMP_AT, 8)
        if not 0 <= stamp < _MAX_TIMESTAMP:
            return b
        appended = stamp * 1000 if data[at + _ATTRIBUTES_AT + 1] & _STAMPED_BY_BROKER else 0
        place = at + _HEAD
        for r in range(used, used + count):
            place = _read_record(data, place, end, name, records[r])
            offset = first + records[r, 0]
            if place < 0 or offset <= before or records[r, 0] > last:
                return b
            records[r, 0], records[r, 1], before = offset, appended, offset
        if place != end:
            return b
        used += count
        batches[b, 0], batches[b, 1], batches[b, 2] = at, end, _read_number(data, at + _CRC_AT, 4)
        batches[b, 3], batches[b, 4], batches[b, 5] = _read_signed(data, at + _EPOCH_AT), first + last + 1, used
        at = end
    return len(batches)


@compiled
def _read_varint(data: Bytes, at: int, end: int) -> tuple[Any, int]:
    """(zigzag number of at most five bytes, position after it); position -1 if there is none before `end`."""
    found: Any = np.int64(0)
    shift = 0
    while at < end and shift < 35:
        byte = np.int64(data[at])
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), at
    return np.int64(0), -1


@compiled
def _read_field(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """(begin, end) of bytes with their length before them; end = -1: null; begin = -1: not before `end`."""
    size, begin = _read_varint(data, at, end)
    if begin < 0 or size < -1 or size > end - begin:
        return -1, -1
    return begin, begin + size if size >= 0 else -1


@compiled
def _read_record(data: Bytes, at: int, end: int, name: Bytes, row: Table) -> int:
    """Writes a record to `row`, with the difference of its offset; returns its end, -1 unless it is well-formed.

    A header other than the signature is left to the library.
    """
    size, begin = _read_varint(data, at, end)
    if begin < 0 or size < 0 or size > end - begin or data[begin] >= 0x80:
        return -1
    stop = begin + size
    _, place = _read_long(data, begin + 1, stop)  # difference of the timestamp
    row[0], place = _read_varint(data, place, stop) if place >= 0 else (np.int64(0), -1)
    if place < 0 or row[0] < 0:
        return -1
    for column in (2, 4):  # key, value
        row[column], row[column + 1] = _read_field(data, place, stop)
        if row[column] < 0:
            return -1
        place = max(row[column], row[column + 1])
    headers, place = _read_varint(data, place, stop)
    row[6], row[7] = 0, -1
    if place >= 0 and headers == 1:
        key, key_end = _read_field(data, place, stop)
        if key < 0 or key_end - key != len(name) or (data[key:key_end] != name).any():
            return -1
        row[6], row[7] = _read_field(data, key_end, stop)
        place = max(row[6], row[7])
    elif headers != 0:
        return -1
    return stop if place == stop else -1


@compiled
def _read_long(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Skips a number of at most nine bytes: (0, position after it), position -1 if there is none before `end`."""
    for i in range(at, min(end, at + 9)):
        if data[i] < 0x80:
            return 0, i + 1
    return 0, -1
