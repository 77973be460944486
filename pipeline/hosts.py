"""Names of this machine and names in HTTP headers: what a browser may be led to, and what it must not."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` is reached from this machine alone. A name other than localhost is not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(url: str) -> str:
    """The host in a URL, in lower case without port or brackets; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def named(header: str) -> str:
    """The host in a Host header, likewise; the port may be a tunnel's."""
    return host_of(f"//{header}")


def same_origin(origin: str, header: str) -> bool:
    """Whether a page of this Origin was served under this Host header."""
    try:
        return urlsplit(origin).netloc == header
    except ValueError:
        return False
