"""The Kafka client of a sender, held at arm's length: it can be abandoned at any moment, and never gets much to hold.

kafka-python 3.0 has no bound of its own memory, ends for good at the second failed login, and `close` raises while
messages wait for a broker that is away. So we bound what it holds, and end it by force where it does not end by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pipeline.config.sections import Kafka
from pipeline.transport import kafka_clients

if TYPE_CHECKING:
    from agents.node.uplink.streams import Stream
    from pipeline.transport.signatures import NodeKeys

BATCH_BYTES = 256 << 10
"""Of one batch: about 40 messages of a node with 8 GPUs. The client's 16 KiB would send larger ones one by one."""
LINGER_MS = 5
"""Wait for company in a batch. Small: a node makes one message a second, for which any wait is only delay; yet enough
for the messages of a backlog, which come without a pause, to share batches."""
FORCED_S = 1.0
"""How long ending a client by force is waited for; chosen: half of the 2 s in which an agent has to be gone."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a client has. `delivery`: until a message has failed, which costs nothing but sending it again.

    `block`: how long one send may wait for what is known of a topic; short, because the other topics wait meanwhile,
    and so does whoever ends us. The client goes on asking, so the next send finds the answer.
    `helpless`: after so long without taking anything a client is made anew: it ends for good at its second failed
    login. Chosen: half of the 30 s within which a user mended on the brokers should be seen to work, and not less, as
    10,000 refused agents then log in 700 times a second. A mended file is seen at once, at no cost to the brokers.
    """

    delivery: float = 30.0
    request: float = kafka_clients.REQUEST_MS / 1000
    block: float = 0.5
    helpless: float = 15.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one message: acknowledged, or `error`."""

    client: Client
    stream: Stream
    offset: int
    error: Exception | None


class Client:
    """One KafkaProducer. Outcomes go into `inbox`, from the client's own I/O thread."""

    def __init__(self, kafka: Kafka, role: str, times: Times, inbox: SimpleQueue[Outcome | None]) -> None:
        """Raises ConfigError on bad credentials; a broker need not be there."""
        from pipeline.transport import (
            kafka_clients,  # here, so that an agent that only spools need not load Kafka's client
        )

        self._inbox, self._kafka = inbox, kafka
        # before the files are read, so that a replacement during the read counts as a change
        self._files = kafka_clients.credential_files_state(kafka)
        self._keys = keys_of(kafka)
        self._producer = kafka_clients.producer(kafka, role, **_settings(times))

    def send(self, stream: Stream, offset: int, value: bytes) -> None:
        """Hands one message over, signed where there are keys; its outcome comes later.

        Raises KafkaError if it is not taken, ConfigError if the node's key cannot be read.
        """
        topic, node = stream.partition.topic, stream.partition.name
        future = self._producer.send(topic, value, node.encode(), headers=self._headers(topic, node, value))
        future.add_callback(self._acknowledged, stream, offset)
        future.add_errback(self._failed, stream, offset)

    def _headers(self, topic: str, node: str, value: bytes) -> list[tuple[str, bytes]]:
        if self._keys is None:
            return []
        from pipeline.transport.signatures import (
            HEADER,
            sign,  # here: without keys an agent need not load OpenSSL
        )

        return [(HEADER, sign(self._keys.signing(node), topic, value))]

    def _acknowledged(self, stream: Stream, offset: int, _: object) -> None:
        self._inbox.put(Outcome(self, stream, offset, None))

    def _failed(self, stream: Stream, offset: int, error: Exception) -> None:
        self._inbox.put(Outcome(self, stream, offset, error))

    def meaning(self, topic: str, error: Exception) -> Exception:
        """What it means that `send` raised `error`: perhaps only that the topic is not there."""
        return self._producer.meaning(topic, error)

    @property
    def outdated(self) -> bool:
        """Whether a file with credentials is another one than this client was made with."""
        return kafka_clients.credential_files_state(self._kafka) != self._files

    @property
    def alive(self) -> bool:
        """Whether the client's I/O thread still runs."""
        return self._producer.alive

    def close(self, force: bool) -> None:
        """Ends the client within about FORCED_S; by `force` what it holds is given up, and must be sent again."""
        self._producer.end(FORCED_S, force)


def keys_of(kafka: Kafka) -> NodeKeys | None:
    """The keys that messages are signed with; None where none are configured."""
    if kafka.node_keys is None:
        return None
    from pipeline.transport.signatures import NodeKeys

    return NodeKeys(kafka.node_keys)


def for_good(error: Exception) -> bool:
    """Whether the brokers would refuse this very message however often it is sent."""
    from kafka.errors import InvalidRecordError, MessageSizeTooLargeError, RecordListTooLargeError

    return isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError | InvalidRecordError)


def _settings(times: Times) -> dict[str, Any]:
    return {
        "linger_ms": LINGER_MS,
        "batch_size": BATCH_BYTES,
        "delivery_timeout_ms": round(times.delivery * 1000),
        "request_timeout_ms": round(times.request * 1000),
        "max_block_ms": round(times.block * 1000),
        "metrics_enabled": False,  # nobody reads them
    }
