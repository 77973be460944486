"""Finds out why the brokers cannot be used: kafka-python reports a wrong password and a dead host both as "unable to
bootstrap".

A separate handshake checks address, TCP, TLS, SASL and Kafka in order. The client itself loses the last response of a
broker that closes the connection, which is how brokers refuse a credential, and its TLS handshake waits for ever on a
frozen broker. Each step here has a deadline (except the system's name resolver: 5 s per try by default).
"""

from __future__ import annotations

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
from pipeline.model.errors import ConfigError
from pipeline.transport import kafka_clients
from pipeline.transport.broker_errors import CREDENTIAL, PROTOCOL, UNREACHABLE, Kind, Trouble, of_error, of_tls

SECONDS = 3.0
"""How long all steps may take together. Chosen: a healthy broker needs 0.01 to 0.3 s."""
READ_BYTES = 65536


class _Stopped(Exception):  # noqa: N818 - carries what is said
    def __init__(self, kind: Kind, text: str, mend: str) -> None:
        super().__init__(text)
        self.trouble = Trouble(kind, text, mend)


class _HungUp(Exception):  # noqa: N818 - reads as what happened
    """The broker closed the connection, or answered what is not Kafka."""


def why_not(kafka: Kafka, seconds: float = SECONDS) -> Trouble | None:
    """None if a broker can be used, else why not. Raises ConfigError on settings that cannot be used."""
    settings = kafka_clients.client_settings(kafka, "handshake")
    servers: list[str] = settings["bootstrap_servers"]
    troubles = []
    for server in servers:
        host, port = _split(server)
        end = time.monotonic() + seconds / len(servers)
        try:
            known = _introduced(kafka, settings, host, port, end)
            return _advertised(kafka, settings, (host, port), known, end)
        except _Stopped as stopped:
            troubles.append(stopped.trouble)
    return next((trouble for trouble in troubles if trouble.kind != "unreachable"), troubles[0])


def _advertised(
    kafka: Kafka, settings: dict[str, Any], asked: tuple[str, int], known: list[tuple[str, int]], end: float
) -> Trouble | None:
    """Whether the brokers can be reached by the names that they give themselves: these are what the client uses."""
    if asked in known:
        return None
    why = "names no broker"
    for host, port in known:
        try:
            _introduced(kafka, settings, host, port, end)
            return None
        except _Stopped as stopped:
            why = f"names its brokers by addresses that fail: {stopped.trouble.text}"
    mend = "mend advertised.listeners on the broker: addresses by which this host reaches it"
    return Trouble("unreachable", f"{_where(*asked)}: answers, but {why}", mend)


def _introduced(kafka: Kafka, settings: dict[str, Any], host: str, port: int, end: float) -> list[tuple[str, int]]:
    """Addresses of all brokers, as the one at host:port tells them after all steps. Raises _Stopped."""
    from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

    where = _where(host, port)
    with _connected(host, port, end) as plain, _sealed(kafka, settings, plain, host, where) as sealed:
        link = _Link(sealed, where, end)
        try:
            link.ask(ApiVersionsRequest(version=0))
        except _HungUp as error:
            raise _first_word(kafka, host, port, end) from error
        if kafka.security_protocol.startswith("SASL"):
            _signed_in(kafka, settings, link, where)
        try:
            answer = link.ask(MetadataRequest(topics=[], version=1))
        except _HungUp as error:
            text = f"{where}: the broker hangs up on who is not signed in; [kafka] security_protocol = "
            raise _Stopped("protocol", f"{text}{kafka.security_protocol!r}", PROTOCOL) from error
    return [(broker.host, broker.port) for broker in answer.brokers]


@contextmanager
def _connected(host: str, port: int, end: float) -> Iterator[socket.socket]:
    where = _where(host, port)
    try:
        link = socket.create_connection((host, port), max(0.1, end - time.monotonic()))
    except socket.gaierror as error:
        raise _Stopped("unreachable", f"{where}: the name does not resolve: {error.strerror}", UNREACHABLE) from error
    except TimeoutError as error:
        raise _Stopped("unreachable", f"{where}: no answer to the connection", UNREACHABLE) from error
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _Stopped("unreachable", f"{where}: {why[:1].lower()}{why[1:]}", UNREACHABLE) from error
    with link:
        yield link


