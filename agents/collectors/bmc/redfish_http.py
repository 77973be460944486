"""HTTP to one BMC: one connection that is kept, one request at a time, answers of bounded size and time.

No proxy is ever used: http.client does not look at the environment.

Who we are to a BMC: a session where it gives one, else the password with each request (DSP0266, Authentication).
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

from agents.collectors.bmc.redfish_document import PREFIX, path_of

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


SESSIONS = f"{PREFIX}/SessionService/Sessions"
MAX_REDIRECTS = 3
_REDIRECT = (301, 302, 303, 307, 308)
_PASSING = (429, 502, 503, 504)
"""Answers with which a BMC says that it is busy as a whole."""


def password_of(path: Path) -> str:
    """The password in a file that only its owner and group may read. Raises Failure, which never quotes it."""
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            wanted = f"wanted one that others may not open: chmod 600 {path}"
            text = f"password_file {path}: open to every user of this host (mode {mode & 0o777:04o}); {wanted}"
            raise Failure(text, away=True)
        found = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        text = f"password_file {path}: {why}; wanted a file with the password that we may read"
        raise Failure(text, away=True) from error
    if not found:
        raise Failure(f"password_file {path}: is empty; wanted the password in it", away=True)
    return found


@dataclass
class Session:
    """Requests in the name of a user. The password is read anew at each login, so that a mended one works at once."""

    client: Client
    user: str = ""
    password_file: Path | None = None
    requests: int = 0
    _token: str = field(default="", repr=False)
    _basic: str = field(default="", repr=False)
    _place: str = ""

    def get(self, path: str, etag: str = "") -> Answer:
        """GET as that user; 304 where the resource is as `etag` says. Raises Failure for any other answer than 200."""
        more = {"If-None-Match": etag} if etag else {}
        answer = self._as_user("GET", path, more)
        if answer.status == 401 and self.user:
            self.forget()
            answer = self._as_user("GET", path, more)
        for _ in range(MAX_REDIRECTS):
            if answer.status not in _REDIRECT:
                break
            answer = self._as_user("GET", self._elsewhere(answer), more)
        if answer.status == 200 or (answer.status == 304 and etag):
            return answer
        raise _refused(f"GET {path}", answer)

    def headers(self) -> dict[str, str]:
        """What names the user in a request; a session is opened where there is none."""
        if self.user and not self._token and not self._basic:
            self._login()
        return self.known() or {}

    def known(self) -> dict[str, str] | None:
        """What names the user now; None where that must be asked for first."""
        found = {"Accept": "application/json", "OData-Version": "4.0"}
        if self.user and not self._token and not self._basic:
            return None
        if self._token:
            found["X-Auth-Token"] = self._token
        elif self._basic:
            found["Authorization"] = self._basic
        return found

    def forget(self) -> None:
        """The session is no longer known to the BMC."""
        self._token = self._basic = self._place = ""

    def logout(self) -> None:
        """Gives the session back: a BMC has room for few."""
        if self._token and self._place:
            with contextlib.suppress(Failure):  # the BMC drops it by itself after SessionTimeout
                self._request("DELETE", self._place, self.headers())
        self.forget()

    def _as_user(self, method: str, path: str, more: Mapping[str, str]) -> Answer:
        return self._request(method, path, {**self.headers(), **more})

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        self.requests += 1
        return self.client.request(method, path, headers, body)

    def _login(self) -> None:
        """A session; where the BMC does not give one, from now on the password goes with each request."""
        password = password_of(self.password_file) if self.password_file is not None else ""
        body = json.dumps({"UserName": self.user, "Password": password}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json", "OData-Version": "4.0"}
        answer = self._request("POST", SESSIONS, headers, body)
        token = answer.headers.get("x-auth-token", "")
        if answer.status in (401, 403):
            raise Failure(
                f"login as {self.user!r}: HTTP {answer.status}; wanted a user and password it knows", away=True
            )
        if answer.status in (200, 201) and token.isascii() and token.isprintable() and token:
            self._token = token
            self._place = path_of(urlsplit(answer.headers.get("location", "")).path) or ""
            return
        pair = base64.b64encode(f"{self.user}:{password}".encode()).decode()
        self._basic = f"Basic {pair}"

    def _elsewhere(self, answer: Answer) -> str:
        """Path that a redirect leads to, on this very BMC: no other host ever sees our token."""
        target, own = urlsplit(answer.headers.get("location", "")), urlsplit(self.client.url)
        path = target.path + (f"?{target.query}" if target.query else "")
        same = (target.scheme or own.scheme, target.netloc or own.netloc) == (own.scheme, own.netloc)
        if not same or not target.path.startswith(PREFIX) or not path.isascii() or not path.isprintable():
            raise Failure("it redirects to another host; wanted an answer of its own")
        return path


def _refused(what: str, answer: Answer) -> Failure:
    try:
        after = float(answer.headers.get("retry-after", "0"))
    except ValueError:  # a date, which needs the BMC's clock to be right
        after = 0.0
    away = answer.status in (*_PASSING, 401)
    return Failure(f"{what}: HTTP {answer.status}", away=away, after=after if 0 < after < 3600 else 0.0)
