"""One HTTP request to one receiver: to a checked address, without redirects, within a deadline. Standard library only.

Destinations come only from the configuration. A host name is resolved once, all its addresses must be allowed, and the
connection uses a checked address (DNS rebinding). Proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import ipaddress
import json
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pipeline.config.addresses import hide_address
from pipeline.model.errors import ConfigError, Refused
from pipeline.notify.connections import DEADLINES, CheckedConnection, ConnectionPool

TIMEOUT_S = 15.0
"""Limit from the connection to the response status (s). Chosen: shorter than group intervals of Alertmanager."""
MAX_BODY_BYTES = 4096
"""Bytes read of the response body, which is ignored: enough for a receiver to finish writing. Chosen."""
MAX_RETRY_AFTER_S, MAX_RETRY_AFTER_CHARACTERS = 86400.0, 64
"""Limits of Retry-After: wait (s) and text length; a date of RFC 9110 has 29 characters. Chosen."""
MAX_OVERLOAD_S = 60.0
"""Longest wait by Retry-After of a 503 (s), which a proxy says too whose receiver is back sooner. Chosen: gateways
limit by the minute, and a page of another incident waits for three of them at most."""
_TUNNELS = tuple(
    map(ipaddress.ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)  # IPv4-mapped and -compatible, NAT64, 6to4, Teredo: an IPv6 address that hides an IPv4 one
_UNICAST, _DOCUMENTATION = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("3fff::/20")
"""Of IPv6, IANA's registry of its address space has 2000::/3 alone as global unicast: not fec0::/10 (site-local, RFC
3879) nor 5f00::/16 (segment routing, RFC 9602). 3fff::/20 is for documentation (RFC 9637, IANA's registry of
special-purpose addresses). `is_global` of Python 3.11 takes all three for public."""
Outcome = Literal["delivered", "retry"]
Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]


class Place(Protocol):
    """Which addresses of a receiver may be called. `section`: that of the configuration, for messages."""

    @property
    def section(self) -> str:
        """Section of the configuration."""
        ...

    @property
    def name(self) -> str:
        """Name of the receiver."""
        ...

    @property
    def allow_private(self) -> tuple[str, ...]:
        """CIDRs of private addresses that may be called."""
        ...


class Destination(Place, Protocol):
    """Where requests go, and which addresses may be called."""

    @property
    def url(self) -> str:
        """The URL, with its path and query."""
        ...

    @property
    def allow_http(self) -> bool:
        """Whether http beyond loopback is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """A destination. `key`: the configuration key of the URL; that of a file if the URL is a secret, never shown."""

    section: str
    name: str
    url: str
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    key: str = "url"


@dataclass(frozen=True, slots=True)
class Request:
    """One request. most: bytes of the response that are read."""

    target: Destination
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    most: int = MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one request. status: 0 if there was none; then `error` is the reason, in our words.

    body: as far as the response was read; it may be shown to the person who asked for it, never logged or stored.
    """

    status: int
    error: str = ""
    retry_after_s: float = 0.0
    body: bytes = b""


Call = Callable[[Request], Answer]


@dataclass(frozen=True, slots=True)
class PostResult:
    """Result of a delivery. `text` is for people and never contains text of the receiver.

    reference: what the receiver calls the message, if later ones refer to it.  limited: not accepted only because the
    receiver limits its rate.
    """

    outcome: Outcome
    text: str
    retry_after_s: float = 0.0
    reference: str = ""
    limited: bool = False


def check_url(receiver: Destination) -> urllib.parse.SplitResult:
    """Returns the parts of a receiver's URL. Raises ConfigError if it can never be called."""
    key = getattr(receiver, "key", "url")
    return _check_parts(Target(receiver.section, receiver.name, receiver.url, receiver.allow_http, key=key))


