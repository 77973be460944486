"""Finds jobs that make no step, wait for data, or step slower than before as a whole: the job is named, never a rank.

No step: GPUs that spin or idle, traffic and I/O pressure show why. Slower steps: each job against its own past, and
whether computing or the network made them longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_integer
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.state import State
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.base.throttle import CAPPED, has_reason, read_reasons
from detectors.straggler.alarm_budget import job_budget
from detectors.straggler.job_throughput import QUIET, JobMeasure
from detectors.straggler.pressure import Pressure
from detectors.straggler.rank_slots import RankSlots
from detectors.straggler.step_samples import StepSamples
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

PACE_EVERY = 30 * SECOND
"""us between two evaluations of the pace: some steps of a large job. Chosen."""
_PARTS = ("step", "compute", "network", "capped")
_LEARNING = 0.02  # gain of the usual value: about 50 evaluations of memory, 25 minutes; chosen
_STILL_SLOWER = 0.05  # share by which steps must be longer now to blame a part: half of what matters
_HALF = 0.5  # share of the longer step that must be found in one part to blame that part; chosen
_POLICY = 0.25  # share of GPUs newly under a power cap from which the cap explains the rest; chosen
PaceCause = Literal["network", "job", "rank", "cap", "over"]


@dataclass(frozen=True, slots=True)
class JobPace:
    """Times of a job now and usually, in s. compute: of the stage with the longest median.   cause: of the slowdown."""

    step: float
    usual: float
    compute: float
    usual_compute: float
    network: float
    usual_network: float
    cause: PaceCause


@dataclass
class JobPaces(State):
    """By job slot. parts: step time, compute, network, share of capped GPUs.   count: evaluations learned from.

    since: when the present slowdown began.
    """

    streams: Streams = part(lambda: Streams(Channel(0.02, 0.10)))
    parts: dict[str, JobMeasure] = part(lambda: {name: JobMeasure() for name in _PARTS})
    count: NDArray[np.int64] = memory(0, np.int64)
    since: NDArray[np.int64] = memory(0, np.int64)
    updated_at: int = notes(int)

    def update(
        self, frame: Frame, ranks: RankSlots, job: NDArray[np.int32], jobs: int, gate: Bools, capped: Bools
    ) -> bool:
        """Adds the steps of an instant; returns whether it was due. job: (S,) job slot of each rank; gate: (jobs,)."""
        self._grow_all(jobs)
        if 0 <= frame.time - self.updated_at < PACE_EVERY:
            return False
        self.updated_at = frame.time
        known = job >= 0
        step = _job_means(ranks.read_ranks(frame, "rank.step_time"), job, known, jobs)
        compute = ranks.stage_medians(ranks.read_ranks(frame, "rank.compute_time"))
        network = ranks.read_ranks(frame, "rank.communication_time")
        longest, least = np.full(jobs, -np.inf), np.full(jobs, np.inf)
        with np.errstate(invalid="ignore"):
            np.fmax.at(longest, job[known], compute[known])
            np.fmin.at(least, job[known], network[known])
        found = (step, longest, least, _job_means(capped.astype(float), job, known, jobs))
        for name, values in zip(_PARTS, found, strict=True):
            self.parts[name].follow(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.log(step)
        gate = gate & np.isfinite(value)
        self.streams.step(value, np.full(jobs, -1, np.int32), frame.time, gate)
        self.since[self.streams.cells[kernel.UP, :jobs] <= 0] = frame.time
        self._learn(gate & (self.streams.cells[kernel.UP, :jobs] <= 2))
        return True

    def _grow_all(self, size: int) -> None:
        self.grow(size)
        for piece in self.parts.values():
            piece.grow(size)

    def _learn(self, gate: Bools) -> None:
        """Follows the usual values, but not while a job may be slow."""
        self.count += gate
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * gate
        for piece in self.parts.values():
            piece.learn(gain)

    def slow_jobs(self) -> NDArray[np.intp]:
        """Returns the slots of jobs that are slower than their own past."""
        words = self.streams.cells[kernel.WORD].view(np.uint32)
        return np.flatnonzero(((words & kernel.ON_UP) != 0)[: len(self.count)] & (self.count >= LEARN))

    def pace_of(self, job: int) -> JobPace:
        """Returns the pace of one job; the cause is the network if collectives take the time, the job if a stage
        does."""
        now = {name: float(piece.now[job]) for name, piece in self.parts.items()}
        usual = {name: float(piece.usual[job]) for name, piece in self.parts.items()}
        longer = {name: now[name] - usual[name] for name in _PARTS}
        cause: PaceCause = "rank"
        if not longer["step"] >= _STILL_SLOWER * usual["step"]:
            cause = "over"
        elif longer["capped"] >= _POLICY:
            cause = "cap"
        elif longer["network"] >= _HALF * longer["step"]:
            cause = "network"
        elif longer["compute"] >= _HALF * longer["step"]:
            cause = "job"
        both = [(now[name], usual[name]) for name in _PARTS[:3]]
        return JobPace(*both[0], *both[1], *both[2], cause)

    def effect(self, job: int) -> float:
        """Returns the share by which its steps are longer, smoothed."""
        return float(np.expm1(self.streams.cells[kernel.EFFECT, job]))

    def score(self, job: int) -> float:
        """Returns the sum of its stream."""
        return float(self.streams.cells[kernel.UP, job])

    def reset_jobs(self, jobs: NDArray[np.intp]) -> None:
        """Resets the slots of jobs of which nothing is known."""
        self._grow_all(int(jobs.max(initial=-1)) + 1)
        mask = np.zeros(self.streams.cells.shape[1], bool)
        mask[jobs[jobs < len(mask)]] = True
        self.streams.reset(mask)
        self.count[jobs] = self.since[jobs] = 0
        for piece in self.parts.values():
            piece.restart(jobs)


def _job_means(values: Floats, job: NDArray[np.int32], counted: Bools, jobs: int) -> Floats:
    """Returns (jobs,) mean of the known values of each job's ranks; NaN without any."""
    known = counted & np.isfinite(values)
    total, size = np.bincount(job[known], values[known], jobs), np.bincount(job[known], minlength=jobs)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / np.where(size > 0, size, np.nan))


