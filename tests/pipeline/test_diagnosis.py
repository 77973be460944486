"""Messages for unusable brokers name the cause; tested over real listeners of every kind."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import diagnosis, kafka_clients
from pipeline.transport.broker_errors import BrokerProblem
from tests.kafka_broker import HOST, Address, Broker, reserve_port
from tests.kafka_clients import kafka_of, untidy_refusals
from tests.kafka_security import Security

pytestmark = pytest.mark.refusals
SECONDS = 10.0
"""Chosen: a refusal takes 0.3 s; a test machine may stall."""


@pytest.fixture
def frozen_listener() -> Iterator[str]:
    """host:port that accepts connections and never answers, as a frozen broker does."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(8)
        yield f"{HOST}:{listener.getsockname()[1]}"


def expect_problem(kafka: Kafka, kind: str, *words: str) -> BrokerProblem:
    trouble = diagnosis.find_broker_problem(kafka, SECONDS)
    assert trouble is not None
    assert trouble.kind == kind, trouble
    assert all(word in trouble.text for word in words), trouble
    assert trouble.remedy
    return trouble


def test_a_usable_broker_has_no_problem(kafka: Address) -> None:
    assert diagnosis.find_broker_problem(kafka_of(kafka)) is None


def test_a_usable_broker_with_tls_and_scram_has_no_problem(secure_kafka: Broker) -> None:
    assert diagnosis.find_broker_problem(kafka_of(secure_kafka)) is None


def test_a_closed_port_refuses_the_connection() -> None:
    with reserve_port() as port:
        expect_problem(Kafka(f"{HOST}:{port.getsockname()[1]}"), "unreachable", HOST, "refused")


@pytest.mark.slow
def test_a_host_name_that_does_not_resolve_is_reported() -> None:
    expect_problem(Kafka("broker.invalid:9092"), "unreachable", "broker.invalid", "resolve")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_a_frozen_broker_takes_no_more_than_the_time_limit(frozen_listener: str, protocol: Any) -> None:
    begun = time.monotonic()
    trouble = diagnosis.find_broker_problem(Kafka(frozen_listener, security_protocol=protocol), 0.3)
    assert time.monotonic() - begun < 5.0
    assert trouble is not None
    assert (trouble.kind, "does not respond" in trouble.text) == ("unreachable", True)


def test_one_reachable_broker_of_the_list_is_enough(kafka: Address) -> None:
    assert (
        diagnosis.find_broker_problem(kafka_of(kafka, bootstrap_servers=f"{HOST}:1, {kafka.bootstrap}"), SECONDS)
        is None
    )


