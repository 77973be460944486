"""Starts workers for an agent that may have threads.

Without threads the agent forks by itself, and what is forked shares its memory: a worker costs about 3 MiB. A process
with threads must not fork (a lock that another thread holds would stay locked for ever in the child): then a fresh
interpreter is started that forks for it, once it is needed, and made anew if it is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from agents.collector import Collector, settings
from agents.workers.children import MOST, RUNNING, Children, single_threaded
from pipeline.supervise import end_with_parent

__all__ = ["RUNNING", "Nursery"]

PATIENCE = 5.0
"""Seconds in which the nursery must answer; it only forks, so chosen far above what a swapping machine needs."""
_MAX = 1 << 16  # bytes of one request: the settings of a lane's collectors
_REFUSED = -2
_PROGRAM = """import socket, sys
from agents.workers import nursery
nursery.run(socket.socket(fileno=int(sys.argv[1])))"""


class Nursery:
    """Starts workers and ends them, in whatever way this process may. pid: that of the other interpreter, or 0."""

    def __init__(self) -> None:
        self._children = Children()
        self._channel: socket.socket | None = None
        self.pid = 0

    def spawn(self, collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> int:
        """Forks a worker that serves each collector over its channel; its pid. Raises OSError if there can be none."""
        if single_threaded():
            return self._children.spawn(collectors, node, channels)
        recipes = [(type(collector), settings(collector)) for collector in collectors]
        return self._ask(("spawn", (recipes, node)), [channel.fileno() for channel in channels])

    def end(self, pid: int) -> int:
        """Kills a worker if it still runs; its wait status, or RUNNING."""
        return self._children.end(pid) if self._children.knows(pid) else self._told(("end", pid))

    def status(self, pid: int) -> int:
        """The wait status of a worker that ended, or RUNNING."""
        return self._children.status(pid) if self._children.knows(pid) else self._told(("status", pid))

    def close(self) -> None:
        """Kills the workers that are left, and the other interpreter."""
        self._children.close()
        self._close_channel()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.pid = 0

    def reap(self) -> None:
        """Waits for workers that have ended, so that none is left as a zombie."""
        self._children.status(0)

    def _told(self, request: tuple[str, object]) -> int:
        try:
            return self._ask(request, [])
        except OSError:  # nobody is there who could know; whether the worker is gone shows its channel
            return RUNNING

    def _ask(self, request: tuple[str, object], handles: list[int]) -> int:
        try:
            return self._exchange(request, handles)
        except OSError:  # it was killed, or does not answer
            self._close_channel()
            return self._exchange(request, handles)

    def _exchange(self, request: tuple[str, object], handles: list[int]) -> int:
        if self._channel is None:
            self._channel, self.pid = _another()
        socket.send_fds(self._channel, [pickle.dumps(request)], handles)
        answer = self._channel.recv(_MAX)
        if not answer:
            raise ConnectionError("the process that forks ended")
        number: int = pickle.loads(answer)
        if number == _REFUSED:
            raise OSError("no process can be forked: out of processes or memory")
        return number


def _another() -> tuple[socket.socket, int]:
    """An interpreter that forks for us: our end of the channel to it, and its pid."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.settimeout(PATIENCE)
        os.set_inheritable(theirs.fileno(), True)
        words = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        return ours, os.posix_spawn(sys.executable, words, environ)


def run(channel: socket.socket) -> NoReturn:
    """The other interpreter: answers requests until the agent's end is closed. A fault ends it."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the agent ends us in its own time
            signal.signal(number, signal.SIG_IGN)
        end_with_parent(signal.SIGKILL)
        importlib.import_module("agents.collectors")  # what the workers shall share
        children = Children()
        while True:
            request, handles, _, _ = socket.recv_fds(channel, _MAX, MOST)
            if not request:
                break
            verb, what = pickle.loads(request)
            channel.send(pickle.dumps(_answer(children, verb, what, handles)))
    finally:
        os._exit(0)


def _answer(children: Children, verb: str, what: Any, handles: list[int]) -> int:
    if verb != "spawn":
        return children.end(what) if verb == "end" else children.status(what)
    recipes, node = what
    channels = [socket.socket(fileno=handle) for handle in handles]
    try:
        return children.spawn([make(**chosen) for make, chosen in recipes], node, channels)
    except OSError:
        return _REFUSED
    finally:
        for channel in channels:
            channel.close()
