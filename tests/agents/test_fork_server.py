"""A fork server that does not respond in time: no answer is taken for that of another request."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket

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
