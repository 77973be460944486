"""Three real Apache Kafka nodes on loopback, each broker and KRaft controller, with the jars of tests/kafka_broker.py.

Small on purpose: 160 MB of heap each, about 3 CPU seconds for a start of all three.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from pipeline.transport import kafka_clients
from tests.kafka_broker import Broker
from tests.kafka_clients import SECONDS, kafka_of
from tests.kafka_security import Security

NODES = (1, 2, 3)
PROPERTIES: Mapping[str, str] = {
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    # elections take seconds on purpose: with the times of a single node, a busy machine would elect all the time
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.election.timeout.ms": "1000",
    "controller.quorum.election.backoff.max.ms": "500",
    "controller.quorum.fetch.timeout.ms": "2000",
    "replica.lag.time.max.ms": "5000",
    "auto.leader.rebalance.enable": "false",  # tests move leaders
}


class Cluster:
    """Three nodes that can be killed, stopped and started one by one. `bootstrap` names all three."""

    security: Security | None = None

    def __init__(self, folder: Path) -> None:
        self.nodes = {number: Broker(folder / str(number), heap="160m") for number in NODES}
        voters = ",".join(f"{number}@{node.controller}" for number, node in self.nodes.items())
        for number, node in self.nodes.items():
            node.cluster = self.nodes[1].cluster
            node.configure({**PROPERTIES, "node.id": str(number), "controller.quorum.voters": voters})
        self.bootstrap = ",".join(node.bootstrap for node in self.nodes.values())

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Broker.close, self.nodes.values()))

    def start(self) -> None:
        """Starts the nodes that do not run, together: each needs another one to become ready."""
        stopped = [node for node in self.nodes.values() if not node.running()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(Broker.start, stopped))
        self.wait_until(lambda admin: len(admin.describe_cluster()["brokers"]) == len(NODES), "all brokers joined")

    def admin(self) -> Any:
        """A connected admin client, to be closed."""
        return closing(kafka_clients.create_admin(kafka_of(self), "tests", SECONDS))

    def wait_until(self, holds: Any, what: str, seconds: float = 30.0) -> None:
        """Waits until `holds` is true of an admin client; brokers may refuse while they elect."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(KafkaError), self.admin() as admin:
                while time.monotonic() < end:
                    if holds(admin):
                        return
                    time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s: {what}")

    def partitions(self, topic: str) -> list[dict[str, Any]]:
        """Partitions of a topic as a broker describes them; one that does not know a new topic yet describes none."""
        found: list[dict[str, Any]] = []

        def is_described(admin: KafkaAdminClient) -> bool:
            found.extend(_partitions(admin, topic))
            return bool(found)

        self.wait_until(is_described, f"{topic} is described")
        return found

    def leader_of(self, topic: str, number: int) -> int:
        """Node that leads a partition; -1 without one."""
        return next(int(p["leader_id"]) for p in self.partitions(topic) if p["partition_index"] == number)

    def wait_for_replicas(self, topic: str, seconds: float = 60.0) -> None:
        """Waits until all replicas of a topic are in sync."""
        self.wait_until(
            lambda admin: all(len(p["isr_nodes"]) == len(p["replica_nodes"]) for p in _partitions(admin, topic)),
            f"all replicas of {topic} are in sync",
            seconds,
        )

    def move_leaders(self, topic: str) -> dict[int, int]:
        """Makes another replica the preferred leader of each partition, and the leader; returns the new leaders."""
        wanted = {}
        with self.admin() as admin:
            moved = {}
            for p in _partitions(admin, topic):
                replicas = [*p["replica_nodes"][1:], p["replica_nodes"][0]]
                moved[_topic_partition(topic, p)] = replicas
                wanted[p["partition_index"]] = replicas[0]
            admin.alter_partition_reassignments(moved)
            admin.elect_leaders(0, {topic: sorted(wanted)}, raise_errors=False)
        self.wait_until(
            lambda admin: {p["partition_index"]: p["leader_id"] for p in _partitions(admin, topic)} == wanted,
            f"the leaders of {topic} are {wanted}",
        )
        return wanted


def _partitions(admin: KafkaAdminClient, topic: str) -> list[dict[str, Any]]:
    found = admin.describe_topics([topic])[0]["partitions"]
    return sorted(found, key=lambda p: int(p["partition_index"]))


def _topic_partition(topic: str, partition: Mapping[str, Any]) -> Any:
    from kafka import TopicPartition

    return TopicPartition(topic, int(partition["partition_index"]))
