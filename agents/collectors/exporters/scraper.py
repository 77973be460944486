"""Scrapes one endpoint over HTTP in its own thread: bounded in bytes, and in time from connect to the last byte.

http.client follows no redirect, which could send the token elsewhere, and uses no proxy.
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
from agents.collectors.exporters.translation import Translation, parse_page, translate_page
from pipeline.foreign.mapping import MetricMapping
from pipeline.http import certificates
from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import read_regular

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


MAX_PAGE_BYTES = 32 << 20
"""Largest page, compressed or not. Chosen: 65,000 switch ports with 4 counters each are about 25 MiB."""
READ_BYTES = 1 << 16
ACCEPT = "text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
"""The plain format first: every exporter has it, and its parser is more tolerant."""
_GZIP = 16 + zlib.MAX_WBITS  # zlib manual, inflateInit2: 16 more than the window's size is gzip alone


class ScrapeError(Exception):
    """The exporter returned no page; the message says why."""


class PageFetcher:
    """Fetches one URL. Token and certificates are read for each request, since they are rotated."""

    def __init__(self, url: str, timeout: float, ca_file: Path | None = None, token_file: Path | None = None) -> None:
        self.url, self.timeout, self._ca_file, self._token_file = url, timeout, ca_file, token_file
        self._system_context: ssl.SSLContext | None = None

    def __call__(self) -> str:
        """Returns the page. Raises ScrapeError."""
        try:
            return self._fetch(time.monotonic() + self.timeout)
        except TimeoutError:
            raise ScrapeError(f"timed out: no whole page within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException, ConfigError) as error:
            raise ScrapeError(str(error) or type(error).__name__) from None

    def _fetch(self, until: float) -> str:
        parts = urlsplit(self.url)
        headers = {"Host": parts.netloc, "Accept": ACCEPT, "User-Agent": "fleetpulse-agent", "Connection": "close"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(self._token_file)}"
        with closing(self._connect(until)) as sock:
            request = http.client.HTTPConnection(parts.hostname or "")
            request.sock = sock
            request.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=headers)
            with http.client.HTTPResponse(cast(socket.socket, _DeadlineReader(sock, until)), method="GET") as answer:
                answer.begin()
                if answer.status != 200:
                    raise ScrapeError(f"answered {answer.status} {answer.reason}; expected 200")
                return _decompress(_read_body(answer), answer.getheader("Content-Encoding", "")).decode(
                    "utf-8", "replace"
                )

    def _connect(self, until: float) -> socket.socket:
        """Returns a connection to the first address that accepts one; each address has its share of the time."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        found = socket.getaddrinfo(parts.hostname, parts.port or (443 if secure else 80), type=socket.SOCK_STREAM)
        failure = OSError(f"{parts.hostname}: has no address")
        for left, (family, kind, protocol, _, address) in zip(range(len(found), 0, -1), found, strict=True):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_seconds_left(until) / left)
                sock.connect(address)
                sock.settimeout(_seconds_left(until))
                return self._tls_context().wrap_socket(sock, server_hostname=parts.hostname) if secure else sock
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure

    def _tls_context(self) -> ssl.SSLContext:
        """Returns the trusted certificates; the system's own ones, which are many, are read once."""
        try:
            if self._ca_file is not None:
                return certificates.trust(self._ca_file)
            if self._system_context is None:
                self._system_context = certificates.trust(None)
        except OSError as error:
            raise ConfigError(f"ca_file {self._ca_file}: {error.strerror}; expected certificates in PEM") from None
        return self._system_context


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket; every wait ends at the deadline of the whole request."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until

    def makefile(self, *_: Any) -> io.BufferedReader:
        """Returns a buffered reader, as http.client requires."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See `io.RawIOBase`."""
        self._sock.settimeout(_seconds_left(self._until))
        return self._sock.recv_into(buffer)


