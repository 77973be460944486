"""The Kafka topics: the settings they should have, and how the topics on the brokers differ from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource
from kafka.errors import NoError, UnknownTopicOrPartitionError, for_code

from pipeline.config.sections import Kafka
from pipeline.model.records import EVENTS, OTLP, TELEMETRY
from pipeline.transport import wire

AGENT_TOPICS = (TELEMETRY, EVENTS)
"""Topics of our agents."""
READ = (*AGENT_TOPICS, OTLP)
"""Topics that the pipeline reads. Without OTLP, or without the right to read it, it reads the others."""
PROBE = "fleetpulse.probe"
"""Topic to which doctor writes a small record, to check that the brokers store it, and their clock."""
DEAD_LETTER_BYTES = 1 << 30
"""Maximum bytes of a dead-letter topic (one partition). Chosen: four times the default limit of the table."""
BATCH_OVERHEAD = 4096
"""Bytes that record batch, key and headers may add to a message; chosen: 61 + about 100 are used."""
SAFE_REPLICAS = 3
"""Replicas from which min.insync.replicas is 2: with fewer, the loss of one broker would stop all sending."""


@dataclass(frozen=True, slots=True)
class Topic:
    """Expected state of a topic. `settings` are Kafka's own names and values."""

    name: str
    partitions: int
    settings: Mapping[str, str]


def dead_letter_topic(topic: str) -> str:
    """Name of the topic for copies of messages that could not be stored."""
    return f"{topic}.dlq"


def configured_topics(kafka: Kafka) -> tuple[Topic, ...]:
    """All topics as configured, in order of creation."""
    hour = 3_600_000
    common = {
        "cleanup.policy": "delete",
        # the broker's clock: with the sender's, a node whose clock is ahead is refused forever (KIP-937)
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
    found = [Topic(name, kafka.partitions, zstd_inside) for name in AGENT_TOPICS]
    found.append(Topic(OTLP, kafka.partitions, text_inside))
    found += [Topic(dead_letter_topic(topic.name), 1, week) for topic in list(found)]
    found.append(Topic(PROBE, 1, common | {"compression.type": "producer", "retention.ms": str(hour)}))
    return tuple(found)


def creation_requests(kafka: Kafka, topics: Iterable[Topic]) -> dict[str, dict[str, Any]]:
    """Arguments of the client's `create_topics` for these topics."""
    return {
        topic.name: {
            "num_partitions": topic.partitions,
            "replication_factor": kafka.replication_factor,
            "configs": dict(topic.settings),
        }
        for topic in topics
    }


@dataclass(frozen=True, slots=True)
class TopicState:
    """Actual state of a topic. `settings`: empty without the right to read them. `headless`: partitions without a
    leader.
    """

    partitions: int
    replicas: int
    headless: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between expected and actual state, with the command or key to correct it."""

    what: str
    found: str
    expected: str
    remedy: str
    loses_messages: bool = False

    def __str__(self) -> str:
        return f"{self.what} is {self.found}, expected {self.expected}"


def read_topics(admin: KafkaAdminClient, wanted: Iterable[Topic]) -> dict[str, TopicState]:
    """The topics that exist on the brokers. Raises kafka's errors, also for a topic without access."""
    names = [topic.name for topic in wanted]
    found = {}
    for topic in admin.describe_topics(names):
        error = for_code(topic["error_code"])
        if error is UnknownTopicOrPartitionError:
            continue
        if error is not NoError:
            raise error(topic["name"])
        found[topic["name"]] = topic["partitions"]
    settings = _settings(admin, found)
    return {
        name: TopicState(
            len(parts),
            min((len(part["replica_nodes"]) for part in parts), default=0),
            sum(part["leader_id"] < 0 for part in parts),
            settings.get(name, {}),
        )
        for name, parts in found.items()
    }


def _settings(admin: KafkaAdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource("TOPIC", name) for name in names]
    if not resources:
        return {}
    answer = admin.describe_configs(resources, config_filter="all").get("topic", {})
    return {name: {key: str(entry["value"]) for key, entry in keys.items()} for name, keys in answer.items()}


def find_differences(kafka: Kafka, topic: Topic, state: TopicState) -> list[Difference]:
    """All differences of a topic from its configuration."""
    tools = f"--bootstrap-server {kafka.bootstrap_servers}"
    found = []
    if state.partitions != topic.partitions:
        found.append(_partition_difference(topic, state, tools))
    if kafka.replication_factor not in (-1, state.replicas):
        remedy = f"kafka-reassign-partitions.sh {tools}, or [kafka] replication_factor = {state.replicas}"
        found.append(Difference("replication factor", str(state.replicas), str(kafka.replication_factor), remedy))
    if not state.settings:
        return [*found, Difference("each setting", "hidden from our user", "readable", "grant DescribeConfigs")]
    for key, value in topic.settings.items():
        if key == "min.insync.replicas" and state.replicas < SAFE_REPLICAS:
            continue  # more than the replicas would stop all sending; the replication factor is reported already
        if (now := state.settings.get(key, "unknown to the broker")) != value:
            alter = f"kafka-configs.sh {tools} --entity-type topics --entity-name {topic.name} --alter"
            costly = topic.name in READ and _too_small(key, now, value)
            found.append(Difference(key, now, value, f"{alter} --add-config {key}={value}", costly))
    return found


def _too_small(key: str, now: str, value: str) -> bool:
    """Whether the brokers would refuse messages that an agent may send."""
    return key == "max.message.bytes" and now.isdecimal() and int(now) < int(value)


def _partition_difference(topic: Topic, state: TopicState, tools: str) -> Difference:
    """Partitions can be added, but never removed; extra partitions of a one-partition topic are harmless."""
    alter = f"kafka-topics.sh {tools} --alter --topic {topic.name} --partitions {topic.partitions}"
    if state.partitions < topic.partitions:
        remedy = f"{alter}, or [kafka] partitions = {state.partitions}"
    elif topic.partitions == 1:
        remedy = "none needed: more than one is harmless here"
    else:
        remedy = f"[kafka] partitions = {state.partitions}"
    return Difference("number of partitions", str(state.partitions), str(topic.partitions), remedy)
