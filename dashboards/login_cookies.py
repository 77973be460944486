"""Cookies and redirects of Streamlit's login: marked Secure, as short-lived as a login, and back to the page asked for.

Streamlit opens the first page after each login, so that a link in an alert would lead to the wrong place.
Here the address of the page with the login button is kept in a cookie from the click to the way back, and used once:
one for each login, as several links may be opened in several tabs. A login that fails leads back there too, with a
cookie that says why: Streamlit answers it with its first page, or with a bare text if the provider does not answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import parse_qs, quote, unquote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config.dashboard import Dashboard
from pipeline.http.addresses import is_same_origin

NEXT = "fleetpulse_next"
FAILURE = "fleetpulse_login_failure"
FAILURE_SECONDS = 60
"""Life of the reason of a failed login (s): it is shown until the page is loaded again later. Chosen."""
FAILURES = {
    "access_denied": "The provider did not allow it (access_denied): it was cancelled, or you have no access there.",
    "unreachable": "The provider does not answer. Try again in a minute; if that lasts, ask its administrator.",
    "incomplete": "It took too long, or its page was opened twice. Log in again.",
    "other": "The provider reported an error; the log of the dashboard has it. Ask the administrator of Fleetpulse.",
}
"""Value of the cookie -> why a login failed. Only these are shown: anyone can make a link to the callback."""
NEXT_SECONDS = 600
"""Life of the address (s): time for a login with a second factor. Chosen."""
MAX_NEXT = 2000
"""Longest address that is kept (characters); a longer one leads to the first page. Chosen."""
USER_COOKIE = "_streamlit_user"
_MAX_AGE = re.compile(r"Max-Age=\d+", re.IGNORECASE)


class LoginCookies:
    """ASGI middleware around Streamlit."""

    def __init__(self, app: ASGIApp, board: Dashboard, public_url: str) -> None:
        """public_url: address of the pages in browsers; with https all cookies are for https only."""
        self._app, self._base = app, board.base_path
        self._secure = "; Secure" if public_url.startswith("https://") else ""
        self._seconds = int(board.oidc.max_hours * 3600) if board.oidc else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]

        async def changed(message: Message) -> None:
            if message["type"] == "http.response.start":
                response = MutableHeaders(scope=message)
                self._change_cookies(response)
                if path == f"{self._base}/auth/login":
                    self._keep_next(headers, response, message)
                elif path == f"{self._base}/oauth2callback":
                    self._use_next(headers, response, parse_qs(scope["query_string"].decode("latin-1")))
            await send(message)

        await self._app(scope, receive, changed)

    def _change_cookies(self, response: MutableHeaders) -> None:
        cookies = response.getlist("set-cookie")
        if not cookies:
            return
        del response["set-cookie"]
        for cookie in cookies:
            text = cookie
            if self._seconds is not None and cookie.startswith(USER_COOKIE):
                text = _MAX_AGE.sub(lambda age: min(age[0], f"Max-Age={self._seconds}", key=_seconds), cookie)
            response.append("set-cookie", text + (self._secure if "; secure" not in text.lower() else ""))

    def _keep_next(self, headers: Headers, response: MutableHeaders, message: Message) -> None:
        """Keeps the address of the page that the login was started on; leads back to it if no login could begin."""
        page = urlsplit(headers.get("referer", ""))
        target = f"{page.path}?{page.query}" if page.query else page.path
        if not is_same_origin(f"{page.scheme}://{page.netloc}", headers.get("host", "")) or not self._is_page(target):
            target = ""
        if message["status"] >= 400:
            message["status"] = 303
            response["location"] = _quoted(target) if target else f"{self._base}/"
            self._set_failure(response, "unreachable", FAILURE_SECONDS)
            return
        self._set_failure(response, "", 0)
        state = parse_qs(urlsplit(response.get("location", "")).query).get("state", [""])[0]
        if target and state:
            self._set_next(response, _name_of(state), quote(target, safe="/"), NEXT_SECONDS)

    def _use_next(self, headers: Headers, response: MutableHeaders, asked: Mapping[str, list[str]]) -> None:
        """Leads to that address, after a failed login with the reason. Its cookie is cleared in any case: used once."""
        name = _name_of(asked.get("state", [""])[0])
        target = unquote(cookie_parser(headers.get("cookie", "")).get(name, ""))
        logged_in = any(
            c.startswith(f"{USER_COOKIE}=") and "max-age=0" not in c.lower() for c in response.getlist("set-cookie")
        )
        if not logged_in and ("error" in asked or "code" in asked):  # else it is the way back from a logout
            code = asked.get("error", ["incomplete"])[0]
            self._set_failure(response, code if code in FAILURES else "other", FAILURE_SECONDS)
        if target and "location" in response and self._is_page(target):
            response["location"] = _quoted(target)
        if target:
            self._set_next(response, name, "", 0)

    def _set_next(self, response: MutableHeaders, name: str, value: str, seconds: int) -> None:
        self._set_cookie(response, name, value, f"{self._base}/oauth2callback", seconds)

    def _set_failure(self, response: MutableHeaders, code: str, seconds: int) -> None:
        self._set_cookie(response, FAILURE, code, f"{self._base}/", seconds)

    def _set_cookie(self, response: MutableHeaders, name: str, value: str, path: str, seconds: int) -> None:
        response.append(
            "set-cookie", f"{name}={value}; Path={path}; HttpOnly; SameSite=Lax; Max-Age={seconds}{self._secure}"
        )

    def _is_page(self, target: str) -> bool:
        """Returns whether a path leads to a page of this dashboard: not to another host, not to the login itself."""
        inside = target.removeprefix(self._base) if target.startswith(f"{self._base}/") else None
        if inside is None or len(target) > MAX_NEXT or re.match(r"/[/\\]", target) or not target.isprintable():
            return False
        return not inside.startswith(("/auth/", "/oauth2callback", "/_stcore/", "/static/", "//"))


def find_failure(cookies: Mapping[str, str]) -> str:
    """Returns why the last login failed; empty if none did just now."""
    return FAILURES.get(cookies.get(FAILURE, ""), "")


def _name_of(state: str) -> str:
    """Returns the name of the cookie of one login."""
    return f"{NEXT}_{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def _quoted(target: str) -> str:
    return quote(target, safe="/?&=%+:@,;!$'()*~-._")


def _seconds(age: str) -> int:
    return int(age.partition("=")[2])
