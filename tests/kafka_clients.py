"""Helpers for tests with brokers: configuration, topics with few partitions, writing and reading records."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.errors import KafkaError

from pipeline.config.sections import Kafka
from pipeline.transport import kafka_clients, topics
from tests.kafka_broker import Address

SECONDS = 20.0
"""Longest wait for a running broker; chosen: answers take milliseconds, a test machine may stall for seconds."""
PARTITIONS = 4
"""Chosen: several nodes share one, and each is created in milliseconds."""


def kafka_of(address: Address, **more: Any) -> Kafka:
    """Returns section [kafka] for these brokers; `more` overrides single keys."""
    found: dict[str, Any] = {"bootstrap_servers": address.bootstrap, "partitions": PARTITIONS}
    if address.security:
        found |= address.security.keys()
    return Kafka(**(found | more))


@contextmanager
def untidy_refusals() -> Iterator[None]:
    """Context in which brokers may refuse: kafka-python leaves the sockets to the collector, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def refusal(kafka: Kafka, seconds: float = 1.0) -> str:
    """Returns the error of kafka-python if the brokers refuse this configuration. Fails if they accept it."""
    with untidy_refusals():
        try:
            kafka_clients.create_admin(kafka, "tests", seconds).close()
        except KafkaError as error:
            return str(error)
    raise AssertionError("the brokers let it in; wanted a refusal")


@contextmanager
def admin_of(address: Address) -> Iterator[KafkaAdminClient]:
    """A connected admin client, closed at the end."""
    with closing(kafka_clients.create_admin(kafka_of(address), "tests", SECONDS)) as admin:
        yield admin


def make_topics(address: Address, **more: Any) -> Kafka:
    """Creates all topics of `fleetpulse init` empty (existing ones are deleted), and returns their [kafka]."""
    kafka = kafka_of(address, **more)
    wanted = topics.creation_requests(kafka, topics.configured_topics(kafka))
    with admin_of(address) as admin:
        _delete(admin, wanted)
        admin.create_topics(wanted, wait_for_metadata=True)
    return kafka


def make_topic(address: Address, name: str, partitions: int = 1, **configs: str) -> None:
    """Creates one empty topic with other settings than `fleetpulse init`; dots in Kafka's settings are written as _."""
    wanted = {"num_partitions": partitions, "configs": {key.replace("_", "."): text for key, text in configs.items()}}
    with admin_of(address) as admin:
        _delete(admin, [name])
        admin.create_topics({name: wanted}, wait_for_metadata=True)


def delete_topics(address: Address, names: Iterable[str]) -> None:
    """Deletes the existing ones of these topics, and returns when the broker no longer lists them."""
    with admin_of(address) as admin:
        _delete(admin, names)


def _delete(admin: KafkaAdminClient, names: Iterable[str]) -> None:
    wanted = set(names)
    if there := wanted & set(admin.list_topics()):
        admin.delete_topics(sorted(there))
    end = time.monotonic() + SECONDS
    while left := wanted & set(admin.list_topics()):  # brokers follow their controller with a small delay
        assert time.monotonic() < end, f"topics {sorted(left)} are still there after {SECONDS} s"
        time.sleep(0.01)


def write(address: Address, topic: str, values: Iterable[bytes], *, key: str = "n0", **more: Any) -> None:
    """Sends values in order under one key with our producer's settings; returns when the broker has them all."""
    with closing(kafka_clients.create_producer(kafka_of(address), "tests", **more)) as producer:
        for sent in [producer.send(topic, value, key=key.encode()) for value in values]:
            sent.get(timeout=SECONDS)


def read(address: Address, topic: str) -> list[Any]:
    """Returns all records that the topic holds now, by partition in order of offsets."""
    found: list[Any] = []
    settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    with closing(kafka_clients.create_consumer(kafka_of(address), "tests", SECONDS, **settings)) as consumer:
        partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())]
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        end = time.monotonic() + SECONDS
        while any(consumer.position(partition) < ends[partition] for partition in partitions):
            assert time.monotonic() < end, f"{topic}: not read within {SECONDS} s"
            found += [r for records in consumer.poll(timeout_ms=100).values() for r in records]
    return sorted(found, key=lambda record: (record.partition, record.offset))
