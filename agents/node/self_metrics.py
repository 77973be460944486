"""What the agent tells of itself, as telemetry: each collector's state and latency, its own cost, its spools.

It lives in the classes `collector` and `agent`, every 10 s (signals.md 2e), and at once when a collector's state
changes, so that a hung driver is in the store with the next tick.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Device, Reading, Rhythm
from agents.node.workers.pool import Looking, Worker
from pipeline.model.signals import CATALOGUE

EVERY_S, MEMORY_EVERY_S = 10.0, 60.0
_STATES = CATALOGUE["collector.state"].states


class Vitals:
    """Readings about the agent of `node`. proc: where the kernel tells of processes.

    cpu_time (s) and memory (bytes) are as they were told last, None before.
    """

    def __init__(self, node: str, looking: Looking, rhythm: Rhythm, proc: Path = Path("/proc")) -> None:
        self._node, self._looking, self._rhythm, self._proc = node, looking, rhythm, proc
        self._tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
        self._ended_ms = 0.0
        self._running_ms: dict[int, float] = {}
        self.cpu_time: float | None = None
        self.memory: int | None = None

    def readings(self, changed: bool, extra: Mapping[str, float]) -> list[Reading]:
        """What is due now; `extra` are values of class agent that others know."""
        found = []
        due = self._rhythm.due(EVERY_S)
        if changed or due:
            found.append(self._collectors())
        if due:
            spent = self._processor_ms()
            self.cpu_time = spent / 1000
            values = {**extra, "agent.cpu_time": spent}
            if self._rhythm.due(MEMORY_EVERY_S):
                self.memory = self._memory()
                values["agent.memory"] = self.memory
            found.append(Reading("agent", (f"agent:{self._node}",), {k: _column(k, v) for k, v in values.items()}))
        return found

    def inventory(self) -> dict[str, Device]:
        """The agent and its collectors."""
        parents = (f"node:{self._node}",)
        found = {f"agent:{self._node}": Device(parents)}
        for worker in self._looking.workers:
            facts = {"place": "process" if worker.collector.isolated else "thread", "every": worker.collector.interval}
            found[self._entity(worker)] = Device(parents, facts)
        return found

    def _entity(self, worker: Worker) -> str:
        return f"collector:{self._node}.{worker.collector.name}"

    def _collectors(self) -> Reading:
        workers = self._looking.workers
        columns = {
            "collector.state": np.array([_STATES.index(w.state) for w in workers]),
            "collector.latency": np.array([w.latency for w in workers]),
            "collector.silence": np.array([w.silence for w in workers]),
            "collector.restarts": np.array([w.restarts for w in workers], np.uint32),
        }
        return Reading("collector", tuple(self._entity(w) for w in workers), columns)

    def _pids(self) -> list[int]:
        return [os.getpid(), *self._looking.pids]

    def _processor_ms(self) -> float:
        """Processor time of all processes of the agent, those that ended included up to their last look."""
        now = {pid: spent for pid in self._pids() if (spent := self._spent_ms(pid)) is not None}
        self._ended_ms += sum(spent for pid, spent in self._running_ms.items() if pid not in now)
        self._running_ms = now
        return round(self._ended_ms + sum(now.values()))

    def _spent_ms(self, pid: int) -> float | None:
        """utime and stime, fields 14 and 15 of proc(5) stat; the name before them may hold anything but a ')' last."""
        try:
            words = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) * self._tick_ms
        except (OSError, IndexError, ValueError):  # it ended meanwhile
            return None

    def _memory(self) -> int:
        """Proportional set size. A worker in a call is left out: its memory map may stay locked while it hangs."""
        return sum(self._resident(pid) for pid in self._pids() if pid not in self._looking.calling)

    def _resident(self, pid: int) -> int:
        try:
            text = (self._proc / str(pid) / "smaps_rollup").read_text()
            return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration, ValueError):  # it ended meanwhile, or a kernel before 4.14
            return 0


def _column(name: str, value: float) -> NDArray[Any]:
    return np.array([value], np.uint64 if CATALOGUE[name].type == "u8" else np.float64)
