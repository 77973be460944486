"""Throughput of whole jobs against their own past, seen from outside: bytes sent, SM activity, power, clocks, I/O wait.

In synchronous training all ranks share the step, so a job that is slower as a whole sends less per second on all its
ports. The cause shows elsewhere: waits and marks on its ports, clocks, I/O pressure, or SMs that wait for no visible
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.state import N, State, memory, notes, part
from detectors.base.statistics import grouped_median
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.straggler.causes import clear_conditions
from detectors.straggler.gpu_placement import LEAST_PEERS, GpuPlacement
from detectors.straggler.pressure import Pressure
from pipeline.model.records import SECOND, Frame

Ints = NDArray[np.int64]
SENT = "nic.tx_bytes"
WAITS = ("nic.port_tx_wait", "nic.rx_pause_duration")
MARKS = ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
ERRORS = ("nic.symbol_errors", "nic.crc_errors", "nic.ack_timeouts")
KINDS = (("wait for credits or under pause", WAITS), ("see congestion marks", MARKS))
"""What shows that a network is slow, in words, and its signals."""
_READ = (SENT, *WAITS, *MARKS, *ERRORS)
_ROWS = (slice(1, 1 + len(WAITS)), slice(1 + len(WAITS), 1 + len(WAITS) + len(MARKS)))
_FLOORS = (2e-6, 2e-10)
"""Waits and marks per byte that count as none: at a tenth of 400 Gb/s 1e4 ticks a second, which is less than a percent
of the time at every known length of a tick, and one packet marked a second. Chosen."""
QUIET = 50e6
"""Bytes/s of a port, a thousandth of 400 Gb/s, that keep-alives and storage may send: its job makes no step. Chosen."""
DOUBLED = float(np.log(2.0))  # ln of the excess of a port, as in link_congestion
PORT_LEARN = 20  # updates before a port is judged: the replay contract
_GAIN = 1 / 240  # of the normal value: memory of four hours; chosen
_SMOOTH = 0.3  # gain of the present value: memory of about 3 updates; chosen
_LONGEST = 300.0  # s between two updates beyond which growth is an average of too much; chosen
JOB_EVERY = 60 * SECOND
"""us between two updates: some steps of a large job. Chosen."""
NUMBERS = ("sent", "active", "power", "clock", "capped", "io")
_LEARNING = 0.02  # gain of the usual value: memory of 50 updates; chosen
_LEAST_NODES = 2  # nodes of a job: a job on one node shows on no port; chosen
_STALE = 300 * SECOND  # us without a step after which its sums restart; chosen: five updates
_STAYS = 4 * 3600 * SECOND
"""us after which a slower job is at its usual throughput: its owner changed it, or accepts it. Chosen: half a shift."""
STILL_SLOWER = 0.05  # share by which a job must be slower now, too: half of what matters; as in straggler_job
_MOST = 0.5  # share of a job's GPUs that must work for it to be judged; chosen
_LEFT_OUT = 0.1  # share of its GPUs that throttle, above which a job is not judged: that is its own event; chosen


@dataclass
class JobMeasure(State):
    """One measure by job slot: its value now, smoothed, and its usual value."""

    now: Floats = memory(np.nan)
    usual: Floats = memory(0.0)

    def follow(self, values: Floats) -> None:
        """Adds a value of each job; NaN changes nothing."""
        last = self.now
        mean = np.where(np.isfinite(last), last + _SMOOTH * (values - last), values)
        last[:] = np.where(np.isfinite(mean), mean, last)

    def learn(self, gain: Floats) -> None:
        """Moves the usual value towards the present one by a share."""
        moved = self.usual + gain * (self.now - self.usual)
        self.usual = np.where(np.isfinite(moved), moved, self.usual)

    def restart(self, slots: NDArray[np.intp]) -> None:
        """Resets the values of some jobs."""
        self.usual[slots], self.now[slots] = 0.0, np.nan


@dataclass
class JobPorts(State):
    """Arrays by port of the frame. last: newest counters.   normal: ln of waits and marks per byte, as learned.

    excess: (2, N) of waits and marks, ln above normal, smoothed.   sent: newest bytes/s.   job: slot, -1 none.
    errs: 0 to 1, smoothed share of the updates with an error.   count: updates learned from.
    """

    last: Floats = memory(np.nan, shape=(len(_READ), N))
    normal: Floats = memory(0.0, shape=(2, N))
    excess: Floats = memory(0.0, shape=(2, N))
    errs: Floats = memory(0.0)
    sent: Floats = memory(np.nan)
    job: Ints = memory(-1, np.int64)
    count: Ints = memory(0, np.int64)
    time: int = notes(int)

    def update(self, frame: Frame, job: Ints, calm: Bools) -> None:
        """Adds all counters. job: (N,) slot of each port's job, -1 none; calm: (slots,) jobs that are not slow."""
        n, seconds = len(frame.entities), (frame.time - self.time) / SECOND
        self.grow(n)
        self.count[:n][job != self.job[:n]] = 0  # the normal of one job is not that of another
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
        erred = (growth[_ROWS[1].stop :] > 0).any(axis=0)  # False for NaN
        self.errs[:n] += _SMOOTH * (erred - self.errs[:n])
        self._judge(rate, np.append(calm, True)[job])

    def _judge(self, rate: Floats, calm: Bools) -> None:
        """Compares waits and marks per byte with their normal value; learns nothing of a job that is slow."""
        n, count = rate.shape[1], self.count[: rate.shape[1]]
        sends = rate[0] >= QUIET
        for row, (rows, floor) in enumerate(zip(_ROWS, _FLOORS, strict=True)):
            amounts = rate[rows]
            finite = np.isfinite(amounts)
            known = finite.any(axis=0) & sends
            per_byte = np.where(finite, amounts, 0).sum(axis=0) / np.where(sends, rate[0], 1)
            level = np.log(np.where(known, per_byte, 0) + floor)
            normal, excess = self.normal[row, :n], self.excess[row, :n]
            above = level - normal
            now = np.where(known & (count >= PORT_LEARN), above, 0.0)
            excess += _SMOOTH * (now - excess)
            learns = known & calm & ((count < PORT_LEARN) | (above < DOUBLED / 2))
            normal += np.where(learns, np.maximum(1 / (count + 1), _GAIN) * above, 0.0)
        count += sends

    def sent_by_job(self, at: Ints, jobs: int) -> Floats:
        """Returns (jobs,) bytes/s of a port of each job: the median of its nodes, each the mean of its ports; NaN
        without any. at: (N,) number of each port's node."""
        sent = self.sent[: len(at)]
        known = np.flatnonzero((self.job[: len(at)] >= 0) & (at >= 0) & np.isfinite(sent))
        total, size = np.bincount(at[known], sent[known]), np.bincount(at[known])
        job = np.full(len(size), -1, np.int32)
        job[at[known]] = self.job[known]
        return median_by_job(total / np.where(size > 0, size, np.nan), job, jobs)


