"""What the jobs of a silent node do: if they make steps, its agent is dead; if they hang or end, its host is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.topology_index import per_topology
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

STEPS_ON = 30 * SECOND
"""A step that ends so long after a node fell silent did not wait for it; chosen: longer than most steps."""
HANGS = 300 * SECOND
"""No step of any other rank for so long is a hang: evaluations and checkpoints take some minutes; chosen."""
WITH_IT = 15 * SECOND
"""A job that ended at most so long before the node's last sample ended with it; chosen: a frame of 10 s and 5 s of
jitter. A node that falls silent later may be rebooted between two jobs."""
AFTER = 600 * SECOND
"""A job that ends later than that after the node's last sample has another reason; the launcher waits for lost ranks:
NCCL's watchdog in PyTorch for 10 min by default."""
_KEPT = 3600 * SECOND  # us for which an ended job matters; chosen
_LOST = 30 * 24 * 3600 * SECOND  # us after which the end of a running job counts as lost; the topology has it; chosen
_MOST = 4096  # jobs that are kept: a fleet runs fewer at a time, so the ends of the oldest were lost; chosen
JobState = Literal["ended", "hangs", "running", "unknown", "none"]


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """What the jobs of a node did after it fell silent, and the job that shows it."""

    state: JobState
    job: str = ""


@dataclass(frozen=True, slots=True)
class _RankPlaces:
    """Ranks in the topology. nodes: (N,) number of each rank's node, -1 none; number: node -> its number;
    jobs: node -> jobs with ranks on it; ranks: job -> positions of its ranks."""

    nodes: NDArray[np.int32]
    number: Mapping[str, int]
    jobs: Mapping[str, list[str]]
    ranks: Mapping[str, NDArray[np.intp]]


