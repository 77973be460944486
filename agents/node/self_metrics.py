"""The agent's own telemetry: state and latency of each collector, its CPU time and memory, its spools.

In the classes `collector` and `agent`, every 10 s (signals.md 2e). A change of a collector's state is sent
immediately, so that a hung driver is in the store with the next tick.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Device, Reading, SamplingSchedule
from agents.node.workers.pool import Worker, WorkerPool
from pipeline.model.signals import CATALOGUE

EVERY_S, MEMORY_EVERY_S = 10.0, 60.0
_STATES = CATALOGUE["collector.state"].states


class SelfMetrics:
    """Readings about the agent of `node`. proc: where /proc is mounted.

    cpu_time (s) and memory (bytes): the last values, None before the first.
    """

    def __init__(self, node: str, pool: WorkerPool, rhythm: SamplingSchedule, proc: Path = Path("/proc")) -> None:
        self._node, self._pool, self._rhythm, self._proc = node, pool, rhythm, proc
        self._tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
        self._ended_ms = 0.0
        self._running_ms: dict[int, float] = {}
        self.cpu_time: float | None = None
        self.memory: int | None = None

    def build_readings(self, changed: bool, extra: Mapping[str, float]) -> list[Reading]:
        """The readings that are due now; `changed` adds the collectors, `extra` are more signals of class agent."""
        found = []
        due = self._rhythm.due(EVERY_S)
        if changed or due:
            found.append(self._collector_reading())
        if due:
            spent = self._total_cpu_ms()
            self.cpu_time = spent / 1000
            values = {**extra, "agent.cpu_time": spent}
            if self._rhythm.due(MEMORY_EVERY_S):
                self.memory = self._total_memory()
                values["agent.memory"] = self.memory
            found.append(Reading("agent", (f"agent:{self._node}",), {k: _column(k, v) for k, v in values.items()}))
        return found

    def inventory(self) -> dict[str, Device]:
        """The agent and its collectors."""
        parents = (f"node:{self._node}",)
        found = {f"agent:{self._node}": Device(parents)}
        for worker in self._pool.workers:
            facts = {"place": "process" if worker.collector.isolated else "thread", "every": worker.collector.interval}
            found[self._entity(worker)] = Device(parents, facts)
        return found

    def _entity(self, worker: Worker) -> str:
        return f"collector:{self._node}.{worker.collector.name}"

    def _collector_reading(self) -> Reading:
        workers = self._pool.workers
        columns = {
            "collector.state": np.array([_STATES.index(w.state) for w in workers]),
            "collector.latency": np.array([w.latency for w in workers]),
            "collector.silence": np.array([w.silence for w in workers]),
            "collector.restarts": np.array([w.restarts for w in workers], np.uint32),
        }
        return Reading("collector", tuple(self._entity(w) for w in workers), columns)

    def _pids(self) -> list[int]:
        return [os.getpid(), *self._pool.pids]

    def _total_cpu_ms(self) -> float:
        """CPU time of all processes of the agent, including those that ended (up to their last measurement)."""
        now = {pid: spent for pid in self._pids() if (spent := self._process_cpu_ms(pid)) is not None}
        self._ended_ms += sum(spent for pid, spent in self._running_ms.items() if pid not in now)
        self._running_ms = now
        return round(self._ended_ms + sum(now.values()))

    def _process_cpu_ms(self, pid: int) -> float | None:
        """utime + stime, fields 14 and 15 of proc(5) stat; the process name before them ends at the last ')'."""
        try:
            words = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) * self._tick_ms
        except (OSError, IndexError, ValueError):  # it has ended
            return None

    def _total_memory(self) -> int:
        """Proportional set size. Workers in a call are excluded: the memory map of a hanging one may stay locked."""
        return sum(self._process_memory(pid) for pid in self._pids() if pid not in self._pool.busy_pids)

    def _process_memory(self, pid: int) -> int:
        try:
            text = (self._proc / str(pid) / "smaps_rollup").read_text()
            return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration, ValueError):  # it has ended, or a kernel before 4.14
            return 0


def _column(name: str, value: float) -> NDArray[Any]:
    return np.array([value], np.uint64 if CATALOGUE[name].type == "u8" else np.float64)
