"""Finds out why the brokers cannot be used: kafka-python reports a wrong password and a dead host both as "unable to
bootstrap".

A separate handshake checks address, TCP, TLS, SASL and Kafka in order. The client itself loses the last response of a
broker that closes the connection, which is how brokers refuse a credential, and its TLS handshake waits forever on a
frozen broker. Each step here has a deadline (except the system's name resolver: 5 s per try by default).
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.config.sections import Kafka
from pipeline.http import certificates
from pipeline.model.errors import ConfigError
from pipeline.transport import kafka_clients, kerberos, oauth_tokens
from pipeline.transport.broker_errors import (
    CREDENTIAL,
    PROTOCOL,
    TICKET,
    TOKEN,
    UNREACHABLE,
    BrokerProblem,
    Kind,
    classify_error,
    classify_tls_error,
)

FILES = "correct [kafka] ca_file, certificate_file and key_file: expected readable PEM files"
SECONDS = 3.0
"""Time limit of a whole handshake (s). Chosen: a healthy broker needs 0.01 to 0.3 s."""
READ_BYTES = 65536


class _HandshakeFailed(Exception):  # noqa: N818 - carries a BrokerProblem
    def __init__(self, kind: Kind, text: str, remedy: str) -> None:
        super().__init__(text)
        self.problem = BrokerProblem(kind, text, remedy)


class _ConnectionClosed(Exception):  # noqa: N818 - reads as what happened
    """The broker closed the connection, or the response is not Kafka."""


def find_broker_problem(kafka: Kafka, seconds: float = SECONDS) -> BrokerProblem | None:
    """Checks whether a broker can be used: None, or the problem. Raises ConfigError on unusable settings."""
    settings = kafka_clients.client_settings(kafka, "handshake")
    servers: list[str] = settings["bootstrap_servers"]
    problems = []
    for server in servers:
        host, port = _split_address(server)
        end = time.monotonic() + seconds / len(servers)
        try:
            known = _list_brokers(kafka, settings, host, port, end)
            return _check_advertised(kafka, settings, (host, port), known, end)
        except _HandshakeFailed as stopped:
            problems.append(stopped.problem)
    return next((problem for problem in problems if problem.kind != "unreachable"), problems[0])


def _check_advertised(
    kafka: Kafka, settings: dict[str, Any], asked: tuple[str, int], known: list[tuple[str, int]], end: float
) -> BrokerProblem | None:
    """Checks the advertised addresses of the brokers, which the client uses: None, or the problem."""
    if asked in known:
        return None
    why = "advertises no broker"
    for host, port in known:
        try:
            _list_brokers(kafka, settings, host, port, end)
            return None
        except _HandshakeFailed as stopped:
            why = f"advertises addresses that fail: {stopped.problem.text}"
    remedy = "correct advertised.listeners on the broker: addresses that this host can reach"
    return BrokerProblem("unreachable", f"{_format_address(*asked)}: responds, but {why}", remedy)


def _list_brokers(kafka: Kafka, settings: dict[str, Any], host: str, port: int, end: float) -> list[tuple[str, int]]:
    """Addresses of all brokers, from the one at host:port after all steps. Raises _HandshakeFailed."""
    from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

    where = _format_address(host, port)
    with _connect(host, port, end) as plain, _start_tls(kafka, plain, host, where) as sealed:
        link = _Connection(sealed, where, end)
        try:
            link.request(ApiVersionsRequest(version=0))
        except _ConnectionClosed as error:
            raise _explain_first_close(kafka, host, port, end) from error
        if kafka.security_protocol.startswith("SASL"):
            _authenticate(kafka, settings, link, host, where)
        try:
            answer = link.request(MetadataRequest(topics=[], version=1))
        except _ConnectionClosed as error:
            raise _explain_last_close(kafka, where) from error
    return [(broker.host, broker.port) for broker in answer.brokers]


@contextmanager
def _connect(host: str, port: int, end: float) -> Iterator[socket.socket]:
    where = _format_address(host, port)
    try:
        link = socket.create_connection((host, port), max(0.1, end - time.monotonic()))
    except socket.gaierror as error:
        raise _HandshakeFailed(
            "unreachable", f"{where}: the name does not resolve: {error.strerror}", UNREACHABLE
        ) from error
    except TimeoutError as error:
        raise _HandshakeFailed("unreachable", f"{where}: no response to the connection", UNREACHABLE) from error
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _HandshakeFailed("unreachable", f"{where}: {why[:1].lower()}{why[1:]}", UNREACHABLE) from error
    with link:
        yield link


def _start_tls(kafka: Kafka, plain: socket.socket, host: str, where: str) -> socket.socket:
    """The connection, with TLS if configured. Raises _HandshakeFailed."""
    if not kafka.security_protocol.endswith("SSL"):
        return plain
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as the client creates it
        if kafka.ca_file is not None:
            certificates.load_trusted(context, kafka.ca_file)
        else:
            context.load_default_certs()
        if kafka.certificate_file is not None:
            certificates.load_own(context, kafka.certificate_file, kafka.key_file)
        return context.wrap_socket(plain, server_hostname=host)
    except TimeoutError as error:
        raise _no_response(where) from error
    except OSError as error:
        if error.filename is not None:
            raise _HandshakeFailed("credential", f"{error.filename}: {error.strerror}", FILES) from error
        if found := classify_tls_error(error, where):
            raise _HandshakeFailed(found.kind, found.text, found.remedy) from error
        text = f"{where}: no TLS at this address; [kafka] security_protocol = {kafka.security_protocol!r}"
        raise _HandshakeFailed("protocol", text, PROTOCOL) from error


def _explain_first_close(kafka: Kafka, host: str, port: int, end: float) -> _HandshakeFailed:
    """Explains a connection that the broker closed at the first request."""
    where = _format_address(host, port)
    if not kafka.security_protocol.endswith("SSL") and _accepts_tls(host, port, end):
        text = f"{where}: the listener requires TLS; [kafka] security_protocol = {kafka.security_protocol!r}"
        return _HandshakeFailed("protocol", text, PROTOCOL)
    return _HandshakeFailed(
        "unreachable", f"{where}: closes the connection at the first request: not a Kafka broker?", UNREACHABLE
    )


def _explain_last_close(kafka: Kafka, where: str) -> _HandshakeFailed:
    """Explains a connection that the broker closed after all steps."""
    if kafka.sasl_mechanism == "GSSAPI" and kafka.security_protocol.startswith("SASL"):
        text = f"{where}: the broker accepts our ticket, but has no user for it ({kerberos.describe_ticket(kafka)})"
        return _HandshakeFailed("credential", text, "correct sasl.kerberos.principal.to.local.rules on the brokers")
    text = f"{where}: the broker closes connections without authentication; [kafka] security_protocol = "
    return _HandshakeFailed("protocol", f"{text}{kafka.security_protocol!r}", PROTOCOL)


def _accepts_tls(host: str, port: int, end: float) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only checks for TLS; sends nothing
    try:
        with _connect(host, port, end) as plain, context.wrap_socket(plain):
            return True
    except (OSError, _HandshakeFailed):
        return False


def _authenticate(kafka: Kafka, settings: dict[str, Any], link: _Connection, host: str, where: str) -> None:
    """Authenticates by SASL. Raises _HandshakeFailed."""
    from kafka.errors import IllegalSaslStateError, NoError, for_code
    from kafka.net.sasl import get_sasl_mechanism
    from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

    try:
        answer = link.request(SaslHandshakeRequest(mechanism=kafka.sasl_mechanism, version=1))
        if for_code(answer.error_code) is IllegalSaslStateError:
            text = (
                f"{where}: the listener does not accept users; [kafka] security_protocol = {kafka.security_protocol!r}"
            )
            raise _HandshakeFailed("protocol", text, PROTOCOL)
        if kafka.sasl_mechanism not in answer.mechanisms:
            text = f"{where}: offers {', '.join(answer.mechanisms)}; [kafka] sasl_mechanism = {kafka.sasl_mechanism!r}"
            raise _HandshakeFailed("protocol", text, "correct [kafka] sasl_mechanism")
        mechanism = get_sasl_mechanism(kafka.sasl_mechanism)(host=host, **settings)
        while not mechanism.is_done():
            answer = link.request(SaslAuthenticateRequest(mechanism.auth_bytes(), version=1))
            if for_code(answer.error_code) is not NoError:
                raise _explain_refusal(kafka, where, answer.error_message)
            mechanism.receive(answer.auth_bytes)
    except oauth_tokens.LoginError as error:
        raise _HandshakeFailed(error.problem.kind, error.problem.text, error.problem.remedy) from error
    except (
        _ConnectionClosed,
        ValueError,
    ) as error:  # ValueError: the broker failed to prove that it has the password
        raise _explain_refusal(kafka, where) from error


def _explain_refusal(kafka: Kafka, where: str, reason: str | None = None) -> _HandshakeFailed:
    """Explains that the broker refused our login; `reason`: its own words."""
    words = " ".join((reason or "").split())[:200]
    said = f"; the broker's reason: {words}" if words else ""
    if kafka.sasl_mechanism == "OAUTHBEARER":
        source = oauth_tokens.token_source(kafka)
        text = f"{where}: the broker refuses our token ({source.describe()}; from {source.where}){said}"
        return _HandshakeFailed("credential", text, TOKEN)
    if kafka.sasl_mechanism == "GSSAPI":
        text = f"{where}: the broker refuses our Kerberos ticket ({kerberos.describe_ticket(kafka)}){said}"
        return _HandshakeFailed("credential", text, TICKET)
    return _HandshakeFailed(
        "credential", f"{where}: user {kafka.username!r} is refused ({kafka.sasl_mechanism})", CREDENTIAL
    )


class _Connection:
    """Requests and responses on one connection, one at a time."""

    def __init__(self, link: socket.socket, where: str, end: float) -> None:
        from kafka.protocol.parser import KafkaProtocol

        self._link, self._where, self._end = link, where, end
        self._protocol = KafkaProtocol(client_id="fleetpulse-handshake")

    def request(self, request: Any) -> Any:
        """The response to a request. Raises _ConnectionClosed, or _HandshakeFailed at a timeout."""
        from kafka.errors import KafkaError

        self._protocol.send_request(request)
        try:
            self._limit()
            self._link.sendall(self._protocol.send_bytes())
            while True:
                self._limit()
                data = self._link.recv(READ_BYTES)
                if not data:
                    raise _ConnectionClosed
                if answers := self._protocol.receive_bytes(data):
                    return answers[0][1]
        except TimeoutError as error:
            raise _no_response(self._where) from error
        except (OSError, KafkaError) as error:
            if found := classify_tls_error(error, self._where):
                raise _HandshakeFailed(found.kind, found.text, found.remedy) from error
            raise _ConnectionClosed from error
        except (struct.error, ValueError, IndexError, TypeError) as error:  # not a response of a Kafka broker
            raise _ConnectionClosed from error

    def _limit(self) -> None:
        self._link.settimeout(max(0.01, self._end - time.monotonic()))


def _no_response(where: str) -> _HandshakeFailed:
    text = f"{where}: accepts the connection but does not respond"
    return _HandshakeFailed(
        "unreachable", text, "check the broker: it is frozen or overloaded, or this is not a Kafka broker"
    )


def _format_address(host: str, port: int) -> str:
    return f"kafka {f'[{host}]' if ':' in host else host}:{port}"


def _split_address(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)


MAX_ERRORS = 16
"""Client errors that are kept; chosen: one failed connection attempt logs about five."""
HANDSHAKE_S = 2.0
"""Time limit of a handshake during normal operation (s). Chosen."""
HANDSHAKE_EVERY_S = 10.0
"""How long the problem found by a handshake is reused (s): 10,000 refused agents must not double the brokers' load.
Chosen. A handshake without a problem is not reused, so that a new problem is reported without delay."""
CHECK_BROKERS = "check log, load and disk of the brokers"


class ClientErrors(logging.Handler):
    """The last errors that Kafka clients of this process logged; kafka-python reports them nowhere else."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: deque[BaseException] = deque(maxlen=MAX_ERRORS)
        self.handshake: tuple[float, BrokerProblem | None] | None = None
        from kafka import errors  # loaded only if Kafka is used

        named = (errors.NotEnoughReplicasError, errors.NotEnoughReplicasAfterAppendError)
        self._replicas = {each.__name__: each for each in named}  # logged by name, when a batch is tried again

    @property
    def newest(self) -> BaseException | None:
        """The last error that is a cause: that a request timed out is none. Too few replicas count before others."""
        from kafka.errors import KafkaTimeoutError

        found = [error for error in list(self.errors) if not isinstance(error, KafkaTimeoutError)]
        refused = [error for error in found if type(error).__name__ in self._replicas]
        return next(reversed(refused or found), None)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        values = record.args if isinstance(record.args, tuple) else ()
        found = [item for item in values if isinstance(item, BaseException)]
        if record.exc_info and record.exc_info[1] is not None:
            found.append(record.exc_info[1])
        found += [self._replicas[item]() for item in values if isinstance(item, str) and item in self._replicas]
        self.errors.extend(error.with_traceback(None) for error in found)  # a traceback would hold the client's frames

    def attach(self) -> None:
        """Starts to collect errors."""
        kafka_clients.mute_client_log().addHandler(self)

    def detach(self) -> None:
        """Stops collecting errors."""
        logging.getLogger(kafka_clients.LOGGER).removeHandler(self)

    def clear(self) -> None:
        """Drops all errors, after a success."""
        self.errors.clear()
        self.handshake = None


