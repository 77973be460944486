"""A program that writes a line per period: run as a child, read by a thread, restarted if it ends or goes silent."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Longest accepted line. Chosen: a document of 128 cores and as many programs has some 100 KiB."""
READ_AT_ONCE = 64 * 1024
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Pause before the first restart and the longest one; doubled each time. Chosen: with a broken driver, restarts must
stay rare. A line resets the pause."""
EXIT_WAIT_S = 5.0
"""Longest wait for an ended child or thread; both end at once after a kill."""


class MonitorProgram:
    """The newest line of a program. Two threads may use it: its own reader, and the caller."""

    def __init__(self, command: Sequence[str], silence: float) -> None:
        """silence: seconds without a line after which the program counts as stuck."""
        self._command, self._silence = tuple(command), silence
        self._lock = threading.Lock()
        self._line: bytes | None = None
        self._problem = ""
        self._stop = threading.Event()
        self._waker, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"lines of {self._command[0]}")
        self._thread.start()

    def pop_line(self) -> bytes | None:
        """Returns the last whole line since the call before; None if there is none. Older lines are dropped."""
        with self._lock:
            found, self._line = self._line, None
            return found

    def problem(self) -> str:
        """Returns why there are no lines; empty while they come."""
        with self._lock:
            return self._problem

    def close(self) -> None:
        """Ends the thread and the program."""
        if self._stop.is_set():
            return
        self._stop.set()
        os.close(self._woken)  # the thread sees the end of this pipe
        self._thread.join(EXIT_WAIT_S)
        os.close(self._waker)

    def _run(self) -> None:
        pause = MIN_PAUSE_S
        while not self._stop.is_set():
            try:
                got = self._run_once()
            except OSError as error:
                got = False
                self._set_problem(f"{self._command[0]} cannot be started: {error.strerror or error}")
            except Exception as fault:  # noqa: BLE001 - without its thread the program would stay silent for ever
                got = False
                self._set_problem(f"{self._command[0]}: {type(fault).__name__}: {fault}")
            pause = MIN_PAUSE_S if got else min(pause * 2, MAX_PAUSE_S)
            self._stop.wait(pause)

    def _run_once(self) -> bool:
        """Runs the program once; returns whether it wrote a line."""
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the agent, which ends the child itself
        )
        assert child.stdout is not None
        got, why = False, ""
        try:
            got, why = self._read(child.stdout.fileno())
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                child.kill()
            child.stdout.close()
            code = self._wait_for_exit(child)
        self._set_problem(why or f"{self._command[0]} ended with status {code}")
        return got

    def _wait_for_exit(self, child: subprocess.Popen[bytes]) -> int | None:
        """Returns the exit code. Waits for a child stuck in the kernel, since a second one would hang too."""
        while True:
            try:
                return child.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                if self._stop.is_set():
                    return None
                self._set_problem(
                    f"{self._command[0]} was killed and does not end: stuck in the kernel (pid {child.pid})"
                )

    def _read(self, pipe: int) -> tuple[bool, str]:
        """Reads until the end; returns (whether there was a line, why the program was given up)."""
        waiting, got, last = b"", False, time.monotonic()
        while not self._stop.is_set():
            ready = select.select([pipe, self._waker], [], [], max(0.0, last + self._silence - time.monotonic()))[0]
            if not ready or time.monotonic() - last > self._silence:  # empty lines do not count
                return got, f"{self._command[0]} wrote nothing for {self._silence:g} s"
            if self._waker in ready:
                break
            data = os.read(pipe, READ_AT_ONCE)
            if not data:
                return got, ""
            *lines, waiting = (waiting + data).split(b"\n")
            if len(waiting) > MAX_LINE_BYTES:
                return got, f"{self._command[0]} wrote a line of more than {MAX_LINE_BYTES} bytes"
            if whole := [line for line in lines if line.strip()]:
                self._store_line(whole[-1])
                got, last = True, time.monotonic()
        return got, ""

    def _store_line(self, line: bytes) -> None:
        with self._lock:
            self._line, self._problem = line, ""

    def _set_problem(self, trouble: str) -> None:
        with self._lock:
            self._problem = trouble
