"""The pipeline's handle on the process that forks a process for each query."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from pipeline.api.query_channel import Channel
from pipeline.api.query_process import NONE
from pipeline.model.errors import Retryable

_ROOT = Path(__file__).parents[2]
_ENVIRON = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Keeps the process to one thread, as a fork copies only the one that asks for it."""


class QueryHost:
    """Starts with `start` or the first query, and again should it have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._closed = False
        self._stop: weakref.finalize[..., QueryHost] | None = None

    def start(self) -> None:
        """Starts the process unless it runs; it is ready about a second later, and a query waits for that."""
        with self._lock:
            if self._channel is None and not self._closed:
                self._start()

    def fork(self, deadline: float) -> tuple[int, Channel]:
        """A new process that waits for a query: its pid, and the channel to it. Raises Retryable."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._fork(theirs.fileno(), deadline)
            except (OSError, EOFError) as error:
                ours.close()
                raise Retryable(f"no process for the query: {error or type(error).__name__}", after_s=5.0) from error
            return pid, Channel(ours)

    def end(self, pid: int) -> None:
        """Kills a process if it still runs; nobody waits for that, nor for one that is being forked."""
        with contextlib.suppress(OSError):
            if (channel := self._channel) is not None:
                channel.send({"end": pid})

    def close(self) -> None:
        """Ends the process and all that it forked, also while a query waits for it to start or to answer."""
        self._closed = True
        if (stop := self._stop) is not None:
            stop()
        with self._lock:
            self._close()

    def _fork(self, handle: int, deadline: float) -> int:
        with self._lock:
            if self._closed:
                raise OSError("closed")
            if time.monotonic() >= deadline:  # the one before waited that long; the process may be about to answer
                raise OSError("the process that forks gave no answer")
            if self._channel is None:
                self._start()
            assert self._channel is not None
            try:
                self._channel.send({}, handle)
                pid: int = self._channel.receive(deadline)[0]["pid"]
            except (OSError, EOFError):  # it ended, hangs, or its answer would be taken for the next one's
                self._close()
                raise
        if pid == NONE:
            raise OSError("the machine has no more processes or no memory for one")
        return pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.api.query_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRON, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a library that gives up writes what the query wants: no line for the log
            )
        self._channel = Channel(ours)
        self._stop = weakref.finalize(self, _stop, self._channel, process)

    def _close(self) -> None:
        if self._stop is not None:
            self._stop()
        self._channel = self._stop = None


def _stop(channel: Channel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.kill()
    process.wait()
