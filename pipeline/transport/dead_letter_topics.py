"""Dead-letter topics: copies of messages that could not be stored, in `<topic>.dlq`, with reason and origin as headers.

The table `dead_letter` is authoritative, written in the transaction that skips the message. These copies are best
effort: at most WAITING_BYTES wait for the brokers; more are counted, logged and dropped. They are sent by a thread of
their own: the client waits for a topic it does not know yet, and ingest may not.
"""

from __future__ import annotations

import logging
import queue
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
TOPIC_WAIT_S = 10.0
"""Maximum wait of a copy for the metadata of its topic. Chosen: a busy broker answers the first request in seconds."""
PAUSE_S = 30.0
"""Pause after a failed copy, so that those behind it do not wait TOPIC_WAIT_S each. Chosen."""
CLOSE_S = 1.0
"""Maximum wait at the end for the remaining copies; chosen."""


class DeadLetterTopics:
    """Sends copies; connects at the first. `skipped`: copies missing in Kafka."""

    def __init__(self, kafka: Kafka, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kafka, self._monotonic = kafka, monotonic
        self._copies: queue.SimpleQueue[tuple[Message, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._producer: kafka_clients.Producer | None = None
        self._lock = threading.Lock()  # ingest, our thread and the thread of the client count
        self._waiting, self._not_before = 0, float("-inf")
        self._reported = False  # whether the last outcome was a missing copy, which was logged
        self.skipped = 0

    def send(self, message: Message, reason: str) -> None:
        """Queues one copy; never raises and never waits."""
        size = len(message.value)
        with self._lock:
            fits = self._waiting + size <= WAITING_BYTES
            self._waiting += size if fits else 0
        if not fits:
            return self._skip("too many wait for the brokers")
        self._copies.put((message, reason))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dead letters", daemon=True)
            self._thread.start()
        return None

    def close(self) -> None:
        """Waits about CLOSE_S for the remaining copies, and closes; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._copies.put(None)
        thread.join(CLOSE_S)
        if self._producer is not None:
            self._producer.shut_down(CLOSE_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            self._send_copy(*copy)

    def _send_copy(self, message: Message, reason: str) -> None:
        size, topic = len(message.value), topics.dead_letter_topic(message.partition.topic)
        if self._monotonic() < self._not_before:
            return self._count_failed(size, "the previous one failed")
        headers = {
            "topic": message.partition.topic,
            "partition": message.partition.name,
            "offset": str(message.offset),
            "reason": reason,
        }
        try:
            self._producer = self._producer or kafka_clients.create_producer(
                self._kafka, "dead-letters", max_block_ms=round(TOPIC_WAIT_S * 1000)
            )
            sent = self._producer.send(
                topic,
                value=message.value,
                headers=[(name, text.encode()) for name, text in headers.items()],
            )
        # ConfigError: the password file is being replaced; ValueError: a topic that just lost its partitions
        except (KafkaError, ConfigError, ValueError) as error:
            self._not_before = self._monotonic() + PAUSE_S
            return self._count_failed(size, self._explain(topic, error))
        sent.add_callback(lambda _: self._count_delivered(size))
        sent.add_errback(lambda error: self._count_failed(size, self._explain(topic, error)))
        return None

    def _count_delivered(self, size: int) -> None:
        with self._lock:
            self._waiting -= size
            self._reported = False

    def _count_failed(self, size: int, why: str) -> None:
        with self._lock:
            self._waiting -= size
        self._skip(why)

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
            if not self._reported:
                log.warning("dead letters: copies are missing in Kafka, the table dead_letter has them: %s", why)
            self._reported = True
            self.skipped += 1
