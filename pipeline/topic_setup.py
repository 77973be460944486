"""The part of `fleetpulse init` that makes the topics on Kafka, and says of those that are there how they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing

from kafka import KafkaAdminClient
from kafka.errors import (
    InvalidReplicationFactorError,
    KafkaError,
    KafkaTimeoutError,
    NoError,
    TopicAlreadyExistsError,
    for_code,
)

from pipeline.config.sections import Kafka
from pipeline.model.errors import Unreachable, UsageError
from pipeline.transport import clients, diagnosis, topic_state, topics
from pipeline.transport.topics import Topic
from pipeline.transport.troubles import of_error

CONNECT_S = 10.0
"""Seconds that brokers have to answer. Chosen: `init` is run by hand, or once when containers start."""
LEADERS_S = 30.0
"""Seconds until all partitions have leaders. Chosen: a broker alone gives 32 of them leaders in 0.2 s."""


def make(kafka: Kafka, say: Callable[[str], None]) -> None:
    """Makes what is missing and changes nothing that is there; harmless to repeat, also by two at once.

    Raises Unreachable where the brokers cannot be used, and UsageError where they refuse what is configured.
    """
    if trouble := diagnosis.why_not(kafka, CONNECT_S):
        raise Unreachable(str(trouble))
    wanted = topics.wanted(kafka)
    try:
        with closing(clients.admin(kafka, "init", CONNECT_S)) as admin:
            known = topic_state.look(admin, wanted)
            made = _made(admin, kafka, [topic for topic in wanted if topic.name not in known])
            _lead(admin, kafka, wanted)
            found = topic_state.look(admin, wanted)
    except KafkaError as error:
        raise Unreachable(str(of_error(kafka, error) or f"kafka {kafka.bootstrap_servers}: {error}")) from error
    for topic in wanted:
        for line in _said(kafka, topic, found[topic.name], topic.name in made):
            say(line)


def _made(admin: KafkaAdminClient, kafka: Kafka, missing: Iterable[Topic]) -> set[str]:
    """Names of the topics that this call made."""
    orders = topics.orders(kafka, missing)
    if not orders:
        return set()
    answers = admin.create_topics(orders, raise_errors=False)["topics"]
    return {answer["name"] for answer in answers if _accepted(kafka, answer["name"], answer)}


def _accepted(kafka: Kafka, name: str, answer: dict[str, object]) -> bool:
    """Whether the brokers made the topic; False if somebody else did meanwhile."""
    error, why = for_code(answer["error_code"]), str(answer.get("error_message") or "")
    if error in (NoError, TopicAlreadyExistsError):
        return error is NoError
    if trouble := of_error(kafka, error()):
        raise Unreachable(f"topic {name}: {trouble}")
    where = f"kafka {kafka.bootstrap_servers}: topic {name}: {why or error.__name__}"
    if error is InvalidReplicationFactorError:
        raise UsageError(
            f"{where}; wanted as many brokers as [kafka] replication_factor = {kafka.replication_factor} says: "
            "start them, or lower it (-1: what the brokers have as default.replication.factor)"
        )
    raise UsageError(f"{where}; wanted brokers that take the settings of docs/kafka.md")


def _lead(admin: KafkaAdminClient, kafka: Kafka, wanted: Iterable[Topic]) -> None:
    """Waits until each partition has a leader."""
    try:
        admin.wait_for_topics([topic.name for topic in wanted], round(LEADERS_S * 1000))
    except KafkaTimeoutError as error:
        raise Unreachable(
            f"kafka {kafka.bootstrap_servers}: {error}; start the brokers that hold these partitions"
        ) from error


def _said(kafka: Kafka, topic: Topic, state: topic_state.State, made: bool) -> Iterable[str]:
    note = "; this version does not read it yet" if topic.name == topics.OTLP else ""
    if made:
        hours = int(topic.settings["retention.ms"]) / 3_600_000
        what = f"{_count(state.partitions, 'partition')}, {_count(state.replicas, 'replica')}"
        yield f"topic {topic.name}: made: {what}, retention {hours:g} h{note}"
        return
    different = topic_state.differences(kafka, topic, state)
    yield f"topic {topic.name}: was there already{'' if different else ', as wanted'}{note}"
    for difference in different:
        yield f"topic {topic.name}: differs: {difference}; mend: {difference.mend}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
