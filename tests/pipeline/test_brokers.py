"""Settings of every Kafka client: from the configuration, with secrets read from files and never shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import kafka_clients
from tests.kafka_broker import Broker
from tests.kafka_clients import kafka_of, make_topics, read, write

SIGNED_IN: dict[str, Any] = {"security_protocol": "SASL_PLAINTEXT", "username": "fleetpulse"}


def test_servers_are_a_list_and_the_client_has_an_id() -> None:
    found = kafka_clients.client_settings(Kafka("a:1, b:2"), "agent")
    assert (found["bootstrap_servers"], found["client_id"]) == (["a:1", "b:2"], "fleetpulse-agent")
    assert not [key for key in found if key.startswith(("ssl_", "sasl_"))]


def test_the_password_is_the_text_of_the_file_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(" with spaces \r\n")
    found = kafka_clients.client_settings(Kafka(**SIGNED_IN, password_file=tmp_path / "password"), "agent")
    assert found["sasl_plain_password"] == " with spaces "


def test_tls_files_are_passed_only_when_tls_is_used(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("x")
    files = {"ca_file": tmp_path / "ca.pem"}
    assert kafka_clients.client_settings(Kafka(security_protocol="SSL", **files), "agent")["ssl_cafile"] == str(
        files["ca_file"]
    )
    assert "ssl_cafile" not in kafka_clients.client_settings(Kafka(**files), "agent")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (SIGNED_IN, "expected username and password_file"),
        ({**SIGNED_IN, "password_file": Path("/nowhere/p")}, r"password_file = '/nowhere/p': No such file.*expected"),
        ({**SIGNED_IN, "password_file": Path("/")}, "password_file = '/': Is a directory"),
        ({**SIGNED_IN, "password_file": Path("/dev/null")}, "is empty; expected the password"),
        ({"security_protocol": "SSL", "ca_file": Path("/nowhere/ca")}, "ca_file = '/nowhere/ca'"),
        ({"security_protocol": "SSL", "key_file": Path("/dev/null")}, "one without the other"),
    ],
)
def test_unusable_credentials_are_reported_with_key_and_file(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kafka_clients.client_settings(Kafka(**keys), "agent")


def test_a_file_that_is_not_text_is_reported_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"\xff\xfesecret")
    with pytest.raises(ConfigError, match="is not text") as refused:
        kafka_clients.client_settings(Kafka(**SIGNED_IN, password_file=tmp_path / "password"), "agent")
    assert "secret" not in str(refused.value)


def test_the_log_of_the_client_is_not_printed_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    logger = kafka_clients.mute_client_log()
    logging.getLogger("kafka.net.manager").error("Connection failed: %s", "x")
    assert (logger.propagate, logger.level) == (False, logging.WARNING)
    assert capfd.readouterr() == ("", "")


def test_messages_arrive_over_tls_and_scram_and_no_log_contains_the_password(
    secure_kafka: Broker, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    security = secure_kafka.security
    assert security is not None
    caplog.set_level(logging.DEBUG)
    kafka = make_topics(secure_kafka)
    values = [str(number).encode() for number in range(50)]
    write(secure_kafka, "telemetry.v1", values)
    assert [record.value for record in read(secure_kafka, "telemetry.v1")] == values
    talk = "".join(capfd.readouterr()) + caplog.text + repr(kafka_of(secure_kafka)) + repr(kafka) + secure_kafka.log
    assert security.password not in talk
