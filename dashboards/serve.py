"""`fleetpulse dashboard`: runs Streamlit in this process until SIGTERM or SIGINT, behind a guard.

The pages use the dashboard's own token, so the guard blocks cross-site access: it accepts only known Host names (DNS
rebinding) and origins, and forbids frames (clickjacking).
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

from dashboards.client import API_TOKEN_FILE, API_URL, read_token
from pipeline.config.sections import Config
from pipeline.http.addresses import is_loopback, is_same_origin, parse_host, parse_host_header
from pipeline.model.errors import Refused, UsageError
from pipeline.runtime import logs

MESSAGE_BYTES = 200 << 20
"""Longest WebSocket message (bytes): Streamlit's default of server.maxMessageSize."""
PING_SECONDS = 30.0
"""Interval and timeout of WebSocket pings (s): Streamlit's default."""
APP = Path(__file__).parent / "app.py"
EXIT_TIMEOUT_S = 2.0
"""Longest wait for threads with an open API request; the process must stop within 3 s. Chosen."""


def run(config: Config) -> int:
    """Serves the pages until a signal. Raises UsageError if the port is in use, Refused beyond loopback."""
    host, port = config.dashboard.host, config.dashboard.port
    _check(config)
    os.environ.update(environment(config))
    sys.stderr.write(f"dashboard: http://{_in_url(host)}:{port} (reads {api_url(config)})\n")
    sys.stderr.flush()
    logs.limit_all_loggers()
    # Streamlit logs on stdout, which is for data
    with contextlib.redirect_stdout(sys.stderr):
        _serve(config)
    threading.Thread(target=_exit_after_timeout, daemon=True).start()
    return 0


def _serve(config: Config) -> None:
    """Runs Streamlit as an ASGI application behind the guard, with a limit of connections."""
    import streamlit  # takes 0.5 s: not at import
    import uvicorn
    from streamlit.web import bootstrap

    from pipeline.http.connections import limit_connections, make_protocol, raise_file_limit

    class Server(uvicorn.Server):
        """uvicorn that returns after a signal, so that the exit status is 0, instead of raising the signal again."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Handles SIGINT and SIGTERM while the server runs, then restores their handlers."""
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    host, port = config.dashboard.host, config.dashboard.port
    bootstrap.load_config_options(options(host, port))
    settings = uvicorn.Config(
        Guard(streamlit.App(APP), allowed_hosts(config)),
        host=host,
        port=port,
        http=make_protocol(limit_connections(config.dashboard.connections, raise_file_limit())),
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
    """Returns the environment of the pages: the API's address and the token file."""
    token_file = config.dashboard.token_file
    return {API_URL: api_url(config), API_TOKEN_FILE: str(token_file) if token_file else ""}


def api_url(config: Config) -> str:
    """Returns [dashboard] api_url, else the address of [api] on this machine."""
    if config.dashboard.api_url:
        return config.dashboard.api_url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.api.host, config.api.host)
    return f"http://{_in_url(host)}:{config.api.port}"


def options(host: str, port: int) -> dict[str, Any]:
    """Returns Streamlit's settings, named as on its command line with underscores for dots."""
    from dashboards.theme import streamlit_options

    settings: dict[str, Any] = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",  # a stack trace contains file names of the server
        "client.showErrorLinks": False,  # no links to other sites
        "logger.hideWelcomeMessage": True,
        # a full collection after each run took 85 % of the time; automatic collection stays on
        "runner.postScriptGC": False,
        **streamlit_options(),
    }
    return {name.replace(".", "_"): value for name, value in settings.items()}


def _check(config: Config) -> None:
    """Raises Refused or UsageError for settings with which Streamlit would fail later."""
    host, port = config.dashboard.host, config.dashboard.port
    if not config.dashboard.behind_proxy and not is_loopback(host):
        raise Refused(
            f"{config.source}: [dashboard] host = {host!r}: the pages have no login, so they listen on loopback only; "
            "expected 127.0.0.1, or behind_proxy = true if a proxy with a login is the only way to reach them"
        )
    if config.dashboard.token_file:
        read_token(config.dashboard.token_file)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"{config.source}: [dashboard] port = {port}: cannot listen on {host}:{port} ({error.strerror}); "
                "expected a free port: is another dashboard running? FLEETPULSE__DASHBOARD__PORT sets another port"
            ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _exit_after_timeout() -> None:
    time.sleep(EXIT_TIMEOUT_S)
    os._exit(0)


HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_POLICY_VIOLATION = 1008
"""Close code of a WebSocket (RFC 6455, 7.4.1)."""


def allowed_hosts(config: Config) -> frozenset[str]:
    """Returns the host names that browsers may use, in addition to loopback; on any port, because of proxies."""
    board = config.dashboard
    known = {board.host.lower(), parse_host(config.notify.external_url), *map(str.lower, board.names)}
    return frozenset(host for host in known - {"", "0.0.0.0", "::"} if not is_loopback(host))


class Guard:
    """ASGI middleware that checks Host and Origin of HTTP requests and WebSockets."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        reason = self._find_refusal(Headers(scope=scope))
        if scope["type"] == "websocket":
            if reason is None:
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason[:120]})
            return
        answer = self._app if reason is None else PlainTextResponse(reason, 421 if "Host" in reason else 403)
        await answer(scope, receive, _with_headers(send))

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