def test_of_several_problems_the_most_specific_one_is_reported(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    both = {"bootstrap_servers": f"{HOST}:1, {secure_kafka.bootstrap}", "password_file": security.wrong_password_file}
    expect_problem(kafka_of(secure_kafka, **both), "credential")


def test_a_wrong_password_is_distinguished_from_a_stopped_broker(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    trouble = expect_problem(
        kafka_of(secure_kafka, password_file=security.wrong_password_file), "credential", "'fleetpulse'"
    )
    assert security.wrong_password_file.read_text().strip() not in str(trouble)


def test_an_unknown_user_is_a_credential_problem(secure_kafka: Broker) -> None:
    expect_problem(kafka_of(secure_kafka, username="stranger"), "credential", "'stranger'", "refused")


def test_an_unsupported_mechanism_is_reported_with_the_supported_ones(secure_kafka: Broker) -> None:
    expect_problem(kafka_of(secure_kafka, sasl_mechanism="PLAIN"), "protocol", "SCRAM-SHA-512", "'PLAIN'")


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
def test_a_plaintext_client_of_a_tls_listener_is_reported(secure_kafka: Broker, protocol: str) -> None:
    expect_problem(kafka_of(secure_kafka, security_protocol=protocol), "protocol", "requires TLS", repr(protocol))


def test_a_client_without_the_required_authentication_is_reported(secure_kafka: Broker) -> None:
    expect_problem(kafka_of(secure_kafka, security_protocol="SSL"), "protocol", "without authentication", "'SSL'")


def test_a_tls_client_of_a_plaintext_listener_is_reported(kafka: Address, secure_kafka: Broker) -> None:
    expect_problem(kafka_of(secure_kafka, bootstrap_servers=kafka.bootstrap), "protocol", "no TLS", "'SASL_SSL'")


def test_authentication_at_a_listener_without_users_is_reported(kafka: Address, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("x")
    wants = {"security_protocol": "SASL_PLAINTEXT", "username": "u", "password_file": tmp_path / "password"}
    expect_problem(kafka_of(kafka, **wants), "protocol", "does not accept users")


def test_an_unknown_certificate_authority_is_a_certificate_problem(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    trouble = expect_problem(kafka_of(secure_kafka, ca_file=security.strangers_ca_file), "certificate", "refused")
    assert "ca_file" in trouble.remedy


def test_a_host_name_missing_in_the_certificate_is_a_certificate_problem(secure_kafka: Broker) -> None:
    # getaddrinfo resolves 127.1 to 127.0.0.1, and no certificate contains it
    trouble = expect_problem(
        kafka_of(secure_kafka, bootstrap_servers=f"127.1:{secure_kafka.port}"), "certificate", "127.1"
    )
    assert "name the broker" in trouble.remedy


def test_a_broker_that_requires_a_client_certificate_is_reported(
    new_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = new_broker("mutual", security=Security(tmp_path / "security", mutual=True))
    assert diagnosis.find_broker_problem(kafka_of(broker), SECONDS) is None
    trouble = expect_problem(kafka_of(broker, certificate_file=None, key_file=None), "certificate")
    assert "certificate_file" in trouble.remedy


def test_files_that_are_not_certificates_are_reported(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    expect_problem(kafka_of(secure_kafka, ca_file=security.password_file), "certificate", "certificate files")


def test_a_server_that_is_not_kafka_is_not_reported_as_a_broker() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(8)
        answering = threading.Thread(target=_answer_http, args=(listener,), daemon=True)
        answering.start()
        expect_problem(Kafka(f"{HOST}:{listener.getsockname()[1]}"), "unreachable", "not a Kafka broker")
        answering.join(SECONDS)


def _answer_http(listener: socket.socket) -> None:
    for _ in range(2):  # the request, and the check for TLS
        link, _address = listener.accept()
        with link:
            link.recv(4096)
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_brokers_that_advertise_an_unreachable_address_are_reported(new_broker: Callable[..., Broker]) -> None:
    with reserve_port() as dead:
        address = f"{HOST}:{dead.getsockname()[1]}"
        broker = new_broker("elsewhere", properties={"advertised.listeners": f"CLIENTS://{address},INSIDE://{HOST}:1"})
        trouble = expect_problem(kafka_of(broker), "unreachable", "responds, but", address)
    assert "advertised.listeners" in trouble.remedy


def test_an_unreadable_password_file_is_a_configuration_problem(secure_kafka: Broker) -> None:
    with pytest.raises(ConfigError, match="password_file"):
        diagnosis.find_broker_problem(kafka_of(secure_kafka, password_file=Path("/nowhere/password")))


# --- clients that run ------------------------------------------------------------------------------------------------


@pytest.fixture
def client_errors() -> Iterator[diagnosis.ClientErrors]:
    client_errors = diagnosis.ClientErrors()
    client_errors.attach()
    yield client_errors
    client_errors.detach()


def problem_of(kafka: Kafka, client_errors: diagnosis.ClientErrors) -> BrokerProblem:
    """Returns the trouble reported when a real client cannot connect."""
    with untidy_refusals(), pytest.raises(KafkaError) as failed:
        kafka_clients.create_admin(kafka, "tests", 1.0).close()
    return diagnosis.explain_failure(kafka, client_errors, failed.value)


@pytest.mark.slow
def test_a_client_without_a_broker_reports_its_own_errors(client_errors: diagnosis.ClientErrors) -> None:
    trouble = problem_of(Kafka(f"{HOST}:1"), client_errors)
    assert (trouble.kind, "refused" in trouble.text) == ("unreachable", True)
    assert client_errors.handshake is None, "a handshake was made although the client's errors are sufficient"


def test_a_client_with_a_wrong_password_reports_it(secure_kafka: Broker, client_errors: diagnosis.ClientErrors) -> None:
    security = secure_kafka.security
    assert security is not None
    assert (
        problem_of(kafka_of(secure_kafka, password_file=security.wrong_password_file), client_errors).kind
        == "credential"
    )


def test_a_client_with_the_wrong_certificate_authority_reports_it(
    secure_kafka: Broker, client_errors: diagnosis.ClientErrors
) -> None:
    security = secure_kafka.security
    assert security is not None
    assert problem_of(kafka_of(secure_kafka, ca_file=security.strangers_ca_file), client_errors).kind == "certificate"


@pytest.mark.slow
def test_a_handshake_is_not_repeated_at_each_failure(
    frozen_listener: str, client_errors: diagnosis.ClientErrors
) -> None:
    kafka, error = Kafka(frozen_listener), TimeoutError("no acknowledgement")
    first = diagnosis.explain_failure(kafka, client_errors, error)
    begun = time.monotonic()
    assert diagnosis.explain_failure(kafka, client_errors, error) == first
    assert time.monotonic() - begun < diagnosis.HANDSHAKE_S / 2


@pytest.mark.parametrize(
    "error", [KafkaTimeoutError("Expiring 30 record(s) for TopicPartition(telemetry.v1, 0)"), TimeoutError("x")]
)
def test_the_clients_text_of_a_delivery_timeout_is_not_repeated(
    kafka: Address, client_errors: diagnosis.ClientErrors, error: Exception
) -> None:
    text = str(diagnosis.explain_failure(kafka_of(kafka), client_errors, error))
    assert "does not acknowledge messages" in text
    assert not [word for word in ("Expiring", "Timeout", "start the broker", "bootstrap_servers") if word in text]


def test_a_delivery_timeout_of_a_refused_user_is_reported_as_such_even_after_a_good_handshake(
    secure_kafka: Broker, client_errors: diagnosis.ClientErrors
) -> None:
    security, error = secure_kafka.security, KafkaTimeoutError("Expiring 30 record(s)")
    assert security is not None
    assert diagnosis.explain_failure(kafka_of(secure_kafka), client_errors, error).kind == "unreachable"
    wrong = kafka_of(secure_kafka, password_file=security.wrong_password_file)
    assert diagnosis.explain_failure(wrong, client_errors, error).kind == "credential"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TopicAuthorizationFailedError(), "forbidden"), (UnknownTopicOrPartitionError(), "missing topic")],
)
def test_a_refused_request_needs_no_handshake(error: KafkaError, kind: str) -> None:
    assert diagnosis.explain_failure(Kafka("broker.invalid:9092"), diagnosis.ClientErrors(), error).kind == kind


def test_client_errors_are_bounded_and_cleared_after_recovery(client_errors: diagnosis.ClientErrors) -> None:
    for number in range(1000):
        logging.getLogger("kafka.net.manager").error("Connection failed: %s", KafkaError(str(number)))
    assert [str(error) for error in client_errors.errors][-1].endswith("999")
    assert len(client_errors.errors) == diagnosis.MAX_ERRORS
    client_errors.clear()
    assert not client_errors.errors


@pytest.mark.slow
def test_a_client_in_an_outage_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    problem_of(Kafka(f"{HOST}:1"), diagnosis.ClientErrors())
    assert capfd.readouterr() == ("", "")


def test_the_log_level_of_the_client_never_includes_passwords() -> None:
    logging.getLogger(kafka_clients.LOGGER).setLevel(logging.DEBUG)
    kafka_clients.client_settings(Kafka(), "tests")
    assert not logging.getLogger("kafka.admin.client").isEnabledFor(logging.DEBUG)


@pytest.mark.slow
@pytest.mark.parametrize("make", [kafka_clients.create_admin, kafka_clients.create_consumer])
def test_a_client_of_a_frozen_tls_broker_stops_in_time(frozen_listener: str, make: Callable[..., Any]) -> None:
    before, begun = set(threading.enumerate()), time.monotonic()
    with untidy_refusals():
        with pytest.raises(KafkaError):
            make(Kafka(frozen_listener, security_protocol="SSL"), "tests", 0.2)
        assert time.monotonic() - begun < 5.0
        for left in set(threading.enumerate()) - before:
            left.join(SECONDS)
            assert not left.is_alive(), f"{left.name} is left behind"
