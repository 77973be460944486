"""Tells the service manager that the agent is ready, alive and stopping: systemd's notification protocol.

One datagram per message to the socket that NOTIFY_SOCKET names (sd_notify(3)); without that variable nothing happens.
The pings of the watchdog come from the agent's loop itself, so that a loop that is stuck ends them and is restarted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

PATIENCE = 4
"""Intervals of the agent that the watchdog waits at least; chosen: a tick may come late twice and still be in time."""
_SECOND_US = 1_000_000


class Notify:
    """The manager's socket, if there is one. No call blocks or raises: an agent without its manager goes on.

    trouble: why the last message was not delivered; None when it was, or when nobody wants to know.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.trouble: str | None = None
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_us = _watchdog(environment)
        self._status = ""
        self._socket = _socket() if self._address else None

    def ready(self, interval: float) -> None:
        """The agent looks every `interval` seconds from now on. A watchdog too short for that is told to wait."""
        lines = ["READY=1"]
        wanted = round(PATIENCE * interval * _SECOND_US)
        if 0 < self._watchdog_us < wanted:
            lines.append(f"WATCHDOG_USEC={wanted}")
        self._send(*lines)

    def alive(self, status: str = "") -> None:
        """One turn of the loop is done; `status` is what `systemctl status` shows, sent when it changes."""
        lines = ["WATCHDOG=1"] if self._watchdog_us else []
        if status != self._status:
            lines.append("STATUS=" + " ".join(status.splitlines()))
        if lines and self._send(*lines):
            self._status = status

    def stopping(self) -> None:
        """The agent was asked to end and is about to."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Lets the socket go; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> bool:
        """Whether the manager has the message. One whose queue is full gets none: the next tick sends another."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            self.trouble = f"NOTIFY_SOCKET: {error.strerror}"
            return False
        self.trouble = None
        return True


def _address(name: str) -> str:
    """The socket's address: a path, or a name in the kernel's own space, which is written with an @ in front.

    Other families (vsock, of virtual machines' managers) are none of a service's on its own machine: not served.
    """
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""


def _watchdog(environment: Mapping[str, str]) -> int:
    """Microseconds after which the manager kills a silent service; 0 where it does not, or means another process."""
    wanted, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not wanted.isdecimal() or (pid and pid != str(os.getpid())):
        return 0
    return int(wanted)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