def explain_failure(kafka: Kafka, causes: ClientErrors, error: BaseException) -> BrokerProblem:
    """Explains why a running client fails with `error`. Runs a handshake (HANDSHAKE_S) only if its errors do not.

    A refused connection explains nothing if there are several brokers: the others may work.
    """
    found = classify_error(kafka, error) or classify_error(kafka, causes.newest or error)
    if found and (found.kind != "unreachable" or len(kafka_clients.broker_addresses(kafka)) == 1):
        return found
    last = causes.handshake
    if last is None or last[1] is None or time.monotonic() - last[0] > HANDSHAKE_EVERY_S:
        causes.handshake = last = (time.monotonic(), _try_handshake(kafka))
    return last[1] or found or _unexplained(kafka, error)


def _unexplained(kafka: Kafka, error: BaseException) -> BrokerProblem:
    """A problem for which a handshake found no cause. The client's own timeout text describes only its internals."""
    from kafka.errors import KafkaTimeoutError

    text = str(error) or type(error).__name__
    if isinstance(error, KafkaTimeoutError | TimeoutError):
        text = "accepts our connection, but does not acknowledge messages or respond in time"
    return BrokerProblem("unreachable", f"kafka {kafka.bootstrap_servers}: {text}", CHECK_BROKERS)


def _try_handshake(kafka: Kafka) -> BrokerProblem | None:
    try:
        if found := find_broker_problem(kafka, HANDSHAKE_S):
            return found
        away = find_absent_brokers(kafka, HANDSHAKE_S)
    except ConfigError as error:
        return BrokerProblem("credential", str(error), "correct the file")
    if not away:
        return None
    text = f"{len(away)} of {len(kafka_clients.broker_addresses(kafka))} brokers cannot be used: "
    return BrokerProblem("unreachable", text + "; ".join(problem.text for problem in away.values()), ABSENT)


ABSENT = "start them; partitions with a replica elsewhere continue"


def find_absent_brokers(kafka: Kafka, seconds: float) -> dict[str, BrokerProblem]:
    """The addresses of bootstrap_servers at which no broker responds, with the reason; each is checked alone."""
    servers = kafka_clients.broker_addresses(kafka)
    found = {}
    for server in servers if len(servers) > 1 else ():
        problem = find_broker_problem(dataclasses.replace(kafka, bootstrap_servers=server), seconds / len(servers))
        if problem is not None and problem.kind == "unreachable":
            found[server] = problem
    return found
