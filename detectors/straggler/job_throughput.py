"""How whole jobs fare beside their own past, seen from the outside: what they send, how active, warm and fast they are.

In synchronous training all ranks share the step, so a job that is slower as a whole sends less in a second on all its
ports. Why shows elsewhere: waits and marks on its ports, clocks, I/O pressure, or SMs that wait with nothing to see.

What the ports of jobs tell each minute: bytes sent, and waits, marks and errors for them, against their own past.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.statistics import grouped_median
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.straggler.causes import clear_conditions
from detectors.straggler.gpu_placement import LEAST_PEERS, GpuPlacement
from detectors.straggler.pressure import Pressure
from pipeline.model.records import SECOND, Frame

SENT = "nic.tx_bytes"
WAITS = ("nic.port_tx_wait", "nic.rx_pause_duration")
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
ERRORS = ("nic.symbol_errors", "nic.crc_errors", "nic.ack_timeouts")
KINDS = (("wait for credits or under pause", WAITS), ("see congestion marks", MARKS))
"""What shows that a network is slow, in words, and the signals that tell it."""
_READ = (SENT, *WAITS, *MARKS, *ERRORS)
_ROWS = (slice(1, 1 + len(WAITS)), slice(1 + len(WAITS), 1 + len(WAITS) + len(MARKS)))
_FLOORS = (2e-6, 2e-10)
"""Waits and marks for a byte below which nothing waits: at a tenth of 400 Gb/s 1e4 ticks a second, which is less than a
percent of the time at every length of tick that is known, and one packet marked a second. Chosen."""
QUIET = 50e6
"""Bytes/s of a port, a thousandth of 400 Gb/s, that keep-alives and storage may send: its job makes no step. Chosen."""
DOUBLED = float(np.log(2.0))  # as link_congestion counts a port in excess
PORT_LEARN = 20  # looks before a port is judged: the replay contract
_GAIN = 1 / 240  # memory of four hours of what is normal; chosen
_PORT_SMOOTH = 0.3  # memory of about 3 looks of what is now; chosen
_LONGEST = 300.0  # s between two looks beyond which growth is an average of too much; chosen
_ARRAYS = ("last", "normal", "excess", "errs", "sent", "job", "count")


class JobPorts:
    """Arrays by port of the frame. excess: (2, N) of waits and marks, logarithm above the own past, smoothed.

    sent: bytes/s in the last look.   errs: 0 to 1, share of the last looks in which it erred.   job: slot, -1 none.
    """

    def __init__(self) -> None:
        self.last, self.normal, self.excess = np.empty((len(_READ), 0)), np.empty((2, 0)), np.empty((2, 0))
        self.errs, self.sent = np.empty(0), np.empty(0)
        self.job, self.count = np.empty(0, np.int64), np.empty(0, np.int64)
        self.time = 0

    def update(self, frame: Frame, job: NDArray[np.int64], calm: Bools) -> None:
        """Takes all counters. job: (N,) slot of each port's job, -1 none; calm: (slots,) jobs that are as ever."""
        n, seconds = len(frame.entities), (frame.time - self.time) / SECOND
        self._grow(n)
        self.count[:n][job != self.job[:n]] = 0  # what is normal for one job is not for another
        self.job[:n] = job
        now = np.stack([frame[name] for name in _READ])
        growth = np.where(now >= self.last[:, :n], now - self.last[:, :n], np.nan)
        self.last[:, :n] = now
        first, self.time = not self.time, frame.time
        if first or not 0 < seconds <= _LONGEST:
            self.sent[:n] = np.nan
            return
        rate = growth / seconds
        self.sent[:n] = rate[0]
        erred = (growth[_ROWS[1].stop :] > 0).any(axis=0)  # NaN: no
        self.errs[:n] += _PORT_SMOOTH * (erred - self.errs[:n])
        self._judge(rate, np.append(calm, True)[job])

    def _judge(self, rate: Floats, calm: Bools) -> None:
        """Waits and marks for each byte, against what is normal; nothing is learnt of a job that is slow."""
        n, count = rate.shape[1], self.count[: rate.shape[1]]
        sends = rate[0] >= QUIET
        for row, (rows, floor) in enumerate(zip(_ROWS, _FLOORS, strict=True)):
            amounts = rate[rows]
            known = np.isfinite(amounts)
            told = known.any(axis=0) & sends
            level = np.log(
                np.where(told, np.where(known, amounts, 0).sum(axis=0) / np.where(sends, rate[0], 1), 0) + floor
            )
            normal, excess = self.normal[row, :n], self.excess[row, :n]
            above = level - normal
            now = np.where(told & (count >= PORT_LEARN), above, 0.0)
            excess += _PORT_SMOOTH * (now - excess)
            learns = told & calm & ((count < PORT_LEARN) | (above < DOUBLED / 2))
            normal += np.where(learns, np.maximum(1 / (count + 1), _GAIN) * above, 0.0)
        count += sends

    def sent_by_job(self, at: NDArray[np.int64], jobs: int) -> Floats:
        """(jobs,) bytes/s of a port of each job: the median of its nodes, each the mean of its ports; NaN of none.

        at: (N,) number of each port's node.
        """
        sent = self.sent[: len(at)]
        known = np.flatnonzero((self.job[: len(at)] >= 0) & (at >= 0) & np.isfinite(sent))
        total, size = np.bincount(at[known], sent[known]), np.bincount(at[known])
        job = np.full(len(size), -1, np.int32)
        job[at[known]] = self.job[known]
        return median_by_job(total / np.where(size > 0, size, np.nan), job, jobs)

    def _grow(self, size: int) -> None:
        if (more := size - len(self.job)) > 0:
            wide = {"last": np.nan, "normal": 0.0, "excess": 0.0}
            for name, fill in wide.items():
                cells = getattr(self, name)
                setattr(self, name, np.concatenate([cells, np.full((len(cells), more), fill)], axis=1))
            self.errs, self.sent = np.append(self.errs, np.zeros(more)), np.append(self.sent, np.full(more, np.nan))
            self.job = np.append(self.job, np.full(more, -1, np.int64))
            self.count = np.append(self.count, np.zeros(more, np.int64))

    def snapshot(self) -> dict[str, Any]:
        return {"time": self.time, **{name: getattr(self, name).copy() for name in _ARRAYS}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.time = int(state["time"])
        for name in _ARRAYS:
            setattr(self, name, np.array(state[name]))


def median_by_job(values: Floats, job: NDArray[np.int32], jobs: int) -> Floats:
    """(jobs,) median of what each job's members show; NaN where nothing is known. job: -1 none."""
    median, _ = grouped_median(values, job)
    out, mine = np.full(jobs, np.nan), job >= 0
    out[job[mine]] = median[mine]
    return out


JOB_EVERY = 60 * SECOND
"""How often jobs are looked at: some steps of a large one. Chosen."""
NUMBERS = ("sent", "active", "power", "clock", "capped", "io")
_SMOOTH, _LEARNING = 0.3, 0.02  # memory of about 3 looks of what is now, and of 50 of what is usual; chosen
_LEAST_NODES = 2  # what one node does alone shows on no port; chosen
_STALE = 300 * SECOND  # after so long without a step its sums begin anew; chosen: five looks
_STAYS = 4 * 3600 * SECOND
"""A job that was so for this long is like this now: its owner changed it, or nobody minds. Chosen: half a shift."""
STILL_SLOWER = 0.05  # share by which a job must be slower now, too: half of what matters; as straggler_job
_MOST = 0.5  # of a job's GPUs that must work for it to be judged; chosen
_LEFT_OUT = 0.1  # share of its GPUs that throttle, above which a job is not judged: that is an event of its own; chosen


class JobThroughput:
    """One cell per job slot. A part() of a detector. `jobs`: job -> slot."""

    def __init__(self) -> None:
        self.ports, self.io = JobPorts(), Pressure("node.io_pressure")
        self.sent, self.active = Streams(Channel(0.02, 0.10)), Streams(Channel(0.02, 0.10))
        self.now = {name: np.empty(0) for name in NUMBERS}
        self.usual = {name: np.empty(0) for name in NUMBERS}
        self.count, self.since, self.seen = (np.empty(0, np.int64) for _ in range(3))
        self.jobs: dict[str, int] = {}
        self.looked = 0
        self._key: tuple[object, ...] = ()
        self._at = np.empty(0, np.int64)

    def is_due(self, time: int) -> bool:
        return not 0 <= time - self.looked < JOB_EVERY

    def update(
        self,
        frames: Mapping[str, Frame],
        seats: GpuPlacement,
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
        slots = self._assign_slots(seats, started)
        self.looked, time = gpus.time, gpus.time
        of, size = slots[seats.job], len(self.count)
        of_node = self._job_by_node(seats, of)
        if (nics := frames.get("nic")) is not None:
            at = self._node_by_port(nics, gpus, seats)
            self.ports.update(nics, of_node[at], self.sent.cells[kernel.UP, :size] <= 2)
        mine = np.where(at_work & ~throttled, of, -1).astype(np.int32)
        found = {name: median_by_job(shown[name], mine, size) for name in ("active", "clock")}
        found["sent"] = self.ports.sent_by_job(self._at, size) if nics is not None else np.full(size, np.nan)
        found |= {name: _mean(shown[name], mine, size) for name in ("power", "capped")}
        found["io"] = self._io_by_job(seats, of_node, size)
        if "node" in frames:
            self.io.update(frames["node"])
        for name, values in found.items():
            last = self.now[name]
            mean = np.where(np.isfinite(last), last + _SMOOTH * (values - last), values)
            last[:] = np.where(np.isfinite(mean), mean, last)
        self._judge(found, self._find_judgeable(of, at_work, throttled, barred, of_node), time)

    def _find_judgeable(
        self, of: NDArray[np.int64], at_work: Bools, throttled: Bools, barred: Bools, alone: NDArray[np.int64]
    ) -> Bools:
        """(slots,) jobs of several nodes that may be judged: most of their GPUs work, few throttle, none is barred."""
        size, mine = len(self.count), of >= 0
        total = np.bincount(of[mine], minlength=size)
        busy = np.bincount(of[mine & at_work], minlength=size)
        stopped = np.bincount(of[mine & barred], minlength=size) > 0
        stopped |= np.bincount(of[mine & throttled], minlength=size) > _LEFT_OUT * total
        several = np.bincount(alone[alone >= 0], minlength=size) >= _LEAST_NODES
        return np.asarray(several & (total >= LEAST_PEERS) & (busy > _MOST * total) & ~stopped)

    def _judge(self, found: Mapping[str, Floats], fit: Bools, time: int) -> None:
        sent, active = found["sent"], found["active"]
        steps = fit & ~(sent < QUIET)  # a job that sends nothing makes no step: others tell of that
        with np.errstate(divide="ignore", invalid="ignore"):
            less = -np.log(np.stack([sent, active]))
        alone = np.full(len(fit), -1, np.int32)
        rested = np.flatnonzero((self.seen > 0) & (time - self.seen > _STALE) & steps).tolist()
        if rested:
            clear_conditions(self.sent, rested)
            clear_conditions(self.active, rested)
        self.seen[steps] = time
        for streams, values in zip((self.sent, self.active), less, strict=True):
            streams.step(values, alone, time, steps)
        size = len(fit)
        up = np.where(np.isfinite(sent), self.sent.cells[kernel.UP, :size], self.active.cells[kernel.UP, :size])
        late, usual = (np.where(np.isfinite(sent), c["sent"], c["active"]) for c in (self.now, self.usual))
        self.since[(up <= 0) | (late > (1 - STILL_SLOWER) * usual)] = time
        learns = steps & (up <= 2)
        self.count += learns
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * learns
        for name in NUMBERS:
            moved = self.usual[name] + gain * (self.now[name] - self.usual[name])
            self.usual[name] = np.where(np.isfinite(moved), moved, self.usual[name])
        self.reset(np.flatnonzero(time - self.since > _STAYS))

    def slow_jobs(self) -> list[tuple[str, int]]:
        """Jobs that are slower than their own past, with their slots."""
        size = len(self.count)
        on = np.where(self.judged_by_traffic(), _on(self.sent, size), _on(self.active, size)) & (self.count >= LEARN)
        return [(name, slot) for name, slot in sorted(self.jobs.items()) if on[slot]] if on.any() else []

    def judged_by_traffic(self) -> Bools:
        """(slots,) jobs whose traffic tells their pace."""
        return np.asarray((self.usual["sent"] > 0) & np.isfinite(self.now["sent"]))

    def _io_by_job(self, seats: GpuPlacement, of_node: NDArray[np.int64], size: int) -> Floats:
        """(slots,) share of the time in which tasks wait for I/O, the median of a job's nodes."""
        shares = np.array([self.io.share_of(node) for node in seats.nodes])
        return median_by_job(shares, of_node[:-1].astype(np.int32), size)

    def _job_by_node(self, seats: GpuPlacement, of: NDArray[np.int64]) -> NDArray[np.int64]:
        """(nodes + 1,) slot of the job that has a node for itself, -1 none; the last serves who is on no node."""
        least = np.full(len(seats.nodes) + 1, np.iinfo(np.int64).max)
        most = np.full(len(seats.nodes) + 1, -1)
        np.minimum.at(least, seats.node, np.where(of >= 0, of, least[0]))
        np.maximum.at(most, seats.node, of)
        most[most != least] = -1
        most[-1] = -1
        return most

    def _node_by_port(self, nics: Frame, gpus: Frame, seats: GpuPlacement) -> NDArray[np.int64]:
        """(ports,) number of each port's node, -1 none."""
        key = (id(nics.topology), nics.topology.version, len(nics.entities), len(gpus.entities))
        if key != self._key:
            number = {name: i for i, name in enumerate(seats.nodes)}
            above = nics.topology.ancestor_of_kind
            self._at = np.array([number.get(above(e, "node") or "", -1) for e in nics.entities], np.int64)
            self._key = key
        return self._at

    def _assign_slots(self, seats: GpuPlacement, started: Callable[[str], int | None]) -> NDArray[np.int64]:
        """(jobs + 1,) slot of each of the seats' jobs, the last, -1, of none; jobs that begin anew learn anew."""
        for job in self.jobs.keys() - set(seats.jobs):
            del self.jobs[job]
        free = iter(sorted(set(range(len(seats.jobs) + len(self.count))) - set(self.jobs.values())))
        fresh = [self.jobs.setdefault(job, next(free)) for job in seats.jobs if job not in self.jobs]
        self._grow(1 + max(self.jobs.values(), default=-1))
        anew = [slot for job, slot in self.jobs.items() if (started(job) or 0) > self.looked]
        self.reset(np.array([*fresh, *anew], np.intp))
        return np.array([*(self.jobs[job] for job in seats.jobs), -1], np.int64)

    def reset(self, slots: NDArray[np.intp]) -> None:
        """Jobs that begin anew, or are otherwise from now on."""
        if not len(slots):
            return
        mask = np.zeros(len(self.count), bool)
        mask[slots] = True
        for streams in (self.sent, self.active):
            streams.reset(mask)
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
