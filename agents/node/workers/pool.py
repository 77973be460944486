"""Asks all collectors what is due at a tick, and waits for no one beyond the patience of that tick."""

from __future__ import annotations

import select
import time as clock_time
from collections.abc import Callable, Sequence
from dataclasses import replace

from agents.collector import Collector
from agents.node.workers.processes import RUNNING, Nursery
from agents.node.workers.read_server import Delivery
from agents.node.workers.worker import Worker, in_process

__all__ = ["Delivery", "Looking", "Worker"]


STOP_S = 0.25
"""How soon a wait notices that it shall stop; chosen, a fraction of the second in which the agent ends."""


class Looking:
    """The workers of one node. `interval` is that of the ticks in s. Made before the process has other threads."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        node: str,
        interval: float = 1.0,
        monotonic: Callable[[], float] = clock_time.monotonic,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._interval, self._monotonic = interval, monotonic
        self._node, self._nursery = node, Nursery()
        self.workers = [Worker(c, node, interval, monotonic, self._nursery) for c in collectors]
        self._settle(self.workers)
        self._before = monotonic()
        self._retired: set[int] = set()
        self._kept: dict[Worker, Delivery] = {}
        self._stopping = stopping

    @property
    def pids(self) -> list[int]:
        """The other processes: those of the workers, those in which a call was left behind, and who forks."""
        return sorted({*self._retired, self._nursery.pid, *(pid for w in self.workers for pid in w.pids)} - {0})

    @property
    def nursery(self) -> int:
        """Process id of the interpreter that forks for an agent with threads; 0 while there is none."""
        return self._nursery.pid

    @property
    def calling(self) -> set[int]:
        """Those of them in which a call is under way."""
        return {w.place.pid for w in self.workers if w.place is not None and w.busy}

    def tick(self, time: int, patience: float, tell: bool = False) -> dict[Worker, Delivery]:
        """What the workers bring within `patience` s, and what came late since the last tick."""
        self._age()
        late, self._kept = self._kept | self._taken([w for w in self.workers if w.busy]), {}
        due = [w for w in self.workers if w.due(time, tell)]
        self._settle(due)
        found = self.wait([w for w in due if w.ask(tell)], patience)
        self._tidy()
        return {w: both(late.get(w), found.get(w)) for w in self.workers if w in late or w in found}

    def mind(self) -> None:
        """Between ticks that are far apart: gives up what outlived its deadline. The next tick tells of it."""
        self._age()
        self._kept |= self._taken([w for w in self.workers if w.overdue])

    def wait(self, asked: Sequence[Worker], patience: float) -> dict[Worker, Delivery]:
        """Waits up to `patience` s for those that were asked, less if it shall stop."""
        found = self._taken(asked)
        until = clock_time.monotonic() + patience
        while (waiting := [w for w in asked if w.busy]) and (left := until - clock_time.monotonic()) > 0:
            if self._stopping():
                break
            poll = select.poll()
            for worker in waiting:
                if worker.place is not None:
                    poll.register(worker.place, select.POLLIN)
            poll.poll(min(left, STOP_S) * 1000)
            found |= self._taken(waiting)
        return found

    def close(self, timeout: float) -> None:
        """Lets the collectors close that do not hang, at most `timeout` s, and ends everything else."""
        until = clock_time.monotonic() + timeout
        for worker in self.workers:
            worker.end()
        for worker in self.workers:
            worker.ended(max(0.001, until - clock_time.monotonic()))
        self._nursery.close()

    def _settle(self, due: Sequence[Worker]) -> None:
        """Gives a place to those that have none: one process to a lane, another to each that must be alone."""
        for worker in due:
            if worker.place is None:
                if worker.collector.isolated and not worker.alone:
                    self._open_lane(worker.collector.lane)
                else:
                    worker.settle()

    def _open_lane(self, lane: str) -> None:
        """One process for all of a lane that have no place, also those whose next look comes later."""
        all_ = [w for w in self.workers if w.collector.isolated and w.collector.lane == lane and not w.alone]
        for worker in all_:
            if worker.place is not None and not worker.busy and worker.place.ended():
                worker.vacate()  # its process ended before its next look was due
        mates = [w for w in all_ if w.waiting]
        if not mates:  # whose process just ended has to wait for its turn
            return
        try:
            places = in_process([w.fresh() for w in mates], self._node, self._nursery)
        except OSError as error:
            for worker in mates:
                worker.unsettled(error)
            return
        for worker, place in zip(mates, places, strict=True):
            worker.place = place

    def _tidy(self) -> None:
        """Ends processes that are not needed: lanes that found nothing to measure, lanes in which a call was left.

        What a call does that was given up (it may spin) must not hurt the others of its lane: they move to a new one
        once their looks are done, and the old one is killed.
        """
        lanes: dict[int, list[Worker]] = {}
        for worker in self.workers:
            worker.forget_gone()
            if worker.place is not None and worker.place.pid:
                lanes.setdefault(worker.place.pid, []).append(worker)
        left = {pid for w in self.workers for pid in w.pids if w.place is None or w.place.pid != pid}
        for pid, mates in lanes.items():
            if pid in left or all(worker.state == "no data" for worker in mates):
                self._retired.add(pid)
                for worker in mates:
                    if not worker.busy:
                        worker.vacate()
        needed = {w.place.pid for w in self.workers if w.place is not None}
        self._retired |= left
        self._retired = {pid for pid in self._retired if pid in needed or self._nursery.end(pid) == RUNNING}
        self._nursery.reap()

    def _taken(self, workers: Sequence[Worker]) -> dict[Worker, Delivery]:
        return {w: d for w in workers if (d := w.take()) is not None}

    def _age(self) -> None:
        """A tick that came late (the machine slept, we were stopped) counts no more than two: no worker is blamed."""
        now = self._monotonic()
        for worker in self.workers:
            worker.age(min(now - self._before, 2 * self._interval))
        self._before = now


def both(late: Delivery | None, found: Delivery | None) -> Delivery:
    """A look that came late and the one of this tick as one delivery; of what both saw the newer holds."""
    if late is None or found is None:
        whole = found or late
        assert whole is not None
        return whole
    inventory = late.inventory if found.inventory is None else found.inventory
    return replace(found, readings=(*late.readings, *found.readings), inventory=inventory)
