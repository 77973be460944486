"""Kafka transport: reads partitions at offsets from the store. A topic that was recreated is a new incarnation.

No consumer group, no automatic offsets: `read` names the offset, and nothing is skipped silently. Memory: at most AHEAD
bytes and one fetch (FETCH_BYTES) per partition here, and one response (RESPONSE_BYTES) in the client.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import (
    CorruptRecordError,
    KafkaError,
    LogTruncationError,
    OffsetOutOfRangeError,
    UnsupportedCodecError,
)

from pipeline.config.sections import Kafka
from pipeline.model.errors import GapError, Offline, Retryable
from pipeline.transport import Message, Partition, kafka_clients, topics
from pipeline.transport.broker_watch import BrokerWatch
from pipeline.transport.dead_letter_topics import DeadLetterTopics
from pipeline.transport.record_batches import MessageRecords


@dataclass(slots=True)
class PartitionBuffer:
    """Polled messages of one partition that were not read yet.

    next_offset: the offset after them. out_of_range: the brokers do not have it. damage: describes a damaged record.
    """

    partition: Partition
    messages: deque[Message] = field(default_factory=deque)
    next_offset: int = -1
    size: int = 0
    out_of_range: bool = False
    damage: str = ""
    paused: bool = False

    @property
    def offset(self) -> int:
        """Offset of the next message."""
        return self.messages[0].offset if self.messages else self.next_offset

    @property
    def stuck(self) -> bool:
        """Whether no more messages can be polled until it restarts at another offset."""
        return self.out_of_range or bool(self.damage)

    def restart_at(self, offset: int) -> None:
        """Drops all messages and errors; the next one is expected at `offset`."""
        self.messages.clear()
        self.next_offset, self.size, self.out_of_range, self.damage = offset, 0, False, ""

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Adds polled messages, at least one."""
        self.messages.extend(messages)
        self.next_offset = messages[-1].offset + 1
        self.size += sum(len(message.value) for message in messages)

    def pop_messages(self, max_messages: int, max_bytes: int) -> list[Message]:
        """Removes and returns contiguous messages, at least one if there is one."""
        count = size = 0
        following = self.offset
        for message in itertools.islice(self.messages, max_messages):
            more = len(message.value)
            if count and (size + more > max_bytes or message.offset != following):
                break
            count, size, following = count + 1, size + more, message.offset + 1
        self.size -= size
        return [self.messages.popleft() for _ in range(count)]


FETCH_BYTES = 1 << 20
"""Maximum bytes per partition in a response. A single larger message is still returned, up to the topic's limit."""
RESPONSE_BYTES = 8 << 20
"""Maximum bytes of a response."""
MAX_RECORDS = 1_000_000_000
"""Maximum records of a response: no limit besides RESPONSE_BYTES."""
HELD_MS = 400
"""The same while all partitions are at their end: the answer is here when the loop returns from its pause, and nothing
waits behind it. Chosen: below READ_WAIT_S."""
LONG_POLL_MS = 100
"""How long a broker holds a fetch request for partitions without data. A partition with new data waits behind it: with
the client's default of 500 ms, reading small messages took 2.5 times as long. Idle cost: 10 small requests a second."""
BUFFER_BYTES = 1 << 20
"""Buffered bytes above which a partition is paused."""
READ_WAIT_S = 0.5
"""Maximum wait of a read for records that exist; chosen: half of what the contract allows."""
SHORT_WAIT_MS = 50
"""Wait of one poll: a poll without records does not return when a partition reaches its end."""
IDLE_POLL_S = 0.02
"""Minimum time between two polls for new records while all partitions are at their end (s)."""
STALL_S = 30.0
"""Time without a response from healthy brokers after which the client is recreated; chosen: 3 request timeouts."""
_CLOSE_MS = 1000


