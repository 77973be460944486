"""Runs a command with limits on its time and output, and kills what it leaves behind."""

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
_MAX_ERROR_BYTES = 1 << 18
"""Most bytes of standard error that are kept. Chosen: 2,000 lines, more only repeats."""
_KILL_WAIT_S = 2.0
"""Seconds to wait for a killed command. Chosen. A command that a dead adapter holds in the kernel is left behind."""
_POLL_S = 0.25
"""Seconds between two checks of a command that prints nothing. Chosen: a stop takes effect within this time."""


class CommandError(Exception):
    """A command could not be started, exceeded a limit or was stopped. The message is for a person."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Exit code, standard output and standard error of a command.

    errors_cut: whether standard error was longer than the kept part.
    """

    code: int
    text: str
    errors: str
    errors_cut: bool = False


@dataclass
class CommandRunner:
    """Runs one command at a time. `stop`, from any thread, kills the running one and everything that it started.

    limit: seconds that it may take. max_bytes: bytes that it may print.
    """

    limit: float
    max_bytes: int
    environment: Mapping[str, str] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False)
    _leftover: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def run(self, command: Sequence[str]) -> CommandOutput:
        """Runs a command and returns its output.

        A failure of the command itself is in the exit code. Raises CommandError if there is no complete output.
        """
        if self._leftover is not None and self._leftover.poll() is None:
            raise CommandError(
                f"{command[0]}: the previous run is still blocked in the kernel (pid {self._leftover.pid})"
            )
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C", **self.environment},
                start_new_session=True,  # its own process group, which can be killed as a whole
            )
        except OSError as error:
            raise CommandError(f"{command[0]}: {error.strerror}") from error
        try:
            return self._collect_output(process, command[0])
        finally:
            self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the remaining processes of a command.

        If it cannot be killed, it is left behind and no other command is started.
        """
        with contextlib.suppress(ProcessLookupError):  # it exited by itself, with all its children
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        try:
            process.wait(_KILL_WAIT_S)
            self._leftover = None
        except subprocess.TimeoutExpired:
            self._leftover = process

    def stop(self) -> None:
        """Kills the running command and refuses further ones."""
        self._stopped.set()

    def _collect_output(self, process: subprocess.Popen[bytes], name: str) -> CommandOutput:
        """Collects the output until both streams are closed."""
        assert process.stdout is not None
        assert process.stderr is not None
        until = time.monotonic() + self.limit
        found = {process.stdout: bytearray(), process.stderr: bytearray()}
        error_bytes = 0
        with selectors.DefaultSelector() as selector:
            for stream in found:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                self._check_limits(name, until)
                for key, _ in selector.select(_POLL_S):
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        error_bytes += len(data)
                        found[process.stderr] += data[: max(0, _MAX_ERROR_BYTES - len(found[process.stderr]))]
                    else:
                        found[process.stdout] += data
                if len(found[process.stdout]) > self.max_bytes:
                    raise CommandError(f"{name}: printed more than {self.max_bytes >> 20} MiB; killed")
        code = self._wait_for_exit(process, name, until)
        out, talk = (bytes(found[s]).decode("utf-8", "replace") for s in (process.stdout, process.stderr))
        return CommandOutput(code, out, talk, error_bytes > _MAX_ERROR_BYTES)

    def _wait_for_exit(self, process: subprocess.Popen[bytes], name: str, until: float) -> int:
        """Returns the exit code. A command may close its output and keep running."""
        while True:
            self._check_limits(name, until)
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def _check_limits(self, name: str, until: float) -> None:
        """Raises CommandError if the command was stopped or its time is over."""
        if self._stopped.is_set():
            raise CommandError(f"{name}: stopped")
        if time.monotonic() > until:
            raise CommandError(f"{name}: did not finish within {self.limit:g} s; killed")