def median_by_job(values: Floats, job: NDArray[np.int32], jobs: int) -> Floats:
    """Returns (jobs,) median of the values of each job's members; NaN without any. job: -1 none."""
    median, _ = grouped_median(values, job)
    out, known = np.full(jobs, np.nan), job >= 0
    out[job[known]] = median[known]
    return out


@dataclass
class JobThroughput(State):
    """By job slot. count: updates learned from.   since: since when it is slow.   stepped_at: last update with a step.

    jobs: job -> slot.   measures: by name of NUMBERS.
    """

    ports: JobPorts = part(JobPorts, of="nic")
    io: Pressure = part(lambda: Pressure("node.io_pressure"), of="node")
    sent: Streams = part(lambda: Streams(Channel(0.02, 0.10)))
    active: Streams = part(lambda: Streams(Channel(0.02, 0.10)))
    measures: dict[str, JobMeasure] = part(lambda: {name: JobMeasure() for name in NUMBERS})
    count: Ints = memory(0, np.int64)
    since: Ints = memory(0, np.int64)
    stepped_at: Ints = memory(0, np.int64)
    jobs: dict[str, int] = notes()
    updated_at: int = notes(int)
    _key: tuple[object, ...] = field(default=(), init=False, repr=False)
    _node_of_port: Ints = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)

    def is_due(self, time: int) -> bool:
        """Returns whether it is time for an update."""
        return not 0 <= time - self.updated_at < JOB_EVERY

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the nodes of the ports are found with the next frame."""
        super().restore(state)
        self._key = ()

    def update(
        self,
        frames: Mapping[str, Frame],
        placement: GpuPlacement,
        shown: Mapping[str, Floats],
        at_work: Bools,
        throttled: Bools,
        barred: Bools,
        started: Callable[[str], int | None],
    ) -> None:
        """Adds the numbers of an instant.

        shown: (N,) measures of the GPUs.   at_work: working GPUs.   throttled: left out.   barred: of jobs that may not
        be judged.   started: returns when a job started, None if that is not known.
        """
        gpus = frames["gpu"]
        slots = self._assign_slots(placement, started)
        self.updated_at, time = gpus.time, gpus.time
        job, size = slots[placement.job], len(self.count)
        job_of_node = self._job_by_node(placement, job)
        if (nics := frames.get("nic")) is not None:
            at = self._node_by_port(nics, gpus, placement)
            self.ports.update(nics, job_of_node[at], self.sent.cells[kernel.UP, :size] <= 2)
        counted = np.where(at_work & ~throttled, job, -1).astype(np.int32)
        found = {name: median_by_job(shown[name], counted, size) for name in ("active", "clock")}
        found["sent"] = self.ports.sent_by_job(self._node_of_port, size) if nics is not None else np.full(size, np.nan)
        found |= {name: _mean_by_job(shown[name], counted, size) for name in ("power", "capped")}
        found["io"] = self._io_by_job(placement, job_of_node, size)
        if "node" in frames:
            self.io.update(frames["node"])
        for name, values in found.items():
            self.measures[name].follow(values)
        self._judge(found, self._find_judgeable(job, at_work, throttled, barred, job_of_node), time)

    def _find_judgeable(self, job: Ints, at_work: Bools, throttled: Bools, barred: Bools, job_of_node: Ints) -> Bools:
        """Returns (slots,) jobs of several nodes that may be judged: most GPUs work, few throttle, none is barred."""
        size, known = len(self.count), job >= 0
        total = np.bincount(job[known], minlength=size)
        busy = np.bincount(job[known & at_work], minlength=size)
        stopped = np.bincount(job[known & barred], minlength=size) > 0
        stopped |= np.bincount(job[known & throttled], minlength=size) > _LEFT_OUT * total
        several = np.bincount(job_of_node[job_of_node >= 0], minlength=size) >= _LEAST_NODES
        return np.asarray(several & (total >= LEAST_PEERS) & (busy > _MOST * total) & ~stopped)

    def _judge(self, found: Mapping[str, Floats], judgeable: Bools, time: int) -> None:
        sent, active = found["sent"], found["active"]
        steps = judgeable & ~(sent < QUIET)  # a job that sends nothing makes no step: straggler_job reports that
        with np.errstate(divide="ignore", invalid="ignore"):
            less = -np.log(np.stack([sent, active]))
        alone = np.full(len(judgeable), -1, np.int32)
        rested = np.flatnonzero((self.stepped_at > 0) & (time - self.stepped_at > _STALE) & steps).tolist()
        if rested:
            clear_conditions(self.sent, rested)
            clear_conditions(self.active, rested)
        self.stepped_at[steps] = time
        for streams, values in zip((self.sent, self.active), less, strict=True):
            streams.step(values, alone, time, steps)
        size, traffic = len(judgeable), np.isfinite(sent)
        up = np.where(traffic, self.sent.cells[kernel.UP, :size], self.active.cells[kernel.UP, :size])
        by_sent, by_active = self.measures["sent"], self.measures["active"]
        late = np.where(traffic, by_sent.now, by_active.now)
        usual = np.where(traffic, by_sent.usual, by_active.usual)
        self.since[(up <= 0) | (late > (1 - STILL_SLOWER) * usual)] = time
        learns = steps & (up <= 2)
        self.count += learns
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * learns
        for measure in self.measures.values():
            measure.learn(gain)
        self.reset_jobs(np.flatnonzero(time - self.since > _STAYS))

    def slow_jobs(self) -> list[tuple[str, int]]:
        """Returns (job, slot) of jobs that are slower than their own past."""
        size = len(self.count)
        on = np.where(self.judged_by_traffic(), _is_on(self.sent, size), _is_on(self.active, size))
        on &= self.count >= LEARN
        return [(name, slot) for name, slot in sorted(self.jobs.items()) if on[slot]] if on.any() else []

    def judged_by_traffic(self) -> Bools:
        """Returns (slots,) jobs whose traffic shows their pace."""
        sent = self.measures["sent"]
        return np.asarray((sent.usual > 0) & np.isfinite(sent.now))

    def _io_by_job(self, placement: GpuPlacement, job_of_node: Ints, size: int) -> Floats:
        """Returns (slots,) share of the time in which tasks wait for I/O, the median of a job's nodes."""
        shares = np.array([self.io.share_of(node) for node in placement.nodes])
        return median_by_job(shares, job_of_node[:-1].astype(np.int32), size)

    def _job_by_node(self, placement: GpuPlacement, job: Ints) -> Ints:
        """Returns (nodes + 1,) slot of the job that has a node alone, -1 none; the last is for GPUs without a node."""
        least = np.full(len(placement.nodes) + 1, np.iinfo(np.int64).max)
        most = np.full(len(placement.nodes) + 1, -1)
        np.minimum.at(least, placement.node, np.where(job >= 0, job, least[0]))
        np.maximum.at(most, placement.node, job)
        most[most != least] = -1
        most[-1] = -1
        return most

    def _node_by_port(self, nics: Frame, gpus: Frame, placement: GpuPlacement) -> Ints:
        """Returns (ports,) number of each port's node, -1 none."""
        key = (id(nics.topology), nics.topology.version, len(nics.entities), len(gpus.entities))
        if key != self._key:
            number = {name: i for i, name in enumerate(placement.nodes)}
            above = nics.topology.ancestor_of_kind
            self._node_of_port = np.array([number.get(above(e, "node") or "", -1) for e in nics.entities], np.int64)
            self._key = key
        return self._node_of_port

    def _assign_slots(self, placement: GpuPlacement, started: Callable[[str], int | None]) -> Ints:
        """Returns (jobs + 1,) slot of each job, the last, -1, for none; jobs that start again learn again."""
        for job in self.jobs.keys() - set(placement.jobs):
            del self.jobs[job]
        free = iter(sorted(set(range(len(placement.jobs) + len(self.count))) - set(self.jobs.values())))
        fresh = [self.jobs.setdefault(job, next(free)) for job in placement.jobs if job not in self.jobs]
        self.grow(1 + max(self.jobs.values(), default=-1))
        for measure in self.measures.values():
            measure.grow(len(self.count))
        restarted = [slot for job, slot in self.jobs.items() if (started(job) or 0) > self.updated_at]
        self.reset_jobs(np.array([*fresh, *restarted], np.intp))
        return np.array([*(self.jobs[job] for job in placement.jobs), -1], np.int64)

    def reset_jobs(self, slots: NDArray[np.intp]) -> None:
        """Resets jobs that start again, or whose present throughput is accepted."""
        if not len(slots):
            return
        mask = np.zeros(len(self.count), bool)
        mask[slots] = True
        for streams in (self.sent, self.active):
            streams.reset(mask)
        self.count[slots], self.since[slots], self.stepped_at[slots] = 0, self.updated_at, 0
        for measure in self.measures.values():
            measure.restart(slots)


def _is_on(streams: Streams, size: int) -> Bools:
    return np.asarray((streams.cells[kernel.WORD, :size].view(np.uint32) & kernel.ON_UP) != 0)


def _mean_by_job(values: Floats, job: NDArray[np.int32], jobs: int) -> Floats:
    known = (job >= 0) & np.isfinite(values)
    size = np.bincount(job[known], minlength=jobs)
    return np.asarray(np.bincount(job[known], values[known], jobs) / np.where(size > 0, size, np.nan))
