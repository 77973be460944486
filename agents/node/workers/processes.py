"""Starts and ends the processes in which collectors run.

An agent without threads forks them itself; they share its memory, so one costs about 3 MiB. A process with threads must
not fork: a lock held by another thread would stay locked in the child. So the first thing that an agent forks, while it
has none, is the fork server, which forks all workers after the start. Where none could be forked, or it died, it is a
fresh interpreter: its imports take seconds of a tenth of a processor, in which ticks are late.
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

from agents.collector import Collector, collector_settings
from agents.node.workers.read_server import serve_reads
from pipeline.runtime.supervise import set_parent_death_signal

__all__ = ["RUNNING", "WorkerProcesses"]

RUNNING = -1
"""Returned instead of a wait status while the process has not ended."""
MAX_WORKERS = 64
"""Collectors of one lane, and kept statuses of ended processes; chosen, the kernel passes at most 253 file descriptors
in one message (SCM_MAX_FD)."""
MAX_OPEN_FILES = 1 << 14
"""File descriptors of a worker. Chosen: each sensor is a file that stays open, some boards have hundreds, and one lane
holds those of many collectors; the usual soft limit is 1024."""
FORK_SERVER_TIMEOUT_S = 5.0
"""Timeout for a response of the fork server; it only forks. Chosen: far above the need of a machine that swaps."""
_REAP_S = 0.05
"""Time (s) for a killed process to end; chosen: unless it waits in the kernel, it needs less than 1 ms."""
_PR_SET_NAME = 15
"""prctl(2); at most 15 bytes are kept."""
_M_ARENA_MAX = -8
"""mallopt(3), glibc: one heap for all threads of a lane, instead of one each."""
_MAX_REQUEST = 1 << 16
"""Bytes of one request: the settings of the collectors of a lane."""
_REFUSED = -2
_PROGRAM = """import socket, sys
from agents.node.workers import processes
processes.serve_forks(socket.socket(fileno=int(sys.argv[1])))"""

FORK_SAFE_THREADS: set[int] = set()
"""Kernel ids of threads that do not prevent a fork: they hold no lock that a worker needs, and no fork hook."""


class WorkerProcesses:
    """Starts and ends workers, directly or through the fork server.

    fork_server_pid: process id of the fork server, or 0.   start_timeout_s: for the first answer of one that is a fresh
    interpreter, once; further ones get FORK_SERVER_TIMEOUT_S, as their sum delays all collectors.
    """

    def __init__(self, start_timeout_s: float = FORK_SERVER_TIMEOUT_S) -> None:
        self._forked = ForkedWorkers()
        self._start_timeout_s = start_timeout_s
        self._channel: socket.socket | None = None
        self.fork_server_pid = 0

    def spawn(self, collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> int:
        """Forks a worker that serves each collector over its channel; its pid. Raises OSError if that is impossible."""
        if is_single_threaded():
            self.fork_server()
            return self._forked.spawn(collectors, node, channels)
        recipes = [(type(collector), collector_settings(collector)) for collector in collectors]
        return self._request(("spawn", (recipes, node)), [channel.fileno() for channel in channels])

    def fork_server(self) -> None:
        """Forks the fork server, for workers that are started when this process has threads, unless it has some now."""
        if self._channel is None and is_single_threaded():
            self._channel, self.fork_server_pid = self._forked.spawn_fork_server()

    def kill(self, pid: int) -> int:
        """Kills a worker if it still runs; its wait status, or RUNNING."""
        return self._forked.kill(pid) if self._forked.owns(pid) else self._query(("end", pid))

    def wait_status(self, pid: int) -> int:
        """The wait status of a worker that ended, or RUNNING."""
        return self._forked.wait_status(pid) if self._forked.owns(pid) else self._query(("status", pid))

    def close(self) -> None:
        """Kills all remaining workers and the fork server."""
        self._forked.close()
        self._close_channel()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.fork_server_pid, signal.SIGKILL)
                os.waitpid(self.fork_server_pid, 0)
            self.fork_server_pid = 0

    def reap(self) -> None:
        """Waits for workers that have ended, so that no zombie remains."""
        self._forked.wait_status(0)

    def _query(self, request: tuple[str, object]) -> int:
        try:
            return self._request(request, [])
        except OSError:  # the fork server is gone; the worker's channel shows whether it ended
            return RUNNING

    def _request(self, request: tuple[str, object], handles: list[int]) -> int:
        try:
            return self._exchange(request, handles)
        except OSError:  # it was killed, or does not respond
            self._close_channel()
        try:
            return self._exchange(request, handles)
        except OSError:  # an answer that came later would be taken for that of the next request
            self._close_channel()
            raise

    def _exchange(self, request: tuple[str, object], handles: list[int]) -> int:
        if self._channel is None:
            self._channel, self.fork_server_pid = _start_fork_server()
            self._channel.settimeout(self._start_timeout_s)
            self._start_timeout_s = min(self._start_timeout_s, FORK_SERVER_TIMEOUT_S)
        socket.send_fds(self._channel, [pickle.dumps(request)], handles)
        answer = self._channel.recv(_MAX_REQUEST)
        self._channel.settimeout(FORK_SERVER_TIMEOUT_S)
        if not answer:
            raise ConnectionError("the fork server ended")
        number: int = pickle.loads(answer)
        if number == _REFUSED:
            raise OSError("cannot fork: out of processes or memory")
        return number


class ForkedWorkers:
    """The workers that this process forked. Each is kept until it was waited for, so that its pid is not reused."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}
        self._memory_frozen = False

    def spawn(self, collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket]) -> int:
        """Forks a worker that serves each collector over its channel; its pid. Raises OSError."""
        parent = os.getpid()
        if (pid := self._fork()) == 0:
            _run_worker(collectors, node, channels, parent)
        self._running.add(pid)
        return pid

    def spawn_fork_server(self) -> tuple[socket.socket, int]:
        """Forks a fork server: our end of the channel to it, and its pid; the caller ends it. Raises OSError."""
        parent = os.getpid()
        ours, theirs = _open_channel()
        with theirs:
            try:
                pid = self._fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                _run_fork_server(theirs, parent)
        return ours, pid

    def _fork(self) -> int:
        self._freeze_memory()
        with warnings.catch_warnings():  # Python 3.12 warns about any other thread, also those in FORK_SAFE_THREADS
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()

    def owns(self, pid: int) -> bool:
        """Whether this process forked it."""
        return pid in self._running or pid in self._ended

    def kill(self, pid: int) -> int:
        """Kills a worker if it still runs; its wait status, or RUNNING."""
        if self.wait_status(pid) == RUNNING and pid in self._running:
            os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + _REAP_S
            while self.wait_status(pid) == RUNNING and time.monotonic() < until:
                time.sleep(0.001)
        return self.wait_status(pid)

    def wait_status(self, pid: int) -> int:
        """The wait status of a worker that ended, or RUNNING."""
        for child in tuple(self._running):
            try:
                found, status = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, so the kernel reaped it; how it ended is unknown
                found, status = child, 0
            if found:
                self._running.discard(child)
                self._ended[child] = status
        for old in list(self._ended)[:-MAX_WORKERS]:
            del self._ended[old]
        return self._ended.get(pid, RUNNING)

    def close(self) -> None:
        """Kills all remaining workers."""
        for pid in tuple(self._running):
            self.kill(pid)

    def _freeze_memory(self) -> None:
        """Excludes the present objects from garbage collection, which would write to every shared page."""
        if not self._memory_frozen:
            gc.collect()
            gc.freeze()
            self._memory_frozen = True


