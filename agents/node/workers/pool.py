"""Reads all collectors that are due at a tick, and waits no longer than the timeout of that tick."""

from __future__ import annotations

import select
import time as clock_time
from collections.abc import Callable, Sequence
from dataclasses import replace

from agents.collector import Collector
from agents.node.workers.processes import RUNNING, WorkerProcesses
from agents.node.workers.read_server import ReadResult
from agents.node.workers.worker import Worker, start_process

__all__ = ["ReadResult", "Worker", "WorkerPool"]


STOP_CHECK_S = 0.25
"""How often a wait checks whether the agent is stopping (s); chosen: a fraction of the second in which it ends."""


class WorkerPool:
    """The workers of one node. Made before the process has other threads (it forks). `interval`: of the ticks, in s.

    processes: those with a fork server that was forked earlier, if this process has threads by now.
    """

    def __init__(
        self,
        collectors: Sequence[Collector],
        node: str,
        interval: float = 1.0,
        monotonic: Callable[[], float] = clock_time.monotonic,
        stopping: Callable[[], bool] = lambda: False,
        processes: WorkerProcesses | None = None,
    ) -> None:
        self._interval, self._monotonic = interval, monotonic
        self._node, self._processes = node, processes or WorkerProcesses()
        self.workers = [Worker(c, node, interval, monotonic, self._processes) for c in collectors]
        self._start_missing(self.workers)
        self._before = monotonic()
        self._retired: set[int] = set()
        self._late_results: dict[Worker, ReadResult] = {}
        self._stopping = stopping

    @property
    def pids(self) -> list[int]:
        """All other processes of the agent: workers, abandoned workers and the fork server."""
        server = self._processes.fork_server_pid
        return sorted({*self._retired, server, *(pid for w in self.workers for pid in w.pids)} - {0})

    @property
    def fork_server_pid(self) -> int:
        """Process id of the fork server; 0 if there is none."""
        return self._processes.fork_server_pid

    @property
    def busy_pids(self) -> set[int]:
        """Processes in which a read is in progress."""
        return {w.client.pid for w in self.workers if w.client is not None and w.busy}

    def tick(self, time: int, timeout: float, with_inventory: bool = False) -> dict[Worker, ReadResult]:
        """The results that arrive within `timeout` s, and those that came late since the last tick."""
        self._add_waiting_time()
        late, self._late_results = self._late_results | self._collect_results([w for w in self.workers if w.busy]), {}
        due = [w for w in self.workers if w.is_due(time, with_inventory)]
        self._start_missing(due)
        found = self.wait_for([w for w in due if w.start_read(with_inventory)], timeout)
        self._end_unneeded()
        return {w: merge_results(late.get(w), found.get(w)) for w in self.workers if w in late or w in found}

    def drop_overdue(self) -> None:
        """Abandons reads beyond their deadline, between ticks that are far apart. The next tick returns them."""
        self._add_waiting_time()
        self._late_results |= self._collect_results([w for w in self.workers if w.overdue])

    def wait_for(self, workers: Sequence[Worker], timeout: float) -> dict[Worker, ReadResult]:
        """The results of `workers` that arrive within `timeout` s; returns earlier if the agent is stopping."""
        found = self._collect_results(workers)
        until = clock_time.monotonic() + timeout
        while (waiting := [w for w in workers if w.busy]) and (left := until - clock_time.monotonic()) > 0:
            if self._stopping():
                break
            poll = select.poll()
            for worker in waiting:
                if worker.client is not None:
                    poll.register(worker.client, select.POLLIN)
            poll.poll(min(left, STOP_CHECK_S) * 1000)
            found |= self._collect_results(waiting)
        return found

    def close(self, timeout: float) -> None:
        """Closes the collectors that do not hang, within `timeout` s, and ends everything else."""
        until = clock_time.monotonic() + timeout
        for worker in self.workers:
            worker.request_stop()
        for worker in self.workers:
            worker.wait_stopped(max(0.001, until - clock_time.monotonic()))
        self._processes.close()

    def _start_missing(self, due: Sequence[Worker]) -> None:
        """Starts workers that do not run: one process per lane, and one for each that needs its own."""
        for worker in due:
            if worker.client is None:
                if worker.collector.isolated and not worker.own_process:
                    self._start_lane(worker.collector.lane)
                else:
                    worker.start()

    def _start_lane(self, lane: str) -> None:
        """Starts one process for all workers of a lane that do not run, also for those that are not due yet."""
        all_ = [w for w in self.workers if w.collector.isolated and w.collector.lane == lane and not w.own_process]
        for worker in all_:
            if worker.client is not None and not worker.busy and worker.client.process_ended():
                worker.release()  # its process ended before its next read was due
        mates = [w for w in all_ if w.can_start]
        if not mates:  # a worker whose process just ended waits for its backoff
            return
        try:
            clients = start_process([w.new_collector() for w in mates], self._node, self._processes)
        except OSError as error:
            for worker in mates:
                worker.record_start_failure(error)
            return
        for worker, client in zip(mates, clients, strict=True):
            worker.client = client

    def _end_unneeded(self) -> None:
        """Ends unneeded processes: lanes without anything to measure, and lanes in which a call was abandoned.

        An abandoned call (it may spin) must not disturb the others of its lane. They move to a new process when their
        reads are done; then the old one is killed.
        """
        lanes: dict[int, list[Worker]] = {}
        for worker in self.workers:
            worker.drop_finished()
            if worker.client is not None and worker.client.pid:
                lanes.setdefault(worker.client.pid, []).append(worker)
        abandoned = {pid for w in self.workers for pid in w.pids if w.client is None or w.client.pid != pid}
        for pid, mates in lanes.items():
            if pid in abandoned or all(worker.state == "no data" for worker in mates):
                self._retired.add(pid)
                for worker in mates:
                    if not worker.busy:
                        worker.release()
        needed = {w.client.pid for w in self.workers if w.client is not None}
        self._retired |= abandoned
        self._retired = {pid for pid in self._retired if pid in needed or self._processes.kill(pid) == RUNNING}
        self._processes.reap()

    def _collect_results(self, workers: Sequence[Worker]) -> dict[Worker, ReadResult]:
        return {w: d for w in workers if (d := w.collect_result()) is not None}

    def _add_waiting_time(self) -> None:
        """Adds the time since the last call to reads in progress: at most two ticks.

        If the machine slept or the agent was stopped, no worker is at fault.
        """
        now = self._monotonic()
        for worker in self.workers:
            worker.add_waiting_time(min(now - self._before, 2 * self._interval))
        self._before = now


def merge_results(late: ReadResult | None, found: ReadResult | None) -> ReadResult:
    """A late result and that of this tick as one; if both have a value, the newer one is used."""
    if late is None or found is None:
        whole = found or late
        assert whole is not None
        return whole
    inventory = late.inventory if found.inventory is None else found.inventory
    return replace(found, readings=(*late.readings, *found.readings), inventory=inventory)