_SILENT = 30 * SECOND  # us without any sample after which a job is not judged: it may have ended; chosen
_STILL = 60 * SECOND  # us without a step before a job is judged: steps of large models take half a minute. Chosen
_LASTS = 60 * SECOND  # us for which it must look the same: a single reading proves little; chosen
_BUSY = 0.9  # utilization of a GPU on which a kernel spins; NVML counts it as busy
_LOW = 0.5
"""Share of its usual power below which a GPU does not compute: a hang leaves 20 to 40 % (MegaScale and Minder show such
traces), evaluations more than half. Chosen."""
_WAITING = 0.2  # share of the time in which tasks wait for I/O, on half of the nodes; chosen
_BEFORE = 120 * SECOND  # us before the last step in which a logged fault may have stopped the job: NCCL retries; chosen
_FATAL = frozenset({"xid", "sxid", "gpu_lost", "switch_state"})
_USUAL = 0.05  # gain of the usual power: about 20 samples of memory; chosen
_KEPT = 24 * 3600 * SECOND  # us after which a fault explains nothing; chosen
_TITLES = {
    "hang": "hangs, no step for {minutes:.0f} min, GPUs at {share:.0f} % of usual power",
    "stall": "waits for data, no step for {minutes:.0f} min, I/O wait {io:.0f} %",
}
_CLEARS = "it makes a step"
JobFindings = list[tuple[str, Finding | None]]
"""Conditions that hold, by key, with the finding that is due, if any."""


