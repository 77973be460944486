"""Finds jobs that make no step, wait for data, or step slower than before as a whole: the job is named, never a rank.

No step: GPUs that spin or idle, traffic and I/O pressure show why. Slower steps: each job against its own past, and
whether computing or the network made them longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.budget import list_alarms
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import events_of
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Checkpoints, Gates
from detectors.base.job_index import JobIndex
from detectors.base.newest import OLD, Newest
from detectors.base.port_rates import SENT
from detectors.base.pressure import CPU, PRESSED, TIMES, Pressure
from detectors.base.statistics import group_means, group_medians_of
from detectors.base.streams import Floats
from detectors.base.throttle import CAPPED, has_reason, read_reasons
from detectors.straggler.job_pace import STILL_SLOWER, JobPace
from detectors.straggler.job_throughput import (
    COLLECTIVES,
    JOB_EVERY,
    MORE,
    POLICY_SHARE,
    QUIET,
    WAITING,
    JobActivity,
    JobNow,
)
from detectors.straggler.rank_slots import RankSlots
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

_HALF = 0.5  # share of the longer step that must be found in one part to blame that part; chosen
_STILL, _STEPS = 60 * SECOND, 3
"""us, and usual steps, without a step before a job is judged. Chosen."""
_LASTS = 60 * SECOND  # us for which it must look the same: a single reading proves little; chosen
_BUSY = 0.9  # utilization of a GPU on which a kernel spins; NVML counts it as busy
_LOW = 0.45
"""Share of its usual power below which a GPU does not compute: a hang leaves 20 to 40 % (MegaScale and Minder show such
traces), evaluations half or more. Chosen between."""
_SPINNING, _UNSURE = 0.35, 900.0
"""The same share below which nothing else looks like a hang, and s for which one that draws more must last: evaluations
and rollouts within nodes draw more as well. Not in the first two hours of a job, in which most pause once. Chosen."""
_PAUSING = 32  # newest jobs that have ended whose pauses are kept; chosen
_NORMAL_SHARE, _LEAST_JOBS = 0.95, 4
"""Share of jobs whose longest pause a new job's may reach before it hangs: a split conformal quantile (Vovk et al.,
Algorithmic Learning in a Random World, 2005), and the longest of all while fewer than 19 jobs are known. From four jobs
on. Chosen: a false page for one job in twenty, once."""
_OWN_PAUSE = 1.5  # times its own longest pause that a job may pause again; chosen
_LONGEST_HANG = 3600.0
"""s from which no step is a hang wherever jobs pause: twice the longest default of PyTorch's watchdog, 30 min."""
_BEFORE = 120 * SECOND  # us before the last step in which a logged fault may have stopped the job: NCCL retries; chosen
_FATAL = ("xid", "sxid", "gpu_lost", "switch_state", "link_state")
_TIMES = ("rank.step_time", "rank.compute_time", "rank.communication_time")
_KEPT = 24 * 3600 * SECOND  # us after which a fault explains nothing; chosen
_TITLES = {"hang": ("hangs", ", GPUs at {:.0f} % of usual power"), "stall": ("waits for data", ", I/O wait {:.0f} %")}
_SLOW = {
    "data": ("waits for data", "node.io_pressure", "tasks wait for I/O"),
    "network": ("in collectives", "rank.communication_time", "network"),
    "job": ("in its slowest stage", "rank.compute_time", "a stage computes longer"),
    "host": ("tasks wait for CPU", CPU, "tasks of its only node wait for processors"),
}
"""By cause of longer steps: the title's end, the signal that shows it, and the cause in the evidence."""
JobFindings = list[tuple[str, Finding | None]]
"""Conditions that hold, by key, with the finding that is due, if any."""


