"""Why brokers cannot be used is told in words that fit the cause, over real listeners of every kind."""

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
from tests.kafka_broker import HOST, Address, Broker, held
from tests.kafka_clients import kafka_of, untidy_refusals
from tests.kafka_security import Security

pytestmark = pytest.mark.refusals
SECONDS = 10.0
"""Chosen: a refusal takes 0.3 s, a test machine may stall."""


@pytest.fixture
def silent() -> Iterator[str]:
    """host:port that takes connections and never answers, as a frozen broker does."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(8)
        yield f"{HOST}:{listener.getsockname()[1]}"


def told(kafka: Kafka, kind: str, *words: str) -> BrokerProblem:
    trouble = diagnosis.find_broker_problem(kafka, SECONDS)
    assert trouble is not None
    assert trouble.kind == kind, trouble
    assert all(word in trouble.text for word in words), trouble
    assert trouble.remedy
    return trouble


def test_nothing_is_wrong_with_a_broker_that_can_be_used(kafka: Address) -> None:
    assert diagnosis.find_broker_problem(kafka_of(kafka)) is None


def test_nothing_is_wrong_with_tls_and_scram(secure_kafka: Broker) -> None:
    assert diagnosis.find_broker_problem(kafka_of(secure_kafka)) is None


def test_a_port_where_nobody_listens_refuses_the_connection() -> None:
    with held() as port:
        told(Kafka(f"{HOST}:{port.getsockname()[1]}"), "unreachable", HOST, "refused")


def test_a_name_that_does_not_resolve_is_said_to_be_one() -> None:
    told(Kafka("broker.invalid:9092"), "unreachable", "broker.invalid", "resolve")


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_a_frozen_broker_costs_no_more_than_the_time_given(silent: str, protocol: Any) -> None:
    begun = time.monotonic()
    trouble = diagnosis.find_broker_problem(Kafka(silent, security_protocol=protocol), 0.3)
    assert time.monotonic() - begun < 5.0
    assert trouble is not None
    assert (trouble.kind, "does not respond" in trouble.text) == ("unreachable", True)


def test_one_broker_of_the_list_that_answers_is_enough(kafka: Address) -> None:
    assert (
        diagnosis.find_broker_problem(kafka_of(kafka, bootstrap_servers=f"{HOST}:1, {kafka.bootstrap}"), SECONDS)
        is None
    )


def test_of_several_troubles_the_most_telling_one_is_named(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    both = {"bootstrap_servers": f"{HOST}:1, {secure_kafka.bootstrap}", "password_file": security.wrong_password_file}
    told(kafka_of(secure_kafka, **both), "credential")


def test_a_wrong_password_is_told_from_a_dead_broker(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    trouble = told(kafka_of(secure_kafka, password_file=security.wrong_password_file), "credential", "'fleetpulse'")
    assert security.wrong_password_file.read_text().strip() not in str(trouble)


def test_an_unknown_user_is_a_wrong_credential(secure_kafka: Broker) -> None:
    told(kafka_of(secure_kafka, username="stranger"), "credential", "'stranger'", "refused")


def test_a_mechanism_that_is_not_offered_is_named_with_those_that_are(secure_kafka: Broker) -> None:
    told(kafka_of(secure_kafka, sasl_mechanism="PLAIN"), "protocol", "SCRAM-SHA-512", "'PLAIN'")


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
def test_who_speaks_plainly_to_tls_is_told_of_tls(secure_kafka: Broker, protocol: str) -> None:
    told(kafka_of(secure_kafka, security_protocol=protocol), "protocol", "requires TLS", repr(protocol))


def test_who_does_not_sign_in_where_one_must_is_told_so(secure_kafka: Broker) -> None:
    told(kafka_of(secure_kafka, security_protocol="SSL"), "protocol", "without authentication", "'SSL'")


def test_who_speaks_tls_to_a_plain_listener_is_told_so(kafka: Address, secure_kafka: Broker) -> None:
    told(kafka_of(secure_kafka, bootstrap_servers=kafka.bootstrap), "protocol", "no TLS", "'SASL_SSL'")


def test_who_signs_in_where_nobody_asks_is_told_so(kafka: Address, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("x")
    wants = {"security_protocol": "SASL_PLAINTEXT", "username": "u", "password_file": tmp_path / "password"}
    told(kafka_of(kafka, **wants), "protocol", "does not accept users")


def test_a_strangers_authority_is_a_matter_of_certificates(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    trouble = told(kafka_of(secure_kafka, ca_file=security.strangers_ca_file), "certificate", "refused")
    assert "ca_file" in trouble.remedy


def test_a_name_that_the_certificate_lacks_is_a_matter_of_certificates(secure_kafka: Broker) -> None:
    # getaddrinfo takes 127.1 for 127.0.0.1, and no certificate names it
    trouble = told(kafka_of(secure_kafka, bootstrap_servers=f"127.1:{secure_kafka.port}"), "certificate", "127.1")
    assert "name the broker" in trouble.remedy


def test_a_broker_that_wants_our_certificate_says_so(new_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = new_broker("mutual", security=Security(tmp_path / "security", mutual=True))
    assert diagnosis.find_broker_problem(kafka_of(broker), SECONDS) is None
    trouble = told(kafka_of(broker, certificate_file=None, key_file=None), "certificate")
    assert "certificate_file" in trouble.remedy


def test_files_that_are_no_certificates_are_named_as_such(secure_kafka: Broker) -> None:
    security = secure_kafka.security
    assert security is not None
    told(kafka_of(secure_kafka, ca_file=security.password_file), "certificate", "certificate files")


def test_a_server_that_is_no_kafka_is_not_called_a_broker() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(8)
        answering = threading.Thread(target=_answers_http, args=(listener,), daemon=True)
        answering.start()
        told(Kafka(f"{HOST}:{listener.getsockname()[1]}"), "unreachable", "not a Kafka broker")
        answering.join(SECONDS)


def _answers_http(listener: socket.socket) -> None:
    for _ in range(2):  # the request, and the question whether TLS is spoken
        link, _address = listener.accept()
        with link:
            link.recv(4096)
            link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_brokers_that_name_themselves_by_an_address_that_fails_are_told(new_broker: Callable[..., Broker]) -> None:
    with held() as dead:
        address = f"{HOST}:{dead.getsockname()[1]}"
        broker = new_broker("elsewhere", properties={"advertised.listeners": f"CLIENTS://{address},INSIDE://{HOST}:1"})
        trouble = told(kafka_of(broker), "unreachable", "responds, but", address)
    assert "advertised.listeners" in trouble.remedy


def test_a_password_file_that_cannot_be_read_is_a_matter_of_configuration(secure_kafka: Broker) -> None:
    with pytest.raises(ConfigError, match="password_file"):
        diagnosis.find_broker_problem(kafka_of(secure_kafka, password_file=Path("/nowhere/password")))


# --- clients that run ------------------------------------------------------------------------------------------------


@pytest.fixture
def causes() -> Iterator[diagnosis.ClientErrors]:
    causes = diagnosis.ClientErrors()
    causes.attach()
    yield causes
    causes.detach()


def said(kafka: Kafka, causes: diagnosis.ClientErrors) -> BrokerProblem:
    """What is said when a real client cannot connect."""
    with untidy_refusals(), pytest.raises(KafkaError) as failed:
        kafka_clients.create_admin(kafka, "tests", 1.0).close()
    return diagnosis.explain_failure(kafka, causes, failed.value)


def test_a_client_without_a_broker_tells_it_from_its_own_errors(causes: diagnosis.ClientErrors) -> None:
    trouble = said(Kafka(f"{HOST}:1"), causes)
    assert (trouble.kind, "refused" in trouble.text) == ("unreachable", True)
    assert causes.handshake is None, "a handshake was made although the client's own errors tell"


def test_a_client_whose_password_is_wrong_says_so(secure_kafka: Broker, causes: diagnosis.ClientErrors) -> None:
    security = secure_kafka.security
    assert security is not None
    assert said(kafka_of(secure_kafka, password_file=security.wrong_password_file), causes).kind == "credential"


def test_a_client_that_trusts_a_stranger_says_so(secure_kafka: Broker, causes: diagnosis.ClientErrors) -> None:
    security = secure_kafka.security
    assert security is not None
    assert said(kafka_of(secure_kafka, ca_file=security.strangers_ca_file), causes).kind == "certificate"


def test_a_handshake_is_not_repeated_at_each_failure(silent: str, causes: diagnosis.ClientErrors) -> None:
    kafka, error = Kafka(silent), TimeoutError("no acknowledgement")
    first = diagnosis.explain_failure(kafka, causes, error)
    begun = time.monotonic()
    assert diagnosis.explain_failure(kafka, causes, error) == first
    assert time.monotonic() - begun < diagnosis.HANDSHAKE_S / 2


@pytest.mark.parametrize(
    "error", [KafkaTimeoutError("Expiring 30 record(s) for TopicPartition(telemetry.v1, 0)"), TimeoutError("x")]
)
def test_of_a_delivery_that_timed_out_the_clients_words_are_not_repeated(
    kafka: Address, causes: diagnosis.ClientErrors, error: Exception
) -> None:
    told = str(diagnosis.explain_failure(kafka_of(kafka), causes, error))
    assert "does not acknowledge messages" in told
    assert not [word for word in ("Expiring", "Timeout", "start the broker", "bootstrap_servers") if word in told]


def test_a_delivery_that_timed_out_for_a_refused_user_is_told_as_that_even_after_a_handshake_that_went_well(
    secure_kafka: Broker, causes: diagnosis.ClientErrors
) -> None:
    security, error = secure_kafka.security, KafkaTimeoutError("Expiring 30 record(s)")
    assert security is not None
    assert diagnosis.explain_failure(kafka_of(secure_kafka), causes, error).kind == "unreachable"
    wrong = kafka_of(secure_kafka, password_file=security.wrong_password_file)
    assert diagnosis.explain_failure(wrong, causes, error).kind == "credential"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TopicAuthorizationFailedError(), "forbidden"), (UnknownTopicOrPartitionError(), "missing topic")],
)
def test_what_a_request_is_refused_for_needs_no_handshake(error: KafkaError, kind: str) -> None:
    assert diagnosis.explain_failure(Kafka("broker.invalid:9092"), diagnosis.ClientErrors(), error).kind == kind


def test_causes_keep_a_bounded_number_of_errors_and_forget_when_all_is_well(causes: diagnosis.ClientErrors) -> None:
    for number in range(1000):
        logging.getLogger("kafka.net.manager").error("Connection failed: %s", KafkaError(str(number)))
    assert [str(error) for error in causes.errors][-1].endswith("999")
    assert len(causes.errors) == diagnosis.MAX_ERRORS
    causes.clear()
    assert not causes.errors


def test_a_client_in_an_outage_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    said(Kafka(f"{HOST}:1"), diagnosis.ClientErrors())
    assert capfd.readouterr() == ("", "")


def test_the_clients_log_is_never_so_fine_that_it_holds_passwords() -> None:
    logging.getLogger(kafka_clients.LOGGER).setLevel(logging.DEBUG)
    kafka_clients.client_settings(Kafka(), "tests")
    assert not logging.getLogger("kafka.admin.client").isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize("make", [kafka_clients.create_admin, kafka_clients.create_consumer])
def test_a_client_of_a_frozen_tls_broker_gives_up(silent: str, make: Callable[..., Any]) -> None:
    before, begun = set(threading.enumerate()), time.monotonic()
    with untidy_refusals():
        with pytest.raises(KafkaError):
            make(Kafka(silent, security_protocol="SSL"), "tests", 0.2)
        assert time.monotonic() - begun < 5.0
        for left in set(threading.enumerate()) - before:
            left.join(SECONDS)
            assert not left.is_alive(), f"{left.name} is left behind"
