"""Shakes hands with the brokers step by step, to tell why they cannot be used.

The client cannot tell: it drops the last answer of a broker that hangs up, which is how brokers refuse a credential,
and its TLS handshake waits for ever on a broker that is frozen. Each step here ends by a time that is given
(but for the system's resolver of names, which has its own: 5 s a try by default).
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.config.sections import Kafka
from pipeline.transport import brokers
from pipeline.transport.troubles import CREDENTIAL, PROTOCOL, UNREACHABLE, Kind, Trouble, of_tls

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
    settings = brokers.settings(kafka, "handshake")
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
