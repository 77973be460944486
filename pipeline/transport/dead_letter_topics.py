"""Dead-letter topics: copies of messages that could not be stored, in `<topic>.dlq`, with reason and origin as headers.

The table `dead_letter` is authoritative, written in the transaction that skips the message. These copies are best
effort: at most WAITING_BYTES wait for the brokers; more are counted, logged and dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kafka.errors import KafkaError, KafkaTimeoutError, UnknownTopicOrPartitionError

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import Message, kafka_clients, topics
from pipeline.transport.broker_errors import MISSING, classify_error

log = logging.getLogger("fleetpulse.kafka")

WAITING_BYTES = 8 << 20
"""Bytes of copies that may wait; chosen: two messages of the largest size. The client itself has no limit."""
BLOCK_S = 0.5
"""Maximum time that a copy blocks ingest, while the client looks for a missing topic."""
PAUSE_S = 30.0
"""Pause after a failed copy, so that many of them cannot block ingest. Chosen."""


class DeadLetterTopics:
    """Sends copies; connects at the first. For one thread. `skipped`: copies missing in Kafka."""

    def __init__(self, kafka: Kafka, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kafka, self._monotonic = kafka, monotonic
        self._producer: kafka_clients.Producer | None = None
        self._lock = threading.Lock()  # the client calls back from its own thread
        self._waiting, self._not_before = 0, float("-inf")
        self._reported = False  # whether the last outcome was a missing copy, which was logged
        self.skipped = 0

    def send(self, message: Message, reason: str) -> None:
        """Sends one copy; never raises, and blocks at most BLOCK_S per PAUSE_S."""
        size, topic = len(message.value), topics.dead_letter_topic(message.partition.topic)
        if self._monotonic() < self._not_before:
            return self._skip("the previous one failed")
        if self._waiting + size > WAITING_BYTES:
            return self._skip("too many wait for the brokers")
        headers = {
            "topic": message.partition.topic,
            "partition": message.partition.name,
            "offset": str(message.offset),
            "reason": reason,
        }
        try:
            self._producer = self._producer or kafka_clients.create_producer(
                self._kafka, "dead-letters", max_block_ms=round(BLOCK_S * 1000)
            )
            sent = self._producer.send(
                topic,
                value=message.value,
                headers=[(name, text.encode()) for name, text in headers.items()],
            )
        # ConfigError: the password file is being replaced; ValueError: a topic that just lost its partitions
        except (KafkaError, ConfigError, ValueError) as error:
            self._not_before = self._monotonic() + PAUSE_S
            return self._skip(self._explain(topic, error))
        with self._lock:
            self._waiting += size
        sent.add_callback(lambda _: self._count_delivered(size))
        sent.add_errback(lambda error: self._count_failed(topic, size, error))
        return None

    def close(self) -> None:
        """Waits up to 1 s for the remaining copies, and closes; may be called twice."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.shut_down(1.0)

    def _count_delivered(self, size: int) -> None:
        with self._lock:
            self._waiting -= size
            self._reported = False

    def _count_failed(self, topic: str, size: int, error: Exception) -> None:
        with self._lock:
            self._waiting -= size
        self._skip(self._explain(topic, error))

    def _explain(self, topic: str, error: Exception) -> str:
        """Describes the problem of the topic, and the remedy."""
        if self._producer is not None:
            error = self._producer.explain_error(topic, error)
        if isinstance(error, UnknownTopicOrPartitionError):
            return f"topic {topic}: does not exist: run `{MISSING}`"
        if isinstance(error, KafkaTimeoutError):
            return f"topic {topic}: no broker responds in time; run `fleetpulse doctor` for the cause"
        return f"topic {topic}: {classify_error(self._kafka, error) or error}"

    def _skip(self, why: str) -> None:
        """Counts a missing copy; logs once until a copy is delivered again."""
        with self._lock:
            self.skipped += 1
            first, self._reported = not self._reported, True
        if first:
            log.warning("dead letters: copies are missing in Kafka, the table dead_letter has them: %s", why)
