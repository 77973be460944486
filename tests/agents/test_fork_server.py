"""A fork server that does not respond in time: no answer is taken for that of another request."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time

import pytest

from agents.node.workers import processes
from agents.node.workers.processes import RUNNING, WorkerProcesses


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[socket.socket] = []

    def start_silent_server() -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0.01)
        servers.append(theirs)
        return ours, os.posix_spawn("/bin/sleep", ["sleep", "60"], {})

    monkeypatch.setattr(processes, "_start_fork_server", start_silent_server)
    workers = WorkerProcesses()
    assert workers.kill(4711) == RUNNING
    for channel in servers:
        with contextlib.suppress(BrokenPipeError):
            channel.send(pickle.dumps(53))  # the pid of a worker that it forked at last
    assert workers.kill(4711) == RUNNING
    workers.close()
    for channel in servers:
        channel.close()


def test_a_fresh_one_may_take_long_to_start_once_and_no_later_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[float] = []

    def start_slow_server() -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        starts.append(time.monotonic())
        if len(starts) == 1:  # answers one request, late, and then hangs
            threading.Timer(0.5, lambda: theirs.send(pickle.dumps(53))).start()
        servers.append(theirs)
        return ours, os.posix_spawn("/bin/sleep", ["sleep", "60"], {})

    servers: list[socket.socket] = []
    monkeypatch.setattr(processes, "FORK_SERVER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(processes, "_start_fork_server", start_slow_server)
    workers = WorkerProcesses(30.0)
    assert workers.kill(4711) == 53
    before = time.monotonic()
    assert workers.kill(4711) == RUNNING  # 0.1 s for the hung one and 0.1 s for its successor
    assert time.monotonic() - before < 10.0
    assert len(starts) == 2
    workers.close()
    for channel in servers:
        channel.close()
