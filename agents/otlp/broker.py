"""Delivers an OTLP request to Kafka's topic `otlp_metrics`, keyed by node, for the OpenTelemetry Collector.

Best effort, beside the spool with the same telemetry: one request is in flight and waits for its acknowledgement.
"""

from __future__ import annotations

from typing import Any

from agents.node.uplink.client import is_permanent
from pipeline.config.sections import Kafka
from pipeline.model.errors import Permanent, Retryable
from pipeline.model.records import OTLP
from pipeline.transport import kafka_clients

ACK_TIMEOUT_S = 30.0
"""Longest wait for the brokers' acknowledgement, as in the telemetry's own producer."""
BLOCK_MS = 5000
"""Longest wait for the topic's metadata; this thread has nothing else to do. Chosen."""
CLOSE_S = 0.5


class KafkaDelivery:
    """Delivers requests to Kafka. Raises ConfigError on bad credentials; the broker may be down."""

    def __init__(self, kafka: Kafka, node: str) -> None:
        self._kafka, self._key = kafka, node.encode()
        self._producer: Any = None
        kafka_clients.client_settings(kafka, "agent")

    def __call__(self, request: bytes) -> None:
        """Sends a request. Raises Retryable or Permanent with the reason."""
        from kafka.errors import KafkaError

        if self._producer is None:
            self._producer = self._make_producer()
        try:
            self._producer.send(OTLP, request, self._key).get(timeout=ACK_TIMEOUT_S)
        except KafkaError as error:
            if is_permanent(error):
                raise Permanent(f"topic {OTLP}: {error}") from error
            why = self._producer.explain_error(OTLP, error)
            self.close()  # a failed client may be unusable; the next one reads the credentials again
            raise Retryable(f"topic {OTLP}: {type(why).__name__}: {why}") from error

    def close(self) -> None:
        """Closes the client; the next request creates another one."""
        if self._producer is not None:
            self._producer.shut_down(CLOSE_S, force=True)
            self._producer = None

    def _make_producer(self) -> Any:
        return kafka_clients.create_producer(
            self._kafka,
            "agent",
            compression_type="zstd",
            linger_ms=0,
            delivery_timeout_ms=round(ACK_TIMEOUT_S * 1000),
            max_block_ms=BLOCK_MS,
            metrics_enabled=False,
        )
