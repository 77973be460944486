"""Finds jobs that stand still, wait for data, or step slower than before as a whole: the job is named, never a rank.

How fast whole jobs step beside their own past, and whether computing or the network made them slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_integer
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.base.throttle import CAPPED, has_reason, read_reasons
from detectors.straggler.alarm_budget import job_budget
from detectors.straggler.pressure import Pressure
from detectors.straggler.rank_slots import RankSlots
from detectors.straggler.step_samples import StepSamples
from pipeline.model.records import SECOND, Finding, Frame, Level

PACE_EVERY = 30 * SECOND
"""How often the pace of jobs is judged: some steps of a large job. Chosen."""
_PARTS = ("step", "compute", "network", "capped")
_LEARNING = 0.02  # of what is usual: about 50 looks of memory, 25 minutes; chosen
_SMOOTH = 0.3  # of what is now: about 3 looks; chosen
_STILL_SLOWER = 0.05  # share by which steps must be longer now for a part to be blamed: half of what matters
_HALF = 0.5  # of what a step takes longer must be found in one part of it to blame that part; chosen
_POLICY = 0.25  # more of the GPUs under a power cap than usual: the cap explains the rest; chosen
PaceCause = Literal["network", "job", "rank", "cap", "over"]


@dataclass(frozen=True, slots=True)
class JobPace:
    """What a job does now and usually. stage: of those whose median computes longest; made: what made it slower."""

    step: float
    usual: float
    compute: float
    usual_compute: float
    network: float
    usual_network: float
    cause: PaceCause


class JobPaces:
    """One cell per job slot: what a step usually takes, and of what it is made."""

    def __init__(self) -> None:
        self.streams = Streams(Channel(0.02, 0.10))
        self.now = {name: np.empty(0) for name in _PARTS}
        self.usual = {name: np.empty(0) for name in _PARTS}
        self.count = np.empty(0, np.int64)
        self.since = np.empty(0, np.int64)
        self.updated_at = 0

    def update(
        self, frame: Frame, places: RankSlots, of: NDArray[np.int32], jobs: int, gate: Bools, capped: Bools
    ) -> bool:
        """Takes the steps of an instant; whether it was time to. of: (S,) job slot of each rank; gate: (jobs,)."""
        self._grow(jobs)
        if 0 <= frame.time - self.updated_at < PACE_EVERY:
            return False
        self.updated_at = frame.time
        mine = of >= 0
        step = _mean(places.read_ranks(frame, "rank.step_time"), of, mine, jobs)
        compute = places.stage_medians(places.read_ranks(frame, "rank.compute_time"))
        network = places.read_ranks(frame, "rank.communication_time")
        longest, least = np.full(jobs, -np.inf), np.full(jobs, np.inf)
        with np.errstate(invalid="ignore"):
            np.fmax.at(longest, of[mine], compute[mine])
            np.fmin.at(least, of[mine], network[mine])
        found = (step, longest, least, _mean(capped.astype(float), of, mine, jobs))
        for name, values in zip(_PARTS, found, strict=True):
            last = self.now[name]
            mean = np.where(np.isfinite(last), last + _SMOOTH * (values - last), values)
            last[:] = np.where(np.isfinite(mean), mean, last)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.log(step)
        gate = gate & np.isfinite(value)
        self.streams.step(value, np.full(jobs, -1, np.int32), frame.time, gate)
        self.since[self.streams.cells[kernel.UP, :jobs] <= 0] = frame.time
        self._learn(gate & (self.streams.cells[kernel.UP, :jobs] <= 2))
        return True

    def _learn(self, take: Bools) -> None:
        """Follows what is usual, but not while a job may be slow."""
        self.count += take
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * take
        for name in _PARTS:
            moved = self.usual[name] + gain * (self.now[name] - self.usual[name])
            self.usual[name] = np.where(np.isfinite(moved), moved, self.usual[name])

    def slow_jobs(self) -> NDArray[np.intp]:
        """Jobs that are slower than their own past."""
        words = self.streams.cells[kernel.WORD].view(np.uint32)
        return np.flatnonzero(((words & kernel.ON_UP) != 0)[: len(self.count)] & (self.count >= LEARN))

    def pace_of(self, job: int) -> JobPace:
        """One job, and what made it slower: the network if collectives take the time, the job if a stage does."""
        now, usual = ({name: float(cells[name][job]) for name in _PARTS} for cells in (self.now, self.usual))
        longer = {name: now[name] - usual[name] for name in _PARTS}
        made: PaceCause = "rank"
        if not longer["step"] >= _STILL_SLOWER * usual["step"]:
            made = "over"
        elif longer["capped"] >= _POLICY:
            made = "cap"
        elif longer["network"] >= _HALF * longer["step"]:
            made = "network"
        elif longer["compute"] >= _HALF * longer["step"]:
            made = "job"
        both = [(now[name], usual[name]) for name in _PARTS[:3]]
        return JobPace(*both[0], *both[1], *both[2], made)

    def effect(self, job: int) -> float:
        """Share by which its steps are longer, smoothed."""
        return float(np.expm1(self.streams.cells[kernel.EFFECT, job]))

    def score(self, job: int) -> float:
        return float(self.streams.cells[kernel.UP, job])

    def reset(self, jobs: NDArray[np.intp]) -> None:
        """Jobs of which nothing is known any more."""
        self._grow(int(jobs.max(initial=-1)) + 1)
        mask = np.zeros(self.streams.cells.shape[1], bool)
        mask[jobs[jobs < len(mask)]] = True
        self.streams.reset(mask)
        self.count[jobs] = self.since[jobs] = 0
        for name in _PARTS:
            self.usual[name][jobs], self.now[name][jobs] = 0.0, np.nan

    def _grow(self, size: int) -> None:
        if (more := size - len(self.count)) > 0:
            self.count, self.since = (np.append(cells, np.zeros(more, np.int64)) for cells in (self.count, self.since))
            self.usual = {name: np.append(cells, np.zeros(more)) for name, cells in self.usual.items()}
            self.now = {name: np.append(cells, np.full(more, np.nan)) for name, cells in self.now.items()}

    def snapshot(self) -> dict[str, Any]:
        names = ("now", "usual", "count", "since", "updated_at")
        return {"streams": self.streams.snapshot(), **{name: getattr(self, name) for name in names}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.streams.restore(state["streams"])
        for name in state.keys() - {"streams"}:
            setattr(self, name, state[name])


def _mean(values: Floats, of: NDArray[np.int32], mine: Bools, jobs: int) -> Floats:
    """(jobs,) mean of what is known of each job's ranks; NaN of none."""
    known = mine & np.isfinite(values)
    total, size = np.bincount(of[known], values[known], jobs), np.bincount(of[known], minlength=jobs)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / np.where(size > 0, size, np.nan))


