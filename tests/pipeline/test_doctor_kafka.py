"""The Kafka checks of `fleetpulse doctor`: broker, credential, topics and clock are separate checks."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import ConfigResource

from pipeline.commands import doctor, doctor_kafka, init_kafka
from pipeline.commands.checks import Check
from pipeline.config.sections import Config, Kafka, Pipeline, Store
from pipeline.transport import topics
from pipeline.transport import topics as topic_state
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import SECONDS, admin_of, delete_topics, kafka_of, make_topics, read, untidy_refusals

ORDER = ["broker", "credential", "topics", "clock"]


def run_checks(kafka: Kafka, **more: Any) -> dict[str, Check]:
    checks = doctor.run_checks(Config(kafka=kafka, pipeline=Pipeline(transport="kafka", **more)), [doctor.transport])
    assert [check.name for check in checks] == ORDER
    return {check.name: check for check in checks}


def check_states(found: dict[str, Check]) -> list[str]:
    return [found[name].state for name in ORDER]


def exit_code(found: dict[str, Check]) -> int:
    return doctor.exit_code(list(found.values()))


def ignore(_: str) -> None:
    """Ignores the output of init."""


def test_all_checks_are_ok_after_init(kafka: Address) -> None:
    found = run_checks(make_topics(kafka))
    assert check_states(found) == ["ok"] * 4
    assert kafka.bootstrap in found["broker"].found
    assert "round trip" in found["clock"].found


def test_all_checks_are_ok_over_tls_and_scram(secure_kafka: Broker) -> None:
    init_kafka.create_topics(kafka_of(secure_kafka), ignore)
    found = run_checks(kafka_of(secure_kafka))
    assert check_states(found) == ["ok"] * 4
    assert "SASL_SSL: user 'fleetpulse', SCRAM-SHA-512" in found["credential"].found


def test_an_unreachable_broker_is_one_failure_with_exit_code_3() -> None:
    found = run_checks(Kafka("127.0.0.1:1"))
    assert check_states(found) == ["fail", "warn", "warn", "warn"]
    assert "127.0.0.1:1" in found["broker"].found
    assert all("not checked" in found[name].found for name in ORDER[1:])
    assert exit_code(found) == 3


def test_a_frozen_broker_is_unreachable(own_broker: Broker) -> None:
    own_broker.freeze()
    found = run_checks(kafka_of(own_broker))
    assert "does not respond" in found["broker"].found
    assert exit_code(found) == 3


@pytest.mark.parametrize(
    ("key", "file", "words"),
    [
        ("password_file", "wrong_password_file", "user 'fleetpulse' is refused"),
        ("ca_file", "strangers_ca_file", "certificate is refused"),
    ],
)
def test_a_refused_client_is_distinguished_from_an_unreachable_broker(
    secure_kafka: Broker, key: str, file: str, words: str
) -> None:
    found = run_checks(kafka_of(secure_kafka, **{key: getattr(secure_kafka.security, file)}))
    assert check_states(found) == ["ok", "fail", "warn", "warn"]
    assert words in found["credential"].found
    assert exit_code(found) == 1


def test_a_missing_password_file_is_named(secure_kafka: Broker, tmp_path: Path) -> None:
    found = run_checks(kafka_of(secure_kafka, password_file=tmp_path / "gone"))
    assert str(tmp_path / "gone") in found["credential"].found
    assert exit_code(found) == 1


@pytest.mark.parametrize(("mode", "state"), [(0o600, "ok"), (0o640, "ok"), (0o644, "warn")])
def test_a_world_readable_password_file_is_a_warning(
    secure_kafka: Broker, tmp_path: Path, mode: int, state: str
) -> None:
    assert secure_kafka.security is not None
    copy = tmp_path / "password"
    copy.write_text(secure_kafka.security.password)
    copy.chmod(mode)
    found = run_checks(kafka_of(secure_kafka, password_file=copy))["credential"]
    assert found.state == state
    assert state == "ok" or found.fix == f"chmod o-rwx {copy}"


def test_a_missing_topic_is_named_and_init_creates_it(kafka: Address) -> None:
    configured = make_topics(kafka)
    delete_topics(kafka, ["events.v1"])
    found = run_checks(configured)
    assert (found["topics"].state, found["topics"].found) == ("fail", "missing: events.v1")
    assert found["topics"].fix == "fleetpulse init"
    assert exit_code(found) == 1
    init_kafka.create_topics(configured, ignore)
    assert check_states(run_checks(configured)) == ["ok"] * 4


def test_settings_that_differ_are_a_warning_with_the_fixing_command(kafka: Address) -> None:
    make_topics(kafka)
    found = run_checks(kafka_of(kafka, retention_hours=1.0))
    assert found["topics"].state == "warn"
    assert "telemetry.v1: retention.ms is 259200000, expected 3600000" in found["topics"].found
    assert "--add-config retention.ms=3600000" in found["topics"].fix
    assert exit_code(found) == 0


def alter_topic(address: Address, topic: str, settings: dict[str, str]) -> None:
    """Alters the settings, and waits until the broker returns them: it follows its controller with a delay."""
    wanted = [one for one in topics.configured_topics(kafka_of(address)) if one.name == topic]
    end = time.monotonic() + SECONDS
    with admin_of(address) as admin:
        admin.alter_configs([ConfigResource("TOPIC", topic, settings)])
        while not settings.items() <= topic_state.read_topics(admin, wanted)[topic].settings.items():
            assert time.monotonic() < end, f"topic {topic} has no {settings} within {SECONDS} s"
            time.sleep(0.01)


def test_a_topic_that_refuses_large_messages_is_a_failure_and_all_fixes_are_listed(kafka: Address) -> None:
    configured = make_topics(kafka)
    alter_topic(kafka, "telemetry.v1", {"max.message.bytes": "20000"})
    alter_topic(kafka, "events.v1", {"retention.ms": "1000"})
    found = run_checks(configured)
    assert (found["topics"].state, exit_code(found)) == ("fail", 1)
    assert "telemetry.v1: max.message.bytes is 20000, expected 4198400" in found["topics"].found
    assert "--entity-name telemetry.v1 --alter --add-config max.message.bytes=4198400" in found["topics"].fix
    assert "--entity-name events.v1 --alter --add-config retention.ms=259200000" in found["topics"].fix


@pytest.mark.parametrize(("topic", "bytes_"), [("telemetry.v1", "9000000"), ("telemetry.v1.dlq", "20000")])
def test_a_different_limit_that_loses_no_message_is_a_warning(kafka: Address, topic: str, bytes_: str) -> None:
    configured = make_topics(kafka)
    alter_topic(kafka, topic, {"max.message.bytes": bytes_})
    assert run_checks(configured)["topics"].state == "warn"


@pytest.mark.refusals
def test_of_two_addresses_the_reachable_and_the_unreachable_one_are_named(kafka: Address) -> None:
    make_topics(kafka)
    with untidy_refusals():
        found = run_checks(kafka_of(kafka, bootstrap_servers=f"127.0.0.1:1, {kafka.bootstrap}"))
    assert check_states(found) == ["warn", "ok", "ok", "ok"]
    assert found["broker"].found == f"kafka: {kafka.bootstrap} answers; kafka 127.0.0.1:1: connection refused"
    assert "bootstrap_servers" in found["broker"].fix
    assert exit_code(found) == 0


def test_without_the_probe_topic_the_clock_is_not_checked(kafka: Address) -> None:
    configured = make_topics(kafka)
    delete_topics(kafka, [topics.PROBE])
    found = run_checks(configured)["clock"]
    assert (found.state, found.fix) == ("warn", "fleetpulse init")
    assert topics.PROBE in found.found


def test_a_topic_without_broker_timestamps_gives_no_clock(kafka: Address) -> None:
    configured = make_topics(kafka)
    alter_topic(kafka, topics.PROBE, {"message.timestamp.type": "CreateTime"})
    found = run_checks(configured)["clock"]
    assert (found.state, "not compared" in found.found) == ("warn", True)
    delete_topics(kafka, [topics.PROBE])


def test_the_clock_check_leaves_two_tiny_records_and_nothing_else(kafka: Address) -> None:
    configured = make_topics(kafka)
    run_checks(configured)
    assert sum(len(record.value) for record in read(kafka, topics.PROBE)) < 100
    assert [
        read(kafka, topic.name) for topic in topics.configured_topics(configured) if topic.name != topics.PROBE
    ] == [[]] * 6


@pytest.mark.parametrize(
    ("ahead", "trip", "state"),
    [
        (0.004, 0.01, "ok"),
        (-0.9, 0.01, "ok"),
        (1.2, 1.0, "ok"),  # the round trip hides 0.5 s of it
        (1.2, 0.01, "warn"),
        (-29.0, 0.01, "warn"),
        (31.0, 0.01, "fail"),
        (-31.0, 0.01, "fail"),
    ],
)
def test_clocks_that_differ_by_a_tick_are_a_warning_and_by_the_lateness_a_failure(
    ahead: float, trip: float, state: str
) -> None:
    found = doctor_kafka.rate_clock(ahead, trip, lateness=30.0)
    assert found.state == state
    assert ("ahead of" if ahead > 0 else "behind") in found.found
    assert f"{abs(ahead) * 1000:.0f} ms" in found.found


@pytest.mark.parametrize("wrong", [120.0, -120.0])
def test_a_wrong_clock_is_detected_with_the_real_broker(kafka: Address, wrong: float) -> None:
    ahead, trip = doctor_kafka.compare_clocks(make_topics(kafka), lambda: time.time() + wrong)
    assert ahead == pytest.approx(wrong, abs=1.0)
    assert doctor_kafka.rate_clock(ahead, trip, 30.0).state == "fail"


def test_the_password_is_in_no_output_of_doctor(
    secure_kafka: Broker, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    security = secure_kafka.security
    assert security is not None
    caplog.set_level("DEBUG")
    wrong = security.wrong_password_file.read_text().strip()
    for file in (security.password_file, security.wrong_password_file):
        config = Config(kafka=kafka_of(secure_kafka, password_file=file), pipeline=Pipeline(transport="kafka"))
        shown = doctor.format_checks(doctor.run_checks(config, [doctor.transport])) + repr(config)
        shown += "".join(capfd.readouterr()) + caplog.text
        assert security.password not in shown
        assert wrong not in shown


def test_the_kafka_checks_are_numbered_with_the_others(kafka: Address, tmp_path: Path) -> None:
    config = Config(kafka=make_topics(kafka), pipeline=Pipeline(transport="kafka"))
    config = dataclasses.replace(config, store=Store(path=tmp_path / "store.duckdb"))
    text = doctor.format_checks(doctor.run_checks(config))
    first = doctor.CHECKS.index(doctor.transport) + 1
    assert f"\n{first:2} ok   broker: kafka: {kafka.bootstrap} answers" in text
    assert f"\n{first + 1:2} ok   credential: " in text
    assert f"\n{first + 2:2} ok   topics: 7 topics are as configured" in text
    assert f"\n{first + 3:2} ok   clock: " in text
    assert f"\n{first + 4:2} " in text
    assert f"\n{len(doctor.CHECKS) + 3:2} " in text
    assert f"\n{len(doctor.CHECKS) + 4:2} " not in text
