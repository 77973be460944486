"""Child processes of the one command: start, watch and stop them together. Standard library only.

Children stay in the parent's process group, so that Ctrl-C reaches them. At stop they receive SIGTERM, and SIGKILL
after STOP_TIMEOUT_S. If the parent is killed, the kernel ends them (`stop_with_parent`).

`Stop` is an Event that signal handlers may set. `threading.Event.set` takes a lock: a handler runs in the main thread
between any two instructions and can find the lock held by the interrupted code, so it could wait forever.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO


class Stop(threading.Event):
    """A stop request. Setting it is one write to a pipe; it cannot be cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def set(self) -> None:
        """Requests the stop."""
        self._is_set = True
        with contextlib.suppress(BlockingIOError):  # the pipe is full: waiting threads are awake
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Returns whether the stop was requested."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` (s) and returns whether the stop was requested."""
        if not self._is_set:
            poll = select.poll()  # select() does not support descriptors above 1024
            poll.register(self._reader, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout * 1000))
        return self._is_set

    def clear(self) -> None:
        """Raises TypeError: a stop request cannot be cleared."""
        raise TypeError("a stop request cannot be cleared")

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


STOP_TIMEOUT_S = 3.0
"""Time between SIGTERM and SIGKILL (s): leaves 2 of the 5 s in which everything must stop. Chosen."""
KEPT_LINES = 20
"""Last lines of each child that are kept, to be shown when it dies. Chosen."""
PARENT = "FLEETPULSE_PARENT"
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends when the parent ends."""


class StopRequested(Exception):  # noqa: N818 - not an error
    """Raised by `Supervisor.wait` after SIGINT or SIGTERM."""


class Child:
    """One child process. Its lines go to stderr with its name; the last ones are kept."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], echo: Callable[[str], None]) -> None:
        self.name = name
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.process = subprocess.Popen(
            list(argv),
            env={**environ, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._echo = echo
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.last.append(line.rstrip("\n"))
                self._echo(f"{self.name}: {line.rstrip()}")

    def poll_status(self) -> int | None:
        """Returns the exit status after the child ended and its lines were read, None while it runs."""
        status = self.process.poll()
        if status is not None:
            self._reader.join(1.0)
        return status


class Supervisor:
    """Children by name. `wait` watches them, `stop_all` ends all of them."""

    def __init__(self, echo: Callable[[str], None] | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.children: dict[str, Child] = {}
        self._environ = environ
        self._echo = print_line if echo is None else echo
        self._stop = Stop()

    def start(self, name: str, argv: Sequence[str]) -> Child:
        """Starts a child."""
        self.children[name] = child = Child(name, argv, self._environ, self._echo)
        return child

    def request_stop(self) -> None:
        """Requests the stop, from any thread or signal handler."""
        self._stop.set()

    def find_dead(self, may_end: Sequence[str] = ()) -> Child | None:
        """Returns a child that ended, None if there is none; those in `may_end` may end with status 0."""
        for child in self.children.values():
            status = child.poll_status()
            if status is not None and not (status == 0 and child.name in may_end):
                return child
        return None

    def wait(self, seconds: float, may_end: Sequence[str] = ()) -> Child | None:
        """Waits up to `seconds` and returns a child that died, None if there is none. Raises StopRequested."""
        until = time.monotonic() + seconds
        while not self._stop.wait(min(0.1, max(0.0, until - time.monotonic()))):
            dead = self.find_dead(may_end)
            if dead is not None and not self._stop.wait(0.2):  # Ctrl-C may reach the child before us
                return dead
            if time.monotonic() >= until:
                return None
        raise StopRequested

    def list_suspended(self) -> list[str]:
        """Returns a text for each child that is suspended by a signal (SIGSTOP, Ctrl-Z). Linux only."""
        return [
            f"{name} is suspended: kill -CONT {c.process.pid}" for name, c in self.children.items() if _is_suspended(c)
        ]

    def stop_all(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Sends SIGTERM to all children, and SIGKILL to those still running after `timeout_s`."""
        for child in self.children.values():
            _send(child, signal.SIGTERM)
        until = time.monotonic() + timeout_s
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                print_line(f"{child.name} did not stop within {timeout_s:g} s; killed")
                _send(child, signal.SIGKILL)
                child.process.wait()

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Within the block, SIGINT and SIGTERM request the stop instead of interrupting the code."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: self.request_stop()) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def report_death(child: Child, out: IO[str] | None = None) -> None:
    """Prints which child ended, how, and its last lines."""
    status = child.process.returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    print_line(f"{child.name} {how}; its last lines:", out)
    for line in list(child.last) or ["(no output)"]:
        print_line(f"  {line}", out)


def print_line(text: str, out: IO[str] | None = None) -> None:
    """Prints one line on stderr; a closed pipe is ignored."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=out or sys.stderr, flush=True)


def set_parent_death_signal(number: int) -> None:
    """Makes the kernel send this process the signal `number` when its parent ends. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def stop_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Called by a child at its start: it receives SIGTERM when the parent ends. Linux only."""
    parent = environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal(signal.SIGTERM)
    if str(os.getppid()) != parent:  # the parent has already ended, or this is a grandchild
        set_parent_death_signal(0)
        if os.getppid() == 1:
            raise SystemExit(f"fleetpulse: the parent process {parent} has ended")


def _send(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is None:
        child.process.send_signal(number)


def _is_suspended(child: Child) -> bool:
    """Returns whether the process is suspended, by its state in /proc/PID/stat (proc(5))."""
    try:
        return Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
