"""Whole jobs that are slower than before, seen from outside: why, and when that is reported.

The network, the job's data or its clocks explain it; a new power cap, or more work in each step, is not a slowdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison, OpenConditions, build_finding, close_ended, due_report
from detectors.base.state import State, notes, part
from detectors.base.streams import Bools, Channel
from detectors.base.throttle import CAPPED, has_reason
from detectors.straggler.gpu_readings import GpuWatch
from detectors.straggler.job_throughput import (
    DOUBLED,
    ERRORS,
    JOB_EVERY,
    KINDS,
    SENT,
    STILL_SLOWER,
    JobThroughput,
)
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Finding, Frame

_POLICY = 0.25  # share of its GPUs newly under a power cap from which that is policy; as in straggler_job
_IO, _TIMES = 0.2, 3.0  # share of the time in which tasks wait for I/O, as in straggler_job, and times that before
_ACTIVE, _POWER, _CLOCK = 0.03, 0.05, 0.03
"""Least fall of a job's SM activity (twice the daily swing of 1 to 2 % of Dubey et al., 2024, section 3.3.4), power and
SM clock (two of NVML's steps) that show that its GPUs wait or are slow. Chosen."""
_MOST = 0.5  # share of a job's ports on a leaf or rail that must wait for it to be blamed; as in link_congestion
_ERRS, _FEW = 0.5, 2  # share of the recent updates in which a port erred; ports that err by themselves; chosen
JobCause = Literal["network", "io", "clock", "waits"]


@dataclass(frozen=True, slots=True)
class NetworkCause:
    """entity: the job, or the part of the network that stands out.   title: in few words; text: in full."""

    entity: str
    title: str
    text: str
    signals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlowJob:
    """A job that is slower as a whole. entity: itself, or the part of the network that stands out.

    title, text: the cause in few words and in full.   traffic: judged by its traffic, else by SM activity.
    """

    job: str
    entity: str
    cause: JobCause
    title: str
    text: str
    since: int
    traffic: bool
    now: Mapping[str, float]
    usual: Mapping[str, float]
    effect: float
    score: float
    signals: tuple[str, ...]

    @property
    def explained(self) -> bool:
        """Whether the cause is visible outside its GPUs."""
        return self.cause in ("network", "io")

    def finding(self, time: int, onset: int, detector: str) -> Finding:
        """Returns the ticket that is due."""
        number, unit = ("sent", "By/s") if self.traffic else ("active", "1")
        now, usual = self.now[number], self.usual[number]
        subject = "" if self.entity == self.job else f"{entity_name(self.job)} "
        return build_finding(
            detector,
            time,
            self.entity,
            (onset, "ticket"),
            score=self.score,
            summary=pager_title(self.entity, f"{subject}{100 * self.effect:.0f} % slower than before, {self.title}"),
            signals=self.signals,
            clears=f"it is less than {100 * STILL_SLOWER:.0f} % slower than before",
            compared=Comparison(now, usual, None, "own past", 0, self.effect, unit),
            job=self.job,
            attribution="NETWORK" if self.cause == "network" else "JOB",
            cause=self.text,
            **{f"{name}_share": self._share(name) for name in ("active", "power", "clock")},
        )

    def _share(self, name: str) -> float | None:
        """Returns the share of the usual value; None where that is unknown."""
        now, usual = self.now[name], self.usual[name]
        return round(now / usual, 4) if usual > 0 and np.isfinite(now) else None


def find_slow_jobs(jobs: JobThroughput, nics: Frame | None) -> list[SlowJob]:
    """Returns jobs that are slower than their own past, without those under a new power cap or with more work."""
    found = [_find_cause(jobs, name, slot, nics) for name, slot in jobs.slow_jobs()]
    return [one for one in found if one is not None]


def _find_cause(jobs: JobThroughput, job: str, slot: int, nics: Frame | None) -> SlowJob | None:
    now = {name: float(measure.now[slot]) for name, measure in jobs.measures.items()}
    usual = {name: float(measure.usual[slot]) for name, measure in jobs.measures.items()}
    less = {name: 1 - now[name] / usual[name] if usual[name] > 0 else 0.0 for name in now}
    traffic = bool(jobs.judged_by_traffic()[slot])
    if not less["sent" if traffic else "active"] >= STILL_SLOWER or now["capped"] - usual["capped"] >= _POLICY:
        return None
    cause: JobCause = "waits"
    signals: tuple[str, ...] = ("gpu.sm_active",)
    entity, title, text = job, "GPUs wait, cause not visible", "its GPUs wait, the cause is not visible"
    if traffic and nics is not None and (network := _find_network_cause(jobs, job, slot, nics)) is not None:
        cause, entity, title, text, signals = "network", network.entity, network.title, network.text, network.signals
    elif now["io"] >= _IO and now["io"] >= _TIMES * usual["io"]:
        cause, signals = "io", ("node.io_pressure",)
        title = f"tasks wait for I/O {100 * now['io']:.0f} %"
        text = f"tasks on its nodes wait for I/O {100 * now['io']:.0f} % of the time"
    elif less["clock"] >= _CLOCK:
        cause, signals = "clock", ("gpu.sm_clock",)
        title = f"SM clocks {100 * less['clock']:.0f} % lower"
        text = f"SM clocks of its GPUs are {100 * less['clock']:.0f} % lower, all alike"
    elif not (less["active"] >= _ACTIVE or less["power"] >= _POWER):
        return None  # as busy as before: it does more in each step
    streams = jobs.sent if traffic else jobs.active
    effect, score = -float(np.expm1(-streams.cells[kernel.EFFECT, slot])), float(streams.cells[kernel.UP, slot])
    signals = tuple(dict.fromkeys((SENT if traffic else "gpu.sm_active", *signals)))
    values = traffic, now, usual, effect, score, signals
    return SlowJob(job, entity, cause, title, text, int(jobs.since[slot]), *values)


def _find_network_cause(jobs: JobThroughput, job: str, slot: int, nics: Frame) -> NetworkCause | None:
    """Returns the part of the network that slows a job; None where its ports are as before."""
    ports, n = jobs.ports, len(nics.entities)
    of_job = np.flatnonzero((ports.job[:n] == slot) & np.isfinite(ports.sent[:n]))
    if not len(of_job):
        return None
    erring = of_job[ports.errs[of_job] >= _ERRS]
    if 0 < len(erring) <= _FEW:
        port = nics.entities[int(erring[np.argmax(ports.errs[erring])])]
        # the detectors of links blame the port
        return NetworkCause(job, f"errors on {entity_name(port)}", f"{port} errs in most minutes", ERRORS)
    over = ports.excess[:, of_job] >= DOUBLED
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
    title = f"{len(waiting)} ports congested, {times:.1f} times as much"
    return NetworkCause(entity, title, text, signals)


def _find_congested_part(ports: NDArray[np.intp], over: Bools, nics: Frame) -> tuple[str, NDArray[np.intp]] | None:
    """Returns the rail on all leaves of which most of a job's ports wait, else the leaf with most such ports; with its
    ports. None if most leaves of the job wait: then the cause is above them, or the job itself."""
    leaves: dict[str, list[int]] = {}
    for place, port in enumerate(ports.tolist()):
        leaves.setdefault(nics.topology.ancestor_of_kind(nics.entities[port], "leaf") or "", []).append(place)
    waiting = {leaf for leaf, places in leaves.items() if leaf and over[places].sum() > max(1, _MOST * len(places))}
    if not waiting or (len(leaves) > 1 and len(waiting) > _MOST * len(leaves)):
        return None
    rails: dict[str, list[str]] = {}
    for leaf, places in leaves.items():
        rails.setdefault(nics.topology.ancestor_of_kind(nics.entities[ports[places[0]]], "rail") or "", []).append(leaf)
    whole = [rail for rail, parts in rails.items() if rail and len(parts) > 1 and waiting.issuperset(parts)]
    if len(whole) == 1:
        return whole[0], ports[[place for leaf in rails[whole[0]] for place in leaves[leaf]]]
    most = max(sorted(waiting), key=lambda leaf: over[leaves[leaf]].sum())
    return most, ports[leaves[most]]


@dataclass
class WholeJobs(State):
    """Reports whole jobs. At most tickets: slow jobs need no immediate action, and link detectors page themselves.

    first: entity blamed for a slow job -> since when.   job_of: entity -> the job.
    """

    jobs: JobThroughput = part(JobThroughput)
    conditions: OpenConditions = notes()
    first: dict[str, int] = notes()
    job_of: dict[str, str] = notes()

    @property
    def channels(self) -> tuple[Channel, Channel, int]:
        """Channels of bytes sent and SM activity, and the time between two updates (us)."""
        return self.jobs.sent.channel, self.jobs.active.channel, JOB_EVERY

    def is_due(self, time: int) -> bool:
        """Returns whether it is time for an update."""
        return self.jobs.is_due(time)

    def update(
        self,
        watch: GpuWatch,
        frames: Mapping[str, Frame],
        busy: Bools,
        excluded: Bools,
        in_maintenance: Bools,
        suspicious: Bools,
        settled: NDArray[np.int64],
        groups: set[str],
        detector: str,
    ) -> list[Finding]:
        """Returns the tickets that are due on whole jobs; none on a job of which a part stands out.

        (N,) masks: working GPUs, throttling with others, in maintenance, with a symptom.   settled: when each settles.
        groups: entities of group events.
        """
        n, placement, readings, frame = len(busy), watch.placement, watch.readings, frames["gpu"]
        time = frame.time
        throttled = excluded | (readings.throttled_since[:n] > 0)
        barred = in_maintenance | placement.reports_compute_time(time) | (time < settled)
        capped = has_reason(readings.bits[:n], CAPPED).astype(np.float64)
        shown = {"active": readings.active[:n], "power": readings.power[:n], "clock": readings.clock[:n]}
        shown["capped"] = capped
        self.jobs.update(frames, placement, shown, busy, throttled, barred, watch.gates.job_started_at)
        blamed = {placement.jobs[k] for k in np.unique(placement.job[suspicious]).tolist() if k >= 0}
        blamed |= {job for e in groups for job in (e, *frame.topology.ancestors(e))}
        doubted = {placement.jobs[k] for k in np.unique(placement.job[throttled]).tolist() if k >= 0}
        slow = {
            one.entity: one
            for one in find_slow_jobs(self.jobs, frames.get("nic"))
            if one.job not in blamed and (one.explained or one.job not in doubted)  # else it may wait for those
        }
        self.first = {e: self.first.get(e, time) for e in slow}
        self.job_of = {e: one.job for e, one in slow.items()}
        onsets = {e: self._onset(one, watch.hold) for e, one in slow.items()}
        holds = {e: watch.hold if one.cause == "network" else watch.job_hold for e, one in slow.items()}
        due = sorted(e for e in slow if time - onsets[e] >= holds[e] * SECOND)
        close_ended(self.conditions, set(due))
        reports = [(e, due_report(self.conditions, e, time, onsets[e], "ticket")) for e in due]
        return [slow[e].finding(time, report[0], detector) for e, report in reports if report is not None]

    def _onset(self, slow: SlowJob, hold: float) -> int:
        """Returns when it began; a cause that appears long after the job became slow is a second one."""
        first = self.first[slow.entity]
        return slow.since if first - slow.since <= hold * SECOND else first

    def relearn(self, entity: str) -> None:
        """Relearns a job, or the job of a blamed entity, after feedback that it is not a fault."""
        slot = self.jobs.jobs.get(self.job_of.get(entity, entity))
        self.jobs.reset_jobs(np.array([] if slot is None else [slot], np.intp))
