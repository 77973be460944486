"""HTTP to one BMC: one connection that is kept, one request at a time, answers of bounded size and time.

No proxy is ever used: http.client does not look at the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MAX_BYTES = 8 << 20
"""Longest body of an answer; chosen: an expanded collection of 1000 outlets has 2 MiB."""
CONNECT_S = 15.0
"""Longest wait for a connection; chosen: a BMC that is up accepts within a few seconds even where it computes long."""
STALE_S = 2.0
"""Time within which a kept connection that the BMC had closed shows it; what fails later was a request under way."""
_PIECE = 1 << 16


class Failure(Exception):  # noqa: N818 - it is an outcome, which the budget minds
    """A request brought nothing. away: whether the BMC as a whole did not answer; after: seconds it asks to wait."""

    def __init__(self, text: str, *, away: bool = False, after: float = 0.0) -> None:
        super().__init__(text)
        self.away, self.after = away, after


@dataclass(frozen=True, slots=True)
class Answer:
    """What the BMC said. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def document(self) -> dict[str, Any]:
        """The body as a JSON object. Raises Failure."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than any Redfish document
            raise Failure(f"the answer is no JSON: {type(error).__name__}") from error
        if not isinstance(found, dict):
            raise Failure(f"the answer is a JSON {type(found).__name__}; wanted an object")
        return found


@dataclass
class Client:
    """The connection to one BMC. `url` is its scheme, host and port."""

    url: str
    timeout: float
    ca_file: Path | None = None
    verify: bool = True
    monotonic: Callable[[], float] = time.monotonic
    began: float | None = None
    """When the request under way began; None while there is none."""
    ended: bool = False
    """Whether nothing more is to be asked."""
    _late: bool = False
    """Whether the request under way outlived its time."""
    _http: http.client.HTTPConnection | None = field(default=None, repr=False)
    _sock: socket.socket | None = field(default=None, repr=False)

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        """One request and its whole answer. Raises Failure, `away` where there was no answer."""
        self.began, self._late = self.monotonic(), False
        try:
            response = self.open(method, path, headers, body)
            found = self._rest(response)
            if self._late:  # a connection that is cut within the head looks like an empty answer
                raise TimeoutError
            if response.will_close:
                self.close()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            why = _why(TimeoutError() if self._late else error, self.timeout)
            raise Failure(f"{method} {path}: {why}", away=True) from error
        except Failure:
            self.close()  # what is left of the answer would be taken for the next one
            raise
        finally:
            self.began = None

    def open(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Sends and waits for the head of the answer; a kept connection that the BMC closed meanwhile is made anew."""
        kept, began = self._http is not None, self.monotonic()
        try:
            return self._send(method, path, headers, body)
        except (ConnectionError, http.client.BadStatusLine, http.client.CannotSendRequest):
            self.close()
            stale = kept and self.monotonic() - began < STALE_S and not self.ended
            if not stale or method != "GET":
                raise
        return self._send(method, path, headers, body)

    def _send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> http.client.HTTPResponse:
        if self._http is None:
            self._http = self._connected()
        self._http.request(method, path, body, dict(headers))
        return self._http.getresponse()

    def _connected(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        made: http.client.HTTPConnection
        if parts.scheme == "https":
            made = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=CONNECT_S, context=self._tls())
        else:
            made = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_S)
        made.connect()
        made.sock.settimeout(self.timeout)
        self._sock = made.sock
        return made

    def _tls(self) -> Any:
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            wanted = "wanted a file of certificates in PEM that we may read"
            raise Failure(f"ca_file {self.ca_file}: {error.strerror}; {wanted}", away=True) from error
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def _rest(self, response: http.client.HTTPResponse) -> bytes:
        pieces, size = [], 0
        while piece := response.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise Failure(f"the answer is longer than {MAX_BYTES} bytes")
        return b"".join(pieces)

    def overdue(self) -> bool:
        """Ends a request that came to its time with a byte now and then, which no time-out of a read would notice."""
        began = self.began
        late = began is not None and self.monotonic() - began > self.timeout + CONNECT_S
        if late:
            self._late = True
            self.abort()
        return late

    def abort(self) -> None:
        """Ends the request under way, from another thread."""
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = self._sock = None


def _why(error: Exception, timeout: float) -> str:
    """The reason for a person, without anything that the BMC sent."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    if type(error).__name__ == "SSLCertVerificationError":
        return f"its certificate is not trusted ({getattr(error, 'verify_message', '')}); name its issuer in ca_file"
    return getattr(error, "strerror", None) or type(error).__name__
