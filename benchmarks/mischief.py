"""Faults of the storm, drawn at random, and their repair."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agents.node.workers.pool import Worker
from benchmarks.trouble import KINDS, MODES

if TYPE_CHECKING:
    from agents.node.agent import Agent
    from benchmarks.stormwatch import Watch

SHORT, LONG = 10.0, 900.0
"""Shortest and longest duration of a fault, s. Chosen: from two ticks to three times an operator's patience."""
DRIVER = "nvmlDeviceGetFieldValues"  # called by every reading of the GPUs


class FaultInjector:
    """Faults of one storm. `pending`: repairs by their due time. Kills only the agent's own processes."""

    def __init__(self, agent: Agent, folder: Path, every: float, draw: random.Random, watch: Watch) -> None:
        self.done: Counter[str] = Counter()
        self._agent, self._folder, self._every, self._draw, self._watch = agent, folder, every, draw, watch
        self._next = every
        self._pending: list[tuple[float, str, Callable[[], None]]] = []
        self._can_fill = os.path.ismount(folder / "spool")

    def run_between_ticks(self, now: float, calm: bool) -> None:
        """Repairs the faults due at `now`, and starts a new one unless `calm`."""
        for entry in [entry for entry in self._pending if entry[0] <= now or calm]:
            self._pending.remove(entry)
            entry[2]()
            self._watch.repaired(entry[1], now)
        if not calm and now >= self._next:
            self._next = now + self._draw.expovariate(1 / self._every)
            acts = [self._hang, self._hang_driver, self._set_mode, self._kill, self._freeze, self._kill_nursery]
            weights = [30, 10, 25, 15, 5, 3]
            if self._can_fill:
                acts, weights = [*acts, self._fill], [*weights, 6]
            self._draw.choices(acts, weights)[0](now)

    def repair_all(self) -> None:
        """Repairs all faults, so that everything can end."""
        for _, _, repair in self._pending:
            repair()
        self._pending.clear()

    # --- faults ------------------------------------------------------------------------------------------------------

    def _hang(self, now: float) -> None:
        """Replaces a file with a FIFO: a process that opens it waits in the kernel."""
        name = self._draw.choice([kind.name for kind in KINDS])
        if self._healthy_worker(name) is None:
            return
        path = self._folder / "modes" / name
        path.unlink()
        os.mkfifo(path)
        self._begun("hang", name, now, lambda: _restore(path))
        self._watch.hung(name, now)

    def _hang_driver(self, now: float) -> None:
        """Makes a call into the driver's library hang."""
        if self._healthy_worker("nvml") is None:
            return
        control = self._folder / "control"
        control.write_text(f"hang {DRIVER} -1\n")
        self._begun("hang in NVML", "nvml", now, lambda: control.unlink())
        self._watch.hung("nvml", now)

    def _set_mode(self, now: float) -> None:
        name, mode = self._draw.choice([kind.name for kind in KINDS]), self._draw.choice(MODES)
        if self._healthy_worker(name) is None:
            return
        path = self._folder / "modes" / name
        path.write_text(f"{mode}\n")
        self._begun(mode, name, now, lambda: _restore(path))

    def _kill(self, now: float) -> None:
        """Kills a worker's process."""
        if pids := self._workers():
            os.kill(self._draw.choice(pids), signal.SIGKILL)
            self.done["kill a worker"] += 1

    def _freeze(self, now: float) -> None:
        """Suspends a worker's process, as in a long wait for memory."""
        if pids := self._workers():
            os.kill(self._draw.choice(pids), signal.SIGSTOP)
            self.done["stop a worker"] += 1

    def _kill_nursery(self, now: float) -> None:
        """Kills the process that forks the workers, and so all of them."""
        if pid := self._agent.pool.fork_server_pid:
            os.kill(pid, signal.SIGKILL)
            self.done["kill the nursery"] += 1

    def _fill(self, now: float) -> None:
        """Fills the disk of the spool, as another program would."""
        hog = self._folder / "spool" / "hog"
        if hog.exists():
            return
        with hog.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:  # full, as it should be
                pass
        self._begun("fill the disk", "disk", now, lambda: hog.unlink())

    # --- targets -----------------------------------------------------------------------------------------------------

    def _begun(self, what: str, name: str, now: float, repair: Callable[[], None]) -> None:
        self.done[what] += 1
        self._pending.append((now + self._draw.uniform(SHORT, LONG), name, repair))

    def _healthy_worker(self, name: str) -> Worker | None:
        """Returns the worker of a running collector without a fault."""
        if any(name == busy for _, busy, _ in self._pending):
            return None
        for worker in self._agent.pool.workers:
            if worker.collector.name == name and worker.state == "ok" and worker.client is not None and not worker.busy:
                return worker
        return None

    def _workers(self) -> list[int]:
        return sorted({w.client.pid for w in self._agent.pool.workers if w.client is not None and w.client.pid})


def _restore(path: Path) -> None:
    """Restores the file, and releases processes that wait at its FIFO."""
    if path.is_fifo():
        with contextlib.suppress(OSError):  # no reader is left
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    fresh = path.with_suffix(".new")
    fresh.write_text("healthy\n")
    fresh.replace(path)
