"""The cost of the processes of one session: processor time and proportional memory, as the kernel counts them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PATIENCE_S = 10.0
"""Longest time for a service to stop; chosen: twice our limit."""


@dataclass(frozen=True)
class Cost:
    """One process: seconds of processor time since its start, user and system, and PSS in MiB."""

    name: str
    cpu: float
    memory: float


class Session:
    """A command in a separate session, with everything that it starts."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path) -> None:
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.log = log

    def costs(self) -> dict[int, Cost]:
        """Returns usage by process id, oldest first. Ended children count for the process that waited for them."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (cost := self._cost(entry)) is not None:
                found[int(entry.name)] = cost
        return dict(sorted(found.items()))

    def _cost(self, entry: Path) -> Cost | None:
        try:
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            fields = tail.split()
            if int(fields[3]) != self.process.pid or fields[0] == "Z":  # proc(5): state ppid pgrp session ...
                return None
            rollup = (entry / "smaps_rollup").read_text()
        except OSError:  # ended in between
            return None
        kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return Cost(head.partition("(")[2], sum(map(int, fields[11:15])) * TICK_S, kib / 1024)

    def end(self) -> None:
        """Sends SIGTERM to the command, and SIGKILL to all that is left of its session."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_S)
        finally:
            for pid in self.costs():
                os.kill(pid, signal.SIGKILL)


def wait_for(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until `holds()` is true. Ends the program after `seconds`."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
