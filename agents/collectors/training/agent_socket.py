"""The path of the agent's socket for training steps, and the training script's end of it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

SERVICE_SOCKET = "/run/fleetpulse/agent/training.sock"
"""Of an agent that runs as a service: systemd creates the folder (RuntimeDirectory=fleetpulse/agent)."""
SOCKET_VARIABLE = "FLEETPULSE_TRAINING_SOCKET"


def socket_paths(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the paths to try in order: FLEETPULSE_TRAINING_SOCKET alone, else the service's and the user's."""
    if chosen := environment.get(SOCKET_VARIABLE):
        return (chosen,)
    own = environment.get("XDG_RUNTIME_DIR")
    return (SERVICE_SOCKET, f"{own}/fleetpulse/training.sock") if own else (SERVICE_SOCKET,)


RETRY_S = 1.0
"""Seconds between two tries to connect. Chosen: a restarted agent is found within a second; an absent one costs two
system calls a second."""
STUCK_S = 10.0
"""Seconds of a full queue before the script connects again: the agent that holds the old socket may hang, and another
one have replaced it. Chosen: a hang of the agent is reported within 30 s."""


class DatagramSender:
    """Sends to the first of `paths` on which an agent listens. Not thread-safe."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self._paths, self._clock = tuple(paths), clock
        self._socket: socket.socket | None = None
        self._next_connect_at = self._full_since = -1.0

    def send(self, data: bytes) -> bool:
        """Returns whether the datagram was sent. Never waits."""
        for _ in range(2):  # a restarted agent has a new socket: the first send finds the old one closed
            if self._socket is None and not self._connect():
                return False
            try:
                self._socket.send(data)  # type: ignore[union-attr] # just connected
            except BlockingIOError:
                self._reconnect_if_stuck()
                return False
            except OSError as failed:
                if failed.errno == errno.EMSGSIZE:
                    return False
                self.close()
            else:
                self._full_since = -1.0
                return True
        return False

    def close(self) -> None:
        """Closes the socket; the next send opens another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        """Closes the socket: scripts need not close it, and must get no ResourceWarning."""
        if getattr(self, "_socket", None) is not None:
            self.close()

    def _connect(self) -> bool:
        now = self._clock()
        if now < self._next_connect_at:
            return False
        self._next_connect_at = now + RETRY_S
        for path in self._paths:
            trial = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            try:
                trial.connect(path)
            except OSError:  # no agent listens there
                trial.close()
            else:
                self._socket = trial
                return True
        return False

    def _reconnect_if_stuck(self) -> None:
        """Closes the socket if the queue has been full for STUCK_S."""
        now = self._clock()
        if self._full_since < 0:
            self._full_since = now
        elif now - self._full_since > STUCK_S:
            self._full_since = -1.0
            self.close()
