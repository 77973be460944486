"""The outermost layer of the pages: Host, Origin, and the headers of every response.

The pages use the dashboard's own token, so the guard blocks cross-site access: it accepts only known Host names (DNS
rebinding) and origins, and forbids frames (clickjacking).
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.http.addresses import is_loopback, is_same_origin, parse_host, parse_host_header

HEALTH = "/_stcore/health"
"""Whether the pages are alive: for probes, which do not know base_path, there too without it."""
HOME = "/fleet"
"""Address of the first page beside the one at /."""
POLICY = {
    "default-src": "'self'",
    "script-src": "'self' 'unsafe-inline' 'unsafe-eval' blob: data:",  # Streamlit's page, charts (Vega), our components
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "worker-src": "'self' blob:",
    "connect-src": "'self'",
    "object-src": "'none'",
    "base-uri": "'self'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
}
"""What pages may load: nothing from elsewhere. Scripts are as strict as Streamlit allows."""
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_POLICY_VIOLATION, _GOING_AWAY = 1008, 1001
"""Close codes of a WebSocket (RFC 6455, 7.4.1)."""


class Guard:
    """ASGI middleware that checks Host and Origin of HTTP requests and WebSockets."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str], seconds: float | None = None, base: str = "") -> None:
        """seconds: longest life of a WebSocket; the browser then connects again, past a proxy that decides again.

        base: path under which a proxy serves the pages.
        """
        self._app, self._allowed, self._seconds, self._base = app, allowed, seconds, base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        reason = self._find_refusal(Headers(scope=scope))
        if scope["type"] == "websocket":
            if reason is None:
                await self._serve_websocket(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason[:120]})
            return
        if self._base and scope["path"] == HEALTH:
            path = self._base + HEALTH
            scope = {**scope, "path": path, "raw_path": path.encode()}
        answer: ASGIApp = self._app if reason is None else PlainTextResponse(reason, 421 if "Host" in reason else 403)
        if reason is None and scope["path"] == self._base + HOME and scope["method"] == "GET":
            # Streamlit serves its first page only at /, but links name all pages alike
            query = scope["query_string"].decode("latin-1")
            answer = RedirectResponse(f"./?{query}" if query else "./", 302)
        await answer(scope, receive, _with_headers(send))

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._app(scope, receive, send)
        except TimeoutError:
            await send({"type": "websocket.close", "code": _GOING_AWAY})

    def _find_refusal(self, headers: Headers) -> str | None:
        """Returns why a request is refused, None if it is allowed."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(parse_host_header(host)) and parse_host_header(host) not in self._allowed:
            return f"Host {parse_host_header(host)!r} is not a name of this dashboard; add it to [dashboard] names"
        if origin is not None and not is_same_origin(origin, host) and parse_host(origin) not in self._allowed:
            return f"Origin {origin!r}: requests from other sites are refused"
        return None


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sent
