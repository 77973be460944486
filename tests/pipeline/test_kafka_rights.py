"""The rights in docs/kafka.md are those that our clients need, on a broker that grants no others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType
from kafka.errors import CoordinatorLoadInProgressError, CoordinatorNotAvailableError, NoError, NotCoordinatorError
from kafka.structs import OffsetAndMetadata, TopicPartition

from pipeline.commands import doctor, init_kafka
from pipeline.config.sections import Config, Pipeline
from pipeline.model.errors import Unreachable
from pipeline.model.records import OTLP
from pipeline.transport import kafka_clients, topics
from tests.kafka_broker import Address, Broker, External
from tests.kafka_clients import SECONDS, admin_of, kafka_of, read, write
from tests.kafka_security import Security

PAGE = Path(__file__).parents[2] / "docs" / "kafka.md"
STRICT = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",  # the broker to itself, and the listener inside
}


@pytest.fixture
def strict_broker(new_broker: Callable[..., Broker], tmp_path: Path) -> Broker:
    return new_broker("strict", security=Security(tmp_path / "security"), properties=STRICT)


def listed_rights() -> list[tuple[str, str, str]]:
    """Returns (kind of resource, name, operation) of each line in the table of rights."""
    part = PAGE.read_text().split("\n## Rights\n")[1].split("\n## ")[0]
    found = []
    for kind, names, operations in re.findall(r"^\| [^|]+ \| (\w+) \| (.*?) \| (.*?) \|$", part, re.M):
        for name in re.findall(r"`(.*?)`", names):
            found += [(kind, name, operation) for operation in re.findall(r"`(.*?)`", operations)]
    return found


def grant_rights(broker: Broker, user: str) -> None:
    inside = re.search(r"INSIDE://(\S+?),", (broker.folder / "server.properties").read_text())
    assert inside is not None
    rules = [
        ACL(
            f"User:{user}",
            "*",
            getattr(ACLOperation, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()),
            ACLPermissionType.ALLOW,
            ResourcePattern(getattr(ResourceType, kind.upper()), name),
        )
        for kind, name, operation in listed_rights()
    ]
    with admin_of(External(inside[1])) as admin:
        admin.create_acls(rules)


def publish_offset(address: Address, offset: int) -> None:
    """Publishes an offset as the pipeline does; the brokers create the topic for it at the first request."""
    stored: dict[Any, Any] = {TopicPartition("telemetry.v1", 0): OffsetAndMetadata(offset, "", -1)}
    end = time.monotonic() + SECONDS
    with closing(kafka_clients.create_admin(kafka_of(address), "tests", SECONDS)) as admin:
        while _has_no_coordinator(admin, stored):
            assert time.monotonic() < end, "offsets are not taken"
            time.sleep(0.05)


def _has_no_coordinator(admin: KafkaAdminClient, stored: dict[Any, Any]) -> bool:
    """Returns whether the group has no coordinator yet. Fails on any other refusal."""
    try:
        answers = set(admin.alter_group_offsets("fleetpulse", stored).values())
    except CoordinatorNotAvailableError:
        return True
    assert answers <= {NoError, NotCoordinatorError, CoordinatorLoadInProgressError}
    return answers != {NoError}


@pytest.mark.slow
def test_without_rights_init_names_the_missing_ones_and_with_the_listed_ones_all_works(strict_broker: Broker) -> None:
    kafka = kafka_of(strict_broker)
    with pytest.raises(Unreachable, match=r"user 'fleetpulse' lacks rights on the topic .*docs/kafka\.md"):
        init_kafka.create_topics(kafka, str)
    config = Config(kafka=kafka, pipeline=Pipeline(transport="kafka"))
    before = {check.name: check for check in doctor.run_checks(config, [doctor.transport])}
    assert [check.state for check in before.values()] == ["ok", "ok", "fail", "warn"]
    assert "docs/kafka.md" in before["topics"].fix
    grant_rights(strict_broker, "fleetpulse")
    init_kafka.create_topics(kafka, str)
    assert {check.state for check in doctor.run_checks(config, [doctor.transport])} == {"ok"}
    for topic in topics.READ:
        if topic != OTLP:  # an agent writes it only where it exports by Kafka
            write(strict_broker, topic, [b"x"])
        assert len(read(strict_broker, topic)) == (topic != OTLP)
    publish_offset(strict_broker, 1)


def test_another_user_does_not_have_these_rights(strict_broker: Broker) -> None:
    grant_rights(strict_broker, "somebody")
    with pytest.raises(Unreachable, match="lacks rights"):
        init_kafka.create_topics(replace(kafka_of(strict_broker)), str)