_SILENT = 30 * SECOND  # a job without any sample for so long is not judged: it may have ended; chosen
_STILL = 60 * SECOND  # steps of large models take up to half a minute; before that nobody looks closer. Chosen
_LASTS = 60 * SECOND  # for so long it must look the same: a single reading tells little; chosen
_BUSY = 0.9  # utilisation of a GPU on which a kernel spins; NVML counts it as busy
_LOW = 0.5
"""Share of its usual power below which a GPU does not compute: a hang leaves 20 to 40 % (MegaScale and Minder show such
traces), evaluations more than half. Chosen."""
_QUIET = 50e6  # bytes/s of a port, a thousandth of 400 Gb/s, that keep-alives and storage may send; chosen
_WAITING = 0.2  # share of the time in which tasks wait for I/O, on half of the nodes; chosen
_BEFORE = 120 * SECOND  # what was logged so long before the last step may have stopped the job; chosen: NCCL retries
_FATAL = frozenset({"xid", "sxid", "gpu_lost", "switch_state"})
_USUAL = 0.05  # of the usual power: about 20 samples of memory; chosen
_KEPT = 24 * 3600 * SECOND  # faults that are older explain nothing; chosen
_TITLES = {
    "hang": "stands still: its GPUs spin at {busy:.0f} % utilisation and {share:.0f} % of their usual power{traffic}",
    "stall": "waits for data: its GPUs idle at {share:.0f} % of their usual power and tasks on its nodes wait for I/O "
    "{io:.0f} % of the time",
}
_CLEARS = "it makes a step"


