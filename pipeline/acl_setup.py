"""`fleetpulse init --acls`: gives the users of agents and pipeline their rights on Kafka, and says who else may write.

Kafka's rules name users and topics; they know nothing of keys, so they cannot bind a user to one node. They decide who
may write telemetry at all. What proves the node is a signature (pipeline/signatures.py).
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
from kafka.errors import KafkaError, KafkaTimeoutError, SecurityDisabledError

from pipeline.config.sections import Kafka
from pipeline.model.errors import Unreachable, UsageError
from pipeline.topic_setup import CONNECT_S
from pipeline.transport import clients, topics
from pipeline.transport.kafka_watch import GROUP
from pipeline.transport.troubles import of_error

_POLL_S = 0.1  # between two looks whether new rules are known; chosen: a broker follows within 0.5 s
Right = tuple[ResourceType, str, ACLOperation]


@dataclass(frozen=True, slots=True)
class Role:
    """What one kind of our clients may do, and the key of [kafka] that names its users."""

    name: str
    key: str
    rights: tuple[Right, ...]


def _on_topics(names: Iterable[str], *operations: ACLOperation) -> tuple[Right, ...]:
    return tuple((ResourceType.TOPIC, name, operation) for name in names for operation in operations)


def roles() -> tuple[Role, ...]:
    """The roles with their rights, as docs/kafka.md lists them. Rights for `init` and `doctor` are given by hand."""
    letters = [topics.dead_letters_of(name) for name in topics.READ]
    pipeline = (
        *_on_topics(topics.READ, ACLOperation.READ),
        *_on_topics(letters, ACLOperation.WRITE),
        (ResourceType.GROUP, GROUP, ACLOperation.READ),
    )
    return (
        Role("agents", "agent_users", _on_topics(topics.READ, ACLOperation.WRITE)),
        Role("pipeline", "pipeline_users", pipeline),
    )


def make(kafka: Kafka, say: Callable[[str], None]) -> None:
    """Makes the rules that are missing and removes none; harmless to repeat.

    Raises UsageError where no users are named or the brokers have no authorizer, Unreachable where they cannot be used.
    """
    wanted = {role: _rules(role, _users(kafka, role)) for role in roles()}
    try:
        with closing(clients.admin(kafka, "init", CONNECT_S)) as admin:
            known = set(_known(admin, kafka))
            missing = [rule for rules in wanted.values() for rule in rules if rule not in known]
            if missing:
                _create(admin, missing)
                known = _settled(admin, kafka, missing)
            for role, rules in wanted.items():
                made = sum(rule in missing for rule in rules)
                say(f"rights of {role.name} ({', '.join(_users(kafka, role))}): {made} made, {len(rules) - made} there")
            for line in _others(known, wanted):
                say(line)
    except SecurityDisabledError as error:
        raise UsageError(
            f"kafka {kafka.bootstrap_servers}: the brokers have no authorizer, so everybody may write; wanted "
            "authorizer.class.name in server.properties"
        ) from error
    except KafkaError as error:
        raise Unreachable(str(of_error(kafka, error) or f"kafka {kafka.bootstrap_servers}: {error}")) from error


def _users(kafka: Kafka, role: Role) -> tuple[str, ...]:
    found: tuple[str, ...] = getattr(kafka, role.key)
    if not found:
        raise UsageError(
            f"[kafka] {role.key}: names nobody; wanted the users of the {role.name}, such as ['User:NAME']"
        )
    return found


def _rules(role: Role, users: Iterable[str]) -> list[ACL]:
    return [
        ACL(user, "*", operation, ACLPermissionType.ALLOW, ResourcePattern(kind, name))
        for user in users
        for kind, name, operation in role.rights
    ]


def _known(admin: KafkaAdminClient, kafka: Kafka) -> Iterator[ACL]:
    """All rules that hold for one of our topics or our group, those for patterns of names included."""
    names = [(ResourceType.TOPIC, topic.name) for topic in topics.wanted(kafka)] + [(ResourceType.GROUP, GROUP)]
    for kind, name in names:
        pattern = ResourcePatternFilter(kind, name, ACLResourcePatternType.MATCH)
        found, _ = admin.describe_acls(ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, pattern))
        yield from found


def _create(admin: KafkaAdminClient, rules: list[ACL]) -> None:
    for error in admin.create_acls(rules)["failed"]:
        raise error


def _settled(admin: KafkaAdminClient, kafka: Kafka, made: list[ACL]) -> set[ACL]:
    """All rules once the broker that answers knows those just made: brokers follow their controller with a delay."""
    end = time.monotonic() + CONNECT_S
    while not set(made) <= (known := set(_known(admin, kafka))):
        if time.monotonic() > end:
            raise KafkaTimeoutError(f"rights were made, but a broker does not have them after {CONNECT_S:g} s")
        time.sleep(_POLL_S)
    return known


def _others(known: Iterable[ACL], wanted: dict[Role, list[ACL]]) -> Iterator[str]:
    """Users beside those of the agents who may write telemetry: whoever may, can speak for any node without a key."""
    agents = {rule.principal for role, rules in wanted.items() if role.name == "agents" for rule in rules}
    telemetry = {
        pattern
        for pattern in {rule.resource_pattern for rule in known}
        if pattern.resource_type == ResourceType.TOPIC and any(_covers(pattern, name) for name in topics.READ)
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
        yield f"rights: {user} may write topic {name}, too; fix: kafka-acls.sh --remove, or name it in agent_users"


def _covers(pattern: ResourcePattern, name: str) -> bool:
    """Whether a rule for this pattern holds for a topic of that name."""
    if pattern.pattern_type == ACLResourcePatternType.PREFIXED:
        return name.startswith(pattern.resource_name)
    return pattern.resource_name in (name, "*")
