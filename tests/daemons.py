"""Real daemons of a test: started with separate logs, awaited, and stopped by their process ids."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

_TAIL = 1500  # characters of each log that an error shows; chosen


class Daemons:
    """The daemons of one cluster below one folder. `failed` is the exception for errors, `ready_s` bounds a wait."""

    def __init__(self, folder: Path, failed: type[Exception], ready_s: float, stop_s: float) -> None:
        self.folder, self._failed, self._ready_s, self._stop_s = folder, failed, ready_s, stop_s
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, name: str, words: Sequence[str], environment: Mapping[str, str], log: str) -> None:
        with open(self.folder / log, "ab") as out:
            self.running[name] = subprocess.Popen(
                words, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def wait(self, what: str, ready: Callable[[], bool], limit: float | None = None) -> None:
        """Waits until `ready`; raises if that takes too long or a daemon ended, with the ends of the logs."""
        limit = self._ready_s if limit is None else limit
        end = time.monotonic() + limit
        while not ready():
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                raise self._failed(f"{what}: not ready after {limit:g} s; ended: {ended}{self.tails()}")
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Kills one daemon with signal 9."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def tails(self) -> str:
        """The last lines of every log."""
        logs = sorted(self.folder.glob("*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-_TAIL:]}" for log in logs)

    def close(self, gently: Collection[str]) -> None:
        """Stops all, the last started first; those in `gently` get time to write their data."""
        for name, process in reversed(self.running.items()):
            process.send_signal(signal.SIGTERM if name in gently else signal.SIGKILL)
            try:
                process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running = {}


class DaemonCluster(ABC):
    """A cluster of daemons as a context manager: configured and started at the entry, closed at the end."""

    def __enter__(self) -> Self:
        try:
            self._configure()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _configure(self) -> None:
        """Writes the files that the daemons read."""

    @abstractmethod
    def _start(self) -> None:
        """Starts the daemons and waits until they are ready."""

    @abstractmethod
    def close(self) -> None:
        """Stops the daemons."""


def free_ports(number: int) -> list[int]:
    """Returns free ports."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports: list[int] = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