@functools.lru_cache(256)
def _check_parts(receiver: Target) -> urllib.parse.SplitResult:
    """Checks a URL. Accepted ones are remembered: a queue of thousands asks for each message."""
    where, shown = _locate_url(receiver), _locate_url(receiver, with_value=True)
    try:
        url = urllib.parse.urlsplit(receiver.url)
        port_is_number = url.port is None or url.port > 0
    except ValueError as error:
        raise ConfigError(f"{where}: is not a URL; expected https://HOST[:PORT]/PATH") from error
    if url.scheme not in ("http", "https") or not url.hostname or not port_is_number:
        raise ConfigError(f"{shown}: expected https://HOST[:PORT]/PATH (or http, see allow_http)")
    if "@" in url.netloc:
        raise ConfigError(f"{where}: contains a user or password; expected none")
    if not receiver.url.isascii() or any(c <= " " or c == "\x7f" for c in receiver.url):
        raise ConfigError(f"{where}: contains a space, control or non-ASCII character; expected it percent-encoded")
    if url.scheme == "http" and not receiver.allow_http and not _is_loopback_name(url.hostname):
        raise ConfigError(f"{where}: found http; expected https, or allow_http = true")
    return url


def check_address(address: str, receiver: Destination, host: str) -> None:
    """Raises Refused if an address of the receiver's host may not be called."""
    ip = ipaddress.ip_address(address.split("%", 1)[0])
    where = f"receiver {receiver.name}: address {ip}"
    hidden = any(ip in net for net in _TUNNELS if ip.version == net.version) and not ip.is_loopback
    if ip.is_multicast or ip.is_unspecified or hidden:
        raise Refused(f"{where} is a multicast, unspecified or tunnel address; expected a unicast address")
    if any(ip in net for net in check_networks(receiver) if ip.version == net.version):
        return
    if ip.is_loopback and _is_loopback_name(host):
        return
    is_reserved = ip.version == 6 and (ip not in _UNICAST or ip in _DOCUMENTATION)
    if is_reserved or not ip.is_global:
        raise Refused(
            f"{where} is private; expected a public address, or its network in allow_private of this receiver"
        )


def check_networks(receiver: Place) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Returns the networks of allow_private. Raises ConfigError if one is none."""
    try:
        return [ipaddress.ip_network(text) for text in receiver.allow_private]
    except ValueError as error:
        raise ConfigError(f"[[{receiver.section}]] {receiver.name}: allow_private: {error}; expected CIDRs") from error


def check_receiver(receiver: Destination) -> None:
    """Raises ConfigError if the receiver can never be called; host names are resolved and checked at each call."""
    host = str(check_url(receiver).hostname)
    check_networks(receiver)
    try:
        check_address(str(ipaddress.ip_address(host)), receiver, host)
    except Refused as error:
        raise ConfigError(f"{_locate_url(receiver, with_value=True)}: {error}") from error
    except ValueError:
        return  # a host name


def _locate_url(receiver: Destination, with_value: bool = False) -> str:
    """Returns section, name and key of a URL; of its value the host, and nothing if it is that of a file, a secret."""
    key = getattr(receiver, "key", "url")
    where = f"[[{receiver.section}]] {receiver.name}: {key}"
    return f"{where} = {hide_address(receiver.url)!r}" if with_value and not key.endswith("_file") else where


def _is_loopback_name(host: str) -> bool:
    """Returns whether the URL names loopback; other names and other spellings of 127.0.0.1 do not count."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def post(
    receiver: Destination,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    resolve: Resolve = _resolve,
) -> PostResult:
    """Sends one POST and returns the result, within `timeout_s` after the name is resolved."""
    return classify_answer(exchange(Request(receiver, body, headers), timeout_s, resolve))


def exchange(
    request: Request, timeout_s: float = TIMEOUT_S, resolve: Resolve = _resolve, pool: ConnectionPool | None = None
) -> Answer:
    """Sends one request and returns the response, within `timeout_s` after the name is resolved.

    pool: idle connections to addresses that were checked; one of them is used if it can be.
    """
    receiver = request.target
    url = check_url(receiver)
    host, port, tls = url.hostname or "", url.port or (443 if url.scheme == "https" else 80), url.scheme == "https"
    if pool is not None and (idle := pool.borrow(host, port, tls)) is not None:
        answer = _exchange(idle, url, request, pool)
        if answer is not CLOSED_BEFORE:
            return answer
    try:
        found = resolve(host, port)
        for *_, address in found:
            check_address(address[0], receiver, host)
    except Refused as error:
        return Answer(0, str(error))
    except (OSError, UnicodeError) as error:
        return Answer(0, f"{host} has no address: {_describe_error(error)}")
    addresses = tuple(dict.fromkeys(address[0] for *_, address in found))
    return _exchange(CheckedConnection(host, port, addresses, tls, timeout_s), url, request, pool)