def find_pace_cause(now: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """Returns why steps are longer: data if tasks wait for I/O, the network if collectives take the time, the host if
    tasks of the only node wait for processors, the job if a stage does.

    Else "", as by a power cap, which makes no collective twice as long, or a single rank.
    """
    longer = {name: now[name] - usual[name] for name in now}
    network = longer["network"] >= _HALF * longer["step"]
    capped = longer["capped"] >= POLICY_SHARE and not (network and now["network"] >= COLLECTIVES * usual["network"])
    if capped or not longer["step"] >= STILL_SLOWER * usual["step"]:
        return ""
    if now["io"] >= WAITING and not now["io"] < MORE * usual["io"]:
        return "data"  # a hook books waiting for the slowest loader as communication
    if network:
        return "network"
    if now["cpu"] >= PRESSED and not now["cpu"] < TIMES * usual["cpu"]:
        return "host"
    return "job" if longer["compute"] >= _HALF * longer["step"] else ""


def find_stuck_kind(job: JobNow, io_pressure: float) -> str:
    """Returns hang for busy GPUs at low power without traffic, stall for idle ones that wait for data, else "".

    io_pressure: share of the time in which tasks wait for I/O, median of the job's nodes; nan is unknown.
    """
    if not job.watts <= _LOW * job.usual_watts:
        return ""
    if job.utilization >= _BUSY:
        return "" if job.bytes_per_second > QUIET else "hang"
    return "stall" if io_pressure >= WAITING else ""


@dataclass
class StragglerJob(Detector):
    """Finds jobs that make no steps, or steps at least 10 % longer than before, with the cause.

    Hang: no step for `hang` s while GPUs spin at less than 45 % of their power and nothing is sent. Of a job on several
    nodes that reports no steps, the time since it last sent data counts, after its first two hours. 15 min if they draw
    more than a third of their power. For longer where jobs paused like that and went on (rollouts, evaluations within
    nodes): 1.5 times the own longest pause, or that of 19 in 20 jobs of the site, at most an hour. Page; for a job of
    one node, which sends nothing anyway, a ticket after an hour.
    Neither if maintenance, an XID, a lost GPU or a link that went down on its nodes explains it: then the job ends
    without help, and other detectors report the cause. Stall: no step for `stall` s while GPUs idle and tasks wait for
    I/O on half of its nodes. Ticket. Slow: a CUSUM on ln(step time) against the job's own past, with its cause: waiting
    for data, collectives (the network) or a stage (the job itself). Page on its node after `hold` s if the job has one
    node, whose tasks wait for processors, three times as long as usual. A ticket after `hold` s if tasks wait for I/O
    on half of its nodes, three times as long as usual. Page after `hold` s if its collectives take nearly twice as long
    as before. Else a suspect, since other detectors report the leaf or port, and the job's owner decides how it divides
    work; with `tickets` a ticket after `hold` s. One slow rank, and a power cap, are left to other detectors.
    Evaluations and checkpoints draw more power than a hang, and show no I/O pressure.

    Source: ByteRobust (SOSP 2025) takes 10 min without RDMA traffic for a hang; PyTorch's watchdog ends it after 10 min
    at the earliest, and jobs that lost a GPU or link are dead within 5 min: `hang` is between. Lin et al. (OSDI
    2025): 42.5 % of jobs are slowed by 10 % or more, mostly by themselves, so that this is not a ticket.
    """

    name: ClassVar[str] = "straggler_job"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ("rank.step", "nic.tx_bytes")
    wants: ClassVar[tuple[str, ...]] = (
        *("rank.step_time", "rank.compute_time", "rank.communication_time", "gpu.power", "gpu.utilization"),
        *("gpu.throttle_reasons", "node.io_pressure", CPU, "node.load1", "node.cpu_count"),
        *("event:job_start", "event:checkpoint"),
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

    slots: RankSlots = part(RankSlots)
    gates: Gates = part(Gates)
    saving: Checkpoints = part(Checkpoints)
    pace: JobPace = part(JobPace, of="job")
    io: Pressure = part(lambda: Pressure("node.io_pressure"), of="node")
    cpu: Pressure = part(lambda: Pressure(CPU), of="node")
    activity: JobActivity = part(JobActivity, of="nic")
    step: NDArray[np.float64] = memory(np.nan)  # newest step, by job slot
    stepped_at: NDArray[np.int64] = memory(0, np.int64)
    sampled_at: NDArray[np.int64] = memory(0, np.int64)
    updated_at: int = notes(int)
    ranks: tuple[Newest, ...] = part(lambda: tuple(map(Newest, _TIMES)), of="rank")
    reasons: Newest = part(lambda: Newest("gpu.throttle_reasons"), of="gpu")
    faults: dict[str, dict[str, Any]] = notes()  # entity -> newest fatal event: time, said
    slower: dict[str, dict[str, Any]] = notes()  # job with longer steps -> cause, since when that is it
    stuck: dict[str, dict[str, Any]] = notes()  # job that does not move -> kind, since, moved_at
    pauses: dict[str, int] = notes()  # job -> us of its longest pause that looked like a hang and ended by itself
    conditions: OpenConditions = notes()
    newest: dict[str, Frame] = field(default_factory=dict, init=False, repr=False)  # by class: columns and topology
    only_node: dict[str, str] = notes()  # job -> its node, of jobs on one

    def drop_ranks(self, kept: NDArray[np.bool_]) -> None:
        """See `Detector.drop_ranks`. Its other cells are of slots."""
        for newest in self.ranks:
            newest.keep_cells(kept)

    def budget(self) -> list[str]:
        """Returns the false alarm rate of its test of step time, and its rules."""
        rules = f"no step for {self.hang:g} s, or for {self.stall:g} s while tasks wait for I/O"
        return list_alarms({}, ("step time", self.pace.streams.channel, JOB_EVERY), rules)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on jobs that hang, stall or slow down."""
        time = self.gates.update(frames)
        if "node" in frames:
            self.io.update(frames["node"])
            self.cpu.update(frames["node"])
        self.activity.read(frames)
        self.newest |= frames
        if (gpus := frames.get("gpu")) is not None:
            self.reasons.update(gpus)
        if (ranks := frames.get("rank")) is not None:
            self._follow_steps(ranks)
        if time is None:
            return []
        self._record_faults(frames, time)
        self.saving.update(frames, time)
        if 0 <= time - self.updated_at < JOB_EVERY:
            return []
        self._follow_pace(time)
        self.updated_at = time
        holds = [*self._judge_stuck_jobs(time), *self._judge_slow(time)]
        close_ended(self.conditions, {key for key, _ in holds})
        return [finding for _, finding in holds if finding is not None]

    def _judge_stuck_jobs(self, time: int) -> JobFindings:
        """Returns jobs that make no step or, where none is reported, send nothing."""
        holds, stuck = JobFindings(), dict[str, dict[str, Any]]()
        if (gpus := self.newest.get("gpu")) is None:
            return holds
        slots, still = self.pace.jobs, self._still()
        reporting = {job: slot for job, slot in slots.items() if np.isfinite(self.step[slot])}
        steps = {job: (int(self.stepped_at[slot]), int(self.sampled_at[slot])) for job, slot in reporting.items()}
        for job in self.activity.update(time, gpus, self.newest.get("nic"), steps):
            before = self.stuck.get(job.name, {"kind": "", "since": time, "moved_at": job.moved_at})
            if before["kind"] == "hang" and job.moved_at > before["moved_at"]:
                self.pauses[job.name] = max(job.moved_at - before["moved_at"], self.pauses.pop(job.name, 0))
            least = still[slots[job.name]] if job.reports else _STILL
            if time - job.moved_at >= least and time - job.seen_at <= OLD:
                stuck[job.name] = before | {"moved_at": job.moved_at}
                holds += self._judge_stuck(gpus, time, job, stuck[job.name])
        self.stuck = stuck
        ended = set([name for name in self.pauses if name not in self.activity.jobs][:-_PAUSING])
        self.pauses = {name: longest for name, longest in self.pauses.items() if name not in ended}
        return holds

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns the pace of a job, or of the job of a blamed node, again: a person said that it is not a fault."""
        jobs = self.pace.jobs.items()
        self.pace.reset_jobs([slot for job, slot in jobs if entity in (job, self.only_node.get(job))])

    def _record_faults(self, frames: Mapping[str, Frame], time: int) -> None:
        """Records logged faults that stop jobs, by node or switch."""
        for event in events_of(frames, *_FATAL):
            if event.kind != "link_state" or event.data.get("state") == "down":
                self.faults[event.entity] = {"time": event.time, "said": event.kind}
        self.faults = {e: fault for e, fault in self.faults.items() if time - fault["time"] <= _KEPT}

    def _follow_steps(self, frame: Frame) -> None:
        """Follows ranks, jobs and their newest step; new jobs take the slots of those that are gone."""
        time = frame.time
        self.slots.update_slots(frame)
        for newest in self.ranks:
            newest.update(frame)
        slots, fresh = self.pace.assign_slots(self.slots.entities["job"])
        self.grow(len(self.pace.count))
        self.step[fresh] = np.nan
        job = slots[self.slots.numbers["job"]]
        top, known = np.full(len(self.step), -np.inf), job >= 0
        np.fmax.at(top, job[known], self.slots.read_ranks(frame, "rank.step")[known])
        sampled = np.isfinite(top)
        moved = sampled & ((top != self.step) | (time - self.sampled_at > OLD))
        again = {name for name, slot in self.pace.jobs.items() if moved[slot] and top[slot] < self.step[slot]}
        self.stuck = {name: state for name, state in self.stuck.items() if name not in again}  # it ended and restarted
        self.sampled_at[sampled] = time
        self.step[moved], self.stepped_at[moved] = top[moved], time

    def _hangs_after(self, job: JobNow) -> float:
        """Returns the s without a step after which a job hangs, given pauses of this site."""
        if len(job.nodes) == 1:  # no traffic is no sign of a hang: it never sends
            return _LONGEST_HANG
        known = sorted(self.pauses.values())
        rank = min(math.ceil(_NORMAL_SHARE * (len(known) + 1)), len(known))
        usual = known[rank - 1] if len(known) >= _LEAST_JOBS else 0
        longest = max(usual, _OWN_PAUSE * self.pauses.get(job.name, 0)) / SECOND
        least = self.hang if job.watts <= _SPINNING * job.usual_watts else max(_UNSURE, self.hang)
        return max(least, min(longest, _LONGEST_HANG))

    def _still(self) -> Floats:
        """Returns (jobs,) us without a step after which each may be stuck."""
        step = self.pace.measures["step"].usual if "step" in self.pace.measures else np.full(len(self.step), np.nan)
        return np.asarray(np.fmax(_STEPS * SECOND * step[: len(self.step)], _STILL))

    def _follow_pace(self, time: int) -> None:
        """Adds an instant to the pace of the jobs that have made a step since the last time."""
        frame, ranks, jobs = self.newest.get("rank"), self.slots, len(self.step)
        if frame is None or not jobs:
            return
        job = np.array([*map(self.pace.jobs.__getitem__, ranks.entities["job"]), -1])[ranks.numbers["job"]]
        known, size = job >= 0, len(frame.entities)
        steps, computes, network = (np.append(n.read(size, time), np.nan)[ranks.column] for n in self.ranks)
        step, compute = group_means(steps, job, jobs), ranks.team_medians(computes)
        longest, least = np.full(jobs, np.nan), np.full(jobs, np.nan)
        np.fmax.at(longest, job[known], compute[known])
        np.fmin.at(least, job[known], network[known])
        capped = np.zeros(len(job))
        if (gpus := self.newest.get("gpu")) is not None:
            ranks.locate_gpus(gpus)
            nodes = JobIndex().places(gpus, None).nodes
            self.only_node = {name: at[0] for name, at in nodes.items() if len(at) == 1}
            reasons = ranks.of_gpus(self.reasons.read(len(gpus.entities), time))
            capped = has_reason(read_reasons(reasons)[0], CAPPED).astype(np.float64)
        least = np.where(np.isfinite(least), least, step - longest)
        waits = np.append(self.io.shares_of(ranks.entities["node"]), np.nan)[ranks.numbers["node"]]
        found = {"step": step, "compute": longest, "network": least, "capped": group_means(capped, job, jobs)}
        found["io"], found["cpu"] = group_medians_of(waits, job, jobs), np.full(jobs, np.nan)
        for name in self.only_node.keys() & self.pace.jobs.keys():
            found["cpu"][self.pace.jobs[name]] = self.cpu.median_share([self.only_node[name]])
        with np.errstate(divide="ignore", invalid="ignore"):
            slower = np.log(step)
        working = ~np.append(self.gates.maintenance_mask(frame), True)[ranks.column]
        barred = np.bincount(job[known & ~working & (ranks.column >= 0)], minlength=jobs) > 0
        gate = ~barred & (self.stepped_at > self.updated_at)
        self.pace.update(found, slower, np.zeros(jobs, np.int8), gate, time)

    def _judge_stuck(self, frame: Frame, time: int, job: JobNow, state: dict[str, Any]) -> JobFindings:
        """Returns why one job makes no step, once it has looked the same for a while; `state` says since when."""
        onset, pressure = job.moved_at, self.io.median_share(job.nodes)
        kind = "" if job.name in self.saving.until else find_stuck_kind(job, pressure)
        if state["kind"] != kind:
            state |= {"kind": kind, "since": time}
        if not kind or time - state["since"] < _LASTS:
            return []
        explanation = self._find_explanation(frame, job.name, job.nodes, onset)
        level: Level = "suspect"
        patience = self._hangs_after(job) if kind == "hang" else self.stall
        surely = not job.new or job.watts <= _SPINNING * job.usual_watts
        if job.seen_at - onset >= patience * SECOND and not explanation and surely:
            level = "page" if kind == "hang" and len(job.nodes) > 1 else "ticket"
        key = f"{kind} {job.name}"
        due = due_report(self.conditions, key, time, onset, level)
        return [(key, self._stuck_finding(time, job, kind, pressure, explanation, due) if due else None)]

    def _stuck_finding(
        self, time: int, job: JobNow, kind: str, pressure: float, explanation: str, due: tuple[int, Level]
    ) -> Finding:
        share, (state, shows) = job.watts / job.usual_watts, _TITLES[kind]
        missing, rests = "step" if job.reports else "traffic", (time - job.moved_at) / SECOND
        shows_it = "gpu.utilization" if kind == "hang" else "node.io_pressure"
        title = f"{state}, no {missing} for {rests / 60:.0f} min"
        shown = {"utilization": job.utilization, "power_share": share, "io_pressure": pressure}
        shown["bytes_per_second"] = job.bytes_per_second
        return self.finding(
            time,
            job.name,
            due,
            score=rests,
            summary=pager_title(job.name, title + shows.format(100 * (share if kind == "hang" else pressure))),
            signals=("rank.step" if job.reports else SENT, "gpu.power", shows_it),
            clears="it makes a step" if job.reports else "it sends data",
            compared=Comparison(job.watts, job.usual_watts, None, "own past", 0, 1 - share, "W"),
            cause=kind,
            attribution="JOB",
            nodes=len(job.nodes),
            explained_by=explanation,
            **{name: value if np.isfinite(value) else None for name, value in shown.items()},
        )

    def _find_explanation(self, frame: Frame, name: str, nodes: Sequence[str], onset: int) -> str:
        """Returns announced maintenance, or a fault logged on its nodes about when it stopped; empty if there is
        none."""
        for entity in (name, *nodes):
            if self.gates.in_maintenance(entity, frame.topology, frame.time):
                return f"announced maintenance on {entity}"
        for entity, fault in self.faults.items():
            around = (entity, *frame.topology.ancestors(entity))
            reaches = not set(around).isdisjoint(nodes) or (entity.startswith("leaf:") and bool(nodes))
            if reaches and fault["time"] >= onset - _BEFORE:
                return f"{fault['said']} of {entity}"
        return ""

    def _judge_slow(self, time: int) -> JobFindings:
        """Returns jobs that step slower than before because of the network or a stage."""
        found, causes = JobFindings(), dict[str, dict[str, Any]]()
        for name, slot in self.pace.slow_jobs():
            now, usual = self.pace.values(slot)
            cause, since = find_pace_cause(now, usual), int(self.pace.since[slot])
            if not cause or time - self.stepped_at[slot] >= self._still()[slot]:
                continue
            known = self.slower.get(name, {"cause": cause, "since": since})
            causes[name] = known if known["cause"] == cause else {"cause": cause, "since": time}
            level: Level = "suspect"
            if time - max(since, causes[name]["since"]) >= self.hold * SECOND:
                harm = cause == "network" and now["network"] >= COLLECTIVES * usual["network"]
                level = (
                    "page" if harm or cause == "host" else "ticket" if self.tickets or cause == "data" else "suspect"
                )
            key = f"slow {name}"
            due = due_report(self.conditions, key, time, since, level)
            found.append((key, self._slow_finding(time, name, slot, due) if due else None))
        self.slower = causes
        return found

    def _slow_finding(self, time: int, name: str, slot: int, due: tuple[int, Level]) -> Finding:
        effect, (now, usual) = float(np.expm1(self.pace.streams.cells[kernel.EFFECT, slot])), self.pace.values(slot)
        found = find_pace_cause(now, usual)
        part, signal, cause = _SLOW[found]
        entity = self.only_node.get(name, name) if found == "host" else name
        subject = "" if entity == name else f"{entity_name(name)} "
        return self.finding(
            time,
            entity,
            due,
            score=float(self.pace.streams.cells[kernel.UP, slot]),
            summary=pager_title(entity, f"{subject}steps {100 * effect:.0f} % slower than before, {part}"),
            signals=("rank.step_time", signal),
            clears=f"they are under {100 * STILL_SLOWER:.0f} % longer than before",
            compared=Comparison(now["step"], usual["step"], None, "own past", 0, effect, "s"),
            job=name,
            cause=cause,
            attribution={"network": "NETWORK", "host": "HOST"}.get(found, "JOB"),
            compute=now["compute"],
            communication=now["network"],
        )
