"""Whether the dashboard would be open to everyone: its start refuses that, and `config check` beforehand."""

from __future__ import annotations

from pipeline.config.sections import Config
from pipeline.http.addresses import is_loopback


def describe_open_pages(config: Config) -> str | None:
    """Returns why the dashboard does not start: its pages would have no login beyond loopback; None if it does."""
    board = config.dashboard
    if board.behind_proxy or board.oidc is not None or is_loopback(board.host):
        return None
    return (
        f"[dashboard] host = {board.host!r}: the pages have no login, so they listen on loopback only; "
        "expected 127.0.0.1, or [dashboard.oidc], or behind_proxy = true if a proxy with a login is the only way "
        "to reach them"
    )