def _sealed(kafka: Kafka, settings: dict[str, Any], plain: socket.socket, host: str, where: str) -> socket.socket:
    """The connection under TLS, if the configuration wants it."""
    if not kafka.security_protocol.endswith("SSL"):
        return plain
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as the client makes it
        if kafka.ca_file is not None:
            context.load_verify_locations(settings["ssl_cafile"])
        else:
            context.load_default_certs()
        if kafka.certificate_file is not None:
            context.load_cert_chain(settings["ssl_certfile"], settings["ssl_keyfile"])
        return context.wrap_socket(plain, server_hostname=host)
    except TimeoutError as error:
        raise _silent(where) from error
    except OSError as error:
        if found := of_tls(error, where):
            raise _Stopped(found.kind, found.text, found.mend) from error
        text = f"{where}: no TLS there; [kafka] security_protocol = {kafka.security_protocol!r}"
        raise _Stopped("protocol", text, PROTOCOL) from error


def _first_word(kafka: Kafka, host: str, port: int, end: float) -> _Stopped:
    """What it means that the very first request is answered by hanging up."""
    where = _where(host, port)
    if not kafka.security_protocol.endswith("SSL") and _speaks_tls(host, port, end):
        text = f"{where}: the listener wants TLS; [kafka] security_protocol = {kafka.security_protocol!r}"
        return _Stopped("protocol", text, PROTOCOL)
    return _Stopped("unreachable", f"{where}: hangs up at the first request: no Kafka broker there?", UNREACHABLE)


def _speaks_tls(host: str, port: int, end: float) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only asks whether TLS is spoken; sends nothing
    try:
        with _connected(host, port, end) as plain, context.wrap_socket(plain):
            return True
    except (OSError, _Stopped):
        return False


def _signed_in(kafka: Kafka, settings: dict[str, Any], link: _Link, where: str) -> None:
    """SaslHandshake and the exchange of the mechanism. Raises _Stopped."""
    from kafka.errors import IllegalSaslStateError, NoError, for_code
    from kafka.net.sasl import get_sasl_mechanism
    from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

    refused = f"{where}: user {kafka.username!r} is refused ({kafka.sasl_mechanism})"
    try:
        answer = link.ask(SaslHandshakeRequest(mechanism=kafka.sasl_mechanism, version=1))
        if for_code(answer.error_code) is IllegalSaslStateError:
            text = f"{where}: the listener takes no user; [kafka] security_protocol = {kafka.security_protocol!r}"
            raise _Stopped("protocol", text, PROTOCOL)
        if kafka.sasl_mechanism not in answer.mechanisms:
            text = f"{where}: offers {', '.join(answer.mechanisms)}; [kafka] sasl_mechanism = {kafka.sasl_mechanism!r}"
            raise _Stopped("protocol", text, "mend [kafka] sasl_mechanism")
        mechanism = get_sasl_mechanism(kafka.sasl_mechanism)(host="", **settings)
        while not mechanism.is_done():
            answer = link.ask(SaslAuthenticateRequest(mechanism.auth_bytes(), version=1))
            if for_code(answer.error_code) is not NoError:
                raise _Stopped("credential", refused, CREDENTIAL)
            mechanism.receive(answer.auth_bytes)
    except (_HungUp, ValueError) as error:  # ValueError: the broker could not prove that it knows the password
        raise _Stopped("credential", refused, CREDENTIAL) from error


