"""Kafka transport: reads partitions at offsets from the store. A topic that was created anew is a new incarnation.

No consumer group, no automatic offsets: `read` names the offset, and nothing is skipped silently. Memory: at most AHEAD
bytes and one fetch (FETCH_BYTES) per partition here, and one response (RESPONSE_BYTES) in the client.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import CorruptRecordError, KafkaError, LogTruncationError, OffsetOutOfRangeError

from pipeline.config.sections import Kafka
from pipeline.model.errors import GapError, Retryable
from pipeline.transport import Message, Partition, kafka_clients, topics
from pipeline.transport.broker_watch import Watch
from pipeline.transport.dead_letter_topics import DeadLetterTopics
from pipeline.transport.signatures import HEADER

APPEND_TIME = 1
"""Type of a record's time: the brokers' clock, as topics.py sets it."""


@dataclass(slots=True)
class Stream:
    """Records that wait, and the offset behind them. lost: that offset is out of range.  damage: what it suffered."""

    partition: Partition
    waiting: deque[Any] = field(default_factory=deque)
    behind: int = -1
    size: int = 0
    lost: bool = False
    damage: str = ""
    paused: bool = False

    @property
    def offset(self) -> int:
        """Of the next record that `take` would give."""
        return self.waiting[0].offset if self.waiting else self.behind

    @property
    def stuck(self) -> bool:
        """Whether nothing comes behind what waits until it begins elsewhere."""
        return self.lost or bool(self.damage)

    def begin_at(self, offset: int) -> None:
        """Forgets what waits and what was wrong there: the next record is sought at `offset`."""
        self.waiting.clear()
        self.behind, self.size, self.lost, self.damage = offset, 0, False, ""

    def add(self, records: Sequence[Any]) -> None:
        """Takes what was polled; at least one record."""
        self.waiting.extend(records)
        self.behind = records[-1].offset + 1
        self.size += sum(len(record.value or b"") for record in records)

    def take(self, max_messages: int, max_bytes: int) -> list[Message]:
        """What waits, contiguous, at least one if there is one."""
        out: list[Message] = []
        size = 0
        while self.waiting and len(out) < max_messages:
            record = self.waiting[0]
            value = record.value or b""
            if out and (size + len(value) > max_bytes or record.offset != out[-1].offset + 1):
                break
            self.waiting.popleft()
            size += len(value)
            appended = record.timestamp * 1000 if record.timestamp_type == APPEND_TIME else 0
            signature = _signature(record.headers)
            out.append(Message(self.partition, record.offset, value, appended, record.key, signature))
        self.size -= size
        return out


def _signature(headers: Sequence[tuple[str, bytes | None]]) -> bytes | None:
    """The signature among a record's headers; None without one."""
    return next((value for name, value in headers if name == HEADER), None) if headers else None


FETCH_BYTES = 1 << 20
"""Of one partition per response. A single larger message still comes, up to what the topic admits."""
RESPONSE_BYTES = 8 << 20
ALL = 1_000_000_000
"""Of a response, which RESPONSE_BYTES bounds."""
LONG_POLL_MS = 100
"""How long a broker keeps a question for partitions that have nothing. One that has records again waits behind it; with
the client's 500 ms reading small messages took 2.5 times as long. Idle it costs ten small requests a second."""
AHEAD = 1 << 20
"""Bytes waiting here from which on a partition is fetched no further."""
PATIENCE = 0.5
"""Seconds that a read waits for what it knows to be there; chosen: half of what the contract allows."""
SHORT_WAIT_MS = 50
"""Of one poll: a poll without records does not return when a partition turns out to be at its end."""
SWEEP = 0.02
"""Partitions at their end are polled for news together, at most so often (s)."""
STALLED = 30.0
"""Seconds without an answer, brokers being well, after which the client is made anew; chosen: 3 requests' time."""
_CLOSE_MS = 1000


