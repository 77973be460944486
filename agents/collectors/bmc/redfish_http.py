"""HTTP to one BMC: one persistent connection, one request at a time, responses of bounded size and time; login and
session.

No proxy is used: http.client ignores the environment. Authentication uses a session if the BMC supports it, else the
password in each request (DSP0266, Authentication).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.collectors.bmc.redfish_document import PREFIX, resource_path
from pipeline.model.regular_files import read_regular_text

MAX_BYTES = 8 << 20
"""Longest body of a response. Chosen: an expanded collection of 1000 outlets has 2 MiB."""
CONNECT_S = 15.0
"""Longest time to connect. Chosen: a BMC that is up accepts within a few seconds, even if its responses take long."""
STALE_S = 2.0
"""Time within which a persistent connection that the BMC had closed fails. A later failure is that of a running
request."""
_PIECE = 1 << 16


class RequestError(Exception):  # an outcome that the schedule uses
    """A request failed. bmc_down: whether the BMC as a whole did not respond; retry_after: seconds to wait, as
    requested by the BMC.
    """

    def __init__(self, text: str, *, bmc_down: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.bmc_down, self.retry_after = bmc_down, retry_after


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def document(self) -> dict[str, Any]:
        """Returns the body as a JSON object. Raises RequestError."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than any Redfish document
            raise RequestError(f"the response is not JSON: {type(error).__name__}") from error
        if not isinstance(found, dict):
            raise RequestError(f"the response is a JSON {type(found).__name__}; expected an object")
        return found


