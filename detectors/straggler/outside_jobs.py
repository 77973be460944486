"""How whole jobs fare beside their own past, seen from the outside: what they send, how active, warm and fast they are.

In synchronous training all ranks share the step, so a job that is slower as a whole sends less in a second on all its
ports. Why shows elsewhere: waits and marks on its ports, clocks, I/O pressure, or SMs that wait with nothing to see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.straggler.causes import calm
from detectors.straggler.ports import QUIET, Ports, median_by_job
from detectors.straggler.pressure import Pressure
from detectors.straggler.seats import PEERS, Seats
from pipeline.records import SECOND, Frame

LOOK = 60 * SECOND
"""How often jobs are looked at: some steps of a large one. Chosen."""
NUMBERS = ("sent", "active", "power", "clock", "capped", "io")
_SMOOTH, _LEARNING = 0.3, 0.02  # memory of about 3 looks of what is now, and of 50 of what is usual; chosen
_LEAST_NODES = 2  # what one node does alone shows on no port; chosen
_STALE = 300 * SECOND  # after so long without a step its sums begin anew; chosen: five looks
_STAYS = 4 * 3600 * SECOND
"""A job that was so for this long is like this now: its owner changed it, or nobody minds. Chosen: half a shift."""
STILL = 0.05  # share by which a job must be slower now, too: half of what matters; as straggler_job
_MOST = 0.5  # of a job's GPUs that must work for it to be judged; chosen
_LEFT_OUT = 0.1  # share of its GPUs that throttle, above which a job is not judged: that is an event of its own; chosen


class JobsOutside:
    """One cell per job slot. A part() of a detector. `jobs`: job -> slot."""

    def __init__(self) -> None:
        self.ports, self.io = Ports(), Pressure("node.io_pressure")
        self.sent, self.active = Streams(Channel(0.02, 0.10)), Streams(Channel(0.02, 0.10))
        self.now = {name: np.empty(0) for name in NUMBERS}
        self.usual = {name: np.empty(0) for name in NUMBERS}
        self.count, self.since, self.seen = (np.empty(0, np.int64) for _ in range(3))
        self.jobs: dict[str, int] = {}
        self.looked = 0
        self._key: tuple[object, ...] = ()
        self._at = np.empty(0, np.int64)

    def due(self, time: int) -> bool:
        return not 0 <= time - self.looked < LOOK

    def look(
        self,
        frames: Mapping[str, Frame],
        seats: Seats,
        shown: Mapping[str, Floats],
        at_work: Bools,
        throttled: Bools,
        barred: Bools,
        started: Callable[[str], int | None],
    ) -> None:
        """Takes the numbers of an instant.

        shown: (N,) what GPUs show; at_work: who works; throttled: left out of that; barred: whose job may not
        be judged; started: when a job began, if told.
        """
        gpus = frames["gpu"]
        slots = self._slots(seats, started)
        self.looked, time = gpus.time, gpus.time
        of, size = slots[seats.job], len(self.count)
        of_node = self._job_of_nodes(seats, of)
        if (nics := frames.get("nic")) is not None:
            at = self._nodes_of(nics, gpus, seats)
            self.ports.look(nics, of_node[at], self.sent.cells[kernel.UP, :size] <= 2)
        mine = np.where(at_work & ~throttled, of, -1).astype(np.int32)
        found = {name: median_by_job(shown[name], mine, size) for name in ("active", "clock")}
        found["sent"] = self.ports.of_jobs(self._at, size) if nics is not None else np.full(size, np.nan)
        found |= {name: _mean(shown[name], mine, size) for name in ("power", "capped")}
        found["io"] = self._io_of(seats, of_node, size)
        if "node" in frames:
            self.io.take(frames["node"])
        for name, values in found.items():
            last = self.now[name]
            mean = np.where(np.isfinite(last), last + _SMOOTH * (values - last), values)
            last[:] = np.where(np.isfinite(mean), mean, last)
        self._judge(found, self._fit(of, at_work, throttled, barred, of_node), time)

    def _fit(
        self, of: NDArray[np.int64], at_work: Bools, throttled: Bools, barred: Bools, alone: NDArray[np.int64]
    ) -> Bools:
        """(slots,) jobs of several nodes that may be judged: most of their GPUs work, few throttle, none is barred."""
        size, mine = len(self.count), of >= 0
        total = np.bincount(of[mine], minlength=size)
        busy = np.bincount(of[mine & at_work], minlength=size)
        stopped = np.bincount(of[mine & barred], minlength=size) > 0
        stopped |= np.bincount(of[mine & throttled], minlength=size) > _LEFT_OUT * total
        several = np.bincount(alone[alone >= 0], minlength=size) >= _LEAST_NODES
        return np.asarray(several & (total >= PEERS) & (busy > _MOST * total) & ~stopped)

    def _judge(self, found: Mapping[str, Floats], fit: Bools, time: int) -> None:
        sent, active = found["sent"], found["active"]
        steps = fit & ~(sent < QUIET)  # a job that sends nothing makes no step: others tell of that
        with np.errstate(divide="ignore", invalid="ignore"):
            less = -np.log(np.stack([sent, active]))
        alone = np.full(len(fit), -1, np.int32)
        rested = np.flatnonzero((self.seen > 0) & (time - self.seen > _STALE) & steps).tolist()
        if rested:
            calm(self.sent, rested)
            calm(self.active, rested)
        self.seen[steps] = time
        for streams, values in zip((self.sent, self.active), less, strict=True):
            streams.step(values, alone, time, steps)
        size = len(fit)
        up = np.where(np.isfinite(sent), self.sent.cells[kernel.UP, :size], self.active.cells[kernel.UP, :size])
        late, usual = (np.where(np.isfinite(sent), c["sent"], c["active"]) for c in (self.now, self.usual))
        self.since[(up <= 0) | (late > (1 - STILL) * usual)] = time
        learns = steps & (up <= 2)
        self.count += learns
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * learns
        for name in NUMBERS:
            moved = self.usual[name] + gain * (self.now[name] - self.usual[name])
            self.usual[name] = np.where(np.isfinite(moved), moved, self.usual[name])
        self.forget(np.flatnonzero(time - self.since > _STAYS))

    def slow(self) -> list[tuple[str, int]]:
        """Jobs that are slower than their own past, with their slots."""
        size = len(self.count)
        on = np.where(self.sends(), _on(self.sent, size), _on(self.active, size)) & (self.count >= LEARN)
        return [(name, slot) for name, slot in sorted(self.jobs.items()) if on[slot]] if on.any() else []

    def sends(self) -> Bools:
        """(slots,) jobs whose traffic tells their pace."""
        return np.asarray((self.usual["sent"] > 0) & np.isfinite(self.now["sent"]))

    def _io_of(self, seats: Seats, of_node: NDArray[np.int64], size: int) -> Floats:
        """(slots,) share of the time in which tasks wait for I/O, the median of a job's nodes."""
        shares = np.array([self.io.of(node) for node in seats.nodes])
        return median_by_job(shares, of_node[:-1].astype(np.int32), size)

    def _job_of_nodes(self, seats: Seats, of: NDArray[np.int64]) -> NDArray[np.int64]:
        """(nodes + 1,) slot of the job that has a node for itself, -1 none; the last serves who is on no node."""
        least = np.full(len(seats.nodes) + 1, np.iinfo(np.int64).max)
        most = np.full(len(seats.nodes) + 1, -1)
        np.minimum.at(least, seats.node, np.where(of >= 0, of, least[0]))
        np.maximum.at(most, seats.node, of)
        most[most != least] = -1
        most[-1] = -1
        return most

    def _nodes_of(self, nics: Frame, gpus: Frame, seats: Seats) -> NDArray[np.int64]:
        """(ports,) number of each port's node, -1 none."""
        key = (id(nics.topology), nics.topology.version, len(nics.entities), len(gpus.entities))
        if key != self._key:
            number = {name: i for i, name in enumerate(seats.nodes)}
            above = nics.topology.above_of_kind
            self._at = np.array([number.get(above(e, "node") or "", -1) for e in nics.entities], np.int64)
            self._key = key
        return self._at

    def _slots(self, seats: Seats, started: Callable[[str], int | None]) -> NDArray[np.int64]:
        """(jobs + 1,) slot of each of the seats' jobs, the last, -1, of none; jobs that begin anew learn anew."""
        for job in self.jobs.keys() - set(seats.jobs):
            del self.jobs[job]
        free = iter(sorted(set(range(len(seats.jobs) + len(self.count))) - set(self.jobs.values())))
        fresh = [self.jobs.setdefault(job, next(free)) for job in seats.jobs if job not in self.jobs]
        self._grow(1 + max(self.jobs.values(), default=-1))
        anew = [slot for job, slot in self.jobs.items() if (started(job) or 0) > self.looked]
        self.forget(np.array([*fresh, *anew], np.intp))
        return np.array([*(self.jobs[job] for job in seats.jobs), -1], np.int64)

    def forget(self, slots: NDArray[np.intp]) -> None:
        """Jobs that begin anew, or are otherwise from now on."""
        if not len(slots):
            return
        mask = np.zeros(len(self.count), bool)
        mask[slots] = True
        for streams in (self.sent, self.active):
            streams.forget(mask)
        self.count[slots], self.since[slots], self.seen[slots] = 0, self.looked, 0
        for name in NUMBERS:
            self.usual[name][slots], self.now[name][slots] = 0.0, np.nan

    def _grow(self, size: int) -> None:
        if (more := size - len(self.count)) > 0:
            self.count, self.since, self.seen = (
                np.append(cells, np.zeros(more, np.int64)) for cells in (self.count, self.since, self.seen)
            )
            self.usual = {name: np.append(cells, np.zeros(more)) for name, cells in self.usual.items()}
            self.now = {name: np.append(cells, np.full(more, np.nan)) for name, cells in self.now.items()}

    def snapshot(self) -> dict[str, Any]:
        pieces = {name: getattr(self, name).snapshot() for name in ("ports", "io", "sent", "active")}
        return {**pieces, **{name: getattr(self, name) for name in _PLAIN}}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("ports", "io", "sent", "active"):
            getattr(self, name).restore(state[name])
        for name in _PLAIN:
            setattr(self, name, state[name])
        self._key = ()


_PLAIN = ("now", "usual", "count", "since", "seen", "jobs", "looked")


def _on(streams: Streams, size: int) -> Bools:
    return np.asarray((streams.cells[kernel.WORD, :size].view(np.uint32) & kernel.ON_UP) != 0)


def _mean(values: Floats, of: NDArray[np.int32], jobs: int) -> Floats:
    known = (of >= 0) & np.isfinite(values)
    size = np.bincount(of[known], minlength=jobs)
    return np.asarray(np.bincount(of[known], values[known], jobs) / np.where(size > 0, size, np.nan))
