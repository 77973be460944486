"""A canary's program as its collector sees it: started, read without waiting, ended by its pid."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LINE_BYTES = 1 << 14
"""Bytes of one line; longer ones are dropped. Chosen: 20 times the size of a result."""
_KILL_WAIT_S = 0.5
"""Longest wait for a killed program. Chosen."""


class CanaryProcess:
    """One program. cpu_s: processor time, known once it has ended; last_text: its last output that is not JSON."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str] = {}) -> None:
        """environ is added to our environment. Raises OSError."""
        mine, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, nothing, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, theirs, number) for number in (1, 2)]
            self.pid = os.posix_spawn(words[0], list(words), {**child_environment(), **environ}, file_actions=actions)
        except OSError:
            os.close(mine)
            raise
        finally:
            os.close(theirs)
            os.close(nothing)
        os.set_blocking(mine, False)
        self._pipe, self._buffer = mine, b""
        self.started_at = time.monotonic()
        self.last_text = ""
        self.status: int | None = None
        self.cpu_s = 0.0

    def read_lines(self) -> list[dict[str, Any]]:
        """Returns the JSON objects written since the last call; other output is kept as `last_text`."""
        try:
            while part := os.read(self._pipe, 1 << 16):
                self._buffer += part
                if len(self._buffer) > 1 << 20:  # more than all results of the largest node
                    break
        except BlockingIOError:
            pass
        *whole, self._buffer = self._buffer.split(b"\n")
        self._buffer = self._buffer[:MAX_LINE_BYTES]
        return [found for line in whole if len(line) < MAX_LINE_BYTES and (found := self._parse_line(line)) is not None]

    def _parse_line(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # other output, such as a traceback
            self.last_text = line.decode(errors="replace")[:200]
            return None
        return found if isinstance(found, dict) else None

    def has_ended(self) -> bool:
        """Whether the program has ended."""
        if self.status is None:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere
                self.status = 0
                return True
            if pid:
                self.status, self.cpu_s = status, usage.ru_utime + usage.ru_stime
        return self.status is not None

    @property
    def death_signal(self) -> str:
        """The name of the signal that ended it; empty if none did."""
        if self.status is None or not os.WIFSIGNALED(self.status):
            return ""
        number = os.WTERMSIG(self.status)
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    def kill(self) -> None:
        """Kills the program if it still runs, and reaps it."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            until = time.monotonic() + _KILL_WAIT_S
            while not self.has_ended() and time.monotonic() < until:
                time.sleep(0.002)

    def close(self) -> None:
        """Kills the program and closes our end of the pipe; may be called twice."""
        self.kill()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def child_environment() -> dict[str, str]:
    """Returns our environment, with our module path, and with libraries that start no threads."""
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def module_command(module: str, *words: object) -> list[str]:
    """Returns the command that runs one of our modules."""
    return [sys.executable, "-m", module, *map(str, words)]
