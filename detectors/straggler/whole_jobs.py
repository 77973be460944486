"""Whole jobs that straggler_inferred says are slower: when that is told, and of which jobs nothing is.

Why a job is slower as a whole, seen from the outside, and what is said of it: the network, its data, its clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.streams import Bools, Channel
from detectors.base.throttle import CAPPED, has_reason
from detectors.straggler.gpu_verdicts import Watched
from detectors.straggler.job_throughput import (
    DOUBLED,
    ERRORS,
    JOB_EVERY,
    KINDS,
    NUMBERS,
    SENT,
    STILL_SLOWER,
    JobThroughput,
)
from pipeline.model.records import SECOND, Finding, Frame

_POLICY = 0.25  # more of its GPUs under a power cap than usual: policy; as straggler_job
_IO, _TIMES = 0.2, 3.0  # share of the time in which tasks wait for I/O, as straggler_job has it, and times that before
_ACTIVE, _POWER, _CLOCK = 0.03, 0.05, 0.03
"""Least fall of a job's SM activity (twice the daily swing of 1 to 2 % of Dubey et al., 2024, section 3.3.4), power and
SM clock (two of NVML's steps) that show that its GPUs wait or are slow. Chosen."""
_MOST = 0.5  # of a job's ports on a leaf or rail that must wait for it to be blamed; as link_congestion
_ERRS, _FEW = 0.5, 2  # share of the last looks in which a port erred; ports that err by themselves; chosen
Why = Literal["network", "io", "clock", "waits"]
Network = tuple[str, str, tuple[str, ...]]
"""Entity, how it shows in words, and signals."""


@dataclass(frozen=True, slots=True)
class SlowJob:
    """A job that is slower as a whole. entity: itself, or the part of the network that stands out; how: in words."""

    job: str
    entity: str
    why: Why
    how: str
    since: int
    traffic: bool
    now: Mapping[str, float]
    usual: Mapping[str, float]
    effect: float
    score: float
    signals: tuple[str, ...]

    @property
    def seen(self) -> bool:
        """Whether something outside its GPUs is seen that makes it slow."""
        return self.why in ("network", "io")

    def finding(self, time: int, onset: int, detector: str) -> Finding:
        number, unit = ("sent", "By/s") if self.traffic else ("active", "1")
        now, usual, network = self.now[number], self.usual[number], self.why == "network"
        told = (
            f"its ports send {now / 1e9:.2f} GB/s each, not {usual / 1e9:.2f}"
            if self.traffic
            else f"SMs of its GPUs are active {100 * now:.0f} % of the time, not {100 * usual:.0f} %"
        )
        made = "the network slows it" if network else "the job itself became slower"
        return Finding(
            time,
            onset,
            self.entity,
            detector,
            "ticket",
            self.score,
            f"{self.job} is {100 * self.effect:.0f} % slower than before, all of it, for "
            f"{(time - onset) / SECOND / 60:.0f} min: {told}; {made}: {self.how}; no node stands out",
            make_evidence(
                f"it is less than {100 * STILL_SLOWER:.0f} % slower than before",
                Comparison(now, usual, None, "own past", 0, self.effect, unit),
                job=self.job,
                attribution="NETWORK" if network else "JOB",
                cause=self.how,
                **{f"{name}_share": self._share(name) for name in ("active", "power", "clock")},
            ),
            self.signals,
        )

    def _share(self, name: str) -> float | None:
        """Of what is usual; None where that is not known."""
        now, usual = self.now[name], self.usual[name]
        return round(now / usual, 4) if usual > 0 and np.isfinite(now) else None


def find_slow_jobs(jobs: JobThroughput, nics: Frame | None) -> list[SlowJob]:
    """Jobs that are slower than their own past, and why; policy, and more work in each step, are no reason."""
    found = [_find_cause(jobs, name, slot, nics) for name, slot in jobs.slow_jobs()]
    return [one for one in found if one is not None]


def _find_cause(jobs: JobThroughput, job: str, slot: int, nics: Frame | None) -> SlowJob | None:
    now, usual = ({name: float(cells[name][slot]) for name in NUMBERS} for cells in (jobs.now, jobs.usual))
    less = {name: 1 - now[name] / usual[name] if usual[name] > 0 else 0.0 for name in NUMBERS}
    traffic = bool(jobs.judged_by_traffic()[slot])
    if not less["sent" if traffic else "active"] >= STILL_SLOWER or now["capped"] - usual["capped"] >= _POLICY:
        return None
    why: Why = "waits"
    signals: tuple[str, ...] = ("gpu.sm_active",)
    entity, how = job, "its GPUs wait, and what for is not seen"
    if traffic and nics is not None and (network := _find_network_cause(jobs, job, slot, nics)) is not None:
        why, (entity, how, signals) = "network", network
    elif now["io"] >= _IO and now["io"] >= _TIMES * usual["io"]:
        why, signals = "io", ("node.io_pressure",)
        how = f"tasks on its nodes wait for I/O {100 * now['io']:.0f} % of the time"
    elif less["clock"] >= _CLOCK:
        why, signals = "clock", ("gpu.sm_clock",)
        how = f"SM clocks of its GPUs are {100 * less['clock']:.0f} % lower, all alike"
    elif not (less["active"] >= _ACTIVE or less["power"] >= _POWER):
        return None  # as busy as ever: it does more in each step
    streams = jobs.sent if traffic else jobs.active
    effect, score = -float(np.expm1(-streams.cells[kernel.EFFECT, slot])), float(streams.cells[kernel.UP, slot])
    told = tuple(dict.fromkeys((SENT if traffic else "gpu.sm_active", *signals)))
    return SlowJob(job, entity, why, how, int(jobs.since[slot]), traffic, now, usual, effect, score, told)


def _find_network_cause(jobs: JobThroughput, job: str, slot: int, nics: Frame) -> Network | None:
    """The part of the network that slows a job; None where its ports are as ever."""
    ports, n = jobs.ports, len(nics.entities)
    mine = np.flatnonzero((ports.job[:n] == slot) & np.isfinite(ports.sent[:n]))
    if not len(mine):
        return None
    erring = mine[ports.errs[mine] >= _ERRS]
    if 0 < len(erring) <= _FEW:
        port = nics.entities[int(erring[np.argmax(ports.errs[erring])])]
        return job, f"{port} errs in most minutes", ERRORS  # the detectors of links blame the port
    over = ports.excess[:, mine] >= DOUBLED
    row = int(np.argmax(over.sum(axis=1)))
    what, signals = KINDS[row]
    if (part := _find_congested_part(mine, over[row], nics)) is not None:
        entity, those = part
        times = float(np.exp(np.median(ports.excess[row, those])))
        return entity, f"its {len(those)} ports on {entity} {what} {times:.1f} times as much as before", signals
    if np.count_nonzero(over[row]) > _MOST * len(mine):
        times = float(np.exp(np.median(ports.excess[row, mine])))
        return job, f"its ports {what} {times:.1f} times as much as before", signals
    return None


def _find_congested_part(mine: NDArray[np.intp], over: Bools, nics: Frame) -> tuple[str, NDArray[np.intp]] | None:
    """The rail on all leaves of which most of a job's ports wait, else the leaf with most such ports; with its ports.

    None if most leaves that the job has wait: then it is what lies over them, or the job itself.
    """
    leaves: dict[str, list[int]] = {}
    for place, port in enumerate(mine.tolist()):
        leaves.setdefault(nics.topology.ancestor_of_kind(nics.entities[port], "leaf") or "", []).append(place)
    waiting = {leaf for leaf, places in leaves.items() if leaf and over[places].sum() > max(1, _MOST * len(places))}
    if not waiting or (len(leaves) > 1 and len(waiting) > _MOST * len(leaves)):
        return None
    rails: dict[str, list[str]] = {}
    for leaf, places in leaves.items():
        rails.setdefault(nics.topology.ancestor_of_kind(nics.entities[mine[places[0]]], "rail") or "", []).append(leaf)
    whole = [rail for rail, parts in rails.items() if rail and len(parts) > 1 and waiting.issuperset(parts)]
    if len(whole) == 1:
        return whole[0], mine[[place for leaf in rails[whole[0]] for place in leaves[leaf]]]
    most = max(sorted(waiting), key=lambda leaf: over[leaves[leaf]].sum())
    return most, mine[leaves[most]]


class WholeJobs:
    """A part() of the detector. A ticket at most: how a job works wakes nobody, and links page themselves."""

    def __init__(self) -> None:
        self.jobs = JobThroughput()
        self.conditions: OpenConditions = {}
        self.first: dict[str, int] = {}  # what a slow job is put down to -> since when
        self.of: dict[str, str] = {}  # and which job

    @property
    def channels(self) -> tuple[Channel, Channel, int]:
        """How bytes sent and SM activity are judged, and how often (us)."""
        return self.jobs.sent.channel, self.jobs.active.channel, JOB_EVERY

    def is_due(self, time: int) -> bool:
        """Whether it is time to look at jobs."""
        return self.jobs.is_due(time)

    def update(
        self,
        of: Watched,
        frames: Mapping[str, Frame],
        busy: Bools,
        crowd: Bools,
        working: Bools,
        odd: Bools,
        groups: set[str],
    ) -> list[Finding]:
        """What is due to be said of whole jobs; nothing of one of which a part stands out.

        busy, crowd, working, odd: (N,) who works, throttles with others, is worked on, stands out.   groups: entities
        of group events.
        """
        n, seats, frame = len(busy), of.placement, frames["gpu"]
        time = frame.time
        throttled = crowd | (of.bit_since[:n] > 0)
        barred = working | seats.reports_compute_time(time) | (time < of.settled[:n])
        capped = has_reason(of.bits[:n], CAPPED).astype(np.float64)
        shown = {"active": of.active[:n], "power": of.power[:n], "clock": of.clock[:n], "capped": capped}
        self.jobs.update(frames, seats, shown, busy, throttled, barred, of.gates.job_started_at)
        blamed = {seats.jobs[k] for k in np.unique(seats.job[odd]).tolist() if k >= 0}
        blamed |= {job for e in groups for job in (e, *frame.topology.ancestors(e))}
        doubted = {seats.jobs[k] for k in np.unique(seats.job[throttled]).tolist() if k >= 0}
        slow = {
            one.entity: one
            for one in find_slow_jobs(self.jobs, frames.get("nic"))
            if one.job not in blamed and (one.seen or one.job not in doubted)  # else it may wait for who throttles
        }
        self.first = {e: self.first.get(e, time) for e in slow}
        self.of = {e: one.job for e, one in slow.items()}
        onsets = {e: self._onset(one, of.hold) for e, one in slow.items()}
        holds = {e: of.hold if one.why == "network" else of.job_hold for e, one in slow.items()}
        due = sorted(e for e in slow if time - onsets[e] >= holds[e] * SECOND)
        close_ended(self.conditions, set(due))
        told = [(e, due_report(self.conditions, e, time, onsets[e], "ticket")) for e in due]
        return [slow[e].finding(time, news[0], of.name) for e, news in told if news is not None]

    def _onset(self, slow: SlowJob, hold: float) -> int:
        """When it began; a cause that is seen long after the job became slow came on top of another."""
        first = self.first[slow.entity]
        return slow.since if first - slow.since <= hold * SECOND else first

    def relearn(self, entity: str) -> None:
        """What a person calls no fault, of a job or of what it is put down to, is normal from now on."""
        slot = self.jobs.jobs.get(self.of.get(entity, entity))
        self.jobs.reset(np.array([] if slot is None else [slot], np.intp))

    def snapshot(self) -> dict[str, Any]:
        plain = {"conditions": self.conditions, "first": dict(self.first), "of": dict(self.of)}
        return {"jobs": self.jobs.snapshot(), **plain}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.jobs.restore(state["jobs"])
        self.conditions, self.first = state["conditions"], dict(state["first"])
        self.of = dict(state["of"])
