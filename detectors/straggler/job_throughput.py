"""Whole jobs that are slower than before, seen from outside: bytes sent, SM activity, power, clocks, I/O wait.

In synchronous training all ranks share the step, so a job that is slower as a whole sends less per second on all its
ports. The network, the job's data or its clocks explain it; a new power cap, or more work in each step, is not a
slowdown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison, OpenConditions, build_finding, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.job_index import JobIndex
from detectors.base.newest import Newest
from detectors.base.port_rates import SENT, PortRates
from detectors.base.pressure import CPU, IO, PRESSED, TIMES, Pressure
from detectors.base.state import State, notes, part
from detectors.base.statistics import group_means, group_medians_of
from detectors.base.streams import LEARN, Bools, Floats
from detectors.straggler.gpu_placement import LEAST_PEERS
from detectors.straggler.job_pace import STILL_SLOWER, JobPace
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

Ints = NDArray[np.int64]
QUIET = 50e6
"""Bytes/s of a port, a thousandth of 400 Gb/s, that keep-alives and storage may send: its job makes no step. Chosen."""
_LEARNED = 10  # updates while it sends until the usual power of a job is known: 5 min; chosen
NEW = 2 * 3600 * SECOND  # us; chosen: twice the usual time between two checkpoints or evaluations
_RECENT = 0.05  # gain of the usual power of a job: memory of 20 updates; chosen
JOB_EVERY = 30 * SECOND
"""us between two updates: some steps of a large job. Chosen."""
_MOST = 0.5  # share of a job's GPUs that must work for it to be judged, or of its ports that must wait; chosen
POLICY_SHARE = 0.25  # share of its GPUs newly under a power cap from which the cap explains the rest; chosen
WAITING, MORE = 0.2, 3.0
"""Share of the time in which tasks wait for I/O, on half of the nodes, and times the usual share. Chosen."""
_ACTIVE, _POWER, _CLOCK = 0.03, 0.05, 0.03
"""Least fall of a job's SM activity (twice the daily swing of 1 to 2 % of Dubey et al., 2024, section 3.3.4), power and
SM clock (two of NVML's steps) that show that its GPUs wait or are slow. Chosen."""
_POWER_OF_CLOCK = 3.0
"""Times the fall of a clock by which throughput or power fall with it, at most: dynamic power is the product of
frequency and the square of voltage, which falls too."""
_PAUSES = 1 / 3  # share of its throughput below which a job saves, evaluates or waits, and is not slower; chosen
_SPINS = 0.3
"""Share of its load that a GPU shows while it waits in a collective: a hang leaves 20 to 40 % of the power (traces of
MegaScale and Minder)."""
COLLECTIVES = 1.8
"""Times its usual that collectives take, from which the network is at fault and not a little more congested: twice
(half of its links or of their rate are lost), less the error of a smoothed mean. Chosen."""
_HOTTER, _COOL = 1.5, 2e-4  # times the usual share of its GPUs that throttle, and the share that is none; chosen
_KNOWN, _SWINGS = NEW // JOB_EVERY, 20.0
"""Updates after which the swings of a job are known; and standard deviations by which training (3 %) that is a third
slower differs from a service with fewer requests. Chosen."""


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

    ports: PortRates = part(PortRates, of="nic")
    watts: Newest = part(lambda: Newest("gpu.power"), of="gpu")
    busy: Newest = part(lambda: Newest("gpu.utilization"), of="gpu")
    jobs: dict[str, list[float]] = notes()

    def read(self, frames: Mapping[str, Frame]) -> None:
        """Adds the readings of an instant."""
        if (nics := frames.get("nic")) is not None:
            self.ports.newest.update(nics)
        if (gpus := frames.get("gpu")) is not None:
            self.watts.update(gpus)
            self.busy.update(gpus)

    def update(self, time: int, gpus: Frame, nics: Frame | None, steps: Mapping[str, tuple[int, int]]) -> list[JobNow]:
        """Adds an instant; returns the jobs of which enough is known. Without a reading of its ports, one sends.

        steps: job that reports steps -> when it made the last, and the newest report (us)."""
        nodes, of_gpu, of_port = JobIndex().places(gpus, nics)
        size, rate = len(nodes), np.full(len(nodes), np.nan)
        if nics is not None:
            rate = group_medians_of(self.ports.update(len(of_port), time), of_port, size)
        readings = (newest.read(len(of_gpu), time) for newest in (self.watts, self.busy))
        watts, busy = (group_means(values, of_gpu, size) for values in readings)
        self.jobs = {name: self.jobs.get(name, [0, 0.0, 0, time]) for name in nodes}
        found = list[JobNow]()
        for i, (name, known) in enumerate(self.jobs.items()):
            rests, reports = rate[i] <= QUIET and len(nodes[name]) > 1, name in steps
            moved_at, seen_at = steps.get(name, (int(known[0]) if rests else time, time))
            if moved_at > known[0] and (reports or rate[i] > QUIET) and np.isfinite(watts[i]):
                known[1] += max(1 / (known[2] + 1), _RECENT) * (float(watts[i]) - known[1])
                known[2] += 1
            known[0] = moved_at
            if reports or known[2] >= _LEARNED:
                now = float(busy[i]), float(watts[i]), known[1], float(rate[i])
                found.append(JobNow(name, nodes[name], moved_at, seen_at, reports, time - known[3] < NEW, *now))
        return found


@dataclass(frozen=True, slots=True)
class JobReason:
    """Why a job is slower as a whole. entity: the job, or its only node.   quick: no phase of a job looks like it."""

    entity: str
    title: str
    signal: str
    level: Level
    quick: bool


_SOURCES = (("sent", SENT, "By/s"), ("active", "gpu.sm_active", "1"), ("power", "gpu.power", "W"))
"""What shows the pace of a job from outside, the best first, its signal and unit."""


@dataclass
class JobThroughput(State):
    """Follows whole jobs without step times. first: entity blamed for a slow job -> since when.

    node_of_job: slot of a job on one node -> that node.   pressed: (slots,) tasks of its nodes began to wait for
    processors.
    """

    ports: PortRates = part(PortRates, of="nic")
    io: Pressure = part(lambda: Pressure(IO), of="node")
    pace: JobPace = part(JobPace)
    conditions: OpenConditions = notes()
    first: dict[str, int] = notes()
    updated_at: int = notes(int)
    node_of_job: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    pressed: Bools = field(default_factory=lambda: np.zeros(0, bool), init=False, repr=False)
    nics: Frame | None = field(default=None, init=False, repr=False)  # newest, for its columns and topology

    def read(self, frames: Mapping[str, Frame]) -> None:
        """Adds the counters of an instant."""
        if "node" in frames:
            self.io.update(frames["node"])
        if (nics := frames.get("nic")) is not None:
            self.ports.newest.update(nics)
            self.nics = nics

    def is_due(self, time: int) -> bool:
        """Returns whether it is time for an update."""
        return not 0 <= time - self.updated_at < JOB_EVERY

    def update(
        self,
        frames: Mapping[str, Frame],
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
        nodes, of_gpu, of_port = JobIndex().places(gpus, self.nics)
        slots, _ = pace.assign_slots(list(nodes))
        job, size, self.updated_at = slots[of_gpu], len(pace.count), gpus.time
        counted = np.where(at_work & ~throttled, job, -1)
        found = {name: group_medians_of(shown[name], counted, size) for name in ("active", "clock")}
        found |= {name: group_means(shown[name], counted, size) for name in ("power", "capped")}
        found["hot"] = group_means(throttled.astype(np.float64), np.where(at_work, job, -1), size)
        found["sent"], found["io"], found["cpu"] = np.full((3, size), np.nan)
        if self.nics is not None:
            found["sent"] = group_medians_of(self.ports.update(len(of_port), gpus.time), slots[of_port], size)
        self.node_of_job = {pace.jobs[name]: at[0] for name, at in nodes.items() if len(at) == 1}
        found["sent"][[*self.node_of_job]] = np.nan  # a job on one node shows on no port
        for name, at in nodes.items():
            slot = pace.jobs[name]
            found["io"][slot], found["cpu"][slot] = self.io.median_share(at), cpu.median_share(at)
        known = np.stack([np.isfinite(found[name]) for name, *_ in _SOURCES])
        source = known.argmax(axis=0).astype(np.int8)
        with np.errstate(divide="ignore", invalid="ignore"):
            slower = -np.log(np.stack([found[name] for name, *_ in _SOURCES])[source, np.arange(size)])
        total, busy, out = (np.bincount(job[(job >= 0) & mask], minlength=size) for mask in (job >= 0, at_work, barred))
        gate = (total >= LEAST_PEERS) & (busy > _MOST * total) & (out == 0)
        gate &= ~(found["sent"] < QUIET)  # a job that sends nothing makes no step: straggler_job reports that
        usual = pace.measures["cpu"].usual[:size] if "cpu" in pace.measures else np.full(size, np.nan)
        self.pressed = (found["cpu"] >= PRESSED) & ~(found["cpu"] < TIMES * usual)
        pace.update(found, slower, source, gate, gpus.time, ~self.pressed)

    def losses(self, names: Sequence[str]) -> Floats:
        """Returns (jobs + 1,) ln of the throughput that each job has lost against its past; NaN where it is unknown, as
        of a job that started since the last update, and in the last cell."""
        now = np.full(len(self.pace.count) + 1, np.nan)
        for number, (name, *_) in enumerate(_SOURCES):
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
        self, frames: Mapping[str, Frame], blamed: Collection[str], holds: tuple[float, float], detector: str
    ) -> list[Finding]:
        """Returns the findings that are due on slow jobs; none of which a part is blamed already.

        holds: s, where no phase of a job looks like it, and elsewhere. A cause that appears long after the job became
        slow is a second one.
        """
        time, slow = frames["gpu"].time, dict[str, tuple[str, int, JobReason]]()
        alone = self.node_of_job.keys()
        pressed = {name: slot for name, slot in self.pace.jobs.items() if slot in alone and self.pressed[slot]}
        for job, slot in sorted((dict(self.pace.slow_jobs()) | pressed).items()):
            reason = self._find_reason(job, slot)
            if reason is not None and (job in pressed or job not in blamed):
                slow[reason.entity] = job, slot, reason
        self.first = {entity: self.first.get(entity, time) for entity in slow}
        found, holding = list[Finding](), set[str]()
        for entity, (job, slot, reason) in sorted(slow.items()):
            since, first = int(self.pace.since[slot]), self.first[entity]
            onset = first if job in pressed or first - since > holds[0] * SECOND else since
            if time - onset >= holds[not reason.quick] * SECOND:
                holding.add(entity)
                if due := due_report(self.conditions, entity, time, onset, reason.level):
                    found.append(self._finding(time, job, slot, reason, due, detector))
        close_ended(self.conditions, holding)
        return found

    def _finding(
        self, time: int, job: str, slot: int, reason: JobReason, due: tuple[int, Level], detector: str
    ) -> Finding:
        now, usual = self.pace.values(slot)
        name, signal, unit = _SOURCES[int(self.pace.source[slot])]
        subject = "" if reason.entity == job else f"{entity_name(job)} "
        effect = -float(np.expm1(-self.pace.streams.cells[kernel.EFFECT, slot]))
        return build_finding(
            *(detector, time, reason.entity, due),
            score=float(self.pace.streams.cells[kernel.UP, slot]),
            summary=pager_title(reason.entity, f"{subject}{100 * effect:.0f} % slower than before, {reason.title}"),
            signals=tuple(dict.fromkeys((signal, reason.signal))),
            clears=f"it is less than {100 * STILL_SLOWER:.0f} % slower than before",
            compared=Comparison(now[name], usual[name], None, "own past", 0, effect, unit),
            job=job,
            attribution="JOB" if reason.entity == job else "NODE",
            cause=reason.title,
        )

    def _find_reason(self, job: str, slot: int) -> JobReason | None:
        """Returns why a job is slower; None if it no longer is, is under a new power cap, or does more in each step."""
        now, usual = self.pace.values(slot)
        measure, *_ = _SOURCES[int(self.pace.source[slot])]
        less = {name: 1 - now[name] / usual[name] if usual[name] > 0 else 0.0 for name in now}
        if not less[measure] >= STILL_SLOWER or now["capped"] - usual["capped"] >= POLICY_SHARE:
            return None
        if now["io"] >= WAITING and not now["io"] < MORE * usual["io"]:
            return JobReason(job, f"tasks wait for I/O {100 * now['io']:.0f} %", IO, "ticket", True)
        node = self.node_of_job.get(slot, job)
        if node != job and self.pressed[slot]:
            return JobReason(node, f"tasks wait for CPU {100 * now['cpu']:.0f} %", CPU, "page", True)
        if now["hot"] > max(_HOTTER * usual["hot"], _COOL):
            return None  # it may wait for GPUs that throttle
        if less["clock"] >= max(_CLOCK, less[measure] / _POWER_OF_CLOCK):
            alone = node != job
            title = f"SM clocks {100 * less['clock']:.0f} % lower"
            return JobReason(node, title, "gpu.sm_clock", "page" if alone else "ticket", alone)
        if measure == "sent" and self._was_steady(slot) and (less["active"] >= _ACTIVE or less["power"] >= _POWER):
            twice = less["sent"] >= 1 - 1 / COLLECTIVES  # a smaller loss may be a phase: no page
            return JobReason(job, "GPUs wait, cause not visible", "gpu.sm_active", "page" if twice else "ticket", twice)
        return None

    def _was_steady(self, slot: int) -> bool:
        """Returns whether what a job lost is far beyond its own swings, as those of requests to a service."""
        swing, loss = float(self.pace.swing[slot]), float(self.pace.streams.cells[kernel.EFFECT, slot])
        return bool(self.pace.count[slot] >= _KNOWN and loss >= _SWINGS * swing**0.5)

    def relearn(self, entity: str) -> None:
        """Relearns a job, or the job of a blamed entity, after feedback that it is not a fault."""
        jobs = self.pace.jobs.items()
        self.pace.reset_jobs([slot for job, slot in jobs if entity in (job, self.node_of_job.get(slot))])
