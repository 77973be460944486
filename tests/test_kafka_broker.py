"""The broker of the tests: it is real, survives kills and freezes, and supports authentication."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.model.records import TELEMETRY
from pipeline.transport import topics
from tests.kafka_broker import Address, Broker, BrokerError
from tests.kafka_clients import admin_of, kafka_of, make_topics, read, refusal, write
from tests.kafka_security import Security


@pytest.fixture
def security(secure_kafka: Broker) -> Security:
    assert secure_kafka.security is not None
    return secure_kafka.security


def values(address: Address) -> list[bytes]:
    return [record.value for record in read(address, TELEMETRY)]


def test_the_shared_broker_has(kafka: Address) -> None:
    made = make_topics(kafka)
    with admin_of(kafka) as admin:
        assert {topic.name for topic in topics.configured_topics(made)} <= set(admin.list_topics())
    assert values(kafka) == []


def test_topics_that_are_created_again_are_empty(kafka: Address) -> None:
    make_topics(kafka)
    write(kafka, TELEMETRY, [b"one", b"two"])
    assert values(kafka) == [b"one", b"two"]
    make_topics(kafka)
    assert values(kafka) == []


@pytest.mark.slow
def test_a_killed_broker_restarts_with_its_data(own_broker: Broker) -> None:
    make_topics(own_broker)
    write(own_broker, TELEMETRY, [b"before"])
    own_broker.kill()
    assert not own_broker.answers()
    own_broker.start()
    write(own_broker, TELEMETRY, [b"after"])
    assert values(own_broker) == [b"before", b"after"]


def test_a_frozen_broker_does_not_answer_until_it_is_thawed(own_broker: Broker) -> None:
    make_topics(own_broker)
    own_broker.freeze()
    assert not own_broker.answers(timeout=0.3)
    own_broker.thaw()
    assert own_broker.answers(timeout=3.0)
    write(own_broker, TELEMETRY, [b"after"])
    assert values(own_broker) == [b"after"]


def test_a_broker_with_invalid_settings_reports_its_log(new_broker: Callable[..., Broker]) -> None:
    with pytest.raises(BrokerError, match="log\\.retention\\.ms"):
        new_broker(properties={"log.retention.ms": "soon"})


@pytest.mark.slow
def test_a_damaged_archive_of_classes_is_harmless(
    new_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broker = new_broker()
    broker.stop()
    archive = tmp_path / "damaged.jsa"
    if broker._archive.exists():
        archive.write_bytes(broker._archive.read_bytes()[: 1 << 20])  # a truncated one ends the JVM with SIGBUS
    monkeypatch.setattr(broker, "_archive", archive)
    broker.start()
    assert broker.answers()
    assert broker.rss_bytes() > 1 << 20
    assert broker.cpu_seconds() > 0
    broker.kill()  # a normal stop would take 3 s to write the archive again


def test_the_secure_broker_serves_clients_with_its_authority_and_password(secure_kafka: Broker) -> None:
    make_topics(secure_kafka)
    write(secure_kafka, TELEMETRY, [b"sealed"])
    assert values(secure_kafka) == [b"sealed"]


def test_the_secure_broker_refuses_plaintext(secure_kafka: Broker) -> None:
    assert refusal(kafka_of(secure_kafka, security_protocol="PLAINTEXT"))


def test_the_secure_broker_refuses_a_wrong_password(security: Security, secure_kafka: Broker) -> None:
    assert refusal(kafka_of(secure_kafka, password_file=security.wrong_password_file))


def test_a_client_with_another_authority_refuses_the_secure_broker(security: Security, secure_kafka: Broker) -> None:
    assert refusal(kafka_of(secure_kafka, ca_file=security.strangers_ca_file))


@pytest.mark.slow
def test_a_mutual_tls_broker_requires_a_client_certificate(new_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = new_broker(security=Security(tmp_path / "security", mutual=True))
    make_topics(broker)
    assert refusal(kafka_of(broker, certificate_file=None, key_file=None))


@pytest.mark.slow
@pytest.mark.parametrize(("required", "outcome"), [("", "skipped"), ("chromium,kafka", "failed")])
def test_a_missing_part_is_skipped_with_the_fix_unless_required(tmp_path: Path, required: str, outcome: str) -> None:
    root = Path(__file__).parents[1]
    environ = {
        **os.environ,
        "PATH": str(tmp_path),
        "FLEETPULSE_REQUIRE_PARTS": required,
        "FLEETPULSE_TEST_KAFKA": "",
    }
    words = [
        "-m",
        "pytest",
        "-q",
        "-rsEfp",
        "-m",
        "kafka",
        "-k",
        "shared_broker_has",
        "tests/test_kafka_broker.py",
    ]
    ran = subprocess.run([sys.executable, *words], cwd=root, env=environ, capture_output=True, text=True)
    assert "run 'make parts'" in ran.stdout, ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (outcome == "skipped"), ran.stdout