def _seconds_left(until: float) -> float:
    """Returns the seconds until the deadline. Raises TimeoutError after it."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def read_token(path: Path) -> str:
    """Returns the bearer token in a file that others may not read. Raises ConfigError, which never quotes it."""
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            wanted = f"expected a file that others may not read: chmod 600 {path}"
            raise ConfigError(f"token_file {path}: open to every user of this host (mode {mode & 0o777:04o}); {wanted}")
        found = read_regular(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"token_file {path}: {why}; expected a readable file with the token") from None
    if not found or not found.isprintable() or " " in found:
        raise ConfigError(f"token_file {path}: expected one bearer token, a single word")
    return found


def _read_body(answer: http.client.HTTPResponse) -> bytes:
    """Returns the whole body, unless it is too long."""
    parts, size = [], 0
    while part := answer.read1(READ_BYTES):
        size += len(part)
        if size > MAX_PAGE_BYTES:
            raise ScrapeError(f"a page of more than {MAX_PAGE_BYTES >> 20} MiB")
        parts.append(part)
    if answer.length:  # read1 returns a partial body if the other end closed too early
        raise ScrapeError(f"the connection closed {answer.length} bytes before the end of the page")
    return b"".join(parts)


def _decompress(body: bytes, encoding: str) -> bytes:
    """Returns the decompressed body; some exporters compress without a request for it."""
    if encoding.strip().lower() in ("", "identity"):
        return body
    if encoding.strip().lower() not in ("gzip", "x-gzip"):
        raise ScrapeError(f"Content-Encoding {encoding}; expected none, or gzip")
    unpacker = zlib.decompressobj(_GZIP)
    try:
        found = unpacker.decompress(body, MAX_PAGE_BYTES + 1)
    except zlib.error as error:
        raise ScrapeError(f"Content-Encoding {encoding}, but the page is not: {error}") from None
    if len(found) > MAX_PAGE_BYTES:
        raise ScrapeError(f"a page of more than {MAX_PAGE_BYTES >> 20} MiB after decompression")
    if not unpacker.eof or unpacker.unused_data:
        raise ScrapeError(f"Content-Encoding {encoding}, but the page is not one whole gzip member")
    return found


MAX_REASON_CHARS = 300
"""Most characters of a reason: some quote the exporter. Chosen: two lines of a terminal."""
_SHOWN_CHARS = 60
"""Characters quoted of a page without series. Chosen: enough to recognise it."""
OVERDUE_S = 5.0
"""Seconds beyond the time-out after which a request counts as down, at most HANG_S in total. Chosen. A request ends by
itself in time, except for steps without a time-out, such as a name server or a file on a remote server."""


@dataclass(frozen=True, slots=True)
class ScrapeResult:
    """One scrape of one endpoint: its translation, or the reason why there is none. took: seconds."""

    target: str
    reason: str = ""
    took: float = 0.0
    series: int = 0
    bad: int = 0
    translation: Translation = field(default_factory=Translation)


class EndpointScraper:
    """One endpoint. Only the newest result that was not read yet is kept."""

    def __init__(
        self, fetch: PageFetcher, names: MetricMapping, given: Mapping[str, str], interval: float, most: int
    ) -> None:
        self._fetch, self._names, self._given, self._interval, self._most = fetch, names, given, interval, most
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._newest: ScrapeResult | None = None
        self._overdue = math.inf
        name = f"scrape {given['target']}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def pop_result(self) -> ScrapeResult | None:
        """Returns the newest result, once; for a request that hangs, one result without a page per interval."""
        with self._lock:
            newest, self._newest = self._newest, None
            if newest is None and time.monotonic() > self._overdue:
                self._overdue = time.monotonic() + self._interval
                return ScrapeResult(
                    self._given["target"], "a GET does not end: is the exporter, a name server or a file unreachable?"
                )
        return newest

    def stop(self) -> None:
        """Ends the thread at its next step; does not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            newest = self.scrape()
            with self._lock:
                self._newest = newest
            self._stop.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def scrape(self) -> ScrapeResult:
        """Does one scrape now."""
        target, began = self._given["target"], time.monotonic()
        reason, series, bad, found = "", 0, 0, Translation()
        try:
            text = self._fetch_text()
            read = parse_page(text)
            series, bad = len(read.series), read.bad
            if bad > series > 0:
                raise ScrapeError(f"{bad} invalid lines and {series} series: is it another page?")
            if not series:
                raise ScrapeError(f"no series in {len(text)} characters, which begin with {text[:_SHOWN_CHARS]!a}")
            found = translate_page(read, self._names, self._given, self._most)
        except ScrapeError as why:
            reason = str(why)
        except Exception as fault:  # noqa: BLE001 - without its thread the endpoint would stay silent forever
            reason = f"{type(fault).__name__}: {fault}"
        return ScrapeResult(target, _clean_reason(reason), time.monotonic() - began, series, bad, found)

    def _fetch_text(self) -> str:
        with self._lock:
            self._overdue = time.monotonic() + min(self._fetch.timeout + OVERDUE_S, HANG_S)
        try:
            return self._fetch()
        finally:
            with self._lock:
                self._overdue = math.inf


def _clean_reason(reason: str) -> str:
    """Returns a reason that is short and has no control characters."""
    return "".join(c if c.isprintable() else "?" for c in reason[:MAX_REASON_CHARS])
