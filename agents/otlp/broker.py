"""One OTLP request to Kafka's topic `otlp_metrics`, keyed by the node: what the OpenTelemetry Collector reads there.

Best effort beside the spool, which holds the same telemetry: one request is in flight, and waits for its answer.
"""

from __future__ import annotations

from typing import Any

from agents.node.uplink.client import is_permanent
from pipeline.config.sections import Kafka
from pipeline.model.errors import Permanent, Retryable
from pipeline.transport import kafka_clients
from pipeline.transport.topics import OTLP

ANSWER_S = 30.0
"""How long the brokers may take to acknowledge; that of the telemetry's own producer (agents/node/uplink/client.py)."""
BLOCK_MS = 5000
"""How long finding the topic may take; this thread has nothing else to do. Chosen."""
CLOSE_S = 0.5


class Broker:
    """Delivers requests to Kafka. Raises ConfigError on bad credentials; a broker need not be there."""

    def __init__(self, kafka: Kafka, node: str) -> None:
        self._kafka, self._key = kafka, node.encode()
        self._producer: Any = None
        kafka_clients.client_settings(kafka, "agent")

    def __call__(self, request: bytes) -> None:
        """Raises Retryable or Permanent, which says why."""
        from kafka.errors import KafkaError

        if self._producer is None:
            self._producer = self._made()
        try:
            self._producer.send(OTLP, request, self._key).get(timeout=ANSWER_S)
        except KafkaError as error:
            if is_permanent(error):
                raise Permanent(f"topic {OTLP}: {error}") from error
            why = self._producer.explain_error(OTLP, error)
            self.close()  # a client that failed may be past use; the next one reads the credentials anew
            raise Retryable(f"topic {OTLP}: {type(why).__name__}: {why}") from error

    def close(self) -> None:
        """Ends the client; the next request makes another."""
        if self._producer is not None:
            self._producer.shut_down(CLOSE_S, force=True)
            self._producer = None

    def _made(self) -> Any:
        return kafka_clients.create_producer(
            self._kafka,
            "agent",
            compression_type="zstd",
            linger_ms=0,
            delivery_timeout_ms=round(ANSWER_S * 1000),
            max_block_ms=BLOCK_MS,
            metrics_enabled=False,
        )
