"""Who we are to a BMC: a session where it gives one, else the password with each request (DSP0266, Authentication)."""

from __future__ import annotations

import base64
import contextlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agents.sources.redfish.client import Answer, Client, Failure
from agents.sources.redfish.document import PREFIX, path_of

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
