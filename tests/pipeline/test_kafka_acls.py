"""`fleetpulse init --acls` on a broker without rights: agents may write, the pipeline may read, others nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kafka.admin import ScramMechanism, UserScramCredentialUpsertion
from kafka.errors import KafkaError

from pipeline.commands import init, init_kafka
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError
from tests.kafka_broker import Address, Broker, External
from tests.kafka_clients import admin_of, kafka_of, make_topics, read, untidy_refusals, write
from tests.kafka_security import MECHANISM, Security
from tests.pipeline.test_kafka_rights import PAGE, STRICT

ROLES = {"agents": "agent_users", "pipeline": "pipeline_users"}


@pytest.fixture
def strict_broker(new_broker: Callable[..., Broker], tmp_path: Path) -> Broker:
    return new_broker("strict", security=Security(tmp_path / "security"), properties=STRICT)


def super_user_listener(broker: Broker) -> External:
    """The listener on which every user is a super user."""
    found = re.search(r"INSIDE://(\S+?),", (broker.folder / "server.properties").read_text())
    assert found is not None
    return External(found[1])


def as_user(broker: Broker, folder: Path, name: str) -> External:
    """The broker as seen by a separate user."""
    assert broker.security is not None
    other = Security.__new__(Security)
    for key, value in {
        "folder": folder / name,
        "mutual": False,
        "username": name,
        "password": f"secret-of-{name}",
    }.items():
        object.__setattr__(other, key, value)
    other.folder.mkdir()
    other.password_file.write_text(other.password)
    other.ca_file.write_text(broker.security.ca_file.read_text())
    with admin_of(super_user_listener(broker)) as admin:
        mechanism = ScramMechanism[MECHANISM.replace("-", "_")]
        admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(name, mechanism, other.password, iterations=4096)]
        )
    return External(broker.bootstrap, other)


def grant_rights(broker: Broker, said: list[str]) -> None:
    kafka = replace(
        kafka_of(super_user_listener(broker)), agent_users=("User:agent",), pipeline_users=("User:pipeline",)
    )
    init_kafka.create_acls(kafka, said.append)


@pytest.mark.slow
def test_agents_may_only_write_and_the_pipeline_may_only_read(strict_broker: Broker, tmp_path: Path) -> None:
    make_topics(super_user_listener(strict_broker))
    said: list[str] = []
    grant_rights(strict_broker, said)
    agent, pipeline, stranger = (as_user(strict_broker, tmp_path, name) for name in ("agent", "pipeline", "stranger"))
    write(agent, "telemetry.v1", [b"x"])
    assert [record.value for record in read(pipeline, "telemetry.v1")] == [b"x"]
    write(pipeline, "telemetry.v1.dlq", [b"letter"])
    for who, topic in ((pipeline, "telemetry.v1"), (stranger, "events.v1"), (agent, "telemetry.v1.dlq")):
        with pytest.raises(KafkaError), untidy_refusals():
            write(who, topic, [b"y"], max_block_ms=2000, delivery_timeout_ms=2000, request_timeout_ms=1000)
    assert read(stranger, "telemetry.v1") == []  # it cannot even list the partitions
    assert said[0] == "rights of agents (User:agent): 2 created, 0 existed"


@pytest.mark.slow
def test_a_second_run_changes_nothing_and_names_other_users_who_may_write(strict_broker: Broker) -> None:
    make_topics(super_user_listener(strict_broker))
    said: list[str] = []
    grant_rights(strict_broker, said)
    kafka = kafka_of(super_user_listener(strict_broker), agent_users=("User:other",), pipeline_users=("User:pipeline",))
    said.clear()
    init_kafka.create_acls(kafka, said.append)
    assert said[0] == "rights of agents (User:other): 2 created, 0 existed"
    assert re.fullmatch(r"rights of pipeline \(User:pipeline\): 0 created, \d+ existed", said[1])
    assert [line.split(";")[0] for line in said[2:]] == [
        "rights: User:agent may also write topic events.v1", "rights: User:agent may also write topic telemetry.v1"
    ]  # fmt: skip


def test_without_users_authorizer_or_kafka_the_missing_part_is_reported(kafka: Address) -> None:
    with pytest.raises(UsageError, match="agent_users: is empty"):
        init_kafka.create_acls(kafka_of(kafka), str)
    with pytest.raises(UsageError, match="no authorizer"):
        init_kafka.create_acls(kafka_of(kafka, agent_users=("User:a",), pipeline_users=("User:b",)), str)
    with pytest.raises(UsageError, match=r"--acls.*transport = \"kafka\""):
        init.initialize(Config(), str, acls=True)


def test_the_granted_rights_are_those_of_the_documentation() -> None:
    part = PAGE.read_text().split("\n## Rights\n")[1].split("\n## ")[0]
    listed = {
        (who, kind, name, operation)
        for who, kind, names, operations in re.findall(r"^\| (\w+) \| (\w+) \| (.*?) \| (.*?) \|$", part, re.M)
        for name in re.findall(r"`(.*?)`", names)
        for operation in re.findall(r"`(.*?)`", operations)
    }
    given = {
        (role.name, kind.name.lower(), name, operation.name.title().replace("_", ""))
        for role in init_kafka.list_roles()
        for kind, name, operation in role.rights
    }
    assert given == listed
