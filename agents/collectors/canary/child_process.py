"""A canary's program as its collector sees it: started, listened to without waiting, ended by its pid."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 1 << 14
"""Bytes of one line; chosen: 20 times what a result takes. What is longer is thrown away."""
_END_S = 0.5
"""How long the kernel gets to end a killed program; chosen."""


class Child:
    """One program. `cpu` is the processor time it took, known once it has ended."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str] = {}) -> None:
        """environ goes on top of ours. Raises OSError."""
        mine, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, nothing, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, theirs, number) for number in (1, 2)]
            self.pid = os.posix_spawn(words[0], list(words), {**environment(), **environ}, file_actions=actions)
        except OSError:
            os.close(mine)
            raise
        finally:
            os.close(theirs)
            os.close(nothing)
        os.set_blocking(mine, False)
        self._from, self._rest = mine, b""
        self.began = time.monotonic()
        self.last = ""
        self.status: int | None = None
        self.cpu = 0.0

    def lines(self) -> list[dict[str, Any]]:
        """What it said since the last call; talk that is no JSON is kept as `last`."""
        try:
            while part := os.read(self._from, 1 << 16):
                self._rest += part
                if len(self._rest) > 1 << 20:  # more than all results of the largest node
                    break
        except BlockingIOError:
            pass
        *whole, self._rest = self._rest.split(b"\n")
        self._rest = self._rest[:LONGEST]
        return [found for line in whole if len(line) < LONGEST and (found := self._parsed(line)) is not None]

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # talk, such as a traceback
            self.last = line.decode(errors="replace")[:200]
            return None
        return found if isinstance(found, dict) else None

    def ended(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            try:
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else waited for it
                self.status = 0
                return True
            if pid:
                self.status, self.cpu = status, usage.ru_utime + usage.ru_stime
        return self.status is not None

    @property
    def died(self) -> str:
        """The signal that ended it, by name; empty if none did."""
        if self.status is None or not os.WIFSIGNALED(self.status):
            return ""
        number = os.WTERMSIG(self.status)
        return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    def end(self) -> None:
        """Kills it if it still runs, and lets go of it."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            until = time.monotonic() + _END_S
            while not self.ended() and time.monotonic() < until:
                time.sleep(0.002)

    def close(self) -> None:
        """Ends it and closes our end of the pipe; may be called twice."""
        self.end()
        if self._from >= 0:
            os.close(self._from)
            self._from = -1


def environment() -> dict[str, str]:
    """Ours, with the modules we were loaded from and libraries that start no threads."""
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def program(module: str, *words: object) -> list[str]:
    """Words that run a module of ours."""
    return [sys.executable, "-m", module, *map(str, words)]
