"""Starts and ends the processes in which collectors run.

An agent without threads forks them itself; they share its memory, so one costs about 3 MiB. A process with threads must
not fork: a lock held by another thread would stay locked in the child. Then a fresh interpreter, the fork server, is
started when first needed, and restarted if it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from agents.collector import Collector, settings
from agents.node.workers.read_server import serve
from pipeline.runtime.supervise import end_with_parent

RUNNING = -1
"""Instead of a wait status: the kernel has not let go of the process."""
MOST = 64
"""Collectors of one lane, and statuses of ended processes that are kept; chosen, the kernel passes at most 253 handles
in one message (SCM_MAX_FD)."""
HANDLES = 1 << 14
"""Files that a worker may hold open. Chosen: a sensor is a file that is opened once, some boards have hundreds, and one
lane holds those of many collectors; the usual soft limit is 1024."""
_REAP_S = 0.05
"""Seconds that a killed process gets to be gone; chosen: one that does not wait in the kernel needs less than 1 ms."""
_PR_SET_NAME = 15
"""prctl(2); at most 15 bytes are kept."""
_M_ARENA_MAX = -8
"""mallopt(3), glibc: one heap for all threads of a lane, where each would have begun its own."""


HARMLESS: set[int] = set()
"""Kernel ids of threads beside which may be forked: they hold no lock that a worker needs, and no hook into fork."""


def single_threaded() -> bool:
    """Whether there is no other thread, those of libraries included: they may hold locks, and hook into fork."""
    try:
        return len(set(map(int, os.listdir("/proc/self/task"))) - HARMLESS) == 1
    except OSError:  # not Linux
        return threading.active_count() == 1


class Children:
    """The workers that were forked here, until they are waited for: so no pid of theirs is used anew meanwhile."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}
        self._settled = False

    def spawn(self, collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> int:
        """Forks a worker that serves each collector over its channel; its pid. Raises OSError."""
        self._settle_memory()
        with warnings.catch_warnings():  # Python 3.12 warns of any other thread, also of those in HARMLESS
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _work(collectors, node, channels)
        self._running.add(pid)
        return pid

    def knows(self, pid: int) -> bool:
        return pid in self._running or pid in self._ended

    def end(self, pid: int) -> int:
        """Kills a worker if it still runs; its wait status, or RUNNING."""
        if self.status(pid) == RUNNING and pid in self._running:
            os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + _REAP_S
            while self.status(pid) == RUNNING and time.monotonic() < until:
                time.sleep(0.001)
        return self.status(pid)

    def status(self, pid: int) -> int:
        """The wait status of a worker that ended, or RUNNING."""
        for child in tuple(self._running):
            try:
                found, status = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:  # the kernel reaped it for us: SIGCHLD is ignored; how it ended is not known
                found, status = child, 0
            if found:
                self._running.discard(child)
                self._ended[child] = status
        for old in list(self._ended)[:-MOST]:
            del self._ended[old]
        return self._ended.get(pid, RUNNING)

    def close(self) -> None:
        """Kills what is left."""
        for pid in tuple(self._running):
            self.end(pid)

    def _settle_memory(self) -> None:
        """What is there now is never looked at by the garbage collector again: that writes to every shared page."""
        if not self._settled:
            gc.collect()
            gc.freeze()
            self._settled = True


def _work(collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> NoReturn:
    """What a forked worker does: each collector in a thread of its own, until its channel is closed."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the agent ends us in its own time
            signal.signal(number, signal.SIG_IGN)
        end_with_parent(signal.SIGKILL)
        close_all_but({channel.fileno() for channel in channels})
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, HANDLES), most))
        _settle_process(f"fp-{collectors[0].lane if len(collectors) > 1 else collectors[0].name}")
        threads = [
            threading.Thread(target=serve, args=(channel, collector, node), name=collector.name, daemon=True)
            for channel, collector in zip(channels[1:], collectors[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        serve(channels[0], collectors[0], node)
        for thread in threads:
            thread.join()
        code = 0
    except BaseException:  # noqa: BLE001 - this is the end of the process: there is nobody to raise to
        traceback.print_exc()
    finally:
        os._exit(code)


def _settle_process(name: str) -> None:
    """The name under which `ps` and `top` show it, and one heap for all its threads. Linux alone; elsewhere nothing."""
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_NAME, name.encode()[:15])
        with contextlib.suppress(AttributeError):  # another C library than glibc
            library.mallopt(_M_ARENA_MAX, 1)


def close_all_but(kept: set[int]) -> None:
    """Nothing of the agent's, such as a spool's lock, and no other worker's channel may stay open in a worker.

    A call may hold it in the kernel for ever, and a channel that somebody else holds open would never be seen to end.
    """
    low = 3
    for handle in sorted(kept):
        os.closerange(low, handle)
        low = handle + 1
    os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


__all__ = ["RUNNING", "Nursery"]

PATIENCE = 5.0
"""Seconds in which the nursery must answer; it only forks, so chosen far above what a swapping machine needs."""
_MAX = 1 << 16  # bytes of one request: the settings of a lane's collectors
_REFUSED = -2
_PROGRAM = """import socket, sys
from agents.node.workers import processes
processes.run(socket.socket(fileno=int(sys.argv[1])))"""


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
        importlib.import_module("agents.collectors.registry")  # what the workers shall share
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
