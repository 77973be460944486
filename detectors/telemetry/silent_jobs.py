"""What the jobs of a silent node do: whether they step on, hang or end tells a dead agent from a dead host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

STEPS_ON = 30 * SECOND
"""A step that ends so long after a node fell silent was made without waiting for it; chosen: longer than most steps."""
HANGS = 300 * SECOND
"""No step of any other rank for so long is a hang: evaluations and checkpoints take some minutes; chosen."""
WITH_IT = 15 * SECOND
"""A job that ended so long before the node's last sample at most, ended with it; chosen: a frame of 10 s and 5 s of
jitter. A node that is silent later was perhaps booted anew between two jobs."""
AFTER = 600 * SECOND
"""A job that ends later than that after the node's last sample has another reason; the launcher waits for lost ranks:
NCCL's watchdog in PyTorch for 10 min by default."""
_KEPT = 3600 * SECOND  # an ended job matters to nobody after that; chosen
_LOST = 30 * 24 * 3600 * SECOND  # a job that runs on for so long is known from the topology as well; chosen
_MOST = 4096  # jobs that are kept: more do not run at once on a fleet, so the ends of the oldest were lost; chosen
State = Literal["ended", "hangs", "goes on", "unknown", "none"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the jobs of a node did when it fell silent, and which job tells."""

    state: State
    job: str = ""


class SilentJobs:
    """Which nodes each job runs on, as job_start told, when it ended, and when each rank made its last step."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, Any]] = {}  # job -> nodes, ended (us or None)
        self._step = np.empty(0)
        self._stepped = np.empty(0, np.int64)
        self._ranks: tuple[str, ...] = ()
        self._on: dict[str, list[str]] | None = None  # node -> jobs that started on it; None: to be looked up
        self._own: dict[str, list[str]] = {}  # node -> jobs of which the topology has ranks on it
        self._of: dict[str, NDArray[np.intp]] = {}  # job -> positions of its ranks
        self._node = np.empty(0, np.int32)  # of each rank: the number of its node, -1 for none
        self._number: dict[str, int] = {}
        self._best: dict[str, tuple[int, int, int]] = {}  # job -> newest step, on which node, newest on another one
        self._version = (0, -1, 0)

    def hear(self, frames: Mapping[str, Frame], time: int) -> None:
        """Takes the events and steps of an instant."""
        for event in (e for f in frames.values() for e in f.events if e.kind in ("job_start", "job_end")):
            self._take(event, next(iter(frames.values())).topology)
        frame = frames.get("rank")
        if frame is not None and "rank.step" in frame.values:
            self._look(frame, time)
        over = [j for j, known in self._jobs.items() if self._is_over(known, time)]
        for job in over:
            del self._jobs[job]
        most = list(self._jobs)[: max(0, len(self._jobs) - _MOST)]
        for job in most:
            del self._jobs[job]
        self._on = None if over or most else self._on

    def _is_over(self, known: dict[str, Any], time: int) -> bool:
        """Whether a job matters no more: it ended, or nobody heard of it for so long that its end was lost."""
        if known["ended"]:
            return bool(time - known["ended"] > _KEPT)
        return bool(time - known.setdefault("heard", time) > _LOST)

    def _take(self, event: Event, topology: Topology) -> None:
        job = self._jobs.pop(event.entity, {"nodes": {}, "ended": None})
        self._jobs[event.entity] = job  # the newest ones last
        self._on = None
        job["heard"] = event.time
        if event.kind == "job_end":
            job["ended"] = max(event.time, job["ended"] or 0)
            return
        if job["ended"] is not None and event.time > job["ended"]:
            job["nodes"], job["ended"] = {}, None
        ranks = event.data.get("ranks")
        for place in ranks.values() if isinstance(ranks, Mapping) else ():
            gpu = place.get("gpu") if isinstance(place, Mapping) else None
            node = topology.above_of_kind(gpu, "node") if isinstance(gpu, str) else None
            if node is not None:
                job["nodes"][node] = 1

    def _look(self, frame: Frame, time: int) -> None:
        steps = frame["rank.step"]
        if len(steps) > len(self._step):
            more = len(steps) - len(self._step)
            self._step = np.append(self._step, np.full(more, np.nan))
            self._stepped = np.append(self._stepped, np.zeros(more, np.int64))
        moved = np.flatnonzero(~np.isnan(steps) & (steps != self._step[: len(steps)]))
        np.minimum(self._stepped, time, out=self._stepped)  # a time that stepped back
        self._step[moved], self._stepped[moved] = steps[moved], time
        self._best = {}
        self._ranks = tuple(frame.entities) if len(frame.entities) != len(self._ranks) else self._ranks

    def of(self, node: str, since: int, time: int, topology: Topology) -> Verdict:
        """What the jobs did that ran on a node which had its last sample at `since`."""
        mine = self._started(node)
        ended = [j for j in mine if (at := self._jobs[j]["ended"]) and since - WITH_IT <= at <= since + AFTER]
        if ended:
            return Verdict("ended", ended[-1])
        mine = [job for job in mine if self._jobs[job]["ended"] is None]
        self._renew(topology)
        mine += [job for job in self._own.get(node, []) if job not in mine]
        if not mine:
            return Verdict("none")
        newest = {job: self._newest(job, node) for job in mine}
        on = next((job for job, at in newest.items() if at > since + STEPS_ON), None)
        if on is not None:
            return Verdict("goes on", on)
        hung = next((job for job, at in newest.items() if at > 0 and since - HANGS < at and time - at > HANGS), None)
        return Verdict("unknown", mine[0]) if hung is None else Verdict("hangs", hung)

    def _started(self, node: str) -> list[str]:
        """Jobs that were told to have started on a node, the newest ones last."""
        if self._on is None:
            self._on = {}
            for job, known in self._jobs.items():
                for each in known["nodes"]:
                    self._on.setdefault(each, []).append(job)
        return self._on.get(node, [])

    def _renew(self, topology: Topology) -> None:
        """Looks up nodes and jobs of all ranks, if the topology is another or there are more of them."""
        version = (id(topology), topology.version, len(self._ranks))
        if version == self._version:
            return
        self._version, self._number, self._best = version, {}, {}
        own: dict[str, dict[str, None]] = {}
        ranks: dict[str, list[int]] = {}
        self._node = np.full(len(self._ranks), -1, np.int32)
        for i, rank in enumerate(self._ranks):
            # by its parents: what lies above GPUs and jobs is known already, that of each rank is of nobody else
            parents = topology.parents.get(rank, ())
            node = next((n for p in parents if (n := topology.above_of_kind(p, "node"))), None)
            jobs = [job for p in parents for job in (p, *topology.above(p)) if job.startswith("job:")]
            for job in dict.fromkeys(jobs):
                ranks.setdefault(job, []).append(i)
            if node is not None:
                self._node[i] = self._number.setdefault(node, len(self._number))
                own.setdefault(node, {}).update(dict.fromkeys(jobs))
        self._own = {node: list(jobs) for node, jobs in own.items()}
        self._of = {job: np.array(mine, np.intp) for job, mine in ranks.items()}

    def _newest(self, job: str, node: str) -> int:
        """When a rank of the job that is not on the node made a step last; 0 if there is none."""
        if job not in self._of:
            return 0
        if job not in self._best:
            stepped, nodes = self._stepped[self._of[job]], self._node[self._of[job]]
            first = int(stepped.argmax())
            others = stepped[nodes != nodes[first]]
            self._best[job] = int(stepped[first]), int(nodes[first]), int(others.max(initial=0))
        newest, where, other = self._best[job]
        return other if where == self._number.get(node, -2) else newest

    def snapshot(self) -> dict[str, Any]:
        jobs = {job: {**k, "nodes": dict(k["nodes"])} for job, k in self._jobs.items()}
        return {"jobs": jobs, "step": self._step.copy(), "stepped": self._stepped.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._jobs, self._step, self._stepped = dict(state["jobs"]), state["step"], state["stepped"]
        self._ranks, self._version, self._on, self._best = (), (0, -1, 0), None, {}