@dataclass
class StragglerJob(Detector):
    """A job that makes no step, and why; and steps at least 10 % longer than the job's own past, and what made them so.

    Hang: no step for `hang` s while GPUs spin at a fraction of their power and nothing is sent. Page, unless an XID, a
    lost GPU or a link that went down on its nodes explains it, since then the job dies by itself and others tell why,
    or unless people work on them.
    Stall: no step for `stall` s while GPUs idle and tasks wait for I/O on half of its nodes. Ticket.
    Slow: a CUSUM on ln(step time) against the job's own past, with what made it so: collectives (the network) or a
    stage (the job itself). A suspect, as the leaf or port is named elsewhere and nobody can mend how a job shares its
    work; with `tickets` a ticket after `hold` s. One slow rank, and a power cap, are left to others.
    Evaluations and checkpoints draw more power than a hang, and tell no I/O pressure.

    Source: ByteRobust (SOSP 2025) takes 10 min without RDMA traffic for a hang; PyTorch's watchdog ends it after 10 min
    at the earliest, and jobs that lost a GPU or link are dead within 5 min: `hang` lies between. Lin et al. (OSDI
    2025): 42.5 % of jobs are slowed by 10 % or more, mostly by themselves, so that this is no ticket.
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
        "Which rank did not come to a collective, hangs of jobs whose power is not measured, and a job that was slow "
        "from its first step."
    )

    hang: float = 360.0
    stall: float = 120.0
    hold: float = 600.0
    tickets: bool = False
    warm_up: float = 200.0

    slots: RankSlots = part(RankSlots)
    samples: StepSamples = part(StepSamples)
    paces: JobPaces = part(JobPaces)
    io: Pressure = part(lambda: Pressure("node.io_pressure"))
    step: NDArray[np.float64] = memory(np.nan)
    stepped_at: NDArray[np.int64] = memory(0, np.int64)
    sampled_at: NDArray[np.int64] = memory(0, np.int64)
    watts: NDArray[np.float64] = memory(np.nan)
    jobs: dict[str, int] = notes()
    faults: dict[str, dict[str, Any]] = notes()
    stuck: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        still = f"no step for {self.hang:g} s, or for {self.stall:g} s while tasks wait for I/O"
        return job_budget("step time", self.paces.streams.channel, PACE_EVERY, still)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        told, frame = self.samples.read_events(frames), frames.get("rank")
        self._record_faults(frames)
        if "node" in frames:
            self.io.update(frames["node"])
        if frame is None or not len(frame.entities):
            return []
        fresh = self.slots.update_slots(frame)
        of = self._assign_slots(frame.time)
        self.samples.apply_events(fresh, told, frame, self.slots, np.zeros(len(self.slots), np.int64))
        _, gate = self.samples.read_steps(frame, self.slots, self.warm_up)
        stuck = self._follow_steps(frames, frame, of)
        holds: list[tuple[str, Finding | None]] = []
        for name, job in stuck:
            holds += self._judge_stuck(frames, frame, name, job, of)
        capped = self._find_capped(frames)
        self.paces.update(frame, self.slots, of, len(self.step), self._find_judgeable(of, gate, frame.time), capped)
        slow = self.paces.slow_jobs()
        if len(slow):
            holds += self._judge_slow(frame, slow)
        if self.conditions or holds:
            close_ended(self.conditions, {key for key, _ in holds})
        return [finding for _, finding in holds if finding is not None]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """The pace that the job has now is its usual one."""
        self.paces.reset(np.array([slot for job, slot in self.jobs.items() if job == entity], np.intp))

    def _record_faults(self, frames: Mapping[str, Frame]) -> None:
        """Keeps what was logged that stops jobs, by node or switch."""
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
        """(S,) slot of each rank's job; jobs that come take the slots of those that are gone."""
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
            self.paces.reset(at)
        slots = np.array([*(self.jobs[job] for job in named), -1], np.int32)
        return slots[self.slots.numbers["job"]]

    def _follow_steps(self, frames: Mapping[str, Frame], frame: Frame, of: NDArray[np.int32]) -> list[tuple[str, int]]:
        """Follows steps and usual power; jobs that have made no step for a while."""
        jobs, time, mine = len(self.step), frame.time, of >= 0
        steps = self.slots.read_ranks(frame, "rank.step")
        top = np.full(jobs, -np.inf)
        np.fmax.at(top, of[mine], steps[mine])
        seen = np.isfinite(top)
        moved = seen & ((top != self.step) | (time - self.sampled_at > _SILENT))  # less than before: the job began anew
        self.sampled_at[seen] = time
        self.step[moved], self.stepped_at[moved] = top[moved], time
        power = self._gpu_means(frames, "gpu.power", of)
        learns = moved & np.isfinite(power)
        self.watts[learns] += np.where(np.isnan(self.watts), 0, _USUAL * (power - self.watts))[learns]
        fresh = learns & np.isnan(self.watts)
        self.watts[fresh] = power[fresh]
        waits = (time - self.stepped_at >= _STILL) & (time - self.sampled_at <= _SILENT)
        found = [(name, job) for name, job in self.jobs.items() if waits[job]] if waits.any() else []
        if self.stuck:
            self.stuck = {name: self.stuck[name] for name, _ in found if name in self.stuck}
        return found

    def _gpu_means(self, frames: Mapping[str, Frame], signal: str, of: NDArray[np.int32]) -> Floats:
        """(jobs,) mean of a signal over the GPUs of each job."""
        gpus, jobs = frames.get("gpu"), len(self.step)
        if gpus is None or signal not in gpus.values:
            return np.full(jobs, np.nan)
        values = self.slots.read_gpus(gpus, signal)
        known = (of >= 0) & np.isfinite(values)
        size = np.bincount(of[known], minlength=jobs)
        return np.asarray(np.bincount(of[known], values[known], jobs) / np.where(size > 0, size, np.nan))

    def _judge_stuck(
        self, frames: Mapping[str, Frame], frame: Frame, name: str, job: int, of: NDArray[np.int32]
    ) -> list[tuple[str, Finding | None]]:
        """Why one job makes no step, once it has looked the same for a while."""
        time, nodes = frame.time, self._job_nodes(job, of)
        busy = float(self._gpu_means(frames, "gpu.utilization", of)[job])
        share = float(self._gpu_means(frames, "gpu.power", of)[job] / self.watts[job])
        io, traffic = self.io.median_share(nodes), self._port_traffic(frames, name, nodes, time)
        kind = ""
        if share <= _LOW and not self.samples.is_saving(name):
            hangs = busy >= _BUSY and not traffic > _QUIET
            kind = "hang" if hangs else "stall" if not busy >= _BUSY and io >= _WAITING else ""
        state = self.stuck.setdefault(name, {})
        measured = np.isfinite(share) or not state.get("kind")
        if measured and state.get("kind") != kind:
            state |= {"kind": kind, "since": time}
        kind, onset = state["kind"], int(self.stepped_at[job])
        if not kind or time - state["since"] < _LASTS:
            return []
        why = self._find_explanation(frame, name, nodes, onset)
        level: Level = "suspect"
        if time - onset >= (self.hang if kind == "hang" else self.stall) * SECOND and not why:
            level = "page" if kind == "hang" else "ticket"
        key = f"{kind} {name}"
        due = due_report(self.conditions, key, time, onset, level)
        if due is None:
            return [(key, None)]
        traffic_words = f", and its ports send {traffic / 1e6:.0f} MB/s" if np.isfinite(traffic) else ""
        numbers = {"busy": 100 * busy, "share": 100 * share, "io": 100 * io, "traffic": traffic_words}
        because, minutes = f"; {why} explains it" if why else "", (time - onset) / (60 * SECOND)
        summary = f"{name} has made no step for {minutes:.0f} min and {_TITLES[kind].format(**numbers)}{because}"
        compared = Comparison(share * (watts := float(self.watts[job])), watts, None, "own past", 0, 1 - share, "W")
        shown = {"utilization": busy, "power_share": share, "io_pressure": io, "bytes_per_second": traffic}
        more = {key: value if np.isfinite(value) else None for key, value in shown.items()}
        signals = ("rank.step", "gpu.power", "gpu.utilization" if kind == "hang" else "node.io_pressure")
        told = make_evidence(
            _CLEARS, compared, cause=kind, attribution="JOB", nodes=len(nodes), explained_by=why, **more
        )
        return [(key, Finding(time, due[0], name, self.name, due[1], (time - onset) / SECOND, summary, told, signals))]

    def _job_nodes(self, job: int, of: NDArray[np.int32]) -> list[str]:
        numbers = np.unique(self.slots.numbers["node"][of == job]).tolist()
        return [self.slots.entities["node"][n] for n in numbers if n >= 0]

    def _port_traffic(self, frames: Mapping[str, Frame], name: str, nodes: Sequence[str], time: int) -> float:
        """Bytes a second that a port of the job's nodes sends on the mean since it was first seen to stand still."""
        nics = frames.get("nic")
        if nics is None or "nic.tx_bytes" not in nics.values:
            return float("nan")
        above, there = nics.topology.ancestor_of_kind, set(nodes)
        values = zip(nics.entities, nics["nic.tx_bytes"], strict=False)
        sent = np.array([v for e, v in values if above(e, "node") in there])
        state = self.stuck.setdefault(name, {})
        before = state.get("sent")
        if before is None or len(before) != len(sent):
            state["sent"], state["sent_at"] = sent, time
            return float("nan")
        grown = (sent - before) / max((time - state["sent_at"]) / SECOND, 1.0)
        grown = grown[grown >= 0]
        return float(np.median(grown)) if len(grown) else float("nan")

    def _find_explanation(self, frame: Frame, name: str, nodes: Sequence[str], onset: int) -> str:
        """Announced work, or what was logged on its nodes about when it stopped; empty if nothing."""
        for entity in (name, *nodes):
            if self.samples.gates.in_maintenance(entity, frame.topology, frame.time):
                return f"announced work on {entity}"
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

    def _find_judgeable(self, of: NDArray[np.int32], gate: Bools, time: int) -> Bools:
        """(jobs,) whose pace is judged: all ranks may be, and a step was made just now."""
        barred = np.bincount(of[(of >= 0) & ~gate], minlength=len(self.step)) > 0
        return np.asarray(~barred & (time - self.stepped_at < _STILL))

    def _judge_slow(self, frame: Frame, slow: NDArray[np.intp]) -> list[tuple[str, Finding | None]]:
        """Jobs that step slower than before, and what made them so."""
        found: list[tuple[str, Finding | None]] = []
        names = {job: name for name, job in self.jobs.items()}
        for job in slow.tolist():
            pace, since = self.paces.pace_of(job), int(self.paces.since[job])
            if job not in names or pace.cause not in ("network", "job"):
                continue
            late = self.tickets and frame.time - since >= self.hold * SECOND
            key = f"slow {names[job]}"
            due = due_report(self.conditions, key, frame.time, since, "ticket" if late else "suspect")
            found.append((key, self._slow_finding(frame, names[job], job, due) if due else None))
        return found

    def _slow_finding(self, frame: Frame, name: str, job: int, due: tuple[int, Level]) -> Finding:
        pace, effect = self.paces.pace_of(job), self.paces.effect(job)
        network = pace.cause == "network"
        part_of = (
            f"collectives take {pace.network:.3g} s of it, not {pace.usual_network:.3g} s, while it computes as before"
            if network
            else f"its slowest stage computes {pace.compute:.3g} s of it, not {pace.usual_compute:.3g} s"
        )
        summary = f"{name} takes {pace.step:.3g} s a step, {100 * effect:.0f} % longer than before: {part_of}"
        compared = Comparison(pace.step, pace.usual, None, "own past", 0, effect, "s")
        cause, whose = ("network", "NETWORK") if network else ("a stage computes longer", "JOB")
        parts = {"compute": pace.compute, "communication": pace.network}
        told = make_evidence("they are under 5 % longer than before", compared, cause=cause, attribution=whose, **parts)
        signals = ("rank.step_time", "rank.communication_time" if network else "rank.compute_time")
        return Finding(frame.time, due[0], name, self.name, due[1], self.paces.score(job), summary, told, signals)
