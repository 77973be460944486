"""A program that prints a line per period: a child, read by a thread, started again when it ends or is silent."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence

LONGEST_LINE = 4 * 1024 * 1024
"""Longest line that is taken; chosen: a document of 128 cores and as many programs has some 100 KiB."""
READ_AT_ONCE = 64 * 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before the first and before each further start, doubled each time; chosen: a broken driver is no cause to
start programs all the time. A line makes it short again."""
PATIENCE_S = 5.0
"""How long an ended child or thread is waited for; both end at once after a kill."""


class Child:
    """The newest line of a program. Two threads may use it: the reader of its own, and whoever asks."""

    def __init__(self, command: Sequence[str], silence: float) -> None:
        """silence: seconds without a line after which the program is taken for stuck."""
        self._command, self._silence = tuple(command), silence
        self._lock = threading.Lock()
        self._line: bytes | None = None
        self._trouble = ""
        self._stop = threading.Event()
        self._waker, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"lines of {self._command[0]}")
        self._thread.start()

    def newest(self) -> bytes | None:
        """The last whole line since the look before; older ones are of no use."""
        with self._lock:
            found, self._line = self._line, None
            return found

    def trouble(self) -> str:
        """Why there are no lines; empty while they come."""
        with self._lock:
            return self._trouble

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        os.close(self._woken)  # the thread sees the end of this pipe
        self._thread.join(PATIENCE_S)
        os.close(self._waker)

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                got = self._once()
            except OSError as error:
                got = False
                self._say(f"{self._command[0]} cannot be started: {error.strerror or error}")
            except Exception as fault:  # noqa: BLE001 - a thread that ended would be a program that is silent for ever
                got = False
                self._say(f"{self._command[0]}: {type(fault).__name__}: {fault}")
            pause = FIRST_PAUSE_S if got else min(pause * 2, LONGEST_PAUSE_S)
            self._stop.wait(pause)

    def _once(self) -> bool:
        """One life of the program; whether it told a line."""
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a person's Ctrl-C goes to the agent, which ends the child in its own time
        )
        assert child.stdout is not None
        got, why = False, ""
        try:
            got, why = self._read(child.stdout.fileno())
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                child.kill()
            child.stdout.close()
            code = self._ended(child)
        self._say(why or f"{self._command[0]} ended with status {code}")
        return got

    def _ended(self, child: subprocess.Popen[bytes]) -> int | None:
        """How it ended. One that the driver holds in the kernel is waited for and told: a second one would hang too."""
        while True:
            try:
                return child.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                if self._stop.is_set():
                    return None
                self._say(f"{self._command[0]} was killed and does not end: it waits in the kernel (pid {child.pid})")

    def _read(self, pipe: int) -> tuple[bool, str]:
        """Reads until the end; (whether there was a line, why it was given up)."""
        waiting, got, last = b"", False, time.monotonic()
        while not self._stop.is_set():
            ready = select.select([pipe, self._waker], [], [], max(0.0, last + self._silence - time.monotonic()))[0]
            if not ready or time.monotonic() - last > self._silence:  # empty lines are no sign of life
                return got, f"{self._command[0]} said nothing for {self._silence:g} s"
            if self._waker in ready:
                break
            data = os.read(pipe, READ_AT_ONCE)
            if not data:
                return got, ""
            *lines, waiting = (waiting + data).split(b"\n")
            if len(waiting) > LONGEST_LINE:
                return got, f"{self._command[0]} wrote a line of more than {LONGEST_LINE} bytes"
            if whole := [line for line in lines if line.strip()]:
                self._keep(whole[-1])
                got, last = True, time.monotonic()
        return got, ""

    def _keep(self, line: bytes) -> None:
        with self._lock:
            self._line, self._trouble = line, ""

    def _say(self, trouble: str) -> None:
        with self._lock:
            self._trouble = trouble
