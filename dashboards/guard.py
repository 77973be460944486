"""Stands before Streamlit: serves no name but ours, no page of another site, and nobody's frame.

The pages act with the dashboard's own token, so a browser must not be led here by others: a foreign name that was made
to point at this machine (DNS rebinding), a script of another origin, or a frame under somebody's buttons.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config.sections import Config
from pipeline.hosts import host_of, is_loopback, named, same_origin

HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_POLICY_VIOLATION = 1008
"""Close code of a WebSocket, RFC 6455 section 7.4.1."""


def names(config: Config) -> frozenset[str]:
    """The hosts under which browsers may reach the pages, beside loopback. Pages of these hosts on any port are ours:
    a proxy publishes on its own."""
    board = config.dashboard
    known = {board.host.lower(), host_of(config.notify.external_url), *map(str.lower, board.names)}
    return frozenset(host for host in known - {"", "0.0.0.0", "::"} if not is_loopback(host))


class Guard:
    """ASGI middleware for HTTP and WebSockets."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        reason = self._objection(Headers(scope=scope))
        if scope["type"] == "websocket":
            if reason is None:
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason[:120]})
            return
        answer = self._app if reason is None else PlainTextResponse(reason, 421 if "Host" in reason else 403)
        await answer(scope, receive, _with_headers(send))

    def _objection(self, headers: Headers) -> str | None:
        """Why a request is refused; None if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(named(host)) and named(host) not in self._allowed:
            return f"Host {named(host)!r} is not a name of this dashboard; [dashboard] names lists those it has"
        if origin is not None and not same_origin(origin, host) and host_of(origin) not in self._allowed:
            return f"Origin {origin!r}: pages of other sites may not use this dashboard"
        return None


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sent
