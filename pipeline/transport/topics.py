"""The topics on Kafka, and the settings that `fleetpulse init` gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import wire
from pipeline.config.sections import Kafka
from pipeline.model.records import EVENTS, TELEMETRY

READ = (TELEMETRY, EVENTS)
"""Topics that the pipeline reads."""
OTLP = "otlp_metrics"
PROBE = "fleetpulse.probe"
"""Where doctor writes one small record to see whether the brokers store what we send, and what time they have."""
DEAD_LETTER_BYTES = 1 << 30
"""Bound of a topic of dead letters, which has one partition. Chosen: four times the default of the table's bound."""
BATCH_OVERHEAD = 4096
"""Bytes that Kafka's record batch, key and headers may add to a message; chosen: 61 + about 100 are in use."""
SAFE_REPLICAS = 3
"""Copies from which on two must have a message: with fewer, the loss of one broker would stop all sending."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic as it should be. `settings` are Kafka's own names and texts."""

    name: str
    partitions: int
    settings: Mapping[str, str]


def dead_letters_of(topic: str) -> str:
    """Name of the topic that gets copies of what could not be stored."""
    return f"{topic}.dlq"


def wanted(kafka: Kafka) -> tuple[Topic, ...]:
    """All topics, in the order in which they are made."""
    hour = 3_600_000
    common = {
        "cleanup.policy": "delete",
        # the brokers' clock: with the sender's, a node whose clock runs ahead is refused for ever (KIP-937)
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(wire.MAX_MESSAGE + BATCH_OVERHEAD),
        "retention.ms": str(round(kafka.retention_hours * hour)),
    }
    if kafka.replication_factor >= SAFE_REPLICAS:
        common["min.insync.replicas"] = "2"  # an acknowledged message survives the loss of a broker
    zstd_inside = common | {"compression.type": "uncompressed"}
    text_inside = common | {"compression.type": "zstd"}
    week = common | {
        "compression.type": "producer",
        "retention.ms": str(7 * 24 * hour),
        "retention.bytes": str(DEAD_LETTER_BYTES),
    }
    found = [Topic(name, kafka.partitions, zstd_inside) for name in READ]
    found.append(Topic(OTLP, kafka.partitions, text_inside))
    found += [Topic(dead_letters_of(topic.name), 1, week) for topic in list(found)]
    found.append(Topic(PROBE, 1, common | {"compression.type": "producer", "retention.ms": str(hour)}))
    return tuple(found)


def orders(kafka: Kafka, topics: Iterable[Topic]) -> dict[str, dict[str, Any]]:
    """What the client's `create_topics` takes to make these topics."""
    return {
        topic.name: {
            "num_partitions": topic.partitions,
            "replication_factor": kafka.replication_factor,
            "configs": dict(topic.settings),
        }
        for topic in topics
    }
