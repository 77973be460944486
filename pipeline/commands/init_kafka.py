"""`fleetpulse init` for Kafka: creates the topics and reports differences; with `--acls`, grants rights and reports
others.

Kafka's ACLs name users and topics, not message keys, so they cannot bind a user to one node. They decide who may write
telemetry at all; a signature proves the node (pipeline/transport/signatures.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)
from kafka.errors import (
    InvalidReplicationFactorError,
    KafkaError,
    KafkaTimeoutError,
    NoError,
    SecurityDisabledError,
    TopicAlreadyExistsError,
    for_code,
)

from pipeline.config.sections import Kafka
from pipeline.model.errors import Unreachable, UsageError
from pipeline.runtime.guides import guide
from pipeline.transport import diagnosis, kafka_clients, topics
from pipeline.transport import topics as topic_state
from pipeline.transport.broker_errors import classify_error
from pipeline.transport.broker_watch import GROUP
from pipeline.transport.topics import Topic

CONNECT_S = 10.0
"""Limit for an answer of the brokers (s). Chosen: `init` runs by hand, or once when containers start."""
LEADERS_S = 30.0
"""Limit until all partitions have leaders (s). Chosen: a single broker needs 0.2 s for 32."""


def create_topics(kafka: Kafka, print_line: Callable[[str], None]) -> None:
    """Creates missing topics and changes no existing ones. It can be repeated and run concurrently.

    Raises Unreachable if the brokers cannot be used, UsageError if they refuse the settings.
    """
    if trouble := diagnosis.find_broker_problem(kafka, CONNECT_S):
        raise Unreachable(str(trouble))
    wanted = topics.configured_topics(kafka)
    try:
        with closing(kafka_clients.create_admin(kafka, "init", CONNECT_S)) as admin:
            known = topic_state.read_topics(admin, wanted)
            made = _create_missing(admin, kafka, [topic for topic in wanted if topic.name not in known])
            _wait_for_leaders(admin, kafka, wanted)
            found = topic_state.read_topics(admin, wanted)
    except KafkaError as error:
        raise Unreachable(str(classify_error(kafka, error) or f"kafka {kafka.bootstrap_servers}: {error}")) from error
    for topic in wanted:
        for line in _describe_topic(kafka, topic, found[topic.name], topic.name in made):
            print_line(line)


def _create_missing(admin: KafkaAdminClient, kafka: Kafka, missing: Iterable[Topic]) -> set[str]:
    """Creates topics and returns the names of those that this call created."""
    orders = topics.creation_requests(kafka, missing)
    if not orders:
        return set()
    answers = admin.create_topics(orders, raise_errors=False)["topics"]
    return {answer["name"] for answer in answers if _was_created(kafka, answer["name"], answer)}


def _was_created(kafka: Kafka, name: str, answer: dict[str, object]) -> bool:
    """Returns whether the topic was created; False if another process created it."""
    error, why = for_code(answer["error_code"]), str(answer.get("error_message") or "")
    if error in (NoError, TopicAlreadyExistsError):
        return error is NoError
    if trouble := classify_error(kafka, error()):
        raise Unreachable(f"topic {name}: {trouble}")
    where = f"kafka {kafka.bootstrap_servers}: topic {name}: {why or error.__name__}"
    if error is InvalidReplicationFactorError:
        raise UsageError(
            f"{where}; expected at least [kafka] replication_factor = {kafka.replication_factor} brokers: "
            "start them, or lower it (-1: default.replication.factor of the brokers)"
        )
    raise UsageError(f"{where}; expected brokers that accept the settings of {guide('kafka.md')}")


def _wait_for_leaders(admin: KafkaAdminClient, kafka: Kafka, wanted: Iterable[Topic]) -> None:
    """Waits until each partition has a leader."""
    try:
        admin.wait_for_topics([topic.name for topic in wanted], round(LEADERS_S * 1000))
    except KafkaTimeoutError as error:
        raise Unreachable(
            f"kafka {kafka.bootstrap_servers}: {error}; start the brokers that hold these partitions"
        ) from error


def _describe_topic(kafka: Kafka, topic: Topic, state: topic_state.TopicState, made: bool) -> Iterable[str]:
    if made:
        hours = int(topic.settings["retention.ms"]) / 3_600_000
        what = f"{_count(state.partitions, 'partition')}, {_count(state.replicas, 'replica')}"
        yield f"topic {topic.name}: created: {what}, retention {hours:g} h"
        return
    different = topic_state.find_differences(kafka, topic, state)
    yield f"topic {topic.name}: already exists{'' if different else ', as configured'}"
    for difference in different:
        yield f"topic {topic.name}: differs: {difference}; fix: {difference.remedy}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


_POLL_S = 0.1  # interval between checks for new ACLs; chosen: a broker has them within 0.5 s
Right = tuple[ResourceType, str, ACLOperation]


@dataclass(frozen=True, slots=True)
class Role:
    """Rights of one kind of client, and the key of [kafka] with its users."""

    name: str
    key: str
    rights: tuple[Right, ...]


def _on_topics(names: Iterable[str], *operations: ACLOperation) -> tuple[Right, ...]:
    return tuple((ResourceType.TOPIC, name, operation) for name in names for operation in operations)


def list_roles() -> tuple[Role, ...]:
    """Returns the roles with their rights (docs/kafka.md). Rights for `init` and `doctor` are granted by hand."""
    letters = [topics.dead_letter_topic(name) for name in topics.READ]
    pipeline = (
        *_on_topics(topics.READ, ACLOperation.READ),
        *_on_topics(letters, ACLOperation.WRITE),
        (ResourceType.GROUP, GROUP, ACLOperation.READ),
    )
    return (
        Role("agents", "agent_users", _on_topics(topics.AGENT_TOPICS, ACLOperation.WRITE)),
        Role("pipeline", "pipeline_users", pipeline),
    )


def create_acls(kafka: Kafka, print_line: Callable[[str], None]) -> None:
    """Creates missing ACLs and removes none. It can be repeated.

    Raises UsageError without users or authorizer, Unreachable if the brokers cannot be used.
    """
    wanted = {role: _rules(role, _users(kafka, role)) for role in list_roles()}
    try:
        with closing(kafka_clients.create_admin(kafka, "init", CONNECT_S)) as admin:
            known = set(_read_acls(admin, kafka))
            missing = [rule for rules in wanted.values() for rule in rules if rule not in known]
            if missing:
                _create(admin, missing)
                known = _wait_for_acls(admin, kafka, missing)
            for role, rules in wanted.items():
                made = sum(rule in missing for rule in rules)
                users = ", ".join(_users(kafka, role))
                print_line(f"rights of {role.name} ({users}): {made} created, {len(rules) - made} existed")
            for line in _describe_other_writers(known, wanted):
                print_line(line)
    except SecurityDisabledError as error:
        raise UsageError(
            f"kafka {kafka.bootstrap_servers}: the brokers have no authorizer, so all users may write; "
            "expected authorizer.class.name in server.properties"
        ) from error
    except KafkaError as error:
        raise Unreachable(str(classify_error(kafka, error) or f"kafka {kafka.bootstrap_servers}: {error}")) from error


def _users(kafka: Kafka, role: Role) -> tuple[str, ...]:
    found: tuple[str, ...] = getattr(kafka, role.key)
    if not found:
        raise UsageError(f"[kafka] {role.key}: is empty; expected the users of the {role.name}, such as ['User:NAME']")
    return found


def _rules(role: Role, users: Iterable[str]) -> list[ACL]:
    return [
        ACL(user, "*", operation, ACLPermissionType.ALLOW, ResourcePattern(kind, name))
        for user in users
        for kind, name, operation in role.rights
    ]


def _read_acls(admin: KafkaAdminClient, kafka: Kafka) -> Iterator[ACL]:
    """Yields all ACLs that apply to our topics or our group, including those with name patterns."""
    names = [(ResourceType.TOPIC, topic.name) for topic in topics.configured_topics(kafka)] + [
        (ResourceType.GROUP, GROUP)
    ]
    for kind, name in names:
        pattern = ResourcePatternFilter(kind, name, ACLResourcePatternType.MATCH)
        found, _ = admin.describe_acls(ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, pattern))
        yield from found


def _create(admin: KafkaAdminClient, rules: list[ACL]) -> None:
    for error in admin.create_acls(rules)["failed"]:
        raise error


def _wait_for_acls(admin: KafkaAdminClient, kafka: Kafka, made: list[ACL]) -> set[ACL]:
    """Waits until the broker has the new ACLs, which it receives from the controller with a delay; returns all ACLs."""
    end = time.monotonic() + CONNECT_S
    while not set(made) <= (known := set(_read_acls(admin, kafka))):
        if time.monotonic() > end:
            raise KafkaTimeoutError(f"rights were created, but a broker does not have them after {CONNECT_S:g} s")
        time.sleep(_POLL_S)
    return known


def _describe_other_writers(known: Iterable[ACL], wanted: dict[Role, list[ACL]]) -> Iterator[str]:
    """Yields a line for each other user who may write telemetry, and so send data for any node without a key."""
    agents = {rule.principal for role, rules in wanted.items() if role.name == "agents" for rule in rules}
    telemetry = {
        pattern
        for pattern in {rule.resource_pattern for rule in known}
        if pattern.resource_type == ResourceType.TOPIC and any(_covers(pattern, name) for name in topics.AGENT_TOPICS)
    }
    others = {
        (rule.principal, rule.resource_pattern.resource_name)
        for rule in known
        if rule.permission_type == ACLPermissionType.ALLOW
        and rule.operation in (ACLOperation.WRITE, ACLOperation.ALL)
        and rule.resource_pattern in telemetry
        and rule.principal not in agents
    }
    for user, name in sorted(others):
        yield f"rights: {user} may also write topic {name}; fix: kafka-acls.sh --remove, or name it in agent_users"


def _covers(pattern: ResourcePattern, name: str) -> bool:
    """Returns whether a pattern matches a topic name."""
    if pattern.pattern_type == ACLResourcePatternType.PREFIXED:
        return name.startswith(pattern.resource_name)
    return pattern.resource_name in (name, "*")
