"""Copies of messages that could not be stored, for other readers: topic `<topic>.dlq`, reason and origin in headers.

The table `dead_letter` is the record, written once in the transaction that passes the message over. These copies are
best effort: at most WAITING bytes wait for the brokers, what does not fit is counted and said.
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
from pipeline.transport.broker_errors import MISSING, of_error

log = logging.getLogger("fleetpulse.kafka")

WAITING = 8 << 20
"""Bytes of copies that may wait; chosen: two messages of the largest size. The client itself has no bound."""
BLOCK_S = 0.5
"""Longest time that one copy may hold up ingest: where its topic is missing, the client looks for it so long."""
PAUSE_S = 30.0
"""After a copy that failed none is tried for so long, so that a flood of them cannot hold up ingest. Chosen."""


class DeadLetterTopics:
    """Sends copies; connects at the first. For one thread. `skipped`: copies that are missing in Kafka."""

    def __init__(self, kafka: Kafka, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kafka, self._monotonic = kafka, monotonic
        self._producer: kafka_clients.Producer | None = None
        self._lock = threading.Lock()  # the client answers on a thread of its own
        self._waiting, self._not_before = 0, float("-inf")
        self._told = False  # whether the last that came of a copy was that it is missing
        self.skipped = 0

    def send(self, message: Message, reason: str) -> None:
        """Hands one copy to the client; never raises, and waits at most BLOCK_S once in PAUSE_S."""
        size, topic = len(message.value), topics.dead_letters_of(message.partition.topic)
        if self._monotonic() < self._not_before:
            return self._skip("the one before failed")
        if self._waiting + size > WAITING:
            return self._skip("too many wait for the brokers")
        headers = {
            "topic": message.partition.topic,
            "partition": message.partition.name,
            "offset": str(message.offset),
            "reason": reason,
        }
        try:
            self._producer = self._producer or kafka_clients.producer(
                self._kafka, "dead-letters", max_block_ms=round(BLOCK_S * 1000)
            )
            sent = self._producer.send(
                topic,
                value=message.value,
                headers=[(name, text.encode()) for name, text in headers.items()],
            )
        # ConfigError: the file of the password is being replaced; ValueError: a topic that just lost its partitions
        except (KafkaError, ConfigError, ValueError) as error:
            self._not_before = self._monotonic() + PAUSE_S
            return self._skip(self._why(topic, error))
        with self._lock:
            self._waiting += size
        sent.add_callback(lambda _: self._came(size))
        sent.add_errback(lambda error: self._failed(topic, size, error))
        return None

    def close(self) -> None:
        """Gives what waits a moment to leave; may be called twice."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.end(1.0)

    def _came(self, size: int) -> None:
        with self._lock:
            self._waiting -= size
            self._told = False

    def _failed(self, topic: str, size: int, error: Exception) -> None:
        with self._lock:
            self._waiting -= size
        self._skip(self._why(topic, error))

    def _why(self, topic: str, error: Exception) -> str:
        """What is wrong with the topic, and the mend."""
        if self._producer is not None:
            error = self._producer.meaning(topic, error)
        if isinstance(error, UnknownTopicOrPartitionError):
            return f"topic {topic}: is not there: run `{MISSING}`"
        if isinstance(error, KafkaTimeoutError):
            return f"topic {topic}: no broker answers in time; `fleetpulse doctor` says why"
        return f"topic {topic}: {of_error(self._kafka, error) or error}"

    def _skip(self, why: str) -> None:
        """Says it once, and again when copies arrived in between."""
        with self._lock:
            self.skipped += 1
            first, self._told = not self._told, True
        if first:
            log.warning("dead letters: copies are missing in Kafka, the table dead_letter has them: %s", why)
