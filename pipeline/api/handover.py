"""The listening socket of the API stays open over a reload: it is handed to the start that follows in this process, and
a stand-in answers on it in the meantime."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable

from pipeline.api import stand_in
from pipeline.config.sections import Api

_LOG = logging.getLogger(__name__)
VARIABLE = "FLEETPULSE_LISTENER"
"""Environment variable that names the socket to the start that follows, in the same process."""


class HandOver:
    """A listening socket with its stand-in."""

    def __init__(self, listener: socket.socket) -> None:
        """Starts the stand-in. Raises OSError."""
        self._descriptor, (until, self._held) = os.dup(listener.fileno()), os.pipe()
        words = [sys.executable, "-I", "-S", stand_in.__file__]
        given = [(os.POSIX_SPAWN_DUP2, until, 0), (os.POSIX_SPAWN_DUP2, self._descriptor, stand_in.LISTENER)]
        try:
            self._pid = os.posix_spawn(sys.executable, words, os.environ, file_actions=given)
        except OSError:
            os.close(self._descriptor)
            os.close(self._held)
            raise
        finally:
            os.close(until)

    def keep(self, api: Api) -> None:
        """Keeps the socket and the stand-in for the program that this process executes next."""
        for descriptor in (self._descriptor, self._held):
            os.set_inheritable(descriptor, True)
        os.environ[VARIABLE] = json.dumps([self._descriptor, self._held, self._pid, api.host, api.port])


def start_stand_in(listener: socket.socket) -> HandOver | None:
    """Returns the stand-in on a listening socket; None, with a line in the log, if it cannot be started."""
    try:
        return HandOver(listener)
    except OSError as error:
        _LOG.warning("API: refuses connections until the pipeline has started again: %s", error)
        return None


def adopt_listener(api: Api) -> tuple[socket.socket | None, Callable[[], None]]:
    """Returns the socket that an earlier start of this process kept, and what ends its stand-in.

    None if there is none, or if it has another address than [api] host and port.
    """
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None, lambda: None
    descriptor, held, pid, host, port = json.loads(text)

    def end_stand_in() -> None:
        os.close(held)
        os.waitpid(pid, 0)

    os.set_inheritable(held, False)
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    if (host, port) == (api.host, api.port):
        return listener, end_stand_in
    listener.close()
    end_stand_in()
    return None, lambda: None
