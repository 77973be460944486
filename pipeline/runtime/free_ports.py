"""Whether a service could listen on an address, asked before a reload gives up the one that it has."""

from __future__ import annotations

import socket
from collections.abc import Collection

WILDCARDS = frozenset({"", "0.0.0.0", "::"})


def check_free(host: str, port: int, own: Collection[tuple[str, int]] = ()) -> None:
    """Binds an address for a moment. Raises OSError if another program listens there or this host lacks the address.

    own: where this process listens until it starts again; of such a port only the host is checked.
    """
    free = any(port == known and _overlap(host, other) for other, known in own)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0 if free else port))


def _overlap(host: str, other: str) -> bool:
    """Returns whether a socket on one host keeps the port of the other from being bound."""
    if host == other or WILDCARDS & {host, other}:
        return True
    return _resolve(host) == _resolve(other)


def _resolve(host: str) -> str:
    """Returns the address of a name of IPv4, else the text itself."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is empty or too long
        return host
