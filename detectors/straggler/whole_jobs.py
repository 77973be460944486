"""Whole jobs that straggler_inferred says are slower: when that is told, and of which jobs nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from detectors.base.findings import Open, close, tell
from detectors.base.streams import Bools, Channel
from detectors.base.throttle import CAPPED, has
from detectors.straggler.job_causes import Slow, slow_jobs
from detectors.straggler.outside_jobs import LOOK, JobsOutside
from detectors.straggler.watched import Watched
from pipeline.records import SECOND, Finding, Frame


class WholeJobs:
    """A part() of the detector. A ticket at most: how a job works wakes nobody, and links page themselves."""

    def __init__(self) -> None:
        self.jobs = JobsOutside()
        self.conditions: Open = {}
        self.first: dict[str, int] = {}  # what a slow job is put down to -> since when
        self.of: dict[str, str] = {}  # and which job

    @property
    def channels(self) -> tuple[Channel, Channel, int]:
        """How bytes sent and SM activity are judged, and how often (us)."""
        return self.jobs.sent.channel, self.jobs.active.channel, LOOK

    def due(self, time: int) -> bool:
        """Whether it is time to look at jobs."""
        return self.jobs.due(time)

    def take(
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
        n, seats, frame = len(busy), of.seats, frames["gpu"]
        time = frame.time
        throttled = crowd | (of.bit_since[:n] > 0)
        barred = working | seats.hooked(time) | (time < of.settled[:n])
        capped = has(of.bits[:n], CAPPED).astype(np.float64)
        shown = {"active": of.active[:n], "power": of.power[:n], "clock": of.clock[:n], "capped": capped}
        self.jobs.look(frames, seats, shown, busy, throttled, barred, of.gates.started)
        blamed = {seats.jobs[k] for k in np.unique(seats.job[odd]).tolist() if k >= 0}
        blamed |= {job for e in groups for job in (e, *frame.topology.above(e))}
        doubted = {seats.jobs[k] for k in np.unique(seats.job[throttled]).tolist() if k >= 0}
        slow = {
            one.entity: one
            for one in slow_jobs(self.jobs, frames.get("nic"))
            if one.job not in blamed and (one.seen or one.job not in doubted)  # else it may wait for who throttles
        }
        self.first = {e: self.first.get(e, time) for e in slow}
        self.of = {e: one.job for e, one in slow.items()}
        onsets = {e: self._onset(one, of.hold) for e, one in slow.items()}
        holds = {e: of.hold if one.why == "network" else of.job_hold for e, one in slow.items()}
        due = sorted(e for e in slow if time - onsets[e] >= holds[e] * SECOND)
        close(self.conditions, set(due))
        told = [(e, tell(self.conditions, e, time, onsets[e], "ticket")) for e in due]
        return [slow[e].finding(time, news[0], of.name) for e, news in told if news is not None]

    def _onset(self, slow: Slow, hold: float) -> int:
        """When it began; a cause that is seen long after the job became slow came on top of another."""
        first = self.first[slow.entity]
        return slow.since if first - slow.since <= hold * SECOND else first

    def forgive(self, entity: str) -> None:
        """What a person calls no fault, of a job or of what it is put down to, is normal from now on."""
        slot = self.jobs.jobs.get(self.of.get(entity, entity))
        self.jobs.forget(np.array([] if slot is None else [slot], np.intp))

    def snapshot(self) -> dict[str, Any]:
        plain = {"conditions": self.conditions, "first": dict(self.first), "of": dict(self.of)}
        return {"jobs": self.jobs.snapshot(), **plain}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.jobs.restore(state["jobs"])
        self.conditions, self.first = state["conditions"], dict(state["first"])
        self.of = dict(state["of"])