class KafkaTransport:
    """Reads the topics `read`. For one thread, but `reachable`. `known`: partitions that the store knows."""

    def __init__(
        self,
        kafka: Kafka,
        known: Iterable[Partition] = (),
        read: Sequence[str] = topics.READ,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka, self._monotonic = kafka, monotonic
        kafka_clients.client_settings(kafka, "pipeline")  # unreadable credentials stop the start, not an hour later
        self._watch = Watch(kafka, known, read)
        self._letters = DeadLetterTopics(kafka)
        self._made: KafkaConsumer | None = None
        self._streams: dict[TopicPartition, Stream] = {}
        self._polled = self._in_vain = float("-inf")
        self._unanswered: dict[TopicPartition, float] = {}
        self._told_end: dict[TopicPartition, int] = {}  # what `bounds` told, `read` must not deny

    # --- the contract ------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Partition]:
        return self._watch.partitions(wait=1.0)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        place = _place(partition)
        try:
            first = self._consumer.beginning_offsets([place], timeout_ms=500)[place]
            self._told_end[place] = end = self._consumer.end_offsets([place], timeout_ms=500)[place]
            return first, end
        except KafkaError as error:
            raise Retryable(f"kafka: {partition.topic}/{partition.name}: {error}") from error

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        place = _place(partition)
        if not self._watch.has(partition):
            self._let_go(place)
            return []
        try:
            return self._read(place, partition, offset, max_messages, max_bytes)
        except (KafkaError, KeyError, AssertionError) as error:  # the client no longer knows what it was assigned
            self._drop_consumer()
            raise Retryable(f"kafka: {type(error).__name__}: {error}; trying with a new client") from error

    def _read(
        self, place: TopicPartition, partition: Partition, offset: int, max_messages: int, max_bytes: int
    ) -> list[Message]:
        if self._begun(place, partition, offset):
            # not waited for: its brokers shall be asked together with those of the partitions that are read next
            raise Retryable(f"kafka: {partition.topic}/{partition.name}: is asked from now on")
        stream = self._streams[place]
        if not stream.waiting:
            self._wait_for(place, stream)
        if not stream.waiting and stream.stuck:
            raise self._explained(place, stream)
        if stream.waiting and stream.offset != offset:
            raise self._gap(partition, offset, stream.offset, "offsets without a message: transactions or compaction")
        return self._taken(place, stream, max_messages, max_bytes)

    def committed(self, partition: Partition, next_offset: int) -> None:
        self._watch.stored(partition, next_offset)

    def dead_letter(self, message: Message, reason: str) -> None:
        self._letters.send(message, reason)

    def reachable(self) -> str | None:
        """May be called from any thread."""
        return self._watch.trouble()

    def close(self) -> None:
        self._letters.close()
        self._watch.close()
        self._drop_consumer()

    # --- one stream --------------------------------------------------------------------------------------------------

    def _begun(self, place: TopicPartition, partition: Partition, offset: int) -> bool:
        """Puts the stream to `offset` if it does not stand there; whether it is a new one."""
        consumer = self._consumer  # raises Retryable before a stream is entered that nobody would be assigned
        stream = self._streams.get(place)
        new = stream is None or stream.partition != partition
        if stream is None or new:
            stream = self._streams[place] = Stream(partition)
            consumer.assign(list(self._streams))
        if stream.offset != offset:
            stream.begin_at(offset)
            consumer.seek(place, offset)
            self._resume(place, stream)
        return new

    def _taken(self, place: TopicPartition, stream: Stream, max_messages: int, max_bytes: int) -> list[Message]:
        out = stream.take(max_messages, max_bytes)
        if stream.paused and stream.size < AHEAD:
            self._resume(place, stream)
        return out

    def _let_go(self, place: TopicPartition) -> None:
        """Forgets a partition that is no more, or that begins anew."""
        self._told_end.pop(place, None)
        if self._streams.pop(place, None) is not None and self._made is not None:
            self._made.assign(list(self._streams))

    def _resume(self, place: TopicPartition, stream: Stream) -> None:
        self._consumer.resume(place)
        stream.paused = False

    def _pause(self, place: TopicPartition, stream: Stream) -> None:
        self._consumer.pause(place)
        stream.paused = True

    # --- polling -----------------------------------------------------------------------------------------------------

    def _wait_for(self, place: TopicPartition, stream: Stream) -> None:
        """Polls until the stream has records or is known to be at its end. Raises Retryable after PATIENCE."""
        if self._at_end(place, stream):
            self._unanswered.pop(place, None)
            # while others have records in hand, those are taken first: each poll costs more than a record
            if not any(other.waiting for other in self._streams.values()) and self._monotonic() - self._polled >= SWEEP:
                self._poll(0)
            return
        until = self._monotonic() + PATIENCE
        if self._monotonic() < self._in_vain + PATIENCE:  # another read waited in vain just now
            until = self._monotonic()
            self._poll(0)
        while not (stream.waiting or stream.stuck or self._at_end(place, stream)):
            if self._monotonic() >= until:
                self._in_vain = self._monotonic()
                self._look_for_stall(place)
                raise Retryable(f"kafka: {place.topic}/{place.partition}: no answer")
            self._poll(SHORT_WAIT_MS)
        self._unanswered.pop(place, None)

    def _at_end(self, place: TopicPartition, stream: Stream) -> bool:
        """Whether the brokers said that nothing lies behind what was read."""
        if stream.waiting or stream.stuck:
            return False
        end = self._consumer.highwater(place)
        # the client's position passes what is no record, such as the marker of a stranger's transaction
        reached = self._consumer.reached(place)
        return reached is not None and self._told_end.get(place, 0) <= reached == end and self._watch.answering

    def _poll(self, wait_ms: int) -> None:
        """Takes what has arrived, for whichever partition."""
        self._polled = self._monotonic()
        try:
            found = self._consumer.poll(wait_ms)
        except LogTruncationError as error:  # what a client is told that has read records which are no more
            return self._lost(error.divergent_offsets, cut=True)
        except OffsetOutOfRangeError as error:
            return self._lost(error.args[0])
        except CorruptRecordError as error:
            return self._damaged(error)
        except KafkaError as error:
            raise Retryable(f"kafka: {error}") from error
        for place, records in found.items():
            stream = self._streams[place]
            stream.add(records)
            if stream.size >= AHEAD:
                self._pause(place, stream)
        return None

    # --- trouble -----------------------------------------------------------------------------------------------------

    def _lost(self, places: Iterable[TopicPartition], cut: bool = False) -> None:
        for place in places:
            stream = self._streams[place]
            stream.lost = True
            self._pause(place, stream)
            if cut:
                self._watch.cut_short(stream.partition)

    def _explained(self, place: TopicPartition, stream: Stream) -> GapError | Retryable:
        """Why a stream cannot go on where it stands. A log that was cut short begins anew as another partition."""
        partition, offset = stream.partition, stream.offset
        if stream.damage:
            return self._gap(partition, offset, offset + 1, stream.damage)
        first, end = self.bounds(partition)
        self._let_go(place)
        if offset < first:
            return self._gap(partition, offset, first, "deleted by the brokers' retention before it was read")
        if offset > end and self._watch.has(partition):  # not said yet
            self._watch.cut_short(partition)
        return Retryable(f"kafka: {partition.topic}/{partition.name}: offset {offset} was refused, trying again")

    @staticmethod
    def _gap(partition: Partition, first: int, after: int, cause: str) -> GapError:
        return GapError(partition.topic, partition.name, first, after, cause)

    def _damaged(self, error: CorruptRecordError) -> None:
        """Marks the partition that the client names in its message; it has no other way to say it."""
        found = re.search(r"topic='([^']+)', partition=(\d+)", str(error))
        place = TopicPartition(found[1], int(found[2])) if found else None
        if place is None or place not in self._streams:
            raise Retryable(f"kafka: {error}") from error
        self._streams[place].damage = "damaged on the broker: its checksum is wrong"
        self._pause(place, self._streams[place])

    def _look_for_stall(self, place: TopicPartition) -> None:
        """Makes the client anew that has left a partition unanswered for long while the brokers are well."""
        now = self._monotonic()
        if not self._watch.answering:
            self._unanswered.clear()
        elif now - self._unanswered.setdefault(place, now) > STALLED:
            self._unanswered.clear()
            self._drop_consumer()

    # --- the client --------------------------------------------------------------------------------------------------

    @property
    def _consumer(self) -> KafkaConsumer:
        if self._made is None:
            if not self._watch.answering:
                raise Retryable(self._watch.trouble() or "kafka: no answer")
            try:
                self._made = kafka_clients.consumer(
                    self._kafka,
                    "pipeline",
                    seconds=1.0,
                    enable_auto_commit=False,
                    auto_offset_reset="none",
                    allow_auto_create_topics=False,
                    max_poll_records=ALL,  # a response that is taken in part makes others wait behind it
                    fetch_max_wait_ms=LONG_POLL_MS,
                    max_partition_fetch_bytes=FETCH_BYTES,
                    fetch_max_bytes=RESPONSE_BYTES,
                    metadata_max_age_ms=10_000,
                )
            except KafkaError as error:
                raise Retryable(f"kafka: {error}") from error
        return self._made

    def _drop_consumer(self) -> None:
        self._streams.clear()
        made, self._made = self._made, None
        if made is not None:
            made.close(autocommit=False, timeout_ms=_CLOSE_MS)


def _place(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic, int(partition.name))


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt(3)
_MIB = 1 << 20
_VALUES = {
    _MMAP_THRESHOLD: 32 * _MIB,  # the most that every glibc admits; holds the largest response and its copies
    _TRIM_THRESHOLD: 64 * _MIB,  # so much may lie idle at the end of the heap; chosen: a few responses
    _TOP_PAD: 16 * _MIB,  # asked of the kernel beyond what is needed; chosen: one response and its copy
}


def keep_large_blocks() -> bool:
    """Raises the thresholds of glibc for this process; False where there is another allocator, which stays as it is.

    Reading from Kafka then takes a fifth less CPU, for at most 64 MiB that stay with the process.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in _VALUES.items())


def collect_seldom() -> None:
    """Lets Python look for cycles once in 50,000 new objects instead of 700.

    Messages that wait are such objects, and none is in a cycle. Messages of one tick then take a fifth less CPU.
    """
    gc.set_threshold(50_000, 20, 100)
