"""Whole jobs that are slower than before, seen from outside: bytes sent, SM activity, power, clocks, I/O wait.

In synchronous training all ranks share the step, so a job that is slower as a whole sends less per second on all its
ports. The network, the job's data or its clocks explain it; a new power cap, or more work in each step, is not a
slowdown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison, OpenConditions, build_finding, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.state import N, State, memory, notes, part
from detectors.base.streams import LEARN, Bools, Floats
from detectors.base.topology_index import JobIndex, per_topology
from detectors.straggler.gpu_placement import LEAST_PEERS, GpuPlacement
from detectors.straggler.gpu_readings import PRESSED, TIMES
from detectors.straggler.job_pace import (
    MARKS,
    READ,
    SENT,
    STILL_SLOWER,
    WAITS,
    JobPace,
    Newest,
    PortRates,
    mean_by_job,
    median_by_job,
)
from detectors.straggler.pressure import Pressure
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

Ints = NDArray[np.int64]
KINDS = (("wait for credits or under pause", WAITS), ("see congestion marks", MARKS))
"""What shows that a network is slow, in words, and its signals."""
_ROWS = (slice(1, 1 + len(WAITS)), slice(1 + len(WAITS), len(READ)))
_FLOORS = (2e-6, 2e-10)
"""Waits and marks per byte that count as none: at a tenth of 400 Gb/s 1e4 ticks a second, which is less than a percent
of the time at every known length of a tick, and one packet marked a second. Chosen."""
QUIET = 50e6
"""Bytes/s of a port, a thousandth of 400 Gb/s, that keep-alives and storage may send: its job makes no step. Chosen."""
_DOUBLED = float(np.log(2.0))  # ln of the excess of a port, as in link_congestion
_PORT_LEARN = 20  # updates before a port is judged: the replay contract
_GAIN = 1 / 240  # of the normal value: memory of two hours; chosen
_LEARNED = 10  # updates while it sends until the usual power of a job is known: 5 min; chosen
NEW = 2 * 3600 * SECOND  # us; chosen: twice the usual time between two checkpoints or evaluations
_RECENT = 0.05  # gain of the usual power of a job: memory of 20 updates; chosen
_SMOOTH = 0.3  # gain of the present value: memory of about 3 updates; chosen
JOB_EVERY = 30 * SECOND
"""us between two updates: some steps of a large job. Chosen."""
_MOST = 0.5  # share of a job's GPUs that must work for it to be judged, or of its ports that must wait; chosen
_LEFT_OUT = 0.1  # share of its GPUs that throttle, above which a job is not judged: that is its own event; chosen
_POLICY = 0.25  # share of its GPUs newly under a power cap from which that is policy; as in straggler_job
_IO, _TIMES = 0.2, 3.0  # share of the time in which tasks wait for I/O, as in straggler_job, and times that before
_ACTIVE, _POWER, _CLOCK = 0.03, 0.05, 0.03
"""Least fall of a job's SM activity (twice the daily swing of 1 to 2 % of Dubey et al., 2024, section 3.3.4), power and
SM clock (two of NVML's steps) that show that its GPUs wait or are slow. Chosen."""
_PAUSES = 1 / 3  # share of its throughput below which a job saves, evaluates or waits, and is not slower; chosen
_SPINS = 0.3
"""Share of its load that a GPU shows while it waits in a collective: a hang leaves 20 to 40 % of the power (traces of
MegaScale and Minder)."""
_KNOWN, _SWINGS = 40, 4.0
"""Updates, 20 min, after which the swings of a job are known; and standard deviations that are no swing. Chosen."""


@dataclass
class JobPorts(State):
    """Arrays by port of the frame. normal: ln of waits and marks per byte, as learned.

    excess: (2, N) of waits and marks, ln above normal, smoothed.   job: slot, -1 none.   count: updates learned from.
    """

    counts: PortRates = part(PortRates)
    normal: Floats = memory(0.0, shape=(2, N))
    excess: Floats = memory(0.0, shape=(2, N))
    job: Ints = memory(-1, np.int64)
    count: Ints = memory(0, np.int64)

    @property
    def sent(self) -> Floats:
        """(N,) newest bytes/s."""
        return np.asarray(self.counts.rate[0])

    def update(self, n: int, time: int, job: Ints, calm: Bools) -> None:
        """Judges all ports by what they counted since the last update. job: (n,) slot of each port's job, -1 none;
        calm: (slots,) jobs that are not slow."""
        self.grow(n)
        self.count[:n][job != self.job[:n]] = 0  # the normal of one job is not that of another
        self.job[:n] = job
        rate, fresh = self.counts.update(n, time)
        self._judge(rate, np.append(calm, True)[job], fresh)

    def _judge(self, rate: Floats, calm: Bools, fresh: Bools) -> None:
        """Compares waits and marks per byte with their normal value; learns nothing of a job that is slow."""
        n, count = rate.shape[1], self.count[: rate.shape[1]]
        sends = fresh & (rate[0] >= QUIET)
        for row, (rows, floor) in enumerate(zip(_ROWS, _FLOORS, strict=True)):
            amounts = rate[rows]
            finite = np.isfinite(amounts)
            known = finite.any(axis=0) & sends
            per_byte = np.where(finite, amounts, 0).sum(axis=0) / np.where(sends, rate[0], 1)
            level = np.log(np.where(known, per_byte, 0) + floor)
            normal, excess = self.normal[row, :n], self.excess[row, :n]
            above = level - normal
            now = np.where(known & (count >= _PORT_LEARN), above, 0.0)
            excess += np.where(fresh, _SMOOTH * (now - excess), 0.0)
            learns = known & calm & ((count < _PORT_LEARN) | (above < _DOUBLED / 2))
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


@dataclass(frozen=True, slots=True)
class JobNow:
    """A job at one instant, from outside; nan is unknown.

    moved_at: its last step, or when its ports last sent data (us).   seen_at: newest reading of either (us).
    reports: whether it reports steps.   new: watched for less than two hours, in which most jobs save, evaluate or roll
    out once: whether it pauses is not known.   utilization: mean of its GPUs.   watts, usual_watts: mean power of its
    GPUs now, and while it moves.   bytes_per_second: median of its ports.
    """

    name: str
    nodes: tuple[str, ...]
    moved_at: int
    seen_at: int
    reports: bool
    new: bool
    utilization: float
    watts: float
    usual_watts: float
    bytes_per_second: float


@dataclass
class JobActivity(State):
    """When each job last moved: made a step or, on several nodes and without step reports, sent data.

    ports, watts, busy: newest readings of ports and GPUs.   jobs: name -> when it last moved (us), usual power of its
    GPUs, updates from which that is learned, and since when it is watched (us).
    """

    ports: PortRates = part(lambda: PortRates((SENT,)), of="nic")
    watts: Newest = part(lambda: Newest("gpu.power"), of="gpu")
    busy: Newest = part(lambda: Newest("gpu.utilization"), of="gpu")
    jobs: dict[str, list[float]] = notes()

    def read(self, frames: Mapping[str, Frame]) -> None:
        """Adds the readings of an instant."""
        if (nics := frames.get("nic")) is not None:
            self.ports.read(nics)
        if (gpus := frames.get("gpu")) is not None:
            self.watts.update(gpus)
            self.busy.update(gpus)

    def update(self, time: int, gpus: Frame, nics: Frame | None, steps: Mapping[str, tuple[int, int]]) -> list[JobNow]:
        """Adds an instant; returns the jobs of which enough is known. Without a reading of its ports, one sends.

        steps: job that reports steps -> when it made the last, and the newest report (us)."""
        names, nodes, of_gpu, of_port = self._places(gpus, nics)
        size, rate = len(names), np.full(len(names), np.nan)
        if nics is not None:
            rate = median_by_job(self.ports.update(len(of_port), time)[0][0], of_port, size)
        readings = (newest.read(len(of_gpu), time) for newest in (self.watts, self.busy))
        watts, busy = (mean_by_job(values, of_gpu, size) for values in readings)
        self.jobs = {name: self.jobs.get(name, [0, 0.0, 0, time]) for name in names}
        found = list[JobNow]()
        for i, (name, known) in enumerate(self.jobs.items()):
            rests, reports = rate[i] <= QUIET and len(nodes[i]) > 1, name in steps
            moved_at, seen_at = steps.get(name, (int(known[0]) if rests else time, time))
            if moved_at > known[0] and (reports or rate[i] > QUIET) and np.isfinite(watts[i]):
                known[1] += max(1 / (known[2] + 1), _RECENT) * (float(watts[i]) - known[1])
                known[2] += 1
            known[0] = moved_at
            if known[2] >= _LEARNED:
                now = float(busy[i]), float(watts[i]), known[1], float(rate[i])
                found.append(JobNow(name, nodes[i], moved_at, seen_at, reports, time - known[3] < NEW, *now))
        return found

    @per_topology
    def _places(self, gpus: Frame, nics: Frame | None) -> tuple[list[str], list[tuple[str, ...]], Ints, Ints]:
        """Returns jobs, their nodes, and the (N,) job of each GPU and of each port of a node with one job, -1 none."""
        topology, index, above = gpus.topology, JobIndex(), gpus.topology.ancestor_of_kind
        nodes: dict[str, dict[str, None]] = {}
        on = [index.job_on(gpu, topology) or "" for gpu in gpus.entities]
        for gpu, job in zip(gpus.entities, on, strict=True):
            nodes.setdefault(job, {})[above(gpu, "node") or ""] = None
        nodes.pop("", None)
        number = {job: i for i, job in enumerate(nodes)}
        of_port = (index.job_of_node(above(e, "node") or "", topology) for e in (nics.entities if nics else ()))
        of = [np.array([number.get(job or "", -1) for job in jobs], np.int64) for jobs in (on, of_port)]
        return list(nodes), [tuple(found) for found in nodes.values()], of[0], of[1]


@dataclass(frozen=True, slots=True)
class JobReason:
    """Why a job is slower as a whole. entity: the job, or the part of the network that stands out.

    title, text: in few words and in full.   network: its ports wait and see no congestion marks, though they are
    counted: packets are lost or held up on the way; congestion: they see marks, or none are counted.
    """

    entity: str
    cause: Literal["network", "congestion", "io", "host", "clock", "waits"]
    title: str
    text: str
    signals: tuple[str, ...]


_NETWORK = ("network", "congestion")
_UNITS = {"sent": "By/s", "active": "1", "power": "W", "clock": "MHz"}
_SOURCES = (("sent", SENT), ("active", "gpu.sm_active"), ("power", "gpu.power"))
"""What shows the pace of a job from outside, the best first, and its signal."""


@dataclass
class JobThroughput(State):
    """Follows whole jobs without step times. first: entity blamed for a slow job -> since when, and the job.

    node_of_job: slot of a job on one node -> that node.
    """

    ports: JobPorts = part(JobPorts, of="nic")
    io: Pressure = part(lambda: Pressure("node.io_pressure"), of="node")
    pace: JobPace = part(JobPace)
    conditions: OpenConditions = notes()
    first: dict[str, list[int | str]] = notes()
    updated_at: int = notes(int)
    node_of_job: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    nics: Frame | None = field(default=None, init=False, repr=False)  # newest, for its columns and topology

    def read(self, frames: Mapping[str, Frame]) -> None:
        """Adds the counters of an instant."""
        if "node" in frames:
            self.io.update(frames["node"])
        if (nics := frames.get("nic")) is not None:
            self.ports.counts.read(nics)
            self.nics = nics

    def is_due(self, time: int) -> bool:
        """Returns whether it is time for an update."""
        return not 0 <= time - self.updated_at < JOB_EVERY

    def update(
        self,
        frames: Mapping[str, Frame],
        placement: GpuPlacement,
        shown: Mapping[str, Floats],
        at_work: Bools,
        throttled: Bools,
        barred: Bools,
        gates: Gates,
        cpu: Pressure,
    ) -> None:
        """Adds an instant.

        shown: (N,) measures of the GPUs.   at_work: working GPUs.   throttled: left out.   barred: of jobs that may not
        be judged.   cpu: how long tasks wait for a processor.
        """
        pace, gpus = self.pace, frames["gpu"]
        pace.reset_jobs(s for job, s in pace.jobs.items() if (gates.job_started_at(job) or 0) > self.updated_at)
        slots, _ = pace.assign_slots(placement.entities["job"])
        job, size, self.updated_at = slots[placement.numbers["job"]], len(pace.count), gpus.time
        job_of_node = _job_by_node(placement, job)
        nics, at = self.nics, np.empty(0, np.int64)
        if nics is not None:
            at = self._node_by_port(nics, gpus, placement.entities["node"])
            calm = pace.streams.cells[kernel.UP, :size] <= 2
            self.ports.update(len(at), gpus.time, job_of_node[at], calm)
        counted = np.where(at_work & ~throttled, job, -1)
        found = {name: median_by_job(shown[name], counted, size) for name in ("active", "clock")}
        found |= {name: mean_by_job(shown[name], counted, size) for name in ("power", "capped")}
        found["sent"] = self.ports.sent_by_job(at, size) if nics is not None else np.full(size, np.nan)
        several = np.bincount(job_of_node[job_of_node >= 0], minlength=size) > 1
        found["sent"][~several] = np.nan  # a job on one node shows on no port
        homes = zip(job_of_node.tolist(), placement.entities["node"], strict=False)
        self.node_of_job = {job: node for job, node in homes if job >= 0 and not several[job]}
        found |= self._measure_waiting(cpu, placement.entities["node"], job_of_node[:-1], size)
        known = np.stack([np.isfinite(found[name]) for name, _ in _SOURCES])
        source = known.argmax(axis=0).astype(np.int8)
        with np.errstate(divide="ignore", invalid="ignore"):
            slower = -np.log(np.stack([found[name] for name, _ in _SOURCES])[source, np.arange(size)])
        masks = (job >= 0, at_work, barred, throttled)
        total, busy, out, hot = (np.bincount(job[(job >= 0) & mask], minlength=size) for mask in masks)
        gate = (total >= LEAST_PEERS) & (busy > _MOST * total) & (out == 0) & (hot <= _LEFT_OUT * total)
        gate &= ~(found["sent"] < QUIET)  # a job that sends nothing makes no step: straggler_job reports that
        pace.update(found, slower, source, gate, gpus.time)

    def _measure_waiting(self, cpu: Pressure, nodes: Sequence[str], job: Ints, size: int) -> dict[str, Floats]:
        """Returns (jobs,) shares of the time in which tasks wait for I/O and for a processor. job: (nodes,) slots."""
        waits = {"io": self.io, "cpu": cpu}
        shares = {name: np.array([pressure.share_of(node) for node in nodes]) for name, pressure in waits.items()}
        return {name: median_by_job(share, job, size) for name, share in shares.items()}

    def losses(self, names: Sequence[str], sources: int = 3) -> Floats:
        """Returns (jobs + 1,) ln of the throughput that each job has lost against its past; NaN where it is unknown, as
        of a job that started since the last update, and in the last cell.

        sources: number of the measures that count, the best first; 1: only what it sends.
        """
        now = np.full(len(self.pace.count) + 1, np.nan)
        for number, (name, _) in enumerate(_SOURCES[:sources]):
            share = self.pace.shares(name)
            share = share if number == 0 else 1 - (1 - share) / (1 - _SPINS)
            now[:-1] = np.where((self.pace.source == number) & (share >= _PAUSES), share, now[:-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(-np.log(now[[*(self.pace.jobs.get(job, -1) for job in names), -1]]))

    def slow_since(self, job: str | None) -> int | None:
        """Returns since when a job is slower than before, now if it is not (us); None if that is not known."""
        slot = self.pace.jobs.get(job or "", -1)
        return int(self.pace.since[slot]) if slot >= 0 and self.pace.count[slot] >= LEARN else None

    def report(
        self,
        frames: Mapping[str, Frame],
        blamed: Collection[str],
        doubted: Collection[str],
        holds: tuple[float, float],
        detector: str,
    ) -> list[Finding]:
        """Returns the findings that are due on slow jobs; none of which a part is blamed already.

        doubted: jobs that may wait for GPUs that throttle.   holds: s, where the network or I/O is the cause, and
        elsewhere. A cause that appears long after the job became slow is a second one.
        """
        time, slow = frames["gpu"].time, dict[str, tuple[str, int, JobReason]]()
        for job, slot in self.pace.slow_jobs():
            reason = None if job in blamed else self._find_reason(job, slot, self.nics)
            if reason is not None and ((reason.cause in _NETWORK) or reason.cause == "io" or job not in doubted):
                slow[reason.entity] = job, slot, reason
        self.first = {entity: self.first.get(entity, [time, job]) for entity, (job, _, _) in slow.items()}
        found, holding = list[Finding](), set[str]()
        for entity, (job, slot, reason) in sorted(slow.items()):
            since, first = int(self.pace.since[slot]), int(self.first[entity][0])
            onset = since if first - since <= holds[0] * SECOND else first
            of_node = reason.entity == self.node_of_job.get(slot)
            if time - onset >= holds[reason.cause not in (*_NETWORK, "io") and not of_node] * SECOND:
                holding.add(entity)
                # without a visible cause it may be a phase of less work: nobody is woken for that
                level: Level = "page" if reason.cause == "network" or of_node else "ticket"
                if due := due_report(self.conditions, entity, time, onset, level):
                    found.append(self._finding(time, job, slot, reason, due, detector))
        close_ended(self.conditions, holding)
        return found

    def _loss(self, slot: int) -> float:
        return -float(np.expm1(-self.pace.streams.cells[kernel.EFFECT, slot]))

    def _finding(
        self, time: int, job: str, slot: int, reason: JobReason, due: tuple[int, Level], detector: str
    ) -> Finding:
        now, usual = self.pace.values(slot)
        name, signal = _SOURCES[int(self.pace.source[slot])]
        subject = "" if reason.entity == job else f"{entity_name(job)} "
        effect = self._loss(slot)
        known = [k for k in _UNITS if usual[k] > 0 and np.isfinite(now[k])]
        shares: dict[str, Any] = {f"{k}_share": round(now[k] / usual[k], 4) for k in known}
        return build_finding(
            *(detector, time, reason.entity, due),
            score=float(self.pace.streams.cells[kernel.UP, slot]),
            summary=pager_title(reason.entity, f"{subject}{100 * effect:.0f} % slower than before, {reason.title}"),
            signals=tuple(dict.fromkeys((signal, *reason.signals))),
            clears=f"it is less than {100 * STILL_SLOWER:.0f} % slower than before",
            compared=Comparison(now[name], usual[name], None, "own past", 0, effect, _UNITS[name]),
            job=job,
            attribution="NETWORK" if reason.cause in _NETWORK else "JOB" if reason.entity == job else "NODE",
            cause=reason.text,
            **shares,
        )

    def _find_reason(self, job: str, slot: int, nics: Frame | None) -> JobReason | None:
        """Returns why a job is slower; None if it no longer is, is under a new power cap, or does more in each step."""
        now, usual = self.pace.values(slot)
        measure, _ = _SOURCES[int(self.pace.source[slot])]
        less = {name: 1 - now[name] / usual[name] if usual[name] > 0 else 0.0 for name in now}
        if not less[measure] >= STILL_SLOWER or now["capped"] - usual["capped"] >= _POLICY:
            return None
        if now["io"] >= _IO and not now["io"] < _TIMES * usual["io"]:
            text = f"tasks on its nodes wait for I/O {100 * now['io']:.0f} % of the time"
            return JobReason(job, "io", f"tasks wait for I/O {100 * now['io']:.0f} %", text, ("node.io_pressure",))
        if measure == "sent" and nics is not None and (network := _find_network_cause(self.ports, job, slot, nics)):
            return network
        node = self.node_of_job.get(slot, job)
        if node != job and now["cpu"] >= PRESSED and not now["cpu"] < TIMES * usual["cpu"]:
            title = f"tasks wait for CPU {100 * now['cpu']:.0f} %"
            return JobReason(node, "host", title, f"{title} of the time", ("node.cpu_pressure",))
        if less["clock"] >= _CLOCK:
            title = f"SM clocks {100 * less['clock']:.0f} % lower"
            return JobReason(node, "clock", title, f"{title}, all alike", ("gpu.sm_clock",))
        if measure == "sent" and self._is_steady(slot) and (less["active"] >= _ACTIVE or less["power"] >= _POWER):
            text = "its GPUs wait, the cause is not visible"
            return JobReason(job, "waits", "GPUs wait, cause not visible", text, ("gpu.sm_active",))
        return None

    def _is_steady(self, slot: int) -> bool:
        """Returns whether what a job lost is beyond its own swings, as those of requests to a service."""
        swing, loss = float(self.pace.swing[slot]), float(self.pace.streams.cells[kernel.EFFECT, slot])
        return bool(self.pace.count[slot] >= _KNOWN and loss >= _SWINGS * swing**0.5)

    def relearn(self, entity: str) -> None:
        """Relearns a job, or the job of a blamed entity, after feedback that it is not a fault."""
        job = str(self.first[entity][1]) if entity in self.first else entity
        self.pace.reset_jobs([self.pace.jobs[job]] if job in self.pace.jobs else [])

    @per_topology
    def _node_by_port(self, nics: Frame, gpus: Frame, nodes: Sequence[str]) -> Ints:
        """Returns (ports,) number of each port's node, -1 none."""
        number = {name: i for i, name in enumerate(nodes)}
        above = nics.topology.ancestor_of_kind
        return np.array([number.get(above(e, "node") or "", -1) for e in nics.entities], np.int64)


def _job_by_node(placement: GpuPlacement, job: Ints) -> Ints:
    """Returns (nodes + 1,) slot of the job that has a node alone, -1 none; the last is for GPUs without a node."""
    nodes = len(placement.entities["node"])
    least, most = np.full(nodes + 1, np.iinfo(np.int64).max), np.full(nodes + 1, -1)
    np.minimum.at(least, placement.numbers["node"], np.where(job >= 0, job, least[0]))
    np.maximum.at(most, placement.numbers["node"], job)
    most[most != least] = -1
    most[-1] = -1
    return most


def _find_network_cause(ports: JobPorts, job: str, slot: int, nics: Frame) -> JobReason | None:
    """Returns the part of the network that slows a job; None where its ports are as before."""
    n = len(nics.entities)
    of_job = np.flatnonzero((ports.job[:n] == slot) & np.isfinite(ports.sent[:n]))
    if not len(of_job):
        return None
    over = ports.excess[:, of_job] >= _DOUBLED
    row = int(np.argmax(over.sum(axis=1)))
    what, signals = KINDS[row]
    entity, waiting, where = job, of_job, ""
    if (part_of := _find_congested_part(of_job, over[row], nics)) is not None:
        entity, waiting = part_of
        where = f" on {entity}"
    elif np.count_nonzero(over[row]) <= _MOST * len(of_job):
        return None
    times = float(np.exp(np.median(ports.excess[row, waiting])))
    count = f"{len(waiting)} " if part_of is not None else ""
    text = f"its {count}ports{where} {what} {times:.1f} times as much as before"
    title = f"{len(waiting)} ports {'congested' if row else 'wait'}, {times:.1f} times as much"
    silent = row == 0 and any(signal in nics.values for signal in MARKS)
    return JobReason(entity, "network" if silent else "congestion", title, text, signals)


def _find_congested_part(ports: NDArray[np.intp], over: Bools, nics: Frame) -> tuple[str, NDArray[np.intp]] | None:
    """Returns the leaf on which most of a job's ports wait, with its ports. None if most of its leaves wait: then the
    cause is above them, or the job itself."""
    leaves: dict[str, list[int]] = {}
    for place, port in enumerate(ports.tolist()):
        leaves.setdefault(nics.topology.ancestor_of_kind(nics.entities[port], "leaf") or "", []).append(place)
    waiting = {leaf for leaf, places in leaves.items() if leaf and over[places].sum() > max(1, _MOST * len(places))}
    if not waiting or (len(leaves) > 1 and len(waiting) > _MOST * len(leaves)):
        return None
    most = max(sorted(waiting), key=lambda leaf: over[leaves[leaf]].sum())
    return most, ports[leaves[most]]