@dataclass
class RedfishConnection:
    """The connection to one BMC. `url` is its scheme, host and port."""

    url: str
    timeout: float
    ca_file: Path | None = None
    verify: bool = True
    monotonic: Callable[[], float] = time.monotonic
    request_started: float | None = None
    """When the current request started; None if there is none."""
    closing: bool = False
    """Whether no further request is to be sent."""
    _timed_out: bool = False
    """Whether the current request exceeded its time."""
    _http: http.client.HTTPConnection | None = field(default=None, repr=False)
    _sock: socket.socket | None = field(default=None, repr=False)

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> HttpResponse:
        """Sends one request and returns the complete response. Raises RequestError, with `bmc_down` if there was no
        response.
        """
        self.request_started, self._timed_out = self.monotonic(), False
        try:
            response = self.open(method, path, headers, body)
            found = self._read_body(response)
            if self._timed_out:  # a connection that ends within the headers looks like an empty response
                raise TimeoutError
            if response.will_close:
                self.close()
            return HttpResponse(response.status, {k.lower(): v for k, v in response.getheaders()}, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            why = _error_reason(TimeoutError() if self._timed_out else error, self.timeout)
            raise RequestError(f"{method} {path}: {why}", bmc_down=True) from error
        except RequestError:
            self.close()  # the rest of this response would be read as the next one
            raise
        finally:
            self.request_started = None

    def open(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Sends a request and waits for the response headers.

        A persistent connection that the BMC closed is replaced.
        """
        kept, began = self._http is not None, self.monotonic()
        try:
            return self._send_request(method, path, headers, body)
        except (ConnectionError, http.client.BadStatusLine, http.client.CannotSendRequest):
            self.close()
            stale = kept and self.monotonic() - began < STALE_S and not self.closing
            if not stale or method != "GET":
                raise
        return self._send_request(method, path, headers, body)

    def _send_request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> http.client.HTTPResponse:
        if self._http is None:
            self._http = self._connect()
        self._http.request(method, path, body, dict(headers))
        return self._http.getresponse()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        made: http.client.HTTPConnection
        if parts.scheme == "https":
            made = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=CONNECT_S, context=self._tls_context()
            )
        else:
            made = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_S)
        made.connect()
        made.sock.settimeout(self.timeout)
        self._sock = made.sock
        return made

    def _tls_context(self) -> Any:
        import ssl

        from pipeline.http import certificates

        try:
            context = certificates.trust(self.ca_file)
        except OSError as error:
            wanted = "expected a readable file of PEM certificates"
            raise RequestError(f"ca_file {self.ca_file}: {error.strerror}; {wanted}", bmc_down=True) from error
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def _read_body(self, response: http.client.HTTPResponse) -> bytes:
        pieces, size = [], 0
        while piece := response.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise RequestError(f"the response is longer than {MAX_BYTES} bytes")
        return b"".join(pieces)

    def abort_overdue(self) -> bool:
        """Aborts a request that exceeded its time with a byte now and then, which no read timeout detects. Returns
        whether it did.
        """
        began = self.request_started
        late = began is not None and self.monotonic() - began > self.timeout + CONNECT_S
        if late:
            self._timed_out = True
            self.abort()
        return late

    def abort(self) -> None:
        """Aborts the current request, from another thread."""
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):  # already closed
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        if self._http is not None:
            self._http.close()
            self._http = self._sock = None


def _error_reason(error: Exception, timeout: float) -> str:
    """Returns the reason of an error, without anything that the BMC sent."""
    if isinstance(error, TimeoutError):
        return f"no response within {timeout:g} s"
    if type(error).__name__ == "SSLCertVerificationError":
        return f"its certificate is not trusted ({getattr(error, 'verify_message', '')}); name its issuer in ca_file"
    return getattr(error, "strerror", None) or type(error).__name__


SESSIONS = f"{PREFIX}/SessionService/Sessions"
MAX_REDIRECTS = 3
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_BUSY_STATUSES = (429, 502, 503, 504)
"""Status codes of a BMC that is busy as a whole."""


def read_password(path: Path) -> str:
    """Returns the password in a file that only its owner and group may read. Raises RequestError, which never contains
    it.
    """
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            wanted = f"expected a file that others cannot read: chmod 600 {path}"
            text = f"password_file {path}: readable by every user of this host (mode {mode & 0o777:04o}); {wanted}"
            raise RequestError(text, bmc_down=True)
        found = read_regular_text(path).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        text = f"password_file {path}: {why}; expected a readable file with the password"
        raise RequestError(text, bmc_down=True) from error
    if not found:
        raise RequestError(f"password_file {path}: is empty; expected the password in it", bmc_down=True)
    return found


@dataclass
class RedfishSession:
    """Requests as a user. The password is read again at each login, so that a corrected one works immediately."""

    client: RedfishConnection
    user: str = ""
    password_file: Path | None = None
    requests: int = 0
    _token: str = field(default="", repr=False)
    _basic: str = field(default="", repr=False)
    _session_path: str = ""

    def get(self, path: str, etag: str = "") -> HttpResponse:
        """Sends GET as the user; 304 if the resource still matches `etag`. Raises RequestError for any status other
        than 200.
        """
        more = {"If-None-Match": etag} if etag else {}
        answer = self._request_as_user("GET", path, more)
        if answer.status == 401 and self.user:
            self.drop_session()
            answer = self._request_as_user("GET", path, more)
        for _ in range(MAX_REDIRECTS):
            if answer.status not in _REDIRECT_STATUSES:
                break
            answer = self._request_as_user("GET", self._redirect_path(answer), more)
        if answer.status == 200 or (answer.status == 304 and etag):
            return answer
        raise _status_error(f"GET {path}", answer)

    def headers(self) -> dict[str, str]:
        """Returns the headers that authenticate a request; logs in if there is no session."""
        if self.user and not self._token and not self._basic:
            self._login()
        return self.current_headers() or {}

    def current_headers(self) -> dict[str, str] | None:
        """Returns the headers that authenticate a request now; None if a login is needed first."""
        found = {"Accept": "application/json", "OData-Version": "4.0"}
        if self.user and not self._token and not self._basic:
            return None
        if self._token:
            found["X-Auth-Token"] = self._token
        elif self._basic:
            found["Authorization"] = self._basic
        return found

    def drop_session(self) -> None:
        """Forgets a session that the BMC no longer accepts."""
        self._token = self._basic = self._session_path = ""

    def logout(self) -> None:
        """Deletes the session: a BMC has room for few."""
        if self._token and self._session_path:
            with contextlib.suppress(RequestError):  # the BMC deletes it after SessionTimeout
                self._request("DELETE", self._session_path, self.headers())
        self.drop_session()

    def _request_as_user(self, method: str, path: str, more: Mapping[str, str]) -> HttpResponse:
        return self._request(method, path, {**self.headers(), **more})

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> HttpResponse:
        self.requests += 1
        return self.client.request(method, path, headers, body)

    def _login(self) -> None:
        """Opens a session. If the BMC does not support sessions, the password is sent with each request from now on."""
        password = read_password(self.password_file) if self.password_file is not None else ""
        body = json.dumps({"UserName": self.user, "Password": password}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json", "OData-Version": "4.0"}
        answer = self._request("POST", SESSIONS, headers, body)
        token = answer.headers.get("x-auth-token", "")
        if answer.status in (401, 403):
            raise RequestError(
                f"login as {self.user!r}: HTTP {answer.status}; expected a valid user and password", bmc_down=True
            )
        if answer.status in (200, 201) and token.isascii() and token.isprintable() and token:
            self._token = token
            self._session_path = resource_path(urlsplit(answer.headers.get("location", "")).path) or ""
            return
        pair = base64.b64encode(f"{self.user}:{password}".encode()).decode()
        self._basic = f"Basic {pair}"

    def _redirect_path(self, answer: HttpResponse) -> str:
        """Returns the path of a redirect on the same BMC. Our token is never sent to another host."""
        target, own = urlsplit(answer.headers.get("location", "")), urlsplit(self.client.url)
        path = target.path + (f"?{target.query}" if target.query else "")
        same = (target.scheme or own.scheme, target.netloc or own.netloc) == (own.scheme, own.netloc)
        if not same or not target.path.startswith(PREFIX) or not path.isascii() or not path.isprintable():
            raise RequestError("redirect to another host; expected a response of the BMC itself")
        return path


def _status_error(what: str, answer: HttpResponse) -> RequestError:
    try:
        after = float(answer.headers.get("retry-after", "0"))
    except ValueError:  # a date, which would need a correct clock on the BMC
        after = 0.0
    away = answer.status in (*_BUSY_STATUSES, 401)
    return RequestError(f"{what}: HTTP {answer.status}", bmc_down=away, retry_after=after if 0 < after < 3600 else 0.0)
