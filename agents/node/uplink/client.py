"""The Kafka client of a sender, isolated: it can be abandoned at any moment, and never holds many messages.

kafka-python 3.0 does not bound its memory, ends permanently at the second failed login, and `close` raises while
messages wait for an unreachable broker. So we bound what it holds, and end it by force if it does not end by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pipeline.config.sections import Kafka
from pipeline.transport import kafka_clients

if TYPE_CHECKING:
    from agents.node.uplink.streams import SendStream
    from pipeline.transport.signatures import NodeKeys

BATCH_BYTES = 256 << 10
"""Of one batch: about 40 messages of a node with 8 GPUs. The default of 16 KiB would send larger ones singly."""
LINGER_MS = 5
"""How long a batch waits for more messages. Short: a node makes one message in 5 s, which any wait only delays; long
enough for messages of a backlog, which follow each other directly, to share batches."""
FORCED_CLOSE_S = 1.0
"""Timeout of ending a client by force; chosen: half of the 2 s in which an agent must end."""


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Timeouts of a client in seconds.

    delivery: until a message has failed, which only means that it is sent again.
    block: of one send that waits for the metadata of a topic; short, because other topics, and the end of the process,
    wait for it. The client keeps asking, so the next send finds the answer.
    blocked: a client that accepts no message for so long is replaced: it ends permanently at its second failed login.
    Chosen: half of the 30 s within which a user fixed on the brokers must work again, and not less, as 10,000 refused
    agents then log in 700 times a second. A fixed credential file is noticed immediately, at no cost to the brokers.
    """

    delivery: float = 30.0
    request: float = kafka_clients.REQUEST_MS / 1000
    block: float = 0.5
    blocked: float = 15.0


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """The outcome of one message: acknowledged, or `error`."""

    client: KafkaSendClient
    stream: SendStream
    offset: int
    error: Exception | None


class KafkaSendClient:
    """One KafkaProducer. Outcomes are put into `inbox`, from the client's own I/O thread."""

    def __init__(
        self, kafka: Kafka, role: str, timeouts: ClientTimeouts, inbox: SimpleQueue[SendOutcome | None]
    ) -> None:
        """Raises ConfigError on bad credentials; the brokers may be unreachable."""
        from pipeline.transport import kafka_clients  # here, so that an agent without Kafka need not load its client

        self._inbox, self._kafka = inbox, kafka
        self._files = kafka_clients.credential_files_state(kafka)
        self._keys = load_node_keys(kafka)
        self._producer = kafka_clients.create_producer(kafka, role, **_settings(timeouts))

    def send(self, stream: SendStream, offset: int, value: bytes) -> None:
        """Passes one message to the client, signed if there are keys; its outcome follows later.

        Raises KafkaError if it is not accepted, ConfigError if the node's key cannot be read.
        """
        topic, node = stream.partition.topic, stream.partition.name
        future = self._producer.send(topic, value, node.encode(), headers=self._headers(topic, node, value))
        future.add_callback(self._acknowledged, stream, offset)
        future.add_errback(self._failed, stream, offset)

    def _headers(self, topic: str, node: str, value: bytes) -> list[tuple[str, bytes]]:
        if self._keys is None:
            return []
        from pipeline.transport.signatures import HEADER, sign  # here: without keys an agent need not load OpenSSL

        return [(HEADER, sign(self._keys.signing_key(node), topic, value))]

    def _acknowledged(self, stream: SendStream, offset: int, _: object) -> None:
        self._inbox.put(SendOutcome(self, stream, offset, None))

    def _failed(self, stream: SendStream, offset: int, error: Exception) -> None:
        self._inbox.put(SendOutcome(self, stream, offset, error))

    def explain(self, topic: str, error: Exception) -> Exception:
        """The actual cause of an `error` that `send` raised: for example that the topic does not exist."""
        return self._producer.explain_error(topic, error)

    @property
    def credentials_changed(self) -> bool:
        """Whether a file with credentials differs from the one this client was made with."""
        return kafka_clients.credential_files_state(self._kafka) != self._files

    @property
    def is_alive(self) -> bool:
        """Whether the client's I/O thread still runs."""
        return self._producer.is_alive

    def close(self, force: bool) -> None:
        """Ends the client within about FORCED_CLOSE_S; with `force` the messages it holds must be sent again."""
        self._producer.shut_down(FORCED_CLOSE_S, force)


def load_node_keys(kafka: Kafka) -> NodeKeys | None:
    """The keys that sign messages; None if none are configured."""
    if kafka.node_keys is None:
        return None
    from pipeline.transport.signatures import NodeKeys

    return NodeKeys(kafka.node_keys)


def check_credentials(kafka: Kafka, role: str, nodes: Iterable[str]) -> None:
    """Raises ConfigError on bad credentials, and if a node has no usable key though [kafka] node_keys is set."""
    kafka_clients.client_settings(kafka, role)
    if keys := load_node_keys(kafka):
        for node in nodes:
            keys.signing_key(node)


def is_permanent(error: Exception) -> bool:
    """Whether the brokers would refuse this message however often it is sent."""
    from kafka.errors import InvalidRecordError, MessageSizeTooLargeError, RecordListTooLargeError

    return isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError | InvalidRecordError)


def _settings(timeouts: ClientTimeouts) -> dict[str, Any]:
    return {
        "linger_ms": LINGER_MS,
        "batch_size": BATCH_BYTES,
        "delivery_timeout_ms": round(timeouts.delivery * 1000),
        "request_timeout_ms": round(timeouts.request * 1000),
        "max_block_ms": round(timeouts.block * 1000),
        "metrics_enabled": False,  # unused
    }
