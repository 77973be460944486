"""The process that forks the workers: one thread, no driver, the collectors' code already loaded.

A forked worker shares that code's memory and costs about 2 MiB. The agent cannot fork by itself once it has threads
(a lock that another thread holds would stay locked for ever in the child). The nursery is forked from the agent before
it has any; if it is lost later, a new one is started as a fresh interpreter.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Sequence
from typing import Any, NoReturn

from agents.collector import Collector, settings
from agents.workers.errand import serve
from pipeline.supervise import end_with_parent

PATIENCE = 5.0
"""Seconds in which the nursery must answer; it only forks, so chosen far above what a swapping machine needs."""
RUNNING = -1
"""Instead of a wait status: the kernel has not let go of the process."""
_REAP_S = 0.05
"""Seconds that a killed process gets to be gone; chosen: one that does not wait in the kernel needs less than 1 ms."""
HANDLES = 1 << 14
"""Files that a worker may hold open. Chosen: a sensor is a file that is opened once, some boards have hundreds, and one
lane holds those of many collectors; the usual soft limit is 1024."""
_MAX = 1 << 16  # bytes of one request: the settings of a lane's collectors
_MOST = 64  # collectors of one lane, as many handles; chosen, the kernel allows 253 (SCM_MAX_FD)
_PROGRAM = """import socket, sys
from agents.workers import nursery
nursery.begin(socket.socket(fileno=int(sys.argv[1])))"""


class Nursery:
    """The agent's end. Starts workers and ends them; made anew if it was lost."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self.pid = 0

    def spawn(self, collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> int:
        """Forks a worker that serves each collector over its channel; its pid. Raises OSError if there can be none."""
        recipes = [(type(collector), settings(collector)) for collector in collectors]
        return self._ask(("spawn", (recipes, node)), [channel.fileno() for channel in channels])

    def end(self, pid: int) -> int:
        """Kills a worker if it still runs; its wait status, or RUNNING."""
        return self._ask(("end", pid), [])

    def status(self, pid: int) -> int:
        """The wait status of a worker that ended, or RUNNING."""
        return self._ask(("status", pid), [])

    def start(self) -> None:
        """Starts the process, if it is not there."""
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(PATIENCE)
        self._channel = ours
        self.pid = _forked(ours, theirs) if _single_threaded() else _executed(theirs)
        theirs.close()

    def close(self) -> None:
        """Kills the nursery, and by that the workers that are left."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def _ask(self, request: tuple[str, object], handles: list[int]) -> int:
        self.start()
        try:
            return self._exchange(request, handles)
        except OSError:  # it was killed, or does not answer
            self.close()
            self.start()
            return self._exchange(request, handles)

    def _exchange(self, request: tuple[str, object], handles: list[int]) -> int:
        assert self._channel is not None
        socket.send_fds(self._channel, [pickle.dumps(request)], handles)
        answer = self._channel.recv(_MAX)
        if not answer:
            raise ConnectionError("the process that forks ended")
        number: int = pickle.loads(answer)
        return number


def _single_threaded() -> bool:
    """Whether there is no other thread, those of libraries included: they may hold locks, and hook into fork."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # not Linux
        return threading.active_count() == 1


def _forked(ours: socket.socket, theirs: socket.socket) -> int:
    _settle_memory()
    pid = os.fork()
    if pid == 0:
        ours.detach()  # closed with all else, without a word of a socket that nobody closed
        _close_all_but({theirs.fileno()})
        run(theirs)
    return pid


def _executed(theirs: socket.socket) -> int:
    """A nursery that shares no memory with us: dearer, and safe beside threads."""
    os.set_inheritable(theirs.fileno(), True)
    words = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
    return os.posix_spawn(sys.executable, words, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def _settle_memory() -> None:
    """What is there now is never looked at by the garbage collector again: that would write to every shared page."""
    gc.collect()
    gc.freeze()


# --- in the nursery --------------------------------------------------------------------------------------------------


def begin(channel: socket.socket) -> NoReturn:
    """A nursery in an interpreter of its own: first it loads what its workers shall share."""
    importlib.import_module("agents.collectors")
    _settle_memory()
    run(channel)


def run(channel: socket.socket) -> NoReturn:
    """The nursery itself: answers requests until the agent's end is closed. A fault ends it, and a new one is made."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the agent ends us in its own time
            signal.signal(number, signal.SIG_IGN)
        end_with_parent(signal.SIGKILL)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, HANDLES), most))
        children = _Children(channel)
        while True:
            request, handles, _, _ = socket.recv_fds(channel, _MAX, _MOST)
            if not request:
                break
            verb, what = pickle.loads(request)
            channel.send(pickle.dumps(children.answer(verb, what, handles)))
    finally:
        os._exit(0)


class _Children:
    """The workers that were forked, until they are waited for. Nobody else waits, so no pid of theirs is used anew."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}

    def answer(self, verb: str, what: Any, handles: list[int]) -> int:
        self._reap()
        if verb == "spawn":
            recipes, node = what
            collectors = [make(**chosen) for make, chosen in recipes]
            return self._spawn(collectors, node, [socket.socket(fileno=handle) for handle in handles])
        if verb == "end":
            self._end(what)
        return self._ended.get(what, RUNNING)

    def _spawn(self, collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> int:
        pid = os.fork()
        if pid == 0:
            self._channel.close()
            _work(collectors, node, channels)
        for channel in channels:
            channel.close()
        self._running.add(pid)
        return pid

    def _end(self, pid: int) -> None:
        if pid not in self._running:
            return
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + _REAP_S
        while pid in self._running and time.monotonic() < until:
            time.sleep(0.001)
            self._reap()

    def _reap(self) -> None:
        for pid in tuple(self._running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._running.discard(pid)
                self._ended[pid] = status
        for pid in list(self._ended)[:-_MOST]:
            del self._ended[pid]


def _work(collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> NoReturn:
    """What a forked worker does. No other worker's channel may stay open in it: its end would not be seen."""
    try:
        end_with_parent(signal.SIGKILL)
        _close_all_but({channel.fileno() for channel in channels})
        threads = [
            threading.Thread(target=serve, args=(channel, collector, node), name=collector.name, daemon=True)
            for channel, collector in zip(channels[1:], collectors[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        serve(channels[0], collectors[0], node)
        for thread in threads:
            thread.join()
    finally:
        os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    """Nothing of the agent's, such as a spool's lock, may stay open where a call can hang in the kernel."""
    low = 3
    for handle in sorted(kept):
        os.closerange(low, handle)
        low = handle + 1
    os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