def is_single_threaded() -> bool:
    """Whether no other thread exists, those of libraries included: they may hold locks and fork hooks."""
    try:
        return len(set(map(int, os.listdir("/proc/self/task"))) - FORK_SAFE_THREADS) == 1
    except OSError:  # not Linux
        return threading.active_count() == 1


def _run_worker(collectors: Sequence[Collector], node: str, channels: Sequence[socket.socket], parent: int) -> NoReturn:
    """The main function of a forked worker: serves each collector in its own thread until its channel is closed."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the agent ends its workers itself
            signal.signal(number, signal.SIG_IGN)
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the signal was set
            os._exit(code)
        close_other_files({channel.fileno() for channel in channels})
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MAX_OPEN_FILES), most))
        _set_up_process(f"fp-{collectors[0].lane if len(collectors) > 1 else collectors[0].name}")
        threads = [
            threading.Thread(target=serve_reads, args=(channel, collector, node), name=collector.name, daemon=True)
            for channel, collector in zip(channels[1:], collectors[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        serve_reads(channels[0], collectors[0], node)
        for thread in threads:
            thread.join()
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here: no caller could handle it
        traceback.print_exc()
    finally:
        os._exit(code)


def _set_up_process(name: str) -> None:
    """Sets the name that `ps` and `top` show, and one heap for all threads. Does nothing if this is not Linux."""
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_NAME, name.encode()[:15])
        with contextlib.suppress(AttributeError):  # another C library than glibc
            library.mallopt(_M_ARENA_MAX, 1)


def close_other_files(kept: set[int]) -> None:
    """Closes all inherited files except `kept` and 0 to 2: those of the agent (a spool's lock) and of other workers.

    A call may hang in the kernel forever and hold them, and a channel that another process holds open never ends.
    """
    low = 3
    for handle in sorted(kept):
        os.closerange(low, handle)
        low = handle + 1
    os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _open_channel() -> tuple[socket.socket, socket.socket]:
    """Returns our end of a channel to a fork server, and that of the server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(FORK_SERVER_TIMEOUT_S)
    return ours, theirs


def _start_fork_server() -> tuple[socket.socket, int]:
    """Starts a fresh interpreter as the fork server: our end of the channel to it, and its pid."""
    ours, theirs = _open_channel()
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        words = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        return ours, os.posix_spawn(sys.executable, words, environ)


def serve_forks(channel: socket.socket) -> NoReturn:
    """The main function of a fork server that is a fresh interpreter. An error ends it."""
    try:
        _set_up_fork_server()
        importlib.import_module("agents.collectors.registry")  # loaded once, shared by the workers
        _answer_requests(channel)
    finally:
        os._exit(0)


def _run_fork_server(channel: socket.socket, parent: int) -> NoReturn:
    """The main function of a forked fork server, which has the modules of the agent. An error ends it."""
    try:
        _set_up_fork_server()
        if os.getppid() == parent:  # else it was killed before the signal was set
            close_other_files({channel.fileno()})
            _set_up_process("fp-fork-server")
            _answer_requests(channel)
    except BaseException:  # noqa: BLE001 - the process ends here: no caller could handle it
        traceback.print_exc()
    finally:
        os._exit(0)


def _set_up_fork_server() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the agent ends the fork server itself
        signal.signal(number, signal.SIG_IGN)
    set_parent_death_signal(signal.SIGKILL)


def _answer_requests(channel: socket.socket) -> None:
    """Answers requests until the agent's end is closed."""
    forked = ForkedWorkers()
    while True:
        request, handles, _, _ = socket.recv_fds(channel, _MAX_REQUEST, MAX_WORKERS)
        if not request:
            return
        verb, argument = pickle.loads(request)
        channel.send(pickle.dumps(_handle_request(forked, verb, argument, handles)))


def _handle_request(forked: ForkedWorkers, verb: str, argument: Any, handles: list[int]) -> int:
    if verb != "spawn":
        return forked.kill(argument) if verb == "end" else forked.wait_status(argument)
    recipes, node = argument
    channels = [socket.socket(fileno=handle) for handle in handles]
    try:
        return forked.spawn([make(**chosen) for make, chosen in recipes], node, channels)
    except OSError:
        return _REFUSED
    finally:
        for channel in channels:
            channel.close()
