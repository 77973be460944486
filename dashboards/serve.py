"""`fleetpulse dashboard`: runs Streamlit in this process until SIGTERM or SIGINT, behind a guard."""

from __future__ import annotations

import contextlib
import os
import secrets as random
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from dashboards import identity, oidc
from dashboards.client import API_TOKEN_FILE, API_URL, read_token, record_reload
from dashboards.guard import Guard
from dashboards.login_cookies import LoginCookies
from pipeline.config.dashboard import Dashboard
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config
from pipeline.http.addresses import is_loopback, parse_host
from pipeline.http.open_pages import describe_open_pages
from pipeline.model.errors import ConfigError, FleetpulseError, Refused, UsageError
from pipeline.model.regular_files import read_regular_text
from pipeline.runtime import logs
from pipeline.runtime.free_ports import check_free
from pipeline.runtime.reload import AGAIN, Load, Outcome, Reload
from pipeline.runtime.systemd import SystemdNotifier

MESSAGE_BYTES = 200 << 20
"""Longest WebSocket message (bytes): Streamlit's default of server.maxMessageSize."""
PING_SECONDS = 30.0
"""Interval and timeout of WebSocket pings (s): Streamlit's default."""
TICKS_ALIVE = 100
"""Ticks of uvicorn, of 0.1 s each, between two messages to systemd. Chosen."""
MIN_SECRET = 16
"""Shortest secret (characters), as for tokens of the API."""
MOST_REASON = 4000
"""Longest reason that the audit takes (characters)."""
APP = Path(__file__).parent / "app.py"
EXIT_TIMEOUT_S = 2.0
"""Longest wait for threads with an open API request; the process must stop within 3 s. Chosen."""


def run(config: Config, load_again: Load | None = None) -> int:
    """Serves the pages until a signal. Raises UsageError if the port is in use, Refused beyond loopback.

    load_again: reads the configuration after SIGHUP; the result is then reload.AGAIN if a new start is due.
    """
    host, port = config.dashboard.host, config.dashboard.port
    check_settings(config)
    _check_port(config)
    identity.configure(config.dashboard)
    os.environ.update(environment(config))
    sys.stderr.write(f"dashboard: http://{_in_url(host)}:{port} (reads {api_url(config)})\n")
    sys.stderr.flush()
    logs.limit_all_loggers()
    # Streamlit logs on stdout, which is for data
    manager = SystemdNotifier()
    hangup = watch_hangup(config, load_again, manager) if load_again else None
    with contextlib.redirect_stdout(sys.stderr):
        _serve(config, hangup, manager)
    if hangup is not None and hangup.accepted:
        return AGAIN
    threading.Thread(target=_exit_after_timeout, daemon=True).start()
    return 0


def watch_hangup(config: Config, load: Load, manager: SystemdNotifier) -> Reload:
    """Returns what answers SIGHUP, with a row of the audit. A pipeline that is away delays nothing: the log has it."""

    def load_checked() -> Config:
        fresh = load()
        check_settings(fresh)
        board, now = fresh.dashboard, config.dashboard
        if (board.host, board.port) != (now.host, now.port):
            _check_port(fresh, [(now.host, now.port)])
        return fresh

    def log(text: str) -> None:
        sys.stderr.write(f"dashboard: {text}\n")
        sys.stderr.flush()

    def record(outcome: Outcome, reason: str) -> None:
        body = {"source": config.source or "defaults", "reason": reason[:MOST_REASON], "outcome": outcome}
        try:
            record_reload(api_url(config), config.dashboard.token_file, body)
        except FleetpulseError as error:
            log(f"reload of the configuration is not in the audit: {error}")

    return Reload("dashboard", config, load_checked, (), record, log, manager.notify_configuration)


def _serve(config: Config, hangup: Reload | None, manager: SystemdNotifier) -> None:
    """Runs Streamlit as an ASGI application behind the guard, with a limit of connections."""
    import streamlit  # takes 0.5 s: not at import
    import uvicorn
    from streamlit.web import bootstrap

    from pipeline.http.connections import limit_connections, make_protocol, raise_file_limit

    board = config.dashboard
    bootstrap.load_config_options(options(config))
    pages = LoginCookies(streamlit.App(APP, secrets=secrets(config)), board, public_url(config))
    settings = uvicorn.Config(
        Guard(pages, allowed_hosts(config), _socket_life(board), board.base_path),
        host=board.host,
        port=board.port,
        http=make_protocol(limit_connections(board.connections, raise_file_limit())),
        ws="websockets-sansio",
        ws_max_size=MESSAGE_BYTES,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        forwarded_allow_ips=list(board.trusted_proxies),
        timeout_graceful_shutdown=1,
    )
    _make_server(settings, hangup, manager).run()


