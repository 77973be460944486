"""`fleetpulse dashboard`: Streamlit in this process, with our settings, until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dashboards.client import API_TOKEN_FILE, API_URL, token_of
from pipeline.config import Config
from pipeline.errors import Refused, UsageError

APP = Path(__file__).parent / "app.py"
LAST_SECONDS = 2.0
"""How long threads that still wait for the API may hold up the end; the whole has to end within 3 s. Chosen."""


def run(config: Config) -> int:
    """Serves the pages until told to end. Raises UsageError if the port is taken, Refused off loopback."""
    from streamlit.web import bootstrap  # half a second: not for those who only ask for --help

    host, port = config.dashboard.host, config.dashboard.port
    _check(config)
    os.environ.update(environment(config))
    flags = options(host, port)
    sys.stderr.write(f"dashboard: http://{_in_url(host)}:{port} (reads {api_url(config)})\n")
    sys.stderr.flush()
    # Streamlit talks on stdout, which is for data.
    with contextlib.redirect_stdout(sys.stderr):
        bootstrap.load_config_options(flags)
        bootstrap.run(str(APP), False, [], flags)
    threading.Thread(target=_end_for_sure, daemon=True).start()
    return 0


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
    if not config.dashboard.behind_proxy and not _loopback(host):
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


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _end_for_sure() -> None:
    time.sleep(LAST_SECONDS)
    os._exit(0)
