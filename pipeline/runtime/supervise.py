"""Several processes of the one command under one parent: started, watched, and ended together. Standard library only.

Children stay in the parent's process group, so that Ctrl-C reaches them too; those that did not hear it are sent
SIGTERM, and SIGKILL when `PATIENCE` is over. Should the parent be killed, the kernel ends them (`die_with_parent`).

Stop: an Event that signal handlers may set.

`threading.Event` takes a lock to be set. A handler runs in the main thread between any two instructions, so it may find
that lock held by the very code it interrupted, a second SIGTERM by the first one's handler, and wait for ever.
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
    """Somebody asked for the end. Setting it is one write to a pipe; it can never be cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def set(self) -> None:
        self._asked = True
        with contextlib.suppress(BlockingIOError):  # full of earlier ones: whoever waits is awake
            os.write(self._writer, b"!")

    def is_set(self) -> bool:
        return self._asked

    def wait(self, timeout: float | None = None) -> bool:
        if not self._asked:
            poll = select.poll()  # select() cannot wait for files above 1024, and agents hold many
            poll.register(self._reader, select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout * 1000))
        return self._asked

    def clear(self) -> None:
        raise TypeError("what was asked cannot be unasked")

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


PATIENCE = 3.0
"""Seconds between SIGTERM and SIGKILL: leaves two of the five in which everything has to be gone. Chosen."""
KEPT_LINES = 20
"""Last lines kept of each child, to be shown when it dies. Chosen."""
PARENT = "FLEETPULSE_PARENT"
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends when the parent is gone."""


class Stopped(Exception):  # noqa: N818 - it is no error: somebody asked for the end
    """SIGINT or SIGTERM arrived."""


class Child:
    """One running process. Its lines go to stderr under its name; the last ones are kept."""

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

    def finished(self) -> int | None:
        """Exit status once it ended and all its lines were read, else None."""
        status = self.process.poll()
        if status is not None:
            self._reader.join(1.0)
        return status


class Supervisor:
    """Children by name. `wait` returns when one ended or somebody asked for the end; `end` leaves nothing running."""

    def __init__(self, echo: Callable[[str], None] | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.children: dict[str, Child] = {}
        self._environ = environ
        self._echo = say if echo is None else echo
        self._asked = Stop()

    def start(self, name: str, argv: Sequence[str]) -> Child:
        """Starts one more child."""
        self.children[name] = child = Child(name, argv, self._environ, self._echo)
        return child

    def ask(self) -> None:
        """Asks for the end, from any thread or signal handler."""
        self._asked.set()

    def dead(self, may_end: Sequence[str] = ()) -> Child | None:
        """A child that ended though nobody asked; those of `may_end` may end with status 0."""
        for child in self.children.values():
            status = child.finished()
            if status is not None and not (status == 0 and child.name in may_end):
                return child
        return None

    def wait(self, seconds: float, may_end: Sequence[str] = ()) -> Child | None:
        """Waits up to `seconds`: the child that died, or None. Raises Stopped when the end was asked for."""
        until = time.monotonic() + seconds
        while not self._asked.wait(min(0.1, max(0.0, until - time.monotonic()))):
            dead = self.dead(may_end)
            if dead is not None and not self._asked.wait(0.2):  # Ctrl-C may have reached the child before us
                return dead
            if time.monotonic() >= until:
                return None
        raise Stopped

    def stopped(self) -> list[str]:
        """Children that a signal stopped (SIGSTOP, Ctrl-Z) and that do nothing since, in words. Linux."""
        return [
            f"{name} was stopped: kill -CONT {c.process.pid}" for name, c in self.children.items() if _is_stopped(c)
        ]

    def end(self, patience: float = PATIENCE) -> None:
        """SIGTERM to all, SIGKILL to those still there after `patience` seconds."""
        for child in self.children.values():
            _send(child, signal.SIGTERM)
        until = time.monotonic() + patience
        for child in self.children.values():
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{child.name} did not end in {patience:g} s; killed")
                _send(child, signal.SIGKILL)
                child.process.wait()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within it, SIGINT and SIGTERM ask for the end instead of interrupting whatever runs."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: self.ask()) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def report_death(child: Child, out: IO[str] | None = None) -> None:
    """Says which child ended, how, and what it said last."""
    status = child.process.returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    say(f"{child.name} {how}; its last lines:", out)
    for line in list(child.last) or ["(it said nothing)"]:
        say(f"  {line}", out)


def say(text: str, out: IO[str] | None = None) -> None:
    """One line of talk on stderr. A reader that went away is no reason to stop."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=out or sys.stderr, flush=True)


def end_with_parent(number: int) -> None:
    """From now on the kernel sends this process `number` when its parent is gone (Linux; elsewhere it does nothing)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Called by a child at its start: from now on the parent's death is a SIGTERM for it. Does nothing elsewhere."""
    parent = environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    end_with_parent(signal.SIGTERM)
    if str(os.getppid()) != parent:  # it died before we could ask, or we are a grandchild
        end_with_parent(0)
        if os.getppid() == 1:
            raise SystemExit(f"fleetpulse: the parent {parent} is gone")


def _send(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is None:
        child.process.send_signal(number)


def _is_stopped(child: Child) -> bool:
    """Whether the kernel has the process as stopped: the state after the name in proc(5)'s stat."""
    try:
        return Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
