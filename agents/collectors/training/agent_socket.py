"""Where the socket of training steps is: one rule for the agent and for training scripts.

The training script's end of the socket: a datagram goes at once or not at all.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

SYSTEM = "/run/fleetpulse/agent/training.sock"
"""Of an agent that runs as a service: systemd makes the folder (RuntimeDirectory=fleetpulse/agent)."""
VARIABLE = "FLEETPULSE_TRAINING_SOCKET"


def places(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Paths to try in this order: what FLEETPULSE_TRAINING_SOCKET names alone, else the service's, then the user's."""
    if chosen := environment.get(VARIABLE):
        return (chosen,)
    own = environment.get("XDG_RUNTIME_DIR")
    return (SYSTEM, f"{own}/fleetpulse/training.sock") if own else (SYSTEM,)


RETRY_S = 1.0
"""Longest time without a try to connect; chosen: an agent that was restarted is found within a second, and an absent
one costs two system calls a second."""
STUCK_S = 10.0
"""After so long with a full queue the path is asked anew: the agent that held the old socket may hang, and another one
have taken its place. Chosen: the agent tells of a hang within 30 s."""


class Sending:
    """Sends to the first of `paths` at which somebody listens. Not for several threads at once."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = monotonic) -> None:
        self._paths, self._clock = tuple(paths), clock
        self._socket: socket.socket | None = None
        self._try_at = self._went = -1.0

    def send(self, data: bytes) -> bool:
        """Whether the datagram went. Never waits."""
        for _ in range(2):  # an agent that was started anew has a new socket: the first send finds the old one closed
            if self._socket is None and not self._connect():
                return False
            try:
                self._socket.send(data)  # type: ignore[union-attr] # just connected
            except BlockingIOError:
                self._give_up_if_stuck()
                return False
            except OSError as failed:
                if failed.errno == errno.EMSGSIZE:
                    return False
                self.close()
            else:
                self._went = -1.0
                return True
        return False

    def close(self) -> None:
        """Lets go of the socket; the next send opens another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        """A script need not close what it reports with, and no ResourceWarning may come of that."""
        if getattr(self, "_socket", None) is not None:
            self.close()

    def _connect(self) -> bool:
        now = self._clock()
        if now < self._try_at:
            return False
        self._try_at = now + RETRY_S
        for path in self._paths:
            trial = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            try:
                trial.connect(path)
            except OSError:  # nobody listens there
                trial.close()
            else:
                self._socket = trial
                return True
        return False

    def _give_up_if_stuck(self) -> None:
        """Notes when the queue was first found full; after STUCK_S the socket is left."""
        now = self._clock()
        if self._went < 0:
            self._went = now
        elif now - self._went > STUCK_S:
            self._went = -1.0
            self.close()
