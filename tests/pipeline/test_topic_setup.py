"""`fleetpulse init` over real brokers: creates missing topics, changes no existing one, reports differences."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.commands import init, init_kafka
from pipeline.config.sections import Config, Kafka, Pipeline, Spool, Store
from pipeline.model.errors import Unreachable, UsageError
from pipeline.model.records import OTLP
from pipeline.transport import topics
from pipeline.transport import topics as topic_state
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import admin_of, delete_topics, kafka_of, read, write

NAMES = [topic.name for topic in topics.configured_topics(Kafka())]


def init_lines(kafka: Kafka) -> list[str]:
    lines: list[str] = []
    init_kafka.create_topics(kafka, lines.append)
    return lines


@pytest.fixture
def empty_brokers(kafka: Address) -> Address:
    """Brokers without any of our topics."""
    delete_topics(kafka, NAMES)
    return kafka


def read_topics(address: Address) -> Mapping[str, topic_state.TopicState]:
    with admin_of(address) as admin:
        return topic_state.read_topics(admin, topics.configured_topics(kafka_of(address)))


def test_topics_are_created_with_their_settings_and_leaders(empty_brokers: Address) -> None:
    lines = init_lines(kafka_of(empty_brokers))
    assert len(lines) == len(NAMES)
    assert "topic telemetry.v1: created: 4 partitions, 1 replica, retention 72 h" in lines
    assert "topic telemetry.v1.dlq: created: 1 partition, 1 replica, retention 168 h" in lines
    state = read_topics(empty_brokers)
    for topic in topics.configured_topics(kafka_of(empty_brokers)):
        found = state[topic.name]
        assert (found.partitions, found.headless) == (topic.partitions, 0)
        assert {key: found.settings[key] for key in topic.settings} == dict(topic.settings)


def test_the_topic_of_other_senders_is_created_once_like_the_others(empty_brokers: Address) -> None:
    first, second = init_lines(kafka_of(empty_brokers)), init_lines(kafka_of(empty_brokers))
    (created,) = [line for line in first if line.startswith(f"topic {OTLP}:")]
    (known,) = [line for line in second if line.startswith(f"topic {OTLP}:")]
    assert created == f"topic {OTLP}: created: 4 partitions, 1 replica, retention 72 h"
    assert known == f"topic {OTLP}: already exists, as configured"


def test_a_second_run_finds_all_topics_and_keeps_their_messages(empty_brokers: Address) -> None:
    init_lines(kafka_of(empty_brokers))
    write(empty_brokers, "telemetry.v1", [b"kept"])
    assert all("already exists, as configured" in line for line in init_lines(kafka_of(empty_brokers)))
    assert [record.value for record in read(empty_brokers, "telemetry.v1")] == [b"kept"]


def test_differences_are_reported_with_the_fix_and_left_alone(empty_brokers: Address) -> None:
    init_lines(kafka_of(empty_brokers, partitions=2))
    before = read_topics(empty_brokers)
    lines = [
        line
        for line in init_lines(kafka_of(empty_brokers, partitions=5, retention_hours=1.0))
        if "telemetry.v1:" in line
    ]
    assert lines[0] == "topic telemetry.v1: already exists"
    assert "number of partitions is 2, expected 5; fix: kafka-topics.sh" in lines[1]
    assert "[kafka] partitions = 2" in lines[1]
    assert "retention.ms is 259200000, expected 3600000; fix: kafka-configs.sh" in lines[2]
    assert "--add-config retention.ms=3600000" in lines[2]
    assert read_topics(empty_brokers) == before


def test_more_partitions_than_configured_are_fixed_in_the_configuration(empty_brokers: Address) -> None:
    init_lines(kafka_of(empty_brokers, partitions=5))
    (line,) = [text for text in init_lines(kafka_of(empty_brokers, partitions=2)) if "telemetry.v1: differs" in text]
    assert line.endswith("number of partitions is 5, expected 2; fix: [kafka] partitions = 5")


def test_two_concurrent_runs_create_each_topic_once(empty_brokers: Address) -> None:
    said: list[list[str]] = []
    both = [threading.Thread(target=lambda: said.append(init_lines(kafka_of(empty_brokers)))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [len(lines) for lines in said] == [len(NAMES)] * 2
    assert sum("created:" in line for lines in said for line in lines) == len(NAMES)


def test_more_replicas_than_brokers_are_refused_with_the_fix(empty_brokers: Address) -> None:
    with pytest.raises(UsageError, match=r"telemetry\.v1.*\[kafka\] replication_factor = 3.*start them, or lower it"):
        init_lines(kafka_of(empty_brokers, replication_factor=3))


def test_fewer_replicas_than_configured_are_reported_and_need_no_more_acknowledgements_than_brokers(
    empty_brokers: Address,
) -> None:
    init_lines(kafka_of(empty_brokers))
    lines = [
        text for text in init_lines(kafka_of(empty_brokers, replication_factor=3)) if "telemetry.v1: differs" in text
    ]
    assert len(lines) == 1
    assert "replication factor is 1, expected 3" in lines[0]


def test_with_three_replicas_two_must_acknowledge_a_message() -> None:
    assert {t.settings.get("min.insync.replicas") for t in topics.configured_topics(Kafka(replication_factor=3))} == {
        "2"
    }
    assert {t.settings.get("min.insync.replicas") for t in topics.configured_topics(Kafka(replication_factor=2))} == {
        None
    }


def test_partitions_without_a_leader_are_counted(empty_brokers: Address) -> None:
    init_lines(kafka_of(empty_brokers))
    with admin_of(empty_brokers) as admin:
        found = admin.describe_topics(["telemetry.v1"])
        found[0]["partitions"][1]["leader_id"] = -1
        admin.describe_topics = lambda names: found
        assert (
            topic_state.read_topics(admin, topics.configured_topics(kafka_of(empty_brokers)))["telemetry.v1"].headless
            == 1
        )


def test_unreachable_brokers_are_reported_by_name() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1.*refused.*bootstrap_servers"):
        init_lines(Kafka("127.0.0.1:1"))


def test_init_works_over_tls_and_scram(secure_kafka: Broker) -> None:
    delete_topics(secure_kafka, NAMES)
    assert "topic telemetry.v1: created: 4 partitions, 1 replica, retention 72 h" in init_lines(kafka_of(secure_kafka))
    write(secure_kafka, "events.v1", [b"sealed"])
    assert [record.value for record in read(secure_kafka, "events.v1")] == [b"sealed"]


@pytest.mark.parametrize(
    ("key", "file", "words"),
    [
        ("password_file", "wrong_password_file", "user 'fleetpulse' is refused"),
        ("ca_file", "strangers_ca_file", "certificate is refused"),
    ],
)
def test_init_reports_why_it_is_refused(secure_kafka: Broker, key: str, file: str, words: str) -> None:
    with pytest.raises(Unreachable, match=words) as refused:
        init_lines(kafka_of(secure_kafka, **{key: getattr(secure_kafka.security, file)}))
    assert secure_kafka.security.password not in str(refused.value)


def test_the_command_creates_store_folders_and_topics(empty_brokers: Address, tmp_path: Path) -> None:
    config = Config(
        store=Store(path=tmp_path / "store.duckdb"),
        spool=Spool(directory=tmp_path / "spool"),
        kafka=kafka_of(empty_brokers),
        pipeline=Pipeline(transport="kafka"),
    )
    lines: list[str] = []
    assert init.initialize(config, lines.append) == 0
    assert sum(" created" in line for line in lines) == 2 + len(NAMES)
    lines.clear()
    assert init.initialize(replace(config), lines.append) == 0
    assert sum("already exists" in line for line in lines) == 3 + len(NAMES)


def test_init_beside_a_running_pipeline_creates_the_missing_topics(empty_brokers: Address, tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    hold = "import sys, duckdb; held = duckdb.connect(sys.argv[1]); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold, str(path)], **pipes) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        lines: list[str] = []
        config = Config(
            kafka=kafka_of(empty_brokers),
            pipeline=Pipeline(transport="kafka"),
            spool=Spool(directory=tmp_path / "spool"),
            store=Store(path=path),
        )
        assert init.initialize(config, lines.append) == 0
        holder.communicate()
    assert f"store: {path} already exists; process {holder.pid} has it open" in lines
    assert "topic telemetry.v1: created: 4 partitions, 1 replica, retention 72 h" in lines