class KafkaTransport:
    """Reads the topics `read`. For one thread, except `find_problem`. `known`: partitions in the store."""

    def __init__(
        self,
        kafka: Kafka,
        known: Iterable[Partition] = (),
        read: Sequence[str] = topics.READ,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka, self._monotonic = kafka, monotonic
        kafka_clients.client_settings(kafka, "pipeline")  # unreadable credentials stop the start, not an hour later
        self._watch = BrokerWatch(kafka, known, read)
        self._dead_letters = DeadLetterTopics(kafka)
        self._client: KafkaConsumer | None = None
        self._buffers: dict[TopicPartition, PartitionBuffer] = {}
        self._last_poll = self._last_timeout = float("-inf")
        self._unanswered_since: dict[TopicPartition, float] = {}
        self._reported_end: dict[TopicPartition, int] = {}  # ends returned by `bounds`, which `read` must reach

    # --- the contract ------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Partition]:
        """See `Transport.partitions`."""
        return self._watch.partitions(wait=1.0)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """See `Transport.bounds`."""
        tp = _topic_partition(partition)
        self._check_leader(tp)
        try:
            first = self._consumer.beginning_offsets([tp], timeout_ms=500)[tp]
            self._reported_end[tp] = end = self._consumer.end_offsets([tp], timeout_ms=500)[tp]
            return first, end
        except KafkaError as error:
            raise Retryable(f"kafka: {partition.topic}/{partition.name}: {error}") from error

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        """See `Transport.read`."""
        tp = _topic_partition(partition)
        if not self._watch.has_partition(partition):
            self._drop_partition(tp)
            return []
        try:
            return self._read(tp, partition, offset, max_messages, max_bytes)
        except (KafkaError, KeyError, AssertionError) as error:  # the client lost its assignment
            self._drop_consumer()
            raise Retryable(f"kafka: {type(error).__name__}: {error}; retrying with a new client") from error

    def _read(
        self, tp: TopicPartition, partition: Partition, offset: int, max_messages: int, max_bytes: int
    ) -> list[Message]:
        if self._seek_stream(tp, partition, offset):
            # no wait: its brokers are asked together with those of the partitions that are read next
            raise Retryable(f"kafka: {partition.topic}/{partition.name}: is fetched from now on")
        buffer = self._buffers[tp]
        if not buffer.messages:
            self._wait_for(tp, buffer)
        if not buffer.messages and buffer.stuck:
            raise self._explain_stop(tp, buffer)
        if buffer.messages and buffer.offset != offset:
            raise self._gap(partition, offset, buffer.offset, "offsets without a message: transactions or compaction")
        return self._pop_messages(tp, buffer, max_messages, max_bytes)

    def commit_offset(self, partition: Partition, next_offset: int) -> None:
        """See `Transport.commit_offset`."""
        self._watch.set_stored(partition, next_offset)

    def send_dead_letter(self, message: Message, reason: str) -> None:
        """See `Transport.send_dead_letter`."""
        self._dead_letters.send(message, reason)

    def find_problem(self) -> str | None:
        """See `Transport.find_problem`. May be called from any thread."""
        return self._watch.current_problem()

    def close(self) -> None:
        """Closes all clients."""
        self._dead_letters.close()
        self._watch.close()
        self._drop_consumer()

    # --- one partition -----------------------------------------------------------------------------------------------

    def _seek_stream(self, tp: TopicPartition, partition: Partition, offset: int) -> bool:
        """Moves the buffer to `offset` if it is elsewhere; returns whether the buffer is new."""
        consumer = self._consumer  # raises Retryable before a buffer is added that would not be assigned
        buffer = self._buffers.get(tp)
        new = buffer is None or buffer.partition != partition
        if buffer is None or new:
            buffer = self._buffers[tp] = PartitionBuffer(partition)
            consumer.assign(list(self._buffers))
        if buffer.offset != offset:
            buffer.restart_at(offset)
            consumer.seek(tp, offset)
            self._resume(tp, buffer)
        return new

    def _pop_messages(
        self, tp: TopicPartition, buffer: PartitionBuffer, max_messages: int, max_bytes: int
    ) -> list[Message]:
        out = buffer.pop_messages(max_messages, max_bytes)
        if buffer.paused and buffer.size < BUFFER_BYTES:
            self._resume(tp, buffer)
        return out

    def _drop_partition(self, tp: TopicPartition) -> None:
        """Drops a partition that is gone or that restarts."""
        self._reported_end.pop(tp, None)
        if self._buffers.pop(tp, None) is not None and self._client is not None:
            self._client.assign(list(self._buffers))

    def _resume(self, tp: TopicPartition, buffer: PartitionBuffer) -> None:
        self._consumer.resume(tp)
        buffer.paused = False

    def _pause(self, tp: TopicPartition, buffer: PartitionBuffer) -> None:
        self._consumer.pause(tp)
        buffer.paused = True

    # --- polling -----------------------------------------------------------------------------------------------------

    def _wait_for(self, tp: TopicPartition, buffer: PartitionBuffer) -> None:
        """Polls until the buffer has records or is known to be at its end. Raises Retryable after READ_WAIT_S."""
        if not buffer.stuck:
            self._check_leader(tp)
        if self._at_end(tp, buffer):
            self._unanswered_since.pop(tp, None)
            # while others have records, those are read first: a poll costs more than a record
            if self._monotonic() - self._last_poll >= IDLE_POLL_S and not any(
                other.messages for other in self._buffers.values()
            ):
                self._poll(0, HELD_MS)
            return
        until = self._monotonic() + READ_WAIT_S
        if self._monotonic() < self._last_timeout + READ_WAIT_S:  # another read just timed out
            until = self._monotonic()
            self._poll(0)
        while not (buffer.messages or buffer.stuck or self._at_end(tp, buffer)):
            if self._monotonic() >= until:
                self._last_timeout = self._monotonic()
                self._check_stall(tp)
                raise Retryable(f"kafka: {tp.topic}/{tp.partition}: no response")
            self._poll(SHORT_WAIT_MS)
        self._unanswered_since.pop(tp, None)

    def _check_leader(self, tp: TopicPartition) -> None:
        """Raises Offline, without a wait that the other partitions would pay for, if the partition has no leader."""
        if self._watch.is_offline(tp):
            self._unanswered_since.pop(tp, None)
            raise Offline(f"kafka: {tp.topic}/{tp.partition}: has no leader")

    def _at_end(self, tp: TopicPartition, buffer: PartitionBuffer) -> bool:
        """Whether the brokers reported that there is nothing after the last record."""
        if buffer.messages or buffer.stuck:
            return False
        end = self._consumer.highwater(tp)
        # the client's position also advances over batches without records, such as transaction markers
        reached = self._consumer.polled_offset(tp)
        return reached is not None and self._reported_end.get(tp, 0) <= reached == end and self._watch.is_answering

    def _poll(self, wait_ms: int, held_ms: int = LONG_POLL_MS) -> None:
        """Polls once, and buffers the records of all partitions. held_ms: of the next fetch request."""
        self._last_poll = self._monotonic()
        consumer = self._consumer
        try:
            consumer.hold_requests(held_ms)
            found = consumer.poll(wait_ms)
        except LogTruncationError as error:  # records that were read no longer exist
            return self._mark_lost(error.divergent_offsets, cut=True)
        except OffsetOutOfRangeError as error:
            return self._mark_lost(error.args[0])
        except CorruptRecordError as error:
            return self._mark_damaged(error)
        except KafkaError as error:
            raise Retryable(f"kafka: {error}") from error
        except Exception as error:
            self._drop_consumer()  # its fetcher may be between two states, in which it would ask itself for ever
            raise Retryable(
                f"kafka: the client failed and is created again: {type(error).__name__}: {error}"
            ) from error
        for tp, messages in found.items():
            buffer = self._buffers[tp]
            buffer.add_messages(messages)
            if buffer.size >= BUFFER_BYTES:
                self._pause(tp, buffer)
        return None

    # --- trouble -----------------------------------------------------------------------------------------------------

    def _mark_lost(self, tps: Iterable[TopicPartition], cut: bool = False) -> None:
        for tp in tps:
            buffer = self._buffers[tp]
            buffer.out_of_range = True
            self._pause(tp, buffer)
            if cut:
                self._watch.mark_truncated(buffer.partition)

    def _explain_stop(self, tp: TopicPartition, buffer: PartitionBuffer) -> GapError | Retryable:
        """The reason why a buffer cannot continue. A truncated log restarts as another partition."""
        partition, offset = buffer.partition, buffer.offset
        if buffer.damage:
            return self._gap(partition, offset, offset + 1, buffer.damage)
        first, end = self.bounds(partition)
        self._drop_partition(tp)
        if offset < first:
            return self._gap(partition, offset, first, "deleted by the brokers' retention before it was read")
        if offset > end and self._watch.has_partition(partition):  # not reported yet
            self._watch.mark_truncated(partition)
        return Retryable(f"kafka: {partition.topic}/{partition.name}: offset {offset} was refused; retrying")

    @staticmethod
    def _gap(partition: Partition, first: int, after: int, cause: str) -> GapError:
        return GapError(partition.topic, partition.name, first, after, cause)

    def _mark_damaged(self, error: CorruptRecordError) -> None:
        """Marks the partition that the client names in its message, the only tp where it does."""
        found = re.search(r"topic='([^']+)', partition=(\d+)", str(error))
        tp = TopicPartition(found[1], int(found[2])) if found else None
        if tp is None or tp not in self._buffers:
            raise Retryable(f"kafka: {error}") from error
        cause = "damaged on the broker: wrong checksum"
        if isinstance(error.__cause__, UnsupportedCodecError):
            cause = f"unreadable here: {error.__cause__}"
        elif error.__cause__ is not None:  # its text varies with the bytes, and losses are counted by cause
            cause = "unreadable: malformed records"
        self._buffers[tp].damage = cause
        self._pause(tp, self._buffers[tp])

    def _check_stall(self, tp: TopicPartition) -> None:
        """Recreates the client if a partition had no response for STALL_S while the brokers are healthy."""
        now = self._monotonic()
        if not self._watch.is_answering:
            self._unanswered_since.clear()
        elif now - self._unanswered_since.setdefault(tp, now) > STALL_S:
            self._unanswered_since.clear()
            self._drop_consumer()

    # --- the client --------------------------------------------------------------------------------------------------

    @property
    def _consumer(self) -> KafkaConsumer:
        if self._client is None:
            if not self._watch.is_answering:
                raise Retryable(self._watch.current_problem() or "kafka: no response")
            try:
                self._client = kafka_clients.create_consumer(
                    self._kafka,
                    "pipeline",
                    seconds=1.0,
                    enable_auto_commit=False,
                    auto_offset_reset="none",
                    allow_auto_create_topics=False,
                    max_poll_records=MAX_RECORDS,  # a partly read response blocks those behind it
                    fetch_max_wait_ms=LONG_POLL_MS,
                    max_partition_fetch_bytes=FETCH_BYTES,
                    fetch_max_bytes=RESPONSE_BYTES,
                    metadata_max_age_ms=10_000,
                )
            except KafkaError as error:
                raise Retryable(f"kafka: {error}") from error
            self._client.read_records(partial(MessageRecords, partition_of=lambda tp: self._buffers[tp].partition))
        return self._client

    def _drop_consumer(self) -> None:
        self._buffers.clear()
        made, self._client = self._client, None
        if made is not None:
            made.close(autocommit=False, timeout_ms=_CLOSE_MS)


def _topic_partition(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic, int(partition.name))