class _Link:
    """Requests and answers on one connection, one after the other."""

    def __init__(self, link: socket.socket, where: str, end: float) -> None:
        from kafka.protocol.parser import KafkaProtocol

        self._link, self._where, self._end = link, where, end
        self._protocol = KafkaProtocol(client_id="fleetpulse-handshake")

    def ask(self, request: Any) -> Any:
        """The answer to a request. Raises _HungUp, or _Stopped where none comes in time."""
        from kafka.errors import KafkaError

        self._protocol.send_request(request)
        try:
            self._limit()
            self._link.sendall(self._protocol.send_bytes())
            while True:
                self._limit()
                data = self._link.recv(READ_BYTES)
                if not data:
                    raise _HungUp
                if answers := self._protocol.receive_bytes(data):
                    return answers[0][1]
        except TimeoutError as error:
            raise _silent(self._where) from error
        except (OSError, KafkaError) as error:
            if found := of_tls(error, self._where):
                raise _Stopped(found.kind, found.text, found.mend) from error
            raise _HungUp from error
        except (struct.error, ValueError, IndexError, TypeError) as error:  # bytes that no Kafka broker sends
            raise _HungUp from error

    def _limit(self) -> None:
        self._link.settimeout(max(0.01, self._end - time.monotonic()))


def _silent(where: str) -> _Stopped:
    text = f"{where}: accepts the connection but does not answer"
    return _Stopped("unreachable", text, "look at the broker: it is frozen or overloaded, or that is no Kafka broker")


def _where(host: str, port: int) -> str:
    return f"kafka {f'[{host}]' if ':' in host else host}:{port}"


def _split(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)


__all__ = ["Causes", "Trouble", "trouble", "why_not"]

KEPT = 16
"""Errors kept of a client's talk; chosen: one failed try to connect logs about five."""
ASK_S = 2.0
"""How long a handshake may take that a running client's owner waits for (s). Chosen."""
AGAIN_S = 10.0
"""A trouble found by a handshake stands so long (s): 10,000 agents that a broker refuses must not double its load.
Chosen. That nothing was wrong never stands: what goes wrong next would be told a while too late."""
ACKNOWLEDGE = "look at the log, load and disk of the brokers"


class Causes(logging.Handler):
    """The last errors that this process's Kafka clients logged. Clients swallow them: their log alone shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: deque[BaseException] = deque(maxlen=KEPT)
        self.asked: tuple[float, Trouble | None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        told = record.args if isinstance(record.args, tuple) else ()
        found = [item for item in told if isinstance(item, BaseException)]
        if record.exc_info and record.exc_info[1] is not None:
            found.append(record.exc_info[1])
        self.errors.extend(error.with_traceback(None) for error in found)  # a traceback would hold the client's frames

    def attach(self) -> None:
        """Begins to listen."""
        kafka_clients.mute_client_log().addHandler(self)

    def detach(self) -> None:
        """Ends listening."""
        logging.getLogger(kafka_clients.LOGGER).removeHandler(self)

    def clear(self) -> None:
        """All is well again: what was heard is past."""
        self.errors.clear()
        self.asked = None


def trouble(kafka: Kafka, causes: Causes, error: BaseException) -> Trouble:
    """Why a running client fails with `error`. Waits ASK_S at most, and only where its errors do not tell."""
    from kafka.errors import KafkaTimeoutError  # only where Kafka is in force

    # the newest that was heard; KafkaTimeoutError only says that trying ended, not why
    heard = next((heard for heard in reversed(list(causes.errors)) if not isinstance(heard, KafkaTimeoutError)), error)
    if found := of_error(kafka, error) or of_error(kafka, heard):
        return found
    asked = causes.asked
    if asked is None or asked[1] is None or time.monotonic() - asked[0] > AGAIN_S:
        causes.asked = asked = (time.monotonic(), _asked(kafka))
    return asked[1] or _unexplained(kafka, error)


def _unexplained(kafka: Kafka, error: BaseException) -> Trouble:
    """A handshake found nothing wrong. The client's words on time that ran out tell no cause, only its own insides."""
    from kafka.errors import KafkaTimeoutError

    text = str(error) or type(error).__name__
    if isinstance(error, KafkaTimeoutError | TimeoutError):
        text = "lets us in, but does not acknowledge messages or answer in time"
    return Trouble("unreachable", f"kafka {kafka.bootstrap_servers}: {text}", ACKNOWLEDGE)


def _asked(kafka: Kafka) -> Trouble | None:
    try:
        return why_not(kafka, ASK_S)
    except ConfigError as error:
        return Trouble("credential", str(error), "mend the file")
