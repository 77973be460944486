"""One HTTP POST to one receiver: to a checked address, without redirects, within a deadline. Standard library only.

Destinations come from the configuration file alone. A name may still be led astray: so it is resolved once, all its
addresses must be allowed, and the connection goes to a checked address. Proxies of the environment are not used.

Whether a receiver accepts posts: after three failures in a row it is probed until it responds.

The retry schedule limits a single message. A receiver that responds again gets everything that waits for it at once.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config.sections import Webhook
from pipeline.model.errors import ConfigError, Refused
from pipeline.model.records import SECOND, iso

TIMEOUT_S = 15.0
"""From connecting to the answer's status. Chosen: shorter than any group interval of Alertmanager."""
READ_BYTES = 4096
"""Of the answer's body, which nobody looks at: enough that an honest receiver finishes writing. Chosen."""
LATER_S, LATER_CHARACTERS = 86400.0, 64
"""Longest wait that a Retry-After may ask for, and its longest text; a date of RFC 9110 has 29 characters. Chosen."""
_TUNNELS = tuple(
    map(ipaddress.ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)  # IPv4-mapped and -compatible, NAT64, 6to4, Teredo: an IPv6 address that hides an IPv4 one
Outcome = Literal["delivered", "retry"]
Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a post. `told` is for people and never holds what the receiver wrote."""

    outcome: Outcome
    told: str
    after_s: float = 0.0


def check_url(receiver: Webhook) -> urllib.parse.SplitResult:
    """The parts of a receiver's URL. Raises ConfigError on what can never be called."""
    where = f"[[notify.webhooks]] {receiver.name}: url"
    try:
        url = urllib.parse.urlsplit(receiver.url)
        port_is_number = url.port is None or url.port > 0
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; wanted https://HOST[:PORT]/PATH") from error
    if url.scheme not in ("http", "https") or not url.hostname or not port_is_number:
        raise ConfigError(f"{where} = {receiver.url!r}: wanted https://HOST[:PORT]/PATH (or http, see allow_http)")
    if "@" in url.netloc:
        raise ConfigError(f"{where}: holds a user or password; wanted none")
    if not receiver.url.isascii() or any(c <= " " or c == "\x7f" for c in receiver.url):
        raise ConfigError(f"{where}: holds a space, control or non-ASCII character; wanted it percent-encoded")
    if url.scheme == "http" and not receiver.allow_http and not _is_loopback_name(url.hostname):
        raise ConfigError(f"{where}: is http; wanted https, or allow_http = true")
    return url


def check_address(address: str, receiver: Webhook, host: str) -> None:
    """Raises Refused if a name's address may not be called."""
    ip = ipaddress.ip_address(address.split("%", 1)[0])
    where = f"receiver {receiver.name}: address {ip}"
    hidden = any(ip in net for net in _TUNNELS if ip.version == net.version) and not ip.is_loopback
    if ip.is_multicast or ip.is_unspecified or hidden:
        raise Refused(f"{where} is multicast, unspecified or a tunnel's; wanted a plain one")
    if any(ip in net for net in _networks(receiver) if ip.version == net.version):
        return
    if ip.is_loopback and _is_loopback_name(host):
        return
    if not ip.is_global:
        raise Refused(f"{where} is not public; wanted it in allow_private of this receiver")


def _networks(receiver: Webhook) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    try:
        return [ipaddress.ip_network(text) for text in receiver.allow_private]
    except ValueError as error:
        raise ConfigError(f"[[notify.webhooks]] {receiver.name}: allow_private: {error}; wanted CIDRs") from error


def check(receiver: Webhook) -> None:
    """Raises ConfigError if the receiver can never be called; names are resolved, and judged, at each call."""
    host = str(check_url(receiver).hostname)
    _networks(receiver)
    try:
        check_address(str(ipaddress.ip_address(host)), receiver, host)
    except Refused as error:
        raise ConfigError(f"[[notify.webhooks]] {receiver.name}: url = {receiver.url!r}: {error}") from error
    except ValueError:
        return  # a name


def refusal(receiver: Webhook) -> str | None:
    """Why the receiver can never be called; None if it can."""
    try:
        check(receiver)
    except ConfigError as error:
        return str(error)
    return None


def _is_loopback_name(host: str) -> bool:
    """Whether the URL itself says loopback; a name that leads there does not count, nor odd spellings of 127.0.0.1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def post(
    receiver: Webhook,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    resolve: Resolve = _resolve,
) -> Answer:
    """Posts once. Whatever the network does ends as an Answer, within `timeout_s` after the name is resolved."""
    url = check_url(receiver)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    try:
        found = resolve(host, port)
        for *_, address in found:
            check_address(address[0], receiver, host)
    except Refused as error:
        return Answer("retry", str(error))
    except (OSError, UnicodeError) as error:
        return Answer("retry", f"{host} has no address: {_words(error)}")
    addresses = tuple(dict.fromkeys(address[0] for *_, address in found))
    return _exchange(_Checked(host, port, addresses, url.scheme == "https", timeout_s), url, body, headers)


class _Checked(http.client.HTTPConnection):
    """Connects to the first checked address that answers; `Host` and the certificate's name stay those of the URL."""

    def __init__(self, host: str, port: int, addresses: Sequence[str], tls: bool, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.timeout_s, self.aborted = timeout_s, False
        self._addresses, self._tls = addresses, tls
        self.default_port = 443 if tls else 80  # so that `Host` names only a port that is not the usual one

    def connect(self) -> None:
        self.sock = self._reach()
        self.sock.settimeout(self.timeout_s)
        if self._tls:
            context = ssl.create_default_context()
            # the handshake comes after the assignment: only so can abort() end one that drips
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock.do_handshake()

    def _reach(self) -> socket.socket:
        share = self.timeout_s / len(self._addresses)
        for address in self._addresses[:-1]:
            with contextlib.suppress(OSError):  # the next address may answer; the last one's error is told
                return socket.create_connection((address, self.port), share)
        return socket.create_connection((self._addresses[-1], self.port), share)

    def abort(self) -> None:
        """Makes the thread that waits on the socket fail at once."""
        self.aborted = True
        if self.sock is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself just now
                self.sock.shutdown(socket.SHUT_RDWR)


def _exchange(connection: _Checked, url: urllib.parse.SplitResult, body: bytes, headers: Mapping[str, str]) -> Answer:
    # a socket's timeout starts again with every byte: only a timer ends a receiver that drips
    timer = threading.Timer(connection.timeout_s, connection.abort)
    timer.daemon = True
    timer.start()
    try:
        path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        with contextlib.suppress(OSError, http.client.HTTPException):  # the status decides, not the body
            response.read(READ_BYTES)
        return judge(response.status, response.getheader("Retry-After"))
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a header that cannot be written
        late = connection.aborted or isinstance(error, TimeoutError)
        return Answer("retry", f"no answer within {connection.timeout_s:g} s" if late else _words(error))
    finally:
        timer.cancel()
        connection.close()


def judge(status: int, retry_after: str | None = None) -> Answer:
    """What a status means for the message: 2xx is delivered, all else is tried again.

    No refusal is final: whoever mends a receiver (a login page in front, a wrong path) expects the pages it missed.
    """
    told = f"HTTP {status}"
    if 200 <= status < 300:
        return Answer("delivered", told)
    if 300 <= status < 400:
        told += ": a redirect, which is never followed; put the final URL into the configuration"
    elif status == 410:
        told += ": the receiver says that this URL is gone"
    elif status in (401, 403):
        told += ": the receiver wants other credentials"
    return Answer("retry", told, _seconds(retry_after))


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After header (RFC 9110 10.2.3), 0 to LATER_S; 0 with one that says nothing."""
    text = (retry_after or "").strip(" \t")
    if not text or len(text) > LATER_CHARACTERS:
        return 0.0
    if re.fullmatch("[0-9]+", text):
        return min(float(text), LATER_S)
    try:
        seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, LookupError, OverflowError, OSError):  # all that hostile dates have led to
        return 0.0
    return min(max(0.0, seconds), LATER_S)


def _words(error: Exception) -> str:
    """What the system says of the error; never text that came from the receiver."""
    said = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {said or 'no valid HTTP request or answer'}"


FAILURES = 3
"""Failures in a row after which a receiver counts as down. Chosen: 0, 1 and 6 s, a restart of a small service."""
PROBE_S, PROBE_LATER_S, PROBE_OFTEN_S = 5, 30, 600
"""Seconds between probes: 5 for the first 10 minutes, then 30. Chosen: a page waits 30 s at most after a recovery."""
MOST_WAIT_S = 300.0
"""Longest wait for the next probe that a Retry-After may ask for. Chosen: a header holds no page back for hours."""
REPORT_S = 30
"""A receiver that fails for so long is reported to the others. Chosen: a restart takes less."""


@dataclass(slots=True)
class ReceiverHealth:
    """What the last posts to one receiver showed. Times in UTC us.

    failures: posts in a row that were not accepted.  since: of the first of them.  answer: to the last of them.
    probes: message -> probes made with it, so that one message that is always refused does not hide a recovery.
    """

    failures: int = 0
    since: int = 0
    answer: str = ""
    next_probe: int = 0
    probes: Counter[str] = field(default_factory=Counter)

    @property
    def down(self) -> bool:
        """Whether the receiver is probed instead of sent everything that is due."""
        return self.failures >= FAILURES

    def accepted(self) -> bool:
        """Takes a 2xx; True if the receiver was down."""
        recovered = self.down
        self.failures, self.answer = 0, ""
        self.probes.clear()
        return recovered

    def failed(self, now: int, answer: str, after_s: float) -> None:
        """Takes a post that was not accepted. after_s: what Retry-After asked for."""
        self.since = self.since if self.failures else now
        self.failures, self.answer = self.failures + 1, answer
        often = now - self.since < PROBE_OFTEN_S * SECOND
        wait = max(PROBE_S if often else PROBE_LATER_S, min(after_s, MOST_WAIT_S))
        self.next_probe = now + int(wait * SECOND)

    def failing(self, now: int) -> bool:
        """Whether the others have to hear of it."""
        return self.down and now - self.since >= REPORT_S * SECOND

    def trouble(self) -> str | None:
        """A sentence for readiness; None while the receiver is not down."""
        return f"accepts no alert since {iso(self.since)[:19]}Z: {self.answer}" if self.down else None
