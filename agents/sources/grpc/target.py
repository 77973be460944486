"""Where a service listens: `unix:PATH`, `/PATH` or `HOST:PORT`; beyond this machine only where that is allowed."""

from __future__ import annotations

import socket
from collections.abc import Callable

MEND = "wanted unix:PATH, /PATH or HOST:PORT, such as unix:/run/service.sock, localhost:8431 or [::1]:8431"


def opener(target: str, anywhere: bool = False) -> Callable[[float], socket.socket]:
    """What connects to the target within so many seconds; raises ValueError for what is no target.

    What is sent and told is not encrypted: hosts but this one must be allowed by `anywhere`.
    """
    path = target.removeprefix("unix:") if target.startswith("unix:") else target
    if target.startswith(("unix:", "/")):
        if not path:
            raise ValueError(f"{target!r}: {MEND}")
        return lambda timeout: _unix(path, timeout)
    host, _, port = target.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{target!r}: {MEND}")
    if not (anywhere or _here(host)):
        raise ValueError(f"{target!r}: not an address of this machine, and the call is not encrypted: wanted localhost")
    return lambda timeout: socket.create_connection((host, int(port)), timeout)


def _unix(path: str, timeout: float) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout)
        found.connect(path)
    except OSError:
        found.close()
        raise
    return found


def _here(host: str) -> bool:
    import ipaddress  # here, since most agents never ask

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