@dataclass
class SilentJobs(State):
    """The nodes and the end of each job, from job_start and job_end, and when each rank made its last step."""

    _jobs: dict[str, dict[str, Any]] = notes()  # job -> nodes, ended (us or None), newest_event
    _step: NDArray[np.float64] = memory(np.nan)
    _stepped: NDArray[np.int64] = memory(0, np.int64)
    _ranks: tuple[str, ...] = field(default=(), init=False, repr=False)
    _on: dict[str, list[str]] | None = field(default=None, init=False, repr=False)  # node -> its jobs; None: unknown
    _newest: dict[str, tuple[int, int, int]] = field(default_factory=dict, init=False, repr=False)
    _placed: _RankPlaces | None = field(default=None, init=False, repr=False)  # that `_newest` belongs to

    def update(self, frames: Mapping[str, Frame], time: int) -> None:
        """Reads the events and steps of an instant."""
        for event in (e for f in frames.values() for e in f.events if e.kind in ("job_start", "job_end")):
            self._record(event, next(iter(frames.values())).topology)
        frame = frames.get("rank")
        if frame is not None and "rank.step" in frame.values:
            self._follow_steps(frame, time)
        over = [j for j, known in self._jobs.items() if self._is_over(known, time)]
        for job in over:
            del self._jobs[job]
        most = list(self._jobs)[: max(0, len(self._jobs) - _MOST)]
        for job in most:
            del self._jobs[job]
        self._on = None if over or most else self._on

    def _is_over(self, known: dict[str, Any], time: int) -> bool:
        """Returns whether a job no longer matters: it ended, or had no event for so long that its end was lost."""
        if known["ended"]:
            return bool(time - known["ended"] > _KEPT)
        return bool(time - known.setdefault("newest_event", time) > _LOST)

    def _record(self, event: Event, topology: Topology) -> None:
        job = self._jobs.pop(event.entity, {"nodes": {}, "ended": None})
        self._jobs[event.entity] = job  # the newest ones last
        self._on = None
        job["newest_event"] = event.time
        if event.kind == "job_end":
            job["ended"] = max(event.time, job["ended"] or 0)
            return
        if job["ended"] is not None and event.time > job["ended"]:
            job["nodes"], job["ended"] = {}, None
        ranks = event.data.get("ranks")
        for place in ranks.values() if isinstance(ranks, Mapping) else ():
            gpu = place.get("gpu") if isinstance(place, Mapping) else None
            node = topology.ancestor_of_kind(gpu, "node") if isinstance(gpu, str) else None
            if node is not None:
                job["nodes"][node] = 1

    def _follow_steps(self, frame: Frame, time: int) -> None:
        steps = frame["rank.step"]
        self.grow(len(steps))
        moved = np.flatnonzero(~np.isnan(steps) & (steps != self._step[: len(steps)]))
        np.minimum(self._stepped, time, out=self._stepped)  # the clock may have been set back
        self._step[moved], self._stepped[moved] = steps[moved], time
        self._newest = {}
        self._ranks = tuple(frame.entities) if len(frame.entities) != len(self._ranks) else self._ranks

    def verdict(self, node: str, since: int, time: int, topology: Topology) -> JobVerdict:
        """Returns what the jobs did that ran on a node with its last sample at `since`."""
        mine = self._started_on(node)
        ended = [j for j in mine if (at := self._jobs[j]["ended"]) and since - WITH_IT <= at <= since + AFTER]
        if ended:
            return JobVerdict("ended", ended[-1])
        mine = [job for job in mine if self._jobs[job]["ended"] is None]
        places = self._places(self._ranks, topology)
        mine += [job for job in places.jobs.get(node, []) if job not in mine]
        if not mine:
            return JobVerdict("none")
        newest = {job: self._newest_step(job, node, places) for job in mine}
        on = next((job for job, at in newest.items() if at > since + STEPS_ON), None)
        if on is not None:
            return JobVerdict("running", on)
        hung = next((job for job, at in newest.items() if at > 0 and since - HANGS < at and time - at > HANGS), None)
        return JobVerdict("unknown", mine[0]) if hung is None else JobVerdict("hangs", hung)

    def _started_on(self, node: str) -> list[str]:
        """Returns the jobs with a job_start on a node, the newest ones last."""
        if self._on is None:
            self._on = {}
            for job, known in self._jobs.items():
                for each in known["nodes"]:
                    self._on.setdefault(each, []).append(job)
        return self._on.get(node, [])

    @per_topology
    def _places(self, names: tuple[str, ...], topology: Topology) -> _RankPlaces:
        """Looks up nodes and jobs of all ranks."""
        number: dict[str, int] = {}
        own: dict[str, dict[str, None]] = {}
        ranks: dict[str, list[int]] = {}
        nodes = np.full(len(names), -1, np.int32)
        for i, rank in enumerate(names):
            # by its parents: the ancestors of GPUs and jobs are cached, those of each rank are its own
            parents = topology.parents.get(rank, ())
            node = next((n for p in parents if (n := topology.ancestor_of_kind(p, "node"))), None)
            jobs = [job for p in parents for job in (p, *topology.ancestors(p)) if job.startswith("job:")]
            for job in dict.fromkeys(jobs):
                ranks.setdefault(job, []).append(i)
            if node is not None:
                nodes[i] = number.setdefault(node, len(number))
                own.setdefault(node, {}).update(dict.fromkeys(jobs))
        own_jobs = {node: list(jobs) for node, jobs in own.items()}
        return _RankPlaces(nodes, number, own_jobs, {job: np.array(mine, np.intp) for job, mine in ranks.items()})

    def _newest_step(self, job: str, node: str, places: _RankPlaces) -> int:
        """Returns when a rank of the job that is not on the node made its last step; 0 if there is none."""
        if places is not self._placed:
            self._placed, self._newest = places, {}
        if job not in places.ranks:
            return 0
        if job not in self._newest:
            stepped, nodes = self._stepped[places.ranks[job]], places.nodes[places.ranks[job]]
            first = int(stepped.argmax())
            others = stepped[nodes != nodes[first]]
            self._newest[job] = int(stepped[first]), int(nodes[first]), int(others.max(initial=0))
        newest, where, other = self._newest[job]
        return other if where == places.number.get(node, -2) else newest
