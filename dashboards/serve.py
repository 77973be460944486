"""`fleetpulse dashboard`: Streamlit in this process, with our settings, until SIGTERM or SIGINT.

Stands before Streamlit: serves no name but ours, no page of another site, and nobody's frame.

The pages act with the dashboard's own token, so a browser must not be led here by others: a foreign name that was made
to point at this machine (DNS rebinding), a script of another origin, or a frame under somebody's buttons.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboards.client import API_TOKEN_FILE, API_URL, token_of
from pipeline.config.sections import Config
from pipeline.http.addresses import host_of, is_loopback, named, same_origin
from pipeline.model.errors import Refused, UsageError
from pipeline.runtime import logs

MESSAGE_BYTES = 200 << 20
"""Longest message over a WebSocket: Streamlit's own default, server.maxMessageSize."""
PING_SECONDS = 30.0
"""Between pings of a viewer, and how long an answer may take: Streamlit's own default."""
APP = Path(__file__).parent / "app.py"
LAST_SECONDS = 2.0
"""How long threads that still wait for the API may hold up the end; the whole has to end within 3 s. Chosen."""


def run(config: Config) -> int:
    """Serves the pages until told to end. Raises UsageError if the port is taken, Refused off loopback."""
    host, port = config.dashboard.host, config.dashboard.port
    _check(config)
    os.environ.update(environment(config))
    sys.stderr.write(f"dashboard: http://{_in_url(host)}:{port} (reads {api_url(config)})\n")
    sys.stderr.flush()
    logs.limit_all()
    # Streamlit talks on stdout, which is for data.
    with contextlib.redirect_stdout(sys.stderr):
        _serve(config)
    threading.Thread(target=_end_for_sure, daemon=True).start()
    return 0


def _serve(config: Config) -> None:
    """Runs Streamlit as an ASGI application behind our guard, with bounded connections."""
    import streamlit  # half a second: not for those who only ask for --help
    import uvicorn
    from streamlit.web import bootstrap

    from pipeline.http.connections import affordable, protocol, raise_file_limit

    class Server(uvicorn.Server):
        """uvicorn whose process ends with status 0 when it was told to end, instead of sending itself the signal."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    host, port = config.dashboard.host, config.dashboard.port
    bootstrap.load_config_options(options(host, port))
    settings = uvicorn.Config(
        Guard(streamlit.App(APP), names(config)),
        host=host,
        port=port,
        http=protocol(affordable(config.dashboard.connections, raise_file_limit())),
        ws="websockets-sansio",
        ws_max_size=MESSAGE_BYTES,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    Server(settings).run()


def environment(config: Config) -> dict[str, str]:
    """What the pages read: where the API is, and the file with its token."""
    token_file = config.dashboard.token_file
    return {API_URL: api_url(config), API_TOKEN_FILE: str(token_file) if token_file else ""}


def api_url(config: Config) -> str:
    """[dashboard] api_url, else where [api] listens as seen from this machine."""
    if config.dashboard.api_url:
        return config.dashboard.api_url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.api.host, config.api.host)
    return f"http://{_in_url(host)}:{config.api.port}"


def options(host: str, port: int) -> dict[str, Any]:
    """Streamlit's settings, in the spelling of its command line with underscores for dots."""
    from dashboards.theme import streamlit_options

    settings: dict[str, Any] = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",  # a stack trace names files of the server
        "client.showErrorLinks": False,  # no errors to other people's sites
        "logger.hideWelcomeMessage": True,
        # A full collection after every run was 85 % of the server's time; automatic collection stays on.
        "runner.postScriptGC": False,
        **streamlit_options(),
    }
    return {name.replace(".", "_"): value for name, value in settings.items()}


def _check(config: Config) -> None:
    """Fails early, with words, where Streamlit would fail late without."""
    host, port = config.dashboard.host, config.dashboard.port
    if not config.dashboard.behind_proxy and not is_loopback(host):
        raise Refused(
            f"{config.source}: [dashboard] host = {host!r}: the pages ask nobody who they are, so that they listen on "
            "loopback only; wanted 127.0.0.1, or behind_proxy = true where a proxy before them signs people in and "
            "nobody reaches them but through it"
        )
    if config.dashboard.token_file:
        token_of(config.dashboard.token_file)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"{config.source}: [dashboard] port = {port}: cannot listen on {host}:{port} ({error.strerror}); "
                "wanted a free port: is another dashboard running? FLEETPULSE__DASHBOARD__PORT sets another one"
            ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _end_for_sure() -> None:
    time.sleep(LAST_SECONDS)
    os._exit(0)


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
