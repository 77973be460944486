"""The Kafka topics: the settings they should have, and how the topics on the brokers differ from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource
from kafka.errors import NoError, UnknownTopicOrPartitionError, for_code

from pipeline.config.sections import Kafka
from pipeline.model.records import EVENTS, TELEMETRY
from pipeline.transport import wire

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


@dataclass(frozen=True, slots=True)
class State:
    """One topic as it is. `settings`: empty if we may not see them. `headless`: partitions without a leader."""

    partitions: int
    replicas: int
    headless: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """What of a topic is not as we want it, and the command or key that mends it. `costly`: messages can be lost."""

    what: str
    found: str
    wanted: str
    mend: str
    costly: bool = False

    def __str__(self) -> str:
        return f"{self.what} is {self.found}, wanted {self.wanted}"


def look(admin: KafkaAdminClient, wanted: Iterable[Topic]) -> dict[str, State]:
    """The topics that exist. Raises kafka's errors, also for a topic that we may not see."""
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
        name: State(
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


def differences(kafka: Kafka, topic: Topic, state: State) -> list[Difference]:
    """All that is not as configured, each with its mend."""
    tools = f"--bootstrap-server {kafka.bootstrap_servers}"
    found = []
    if state.partitions != topic.partitions:
        found.append(_partitions(topic, state, tools))
    if kafka.replication_factor not in (-1, state.replicas):
        mend = f"kafka-reassign-partitions.sh {tools}, or [kafka] replication_factor = {state.replicas}"
        found.append(Difference("replication factor", str(state.replicas), str(kafka.replication_factor), mend))
    if not state.settings:
        return [*found, Difference("each setting", "hidden from our user", "to be seen", "allow it DescribeConfigs")]
    for key, value in topic.settings.items():
        if key == "min.insync.replicas" and state.replicas < SAFE_REPLICAS:
            continue  # more than there are copies would stop all sending; the replication factor was named already
        if (now := state.settings.get(key, "unknown to the broker")) != value:
            alter = f"kafka-configs.sh {tools} --entity-type topics --entity-name {topic.name} --alter"
            costly = topic.name in READ and _too_small(key, now, value)
            found.append(Difference(key, now, value, f"{alter} --add-config {key}={value}", costly))
    return found


def _too_small(key: str, now: str, value: str) -> bool:
    """Whether the brokers would refuse messages for ever that an agent may send."""
    return key == "max.message.bytes" and now.isdecimal() and int(now) < int(value)


def _partitions(topic: Topic, state: State, tools: str) -> Difference:
    """More can be had at any time, fewer never; of the topics with one partition we want no more."""
    alter = f"kafka-topics.sh {tools} --alter --topic {topic.name} --partitions {topic.partitions}"
    if state.partitions < topic.partitions:
        mend = f"{alter}, or [kafka] partitions = {state.partitions}"
    elif topic.partitions == 1:
        mend = "none needed: more than one does no harm here"
    else:
        mend = f"[kafka] partitions = {state.partitions}"
    return Difference("number of partitions", str(state.partitions), str(topic.partitions), mend)
