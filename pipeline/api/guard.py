"""The outermost layer of the API: checks who calls from where and how much, and turns a crash into a plain 500.

It is written against ASGI itself, because a body must be counted before anything parses it.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.api.problem import ProblemResponse, make_problem
from pipeline.api.tokens import Tokens
from pipeline.http.addresses import is_loopback, is_same_origin, parse_host_header

BODY_BYTES = 256 * 1024
"""Longest request body (chosen: four times the longest query; nothing else comes near)."""
OPEN_PATHS = frozenset({"/healthz"})
USER = "fleetpulse.user"
_LOG = logging.getLogger(__name__)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware. Puts the caller's name into the scope under `USER`."""

    def __init__(self, app: ASGIApp, tokens: Tokens, host: str) -> None:
        self.app, self.tokens, self.loopback = app, tokens, is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watched = _ResponseStart(send)
        refusal, messages = self._find_refusal(scope), _BodyReplay(receive, b"")
        if refusal is None:
            body = await _read_body(receive)
            messages = _BodyReplay(receive, body or b"")
            if body is None:
                refusal = make_problem(413, f"the body is longer than {BODY_BYTES} bytes")
        try:
            await (refusal or self.app)(scope, messages.receive, watched.send)
        except Exception:  # the last line of defence: no caller may see what went wrong inside  # noqa: BLE001
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not watched.started:
                await make_problem(500, "the request failed inside; the log of the pipeline tells why")(
                    scope, receive, watched.send
                )

    def _find_refusal(self, scope: Scope) -> ProblemResponse | None:
        """The answer to a caller who may not; None lets it pass."""
        headers = Headers(scope=scope)
        if self.loopback and not is_loopback(parse_host_header(headers.get("host", ""))):
            # a page from elsewhere whose name was made to point at 127.0.0.1 still sends its own name
            return make_problem(421, f"Host {headers.get('host', '')!r}: this server answers to loopback names only")
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and not is_same_origin(origin, headers.get("host", "")):
                return make_problem(403, f"Origin {origin!r}: pages of other sites may not call this server")
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return make_problem(415, "wanted Content-Type: application/json")
        scope[USER] = "local"
        if self.tokens and scope["path"] not in OPEN_PATHS:
            scope[USER] = self.tokens.find_user(headers.get("authorization", ""))
            if scope[USER] is None:
                return make_problem(
                    401, "wanted Authorization: Bearer with a token of [api] token_file", {"WWW-Authenticate": "Bearer"}
                )
        return None


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if it is too long. A caller who hangs up has said what they had to say."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


class _BodyReplay:
    """Gives the application the body that was read already, then whatever follows."""

    def __init__(self, receive: Receive, body: bytes) -> None:
        self._receive, self._body, self._told = receive, body, False

    async def receive(self) -> Message:
        if self._told:
            return await self._receive()
        self._told = True
        return {"type": "http.request", "body": self._body, "more_body": False}


class _ResponseStart:
    """Adds the headers that every answer bears, and remembers whether an answer began."""

    def __init__(self, send: Send) -> None:
        self._send, self.started = send, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)
