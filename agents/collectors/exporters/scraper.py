"""The thread that scrapes one endpoint again and again; what it brought waits for the collector's next look.

One GET of an exporter's page over HTTP: bounded in bytes and, from connecting to its last byte, in time.

http.client follows no redirect, which would carry the token elsewhere, and uses no proxy.
"""

from __future__ import annotations

import http.client
import io
import math
import socket
import ssl
import stat
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from agents.collector import HANG_S
from agents.collectors.exporters.mapping import Names
from agents.collectors.exporters.translation import Translated, page, translate
from pipeline.model.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


MOST_BYTES = 32 << 20
"""Largest page, packed or not; chosen: 65,000 switch ports with 4 counters each are about 25 MiB."""
CHUNK = 1 << 16
ACCEPT = "text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
"""The plain format first: every exporter has it, and its parser forgives more."""
_GZIP = 16 + zlib.MAX_WBITS  # zlib manual, inflateInit2: 16 more than the window's size is gzip alone


class Unreachable(Exception):  # noqa: N818 - what is wrong is with the exporter
    """The exporter gave no page; the text says why."""


class Fetch:
    """GETs of one URL. Token and certificates are read anew for each, since they are rotated."""

    def __init__(self, url: str, timeout: float, ca_file: Path | None = None, token_file: Path | None = None) -> None:
        self.url, self.timeout, self._ca_file, self._token_file = url, timeout, ca_file, token_file
        self._system: ssl.SSLContext | None = None

    def __call__(self) -> str:
        """The page. Raises Unreachable."""
        try:
            return self._page(time.monotonic() + self.timeout)
        except TimeoutError:
            raise Unreachable(f"timed out: no whole page within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException, ConfigError) as error:
            raise Unreachable(str(error) or type(error).__name__) from None

    def _page(self, until: float) -> str:
        parts = urlsplit(self.url)
        headers = {"Host": parts.netloc, "Accept": ACCEPT, "User-Agent": "fleetpulse-agent", "Connection": "close"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {token(self._token_file)}"
        with closing(self._connected(until)) as sock:
            request = http.client.HTTPConnection(parts.hostname or "")
            request.sock = sock
            request.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=headers)
            with http.client.HTTPResponse(cast(socket.socket, _Timed(sock, until)), method="GET") as answer:
                answer.begin()
                if answer.status != 200:
                    raise Unreachable(f"answered {answer.status} {answer.reason}; wanted 200")
                return _unpacked(_body(answer), answer.getheader("Content-Encoding", "")).decode("utf-8", "replace")

    def _connected(self, until: float) -> socket.socket:
        """A connection to the first of its addresses that takes one; each has its share of the time."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        found = socket.getaddrinfo(parts.hostname, parts.port or (443 if secure else 80), type=socket.SOCK_STREAM)
        trouble = OSError(f"{parts.hostname}: has no address")
        for left, (family, kind, protocol, _, address) in zip(range(len(found), 0, -1), found, strict=True):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(until) / left)
                sock.connect(address)
                sock.settimeout(_left(until))
                return self._trust().wrap_socket(sock, server_hostname=parts.hostname) if secure else sock
            except OSError as error:
                sock.close()
                trouble = error
            except BaseException:
                sock.close()
                raise
        raise trouble

    def _trust(self) -> ssl.SSLContext:
        """Whom we trust; this system's own certificates are read once: they are many."""
        try:
            if self._ca_file is not None:
                return ssl.create_default_context(cafile=self._ca_file)
            if self._system is None:
                self._system = ssl.create_default_context()
        except OSError as error:
            raise ConfigError(f"ca_file {self._ca_file}: {error}; wanted certificates in PEM") from None
        return self._system


class _Timed(io.RawIOBase):
    """What a socket brings; every wait for it ends when the whole GET has to."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._sock.settimeout(_left(self._until))
        return self._sock.recv_into(buffer)


def _left(until: float) -> float:
    """Seconds until then. Raises TimeoutError where there are none."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def token(path: Path) -> str:
    """The bearer token in a file that only its owner and group may read. Raises ConfigError, which never quotes it."""
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            wanted = f"wanted one that others may not open: chmod 600 {path}"
            raise ConfigError(f"token_file {path}: open to every user of this host (mode {mode & 0o777:04o}); {wanted}")
        found = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"token_file {path}: {why}; wanted a file with the token that we may read") from None
    if not found or not found.isprintable() or " " in found:
        raise ConfigError(f"token_file {path}: wanted one bearer token in it, a single word")
    return found