def _socket_life(board: Dashboard) -> float | None:
    return board.proxy_login.check_seconds if board.proxy_login else None


def _make_server(settings: Any, hangup: Reload | None, manager: SystemdNotifier) -> Any:
    """Returns uvicorn's server with our handling of signals, and messages to systemd."""
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn that notifies systemd, and returns after a signal with exit status 0 instead of raising it again."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Opens the port, then reports that the pages are ready."""
            await super().startup(sockets)
            manager.notify_ready()

        async def on_tick(self, counter: int) -> bool:
            """Reports every 10 s, from the loop itself, that it is alive."""
            if counter % TICKS_ALIVE == 0:
                manager.notify_alive()
            if hangup is not None and hangup.poll():
                manager.notify_reloading()
                return True  # ends the server
            return await super().on_tick(counter)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Handles SIGINT and SIGTERM while the server runs, then restores their handlers."""
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    return Server(settings)


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


def public_url(config: Config) -> str:
    """Returns the address of the pages in browsers, without a slash at its end: where the provider sends people to."""
    board = config.dashboard
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(board.host, board.host)
    return (config.notify.external_url or f"http://{_in_url(host)}:{board.port}{board.base_path}").rstrip("/")


def secrets(config: Config) -> dict[str, Any]:
    """Returns the settings of Streamlit's login; none without [dashboard.oidc]. Raises ConfigError."""
    settings = config.dashboard.oidc
    if settings is None:
        return {}
    cookie, where = settings.cookie_secret_file, config.source
    key = _read_secret(where, cookie) if cookie else random.token_urlsafe(32)
    asked = {"scope": " ".join(settings.scopes), "code_challenge_method": "S256", "prompt": settings.prompt}
    return {
        "auth": {
            "redirect_uri": f"{public_url(config)}/oauth2callback",
            "cookie_secret": key,
            "client_id": settings.client_id,
            "client_secret": _read_secret(where, settings.client_secret_file),
            "server_metadata_url": oidc.metadata_url(settings),
            "expose_tokens": ["access"],
            "client_kwargs": asked,
        }
    }


def _read_secret(where: str, path: Path) -> str:
    """Returns the secret in a file, without its line end. Raises ConfigError that names the configuration's file."""
    try:
        text = read_regular_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: [dashboard.oidc] {path}: cannot be read: {error}; expected a file with one secret"
        ) from error
    if len(text) < MIN_SECRET:
        raise ConfigError(
            f"{where}: [dashboard.oidc] {path}: {len(text)} characters; expected a secret of at least {MIN_SECRET}"
        )
    return text


def options(config: Config) -> dict[str, Any]:
    """Returns Streamlit's settings, named as on its command line with underscores for dots."""
    from dashboards.theme import streamlit_options

    board = config.dashboard
    settings: dict[str, Any] = {
        "server.address": board.host,
        "server.port": board.port,
        "server.baseUrlPath": board.base_path.strip("/"),
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


def check_settings(config: Config) -> None:
    """Raises Refused or UsageError for settings with which Streamlit would fail later."""
    if open_pages := describe_open_pages(config):
        raise Refused(f"{config.source}: {open_pages}")
    check_with_origin(config, secrets)
    if config.dashboard.token_file:
        read_token(config.dashboard.token_file)


def _check_port(config: Config, own: Collection[tuple[str, int]] = ()) -> None:
    """Raises UsageError if another program listens on the port. own: where this process does."""
    host, port = config.dashboard.host, config.dashboard.port
    try:
        check_free(host, port, own)
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


def allowed_hosts(config: Config) -> frozenset[str]:
    """Returns the host names that browsers may use, in addition to loopback; on any port, because of proxies."""
    board = config.dashboard
    known = {board.host.lower(), parse_host(config.notify.external_url), *map(str.lower, board.names)}
    return frozenset(host for host in known - {"", "0.0.0.0", "::"} if not is_loopback(host))