@dataclass(frozen=True, slots=True)
class StuckReadings:
    """Readings of a job without steps; nan is unknown.

    utilization: mean of its GPUs.   power_share: of their usual power.   io_pressure: share of time, median of nodes.
    bytes_per_second: median of its ports.
    """

    utilization: float
    power_share: float
    io_pressure: float
    bytes_per_second: float

    def kind(self) -> str:
        """Returns hang for busy GPUs at low power without traffic, stall for idle ones that wait for data, else ""."""
        if not self.power_share <= _LOW:
            return ""
        if self.utilization >= _BUSY:
            return "" if self.bytes_per_second > QUIET else "hang"
        return "stall" if self.io_pressure >= _WAITING else ""

    def title(self, job: str, kind: str, still: int) -> str:
        """Returns the title of a finding. still: us without a step."""
        numbers = {"minutes": still / (60 * SECOND), "share": 100 * self.power_share, "io": 100 * self.io_pressure}
        return pager_title(job, _TITLES[kind].format(**numbers))

    def evidence(self) -> dict[str, float | None]:
        """Returns the readings; None is unknown."""
        return {f.name: v if np.isfinite(v := getattr(self, f.name)) else None for f in fields(self)}


@dataclass
class StragglerJob(Detector):
    """Finds jobs that make no steps, or steps at least 10 % longer than before, with the cause.

    Hang: no step for `hang` s while GPUs spin at a fraction of their power and nothing is sent. Page, unless there is
    maintenance, or an XID, a lost GPU or a link that went down on its nodes explains it: then the job ends without
    help, and other detectors report the cause. Stall: no step for `stall` s while GPUs idle and tasks wait for I/O on
    half of its nodes. Ticket. Slow: a CUSUM on ln(step time) against the job's own past, with its cause: collectives
    (the network) or a stage (the job itself). A suspect, since other detectors report the leaf or port, and the job's
    owner decides how it divides work; with `tickets` a ticket after `hold` s. One slow rank, and a power cap, are left
    to other detectors. Evaluations and checkpoints draw more power than a hang, and show no I/O pressure.

    Source: ByteRobust (SOSP 2025) takes 10 min without RDMA traffic for a hang; PyTorch's watchdog ends it after 10 min
    at the earliest, and jobs that lost a GPU or link are dead within 5 min: `hang` is between. Lin et al. (OSDI
    2025): 42.5 % of jobs are slowed by 10 % or more, mostly by themselves, so that this is not a ticket.
    """

    name: ClassVar[str] = "straggler_job"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ("rank.step",)
    wants: ClassVar[tuple[str, ...]] = (
        *("rank.step_time", "rank.compute_time", "rank.communication_time", "gpu.power", "gpu.utilization"),
        *("gpu.throttle_reasons", "nic.tx_bytes", "node.io_pressure", "event:job_start", "event:checkpoint"),
        *("event:xid", "event:link_state", "event:gpu_lost", "event:maintenance_start"),
    )
    cannot_see: ClassVar[str] = (
        "Which rank did not join a collective; hangs of jobs whose power is not measured; and a job that was slow from "
        "its first step."
    )

    hang: float = 360.0
    stall: float = 120.0
    hold: float = 600.0
    tickets: bool = False
    warm_up: float = 200.0

    slots: RankSlots = part(RankSlots)
    samples: StepSamples = part(StepSamples)
    paces: JobPaces = part(JobPaces)
    io: Pressure = part(lambda: Pressure("node.io_pressure"), of="node")
    step: NDArray[np.float64] = memory(np.nan)  # newest step, by job slot
    stepped_at: NDArray[np.int64] = memory(0, np.int64)
    sampled_at: NDArray[np.int64] = memory(0, np.int64)
    watts: NDArray[np.float64] = memory(np.nan)  # usual mean power of its GPUs
    jobs: dict[str, int] = notes()  # job -> slot
    faults: dict[str, dict[str, Any]] = notes()  # entity -> newest fatal event: time, said
    stuck: dict[str, dict[str, Any]] = notes()  # job without a step -> kind, since, sent
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        """Returns the false alarm rate of its test of step time, and its rules."""
        rules = f"no step for {self.hang:g} s, or for {self.stall:g} s while tasks wait for I/O"
        return job_budget("step time", self.paces.streams.channel, PACE_EVERY, rules)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on jobs that hang, stall or slow down."""
        events, frame = self.samples.read_events(frames), frames.get("rank")
        self._record_faults(frames)
        if "node" in frames:
            self.io.update(frames["node"])
        if frame is None or not len(frame.entities):
            return []
        fresh = self.slots.update_slots(frame)
        job = self._assign_slots(frame.time)
        self.samples.apply_events(fresh, events, frame, self.slots, np.zeros(len(self.slots), np.int64))
        _, gate = self.samples.read_steps(frame, self.slots, self.warm_up)
        stuck = self._follow_steps(frames, frame, job)
        holds: JobFindings = []
        for name, slot in stuck:
            holds += self._judge_stuck(frames, frame, name, slot, job)
        capped = self._find_capped(frames)
        judgeable = self._find_judgeable(job, gate, frame.time)
        self.paces.update(frame, self.slots, job, len(self.step), judgeable, capped)
        slow = self.paces.slow_jobs()
        if len(slow):
            holds += self._judge_slow(frame, slow)
        if self.conditions or holds:
            close_ended(self.conditions, {key for key, _ in holds})
        return [finding for _, finding in holds if finding is not None]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns the pace of a job again: a person said that it is not a fault."""
        self.paces.reset_jobs(np.array([slot for job, slot in self.jobs.items() if job == entity], np.intp))

    def _record_faults(self, frames: Mapping[str, Frame]) -> None:
        """Records logged faults that stop jobs, by node or switch."""
        for frame in frames.values():
            for event in frame.events:
                down = event.kind == "link_state" and event.data.get("state") == "down"
                if down or event.kind in _FATAL:
                    number = read_integer(event.data.get("xid"))
                    said = event.kind if number is None else f"{event.kind} {number}"
                    self.faults[event.entity] = {"time": event.time, "said": said}
        if self.faults:
            now = max(frame.time for frame in frames.values())
            self.faults = {e: fault for e, fault in self.faults.items() if now - fault["time"] <= _KEPT}

    def _assign_slots(self, time: int) -> NDArray[np.int32]:
        """Returns (S,) job slot of each rank; new jobs take the slots of those that are gone."""
        named = self.slots.entities["job"]
        if set(named) != set(self.jobs):
            for job in self.jobs.keys() - set(named):
                del self.jobs[job]
                self.stuck.pop(job, None)
            free = iter(sorted(set(range(len(named) + len(self.step))) - set(self.jobs.values())))
            fresh = [self.jobs.setdefault(job, next(free)) for job in named if job not in self.jobs]
            self.grow(1 + max(self.jobs.values(), default=-1))
            at = np.array(fresh, np.intp)
            self.step[at] = self.watts[at] = np.nan
            self.stepped_at[at], self.sampled_at[at] = time, time
            self.paces.reset_jobs(at)
        slots = np.array([*(self.jobs[job] for job in named), -1], np.int32)
        return slots[self.slots.numbers["job"]]

    def _follow_steps(self, frames: Mapping[str, Frame], frame: Frame, job: NDArray[np.int32]) -> list[tuple[str, int]]:
        """Follows steps and usual power; returns jobs that have made no step for a while."""
        jobs, time, known = len(self.step), frame.time, job >= 0
        steps = self.slots.read_ranks(frame, "rank.step")
        top = np.full(jobs, -np.inf)
        np.fmax.at(top, job[known], steps[known])
        sampled = np.isfinite(top)
        # a lower step than before: the job started again
        moved = sampled & ((top != self.step) | (time - self.sampled_at > _SILENT))
        self.sampled_at[sampled] = time
        self.step[moved], self.stepped_at[moved] = top[moved], time
        power = self._gpu_means(frames, "gpu.power", job)
        learns = moved & np.isfinite(power)
        self.watts[learns] += np.where(np.isnan(self.watts), 0, _USUAL * (power - self.watts))[learns]
        fresh = learns & np.isnan(self.watts)
        self.watts[fresh] = power[fresh]
        waits = (time - self.stepped_at >= _STILL) & (time - self.sampled_at <= _SILENT)
        found = [(name, slot) for name, slot in self.jobs.items() if waits[slot]] if waits.any() else []
        if self.stuck:
            self.stuck = {name: self.stuck[name] for name, _ in found if name in self.stuck}
        return found

    def _gpu_means(self, frames: Mapping[str, Frame], signal: str, job: NDArray[np.int32]) -> Floats:
        """Returns (jobs,) mean of a signal over the GPUs of each job."""
        gpus, jobs = frames.get("gpu"), len(self.step)
        if gpus is None or signal not in gpus.values:
            return np.full(jobs, np.nan)
        values = self.slots.read_gpus(gpus, signal)
        known = (job >= 0) & np.isfinite(values)
        size = np.bincount(job[known], minlength=jobs)
        return np.asarray(np.bincount(job[known], values[known], jobs) / np.where(size > 0, size, np.nan))

    def _judge_stuck(
        self, frames: Mapping[str, Frame], frame: Frame, name: str, slot: int, job: NDArray[np.int32]
    ) -> JobFindings:
        """Returns why one job makes no step, once it has looked the same for a while."""
        nodes, time = self._job_nodes(slot, job), frame.time
        readings = self._read_stuck(frames, name, slot, job, nodes)
        kind = "" if self.samples.is_saving(name) else readings.kind()
        state = self.stuck.setdefault(name, {})
        measured = np.isfinite(readings.power_share) or not state.get("kind")
        if measured and state.get("kind") != kind:
            state |= {"kind": kind, "since": time}
        kind, onset = state["kind"], int(self.stepped_at[slot])
        if not kind or time - state["since"] < _LASTS:
            return []
        explanation = self._find_explanation(frame, name, nodes, onset)
        level: Level = "suspect"
        if time - onset >= (self.hang if kind == "hang" else self.stall) * SECOND and not explanation:
            level = "page" if kind == "hang" else "ticket"
        key = f"{kind} {name}"
        due = due_report(self.conditions, key, time, onset, level)
        if due is None:
            return [(key, None)]
        watts, share = float(self.watts[slot]), readings.power_share
        finding = self.finding(
            time,
            name,
            due,
            score=(time - onset) / SECOND,
            summary=readings.title(name, kind, time - onset),
            signals=("rank.step", "gpu.power", "gpu.utilization" if kind == "hang" else "node.io_pressure"),
            clears=_CLEARS,
            compared=Comparison(share * watts, watts, None, "own past", 0, 1 - share, "W"),
            cause=kind,
            attribution="JOB",
            nodes=len(nodes),
            explained_by=explanation,
            **readings.evidence(),
        )
        return [(key, finding)]

    def _read_stuck(
        self, frames: Mapping[str, Frame], name: str, slot: int, job: NDArray[np.int32], nodes: Sequence[str]
    ) -> StuckReadings:
        busy = float(self._gpu_means(frames, "gpu.utilization", job)[slot])
        share = float(self._gpu_means(frames, "gpu.power", job)[slot] / self.watts[slot])
        traffic = self._port_traffic(frames, name, nodes, frames["rank"].time)
        return StuckReadings(busy, share, self.io.median_share(nodes), traffic)

    def _job_nodes(self, slot: int, job: NDArray[np.int32]) -> list[str]:
        numbers = np.unique(self.slots.numbers["node"][job == slot]).tolist()
        return [self.slots.entities["node"][n] for n in numbers if n >= 0]

    def _port_traffic(self, frames: Mapping[str, Frame], name: str, nodes: Sequence[str], time: int) -> float:
        """Returns the median bytes/s that a port of the job's nodes has sent since the job made no step."""
        nics = frames.get("nic")
        if nics is None or "nic.tx_bytes" not in nics.values:
            return float("nan")
        above, wanted = nics.topology.ancestor_of_kind, set(nodes)
        values = zip(nics.entities, nics["nic.tx_bytes"], strict=False)
        sent = np.array([v for e, v in values if above(e, "node") in wanted])
        state = self.stuck.setdefault(name, {})
        before = state.get("sent")
        if before is None or len(before) != len(sent):
            state["sent"], state["sent_at"] = sent, time
            return float("nan")
        growth = (sent - before) / max((time - state["sent_at"]) / SECOND, 1.0)
        growth = growth[growth >= 0]
        return float(np.median(growth)) if len(growth) else float("nan")

    def _find_explanation(self, frame: Frame, name: str, nodes: Sequence[str], onset: int) -> str:
        """Returns announced maintenance, or a fault logged on its nodes about when it stopped; empty if there is
        none."""
        for entity in (name, *nodes):
            if self.samples.gates.in_maintenance(entity, frame.topology, frame.time):
                return f"announced maintenance on {entity}"
        for entity, fault in self.faults.items():
            around = (entity, *frame.topology.ancestors(entity))
            reaches = not set(around).isdisjoint(nodes) or (entity.startswith("leaf:") and bool(nodes))
            if reaches and fault["time"] >= onset - _BEFORE:
                return f"{fault['said']} of {entity}"
        return ""

    def _find_capped(self, frames: Mapping[str, Frame]) -> Bools:
        gpus = frames.get("gpu")
        if gpus is None or "gpu.throttle_reasons" not in gpus.values:
            return np.zeros(len(self.slots), bool)
        return has_reason(read_reasons(self.slots.read_gpus(gpus, "gpu.throttle_reasons"))[0], CAPPED)

    def _find_judgeable(self, job: NDArray[np.int32], gate: Bools, time: int) -> Bools:
        """Returns (jobs,) jobs whose pace is judged: all ranks may be, and it has just made a step."""
        barred = np.bincount(job[(job >= 0) & ~gate], minlength=len(self.step)) > 0
        return np.asarray(~barred & (time - self.stepped_at < _STILL))

    def _judge_slow(self, frame: Frame, slow: NDArray[np.intp]) -> JobFindings:
        """Returns jobs that step slower than before because of the network or a stage."""
        found: JobFindings = []
        names = {slot: name for name, slot in self.jobs.items()}
        for slot in slow.tolist():
            pace, since = self.paces.pace_of(slot), int(self.paces.since[slot])
            if slot not in names or pace.cause not in ("network", "job"):
                continue
            late = self.tickets and frame.time - since >= self.hold * SECOND
            key = f"slow {names[slot]}"
            due = due_report(self.conditions, key, frame.time, since, "ticket" if late else "suspect")
            found.append((key, self._slow_finding(frame, names[slot], slot, due) if due else None))
        return found

    def _slow_finding(self, frame: Frame, name: str, slot: int, due: tuple[int, Level]) -> Finding:
        pace, effect = self.paces.pace_of(slot), self.paces.effect(slot)
        network = pace.cause == "network"
        where = "in collectives" if network else "in its slowest stage"
        return self.finding(
            frame.time,
            name,
            due,
            score=self.paces.score(slot),
            summary=pager_title(name, f"steps {100 * effect:.0f} % slower than before, {where}"),
            signals=("rank.step_time", "rank.communication_time" if network else "rank.compute_time"),
            clears="they are under 5 % longer than before",
            compared=Comparison(pace.step, pace.usual, None, "own past", 0, effect, "s"),
            cause="network" if network else "a stage computes longer",
            attribution="NETWORK" if network else "JOB",
            compute=pace.compute,
            communication=pace.network,
        )
