"""The outermost layer of the API: checks the caller's token, origin and body size, and answers 500 after a crash.

It is plain ASGI, because the size of a body must be checked before anything parses it.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.api.problem import ProblemResponse, make_problem
from pipeline.api.tokens import Tokens
from pipeline.http.addresses import is_loopback, is_same_origin, parse_host_header
from pipeline.http.client import NO_RIGHT
from pipeline.http.roles import (
    ACTS_PATH,
    CLIENT_HEADER,
    EXECUTOR_PATH,
    MAX_CLIENT,
    MAX_NAME,
    MAX_SUBJECT,
    ROLE_HEADER,
    SUBJECT_HEADER,
    USER_HEADER,
    decode_name,
    find_role,
    has_version,
)
from pipeline.model.records import Caller
from pipeline.model.roles import ROLES

BODY_BYTES = 256 * 1024
"""Longest request body (chosen: four times the longest query; all other bodies are much shorter)."""
OPEN_PATHS = frozenset({"/healthz"})
SIGNED_PATHS = re.compile(r"/api/v1/receivers/[A-Za-z0-9_.-]{1,64}/pagerduty")
"""Routes that check the sender's signature themselves, under whichever name a proxy in front passes on."""
USER, REFUSED = "fleetpulse.user", "fleetpulse.refused"
AUDITED = 60
"""Attempts without the right that are written to the audit in a minute. Chosen: more than people make."""
UNKNOWN_A_DAY = 100
"""Attempts without a valid token that are written to the audit in a day. Chosen: of a million rows, 4 % in 400 days."""
_DAY_S = 86_400
_LOG = logging.getLogger(__name__)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware. Sets the caller's name in the scope under `USER`."""

    def __init__(
        self, app: ASGIApp, tokens: Tokens, host: str, refused: Callable[[Caller, str, str], None] = lambda *_: None
    ) -> None:
        """refused: called with who tried what, and why it was refused, at most AUDITED times a minute."""
        self.app, self.tokens, self.loopback, self._refused = app, tokens, is_loopback(host), refused
        self._audited: deque[float] = deque(maxlen=AUDITED)
        self._day, self._unknown = 0, 0  # a day, and its attempts without a valid token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watched = _ResponseStart(send)
        refusal, messages = self._find_refusal(scope), _BodyReplay(receive, b"")
        if REFUSED in scope:
            await self._audit(scope, *scope[REFUSED])
        if refusal is None:
            body = await _read_body(receive)
            messages = _BodyReplay(receive, body or b"")
            if body is None:
                refusal = make_problem(413, f"the body is longer than {BODY_BYTES} bytes")
        try:
            await (refusal or self.app)(scope, messages.receive, watched.send)
        except Exception:  # no caller may see internal errors  # noqa: BLE001
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not watched.started:
                await make_problem(500, "internal error; see the log of the pipeline")(scope, receive, watched.send)
        if refusal is None and REFUSED in scope:  # by a route that checks a signature itself
            await self._audit(scope, *scope[REFUSED])

    def _find_refusal(self, scope: Scope) -> ProblemResponse | None:
        """Returns the answer that rejects the request; None if it is allowed."""
        headers = Headers(scope=scope)
        is_signed = scope["method"] == "POST" and SIGNED_PATHS.fullmatch(scope["path"]) is not None
        if self.loopback and not is_signed and not is_loopback(parse_host_header(headers.get("host", ""))):
            # DNS rebinding: a page whose name resolves to 127.0.0.1 still sends its own name
            return make_problem(421, f"Host {headers.get('host', '')!r}: this server answers to loopback names only")
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and not is_same_origin(origin, headers.get("host", "")):
                return make_problem(403, f"Origin {origin!r}: pages of other sites may not call this server")
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return make_problem(415, "expected Content-Type: application/json")
        if is_signed or scope["path"] in OPEN_PATHS:
            scope[USER] = Caller("unknown", "viewer", _origin(scope))
            return None
        return self._identify(scope, headers) or _refuse_version(scope, headers)

    def _identify(self, scope: Scope, headers: Headers) -> ProblemResponse | None:
        """Sets the caller in the scope; returns the answer that rejects the request, None if it has the right."""
        origin = _origin(scope)
        caller = self.tokens.find_user(headers.get("authorization", "")) if self.tokens else Caller("local")
        if caller is None:
            why = "expected Authorization: Bearer with a token of [api] token_file or `fleetpulse token create`"
            owner, what = self.tokens.explain(headers.get("authorization", ""))
            scope[REFUSED] = Caller(owner, "viewer", origin), what
            return make_problem(401, why, {"WWW-Authenticate": "Bearer"}, NO_RIGHT)
        scope[USER] = Caller(caller, caller.role, origin, caller.on_behalf_of, is_executor=caller.is_executor)
        try:
            scope[USER] = find_person(scope[USER], headers)
        except ValueError as error:
            return make_problem(400, str(error))
        except PermissionError as error:
            scope[REFUSED] = scope[USER], str(error)
            return make_problem(403, str(error), kind=NO_RIGHT)
        if scope["path"].startswith(EXECUTOR_PATH) and not scope[USER].is_executor:
            made = "see fleetpulse token create --executor; a token with --on-behalf-of cannot be one"
            why = f"{scope[USER]} is no executor: {made}"
            scope[REFUSED] = scope[USER], why
            return make_problem(403, why, kind=NO_RIGHT)
        writes = scope["method"] not in ("GET", "HEAD")
        if not self.tokens and writes and scope["path"].startswith(ACTS_PATH):
            why = "acts need a token or a person who signed in, and there is no token: see fleetpulse token create"
            scope[REFUSED] = scope[USER], why
            return make_problem(403, why, kind=NO_RIGHT)
        needed = find_role(scope["method"], scope["path"])
        if not scope[USER].may(needed):
            why = f"{scope[USER]} is {scope[USER].role}; {scope['method']} {scope['path']} needs the role {needed}"
            scope[REFUSED] = scope[USER], why
            return make_problem(403, why, kind=NO_RIGHT)
        return None

    async def _audit(self, scope: Scope, caller: Caller, why: str) -> None:
        """Records an attempt without the right; beyond AUDITED a minute only in the log, so that a flood fills no disk,
        and beyond UNKNOWN_A_DAY without a valid token, so that nobody without one pushes the rows of others out.

        Reads without a valid token are not recorded: browsers and probes make them all the time.
        """
        is_unknown = caller == "unknown" or USER not in scope
        if is_unknown and scope["method"] in ("GET", "HEAD"):
            return
        now = time.monotonic()
        is_full = len(self._audited) == AUDITED and now - self._audited[0] < 60
        if is_unknown and not is_full:
            day = int(now // _DAY_S)
            self._day, self._unknown = day, self._unknown + 1 if day == self._day else 1
            is_full = self._unknown > UNKNOWN_A_DAY
            if self._unknown == UNKNOWN_A_DAY:
                why += f"; the last of {UNKNOWN_A_DAY} without a valid token in a day, more are only in the log"
        if is_full:
            _LOG.warning("%s from %s refused: %s", scope["path"], caller.origin, why)
            return
        self._audited.append(now)
        try:
            await run_in_threadpool(self._refused, caller, f"{scope['method']} {scope['path']}", why)
        except Exception:  # the answer must not depend on it  # noqa: BLE001
            _LOG.exception("an attempt without the right was not written to the audit")


def _refuse_version(scope: Scope, headers: Headers) -> ProblemResponse | None:
    """Returns the answer to a write with `If-Match` of what has no version; None without it."""
    given = headers.get("if-match", "*").strip()
    if given == "*" or scope["method"] in ("GET", "HEAD") or has_version(scope["path"]):
        return None
    return make_problem(412, f"If-Match: {given[:64]}: {scope['path']} has no version; send it without If-Match")


def find_person(caller: Caller, headers: Headers) -> Caller:
    """Returns the person that a program names, with the lower of both roles; the caller if it names none.

    The origin then is the person's address and the program, and if known the subject of the login:
    `10.1.2.3 via dashboard (127.0.0.1), subject 24400320`. Raises PermissionError if the token lacks the right,
    ValueError if the headers are not understood.
    """
    given = {name: headers.getlist(name) for name in (USER_HEADER, ROLE_HEADER, CLIENT_HEADER, SUBJECT_HEADER)}
    if not any(given.values()):
        return caller
    if not caller.on_behalf_of:
        raise PermissionError(f"{caller} may not act on behalf of others; see fleetpulse token create --on-behalf-of")
    if any(len(given[name]) != 1 for name in (USER_HEADER, ROLE_HEADER)) or any(
        len(all_) > 1 for all_ in given.values()
    ):
        raise ValueError(
            f"expected one {USER_HEADER}, one {ROLE_HEADER}, at most one {CLIENT_HEADER}, {SUBJECT_HEADER}"
        )
    name = _decode(USER_HEADER, given[USER_HEADER][0], MAX_NAME)
    subject = _decode(SUBJECT_HEADER, given[SUBJECT_HEADER][0], MAX_SUBJECT) if given[SUBJECT_HEADER] else ""
    role = next((role for role in ROLES if role == given[ROLE_HEADER][0]), None)
    if role is None:
        raise ValueError(f"{ROLE_HEADER}: {given[ROLE_HEADER][0][:32]!r}: expected one of {', '.join(ROLES)}")
    address = "".join(given[CLIENT_HEADER])
    if len(address) > MAX_CLIENT or not (address.isascii() and address.isprintable()):
        raise ValueError(f"{CLIENT_HEADER}: expected an address of at most {MAX_CLIENT} characters")
    lower = min(role, caller.role, key=ROLES.index)
    origin = f"{address} via {caller} ({caller.origin})".strip() + (f", subject {subject}" if subject else "")
    return Caller(name, lower, origin, is_person=True, subject=subject)


def _decode(header: str, value: str, longest: int) -> str:
    try:
        return decode_name(value, longest)
    except ValueError as error:
        raise ValueError(f"{header}: {error}") from error


def _origin(scope: Scope) -> str:
    """Returns the caller's address."""
    return str((scope.get("client") or ("",))[0])


async def _read_body(receive: Receive) -> bytes | None:
    """Returns the whole body, or what arrived before the caller disconnected; None if it is too long."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


class _BodyReplay:
    """Passes the body that was already read to the application, then all later messages."""

    def __init__(self, receive: Receive, body: bytes) -> None:
        self._receive, self._body, self._sent = receive, body, False

    async def receive(self) -> Message:
        """Returns the body once, then the messages that follow."""
        if self._sent:
            return await self._receive()
        self._sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}


class _ResponseStart:
    """Adds the headers of every answer, and records whether the answer has started."""

    def __init__(self, send: Send) -> None:
        self._send, self.started = send, False

    async def send(self, message: Message) -> None:
        """Sends a message; adds the headers to the start of an answer."""
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)