def _body(answer: http.client.HTTPResponse) -> bytes:
    """The whole body, unless it is too long."""
    parts, size = [], 0
    while part := answer.read1(CHUNK):
        size += len(part)
        if size > MOST_BYTES:
            raise Unreachable(f"a page of more than {MOST_BYTES >> 20} MiB")
        parts.append(part)
    if answer.length:  # read1 gives what there was, where the other end closed too early
        raise Unreachable(f"the page broke off {answer.length} bytes before its end")
    return b"".join(parts)


def _unpacked(body: bytes, encoding: str) -> bytes:
    """The body as it was before it was packed; some exporters pack though nobody asked for it."""
    if encoding.strip().lower() in ("", "identity"):
        return body
    if encoding.strip().lower() not in ("gzip", "x-gzip"):
        raise Unreachable(f"Content-Encoding {encoding}; wanted none, or gzip")
    unpacker = zlib.decompressobj(_GZIP)
    try:
        found = unpacker.decompress(body, MOST_BYTES + 1)
    except zlib.error as error:
        raise Unreachable(f"Content-Encoding {encoding}, but the page is none: {error}") from None
    if len(found) > MOST_BYTES:
        raise Unreachable(f"a page of more than {MOST_BYTES >> 20} MiB once it is unpacked")
    if not unpacker.eof or unpacker.unused_data:
        raise Unreachable(f"Content-Encoding {encoding}, but the page is not one whole gzip member")
    return found


MOST_WORDS = 300
"""Most characters of a reason: some hold what the exporter sent. Chosen: two lines of a terminal."""
_SHOWN = 60
"""Characters of a page without a series that are shown; chosen: enough to see what it is instead."""
OVERDUE_S = 5.0
"""How much longer than its time-out a GET may take before it counts as down, HANG_S at most; chosen. It ends itself in
time; only what has no time-out, as a name server or a file on a server that is away, can take longer."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape of one endpoint: what it brought, or why it brought nothing. took: seconds."""

    target: str
    reason: str = ""
    took: float = 0.0
    series: int = 0
    bad: int = 0
    found: Translated = field(default_factory=Translated)


class Scraper:
    """One endpoint. Only the newest scrape that nobody took yet is kept."""

    def __init__(self, fetch: Fetch, names: Names, given: Mapping[str, str], interval: float, most: int) -> None:
        self._fetch, self._names, self._given, self._interval, self._most = fetch, names, given, interval, most
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._newest: Scrape | None = None
        self._overdue = math.inf
        name = f"scrape {given['target']}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Scrape | None:
        """The newest scrape, once; one without a page, once an interval, for a GET that does not end."""
        with self._lock:
            newest, self._newest = self._newest, None
            if newest is None and time.monotonic() > self._overdue:
                self._overdue = time.monotonic() + self._interval
                return Scrape(self._given["target"], "a GET does not end: is the exporter, a name server or file away?")
        return newest

    def stop(self) -> None:
        """Ends the thread at its next step; it waits for nobody."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            newest = self.scrape()
            with self._lock:
                self._newest = newest
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def scrape(self) -> Scrape:
        """One scrape now."""
        target, began = self._given["target"], time.monotonic()
        reason, series, bad, found = "", 0, 0, Translated()
        try:
            text = self._text()
            read = page(text)
            series, bad = len(read.series), read.bad
            if bad > series > 0:
                raise Unreachable(f"{bad} lines that are no samples beside {series} series: is it another page?")
            if not series:
                raise Unreachable(f"no series in {len(text)} characters that begin with {text[:_SHOWN]!a}")
            found = translate(read, self._names, self._given, self._most)
        except Unreachable as why:
            reason = str(why)
        except Exception as fault:  # noqa: BLE001 - a thread that ended would be an endpoint that is silent for ever
            reason = f"{type(fault).__name__}: {fault}"
        return Scrape(target, _plain(reason), time.monotonic() - began, series, bad, found)

    def _text(self) -> str:
        with self._lock:
            self._overdue = time.monotonic() + min(self._fetch.timeout + OVERDUE_S, HANG_S)
        try:
            return self._fetch()
        finally:
            with self._lock:
                self._overdue = math.inf


def _plain(reason: str) -> str:
    """A reason that is short and holds nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in reason[:MOST_WORDS])
