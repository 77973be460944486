"""A command under limits: of time, of what it may print, and of who may outlive it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_CHUNK = 1 << 16
_TALK = 1 << 18
"""Most bytes of standard error that are kept; chosen: 2,000 lines, more is the same thing again."""
_LEAVE_S = 2.0
"""How long a command that was killed is waited for; chosen. One that a dead adapter holds in the kernel is left."""
_TICK_S = 0.25
"""How often a command is looked at while it is silent; chosen: a stop is obeyed within it."""


class CommandError(Exception):
    """A command could not be run, ran too long, printed too much or was stopped; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed and how it ended. cut: whether it had more to say on standard error than is kept."""

    code: int
    text: str
    talk: str
    cut: bool = False


@dataclass
class Command:
    """Runs one command at a time; `stop`, from any thread, ends the one that runs with all that it started.

    limit: seconds it may take. most: bytes it may print.
    """

    limit: float
    most: int
    environment: Mapping[str, str] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _left: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def run(self, command: Sequence[str]) -> Output:
        """Raises CommandError where there is no output to be had. A command's own failure is its code."""
        if self._left is not None and self._left.poll() is None:
            raise CommandError(f"{command[0]}: the one before it still waits in the kernel (pid {self._left.pid})")
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C", **self.environment},
                start_new_session=True,  # so that its process group is its own and can be ended whole
            )
        except OSError as error:
            raise CommandError(f"{command[0]}: {error.strerror}") from error
        try:
            return self._follow(process, command[0])
        finally:
            self._leave(process)

    def _leave(self, process: subprocess.Popen[bytes]) -> None:
        """Ends what is left of a command; one that cannot be ended is waited for no longer, and none follows it."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, with all its children
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        try:
            process.wait(_LEAVE_S)
            self._left = None
        except subprocess.TimeoutExpired:
            self._left = process

    def stop(self) -> None:
        """Ends what runs, and refuses what would run."""
        self._stopped.set()

    def _follow(self, process: subprocess.Popen[bytes], name: str) -> Output:
        """Takes what it prints until both ends are closed."""
        assert process.stdout is not None
        assert process.stderr is not None
        until = time.monotonic() + self.limit
        found = {process.stdout: bytearray(), process.stderr: bytearray()}
        said = 0
        with selectors.DefaultSelector() as selector:
            for stream in found:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                self._may_go_on(name, until)
                for key, _ in selector.select(_TICK_S):
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        said += len(data)
                        found[process.stderr] += data[: max(0, _TALK - len(found[process.stderr]))]
                    else:
                        found[process.stdout] += data
                if len(found[process.stdout]) > self.most:
                    raise CommandError(f"{name}: printed more than {self.most >> 20} MiB; it was ended")
        code = self._end(process, name, until)
        out, talk = (bytes(found[s]).decode("utf-8", "replace") for s in (process.stdout, process.stderr))
        return Output(code, out, talk, said > _TALK)

    def _end(self, process: subprocess.Popen[bytes], name: str, until: float) -> int:
        """Its code; it may close what it prints to and stay."""
        while True:
            self._may_go_on(name, until)
            try:
                return process.wait(_TICK_S)
            except subprocess.TimeoutExpired:
                continue

    def _may_go_on(self, name: str, until: float) -> None:
        if self._stopped.is_set():
            raise CommandError(f"{name}: stopped")
        if time.monotonic() > until:
            raise CommandError(f"{name}: did not end within {self.limit:g} s; it was ended")
