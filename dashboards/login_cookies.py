"""Cookies and redirects of Streamlit's login: marked Secure, as short-lived as a login, and back to the page asked for.

Streamlit opens the first page after each login, so that a link in an alert would lead to the wrong place.
Here the address of the page with the login button is kept in a cookie from the click to the way back, and used once.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config.dashboard import Dashboard
from pipeline.http.addresses import is_same_origin

NEXT = "fleetpulse_next"
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
                    self._keep_next(headers, response)
                elif path == f"{self._base}/oauth2callback":
                    self._use_next(headers, response)
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

    def _keep_next(self, headers: Headers, response: MutableHeaders) -> None:
        """Keeps the address of the page that the login was started on."""
        page = urlsplit(headers.get("referer", ""))
        target = f"{page.path}?{page.query}" if page.query else page.path
        if is_same_origin(f"{page.scheme}://{page.netloc}", headers.get("host", "")) and self._is_page(target):
            self._set_next(response, quote(target, safe="/"), NEXT_SECONDS)

    def _use_next(self, headers: Headers, response: MutableHeaders) -> None:
        """Leads to that address after a successful login. The cookie is cleared in any case: used once."""
        cookie = cookie_parser(headers.get("cookie", "")).get(NEXT)
        if not cookie:
            return
        target = unquote(cookie)
        logged_in = any(
            c.startswith(f"{USER_COOKIE}=") and "max-age=0" not in c.lower() for c in response.getlist("set-cookie")
        )
        if logged_in and "location" in response and self._is_page(target):
            response["location"] = quote(target, safe="/?&=%+:@,;!$'()*~-._")
        self._set_next(response, "", 0)

    def _set_next(self, response: MutableHeaders, value: str, seconds: int) -> None:
        path = f"{self._base}/oauth2callback"
        response.append(
            "set-cookie", f"{NEXT}={value}; Path={path}; HttpOnly; SameSite=Lax; Max-Age={seconds}{self._secure}"
        )

    def _is_page(self, target: str) -> bool:
        """Returns whether a path leads to a page of this dashboard: not to another host, not to the login itself."""
        inside = target.removeprefix(self._base) if target.startswith(f"{self._base}/") else None
        if inside is None or len(target) > MAX_NEXT or re.match(r"/[/\\]", target) or not target.isprintable():
            return False
        return not inside.startswith(("/auth/", "/oauth2callback", "/_stcore/", "/static/", "//"))


def _seconds(age: str) -> int:
    return int(age.partition("=")[2])