CLOSED_BEFORE = Answer(0, "the receiver closed the idle connection")
"""The receiver closed a connection between two requests: it is sent again on a new one, with the same id."""
_CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


def _exchange(
    connection: CheckedConnection, url: urllib.parse.SplitResult, request: Request, pool: ConnectionPool | None
) -> Answer:
    number, kept = DEADLINES.start(connection), False
    try:
        path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        headers = (
            {"Content-Type": "application/json", **request.headers} if request.body is not None else request.headers
        )
        connection.request(request.method, path, request.body, dict(headers))
        connection.acknowledge_quickly()
        response = connection.getresponse()
        body = b""
        with contextlib.suppress(OSError, http.client.HTTPException):  # a status without its body is an answer too
            body = response.read(request.most)
            kept = pool is not None and response.isclosed() and connection.sock is not None
        return Answer(response.status, "", _parse_retry_after(response.getheader("Retry-After")), body)
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: an invalid header
        late = connection.aborted or isinstance(error, TimeoutError)
        if connection.reused and not late and isinstance(error, _CLOSED):
            return CLOSED_BEFORE
        return Answer(0, f"no answer within {connection.timeout_s:g} s" if late else _describe_error(error))
    finally:
        DEADLINES.cancel(number)
        if kept and pool is not None and not connection.aborted:
            pool.give_back(connection)
        else:
            connection.close()


def classify_answer(answer: Answer) -> PostResult:
    """Returns the result of a response: 2xx is delivered, everything else is retried."""
    if not answer.status:
        return PostResult("retry", answer.error)
    return _classify(answer.status, answer.retry_after_s)


def classify_status(status: int, retry_after: str | None = None) -> PostResult:
    """Returns the result of a response status: 2xx is delivered, all others are retried.

    Also 4xx: after a receiver is repaired (a login page in front, a wrong path), the missed pages are expected. 429
    is a limit of the rate (RFC 6585 4), and so is 503 that says when to come back (RFC 9110 15.6.4: temporary
    overload), as many gateways do; its pause is shorter, since what is away is said to come back too.
    """
    return _classify(status, _parse_retry_after(retry_after))


def _classify(status: int, after_s: float) -> PostResult:
    text = f"HTTP {status}"
    if 200 <= status < 300:
        return PostResult("delivered", text)
    is_overload = status == 503 and after_s > 0
    if 300 <= status < 400:
        text += ": a redirect, which is not followed; configure the final URL"
    elif status == 410:
        text += ": the URL no longer exists"
    elif status in (401, 403):
        text += ": the receiver rejects the credentials"
    elif status == 429:
        text += ": the receiver limits the rate"
    elif is_overload:
        text, after_s = f"{text}: the receiver asks to wait", min(after_s, MAX_OVERLOAD_S)
    return PostResult("retry", text, after_s, limited=status == 429 or is_overload)


def refuse_unexpected(answer: Answer, expected: str) -> PostResult:
    """Returns the failure of an answer of 2xx that is not that of the service, which may not have got the message.

    expected: what the service answers.
    """
    found = f"HTTP {answer.status}: unexpected answer, {_describe_body(answer.body)}"
    return PostResult(
        "retry", f"{found}; expected {expected}; check the URL and what answers there, such as a sign-in page"
    )


def _describe_body(body: bytes) -> str:
    """Returns what a body is, without its text."""
    text = body.strip()
    if not text:
        return "without a body"
    if text[:1] == b"<":
        return "an HTML or XML page"
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "not JSON"
    return "other JSON"


def _parse_retry_after(retry_after: str | None) -> float:
    """Returns the seconds of a Retry-After header (RFC 9110 10.2.3), 0 to MAX_RETRY_AFTER_S; 0 if invalid."""
    text = (retry_after or "").strip(" \t")
    if not text or len(text) > MAX_RETRY_AFTER_CHARACTERS:
        return 0.0
    if re.fullmatch("[0-9]+", text):
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, LookupError, OverflowError, OSError):  # raised by invalid dates
        return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_S)


def _describe_error(error: Exception) -> str:
    """Returns the system's text of an error, never text from the receiver."""
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {reason or 'no valid HTTP request or response'}"
