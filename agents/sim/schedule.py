"""Schedule: which job runs where and when. Jobs start, lose nodes, move and end.

The busy nodes are divided into partitions, each with one job at a time. With `mean_hours` 0 the job of a partition
never ends. A fault that stops a job ends its allocation at that moment; the job restarts some minutes later, with spare
nodes for those that are out of service: its ranks keep their names and change GPUs. The whole schedule follows from
scenario, seed and faults, and is known before the first block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from agents.sim.layout import Layout
from agents.sim.physics.noise import generator

FIRST_JOB = 81  # number in the first job's name; chosen, not to be mistaken for a rank or a node
STAGES = 4
_PAUSE_S, _RESTART_S = (120.0, 1200.0), (180.0, 600.0)  # between two jobs; until a stopped job returns. Chosen
_SHORTEST_H = 0.5  # h; below it a job is a test, not training; chosen
_SPLIT, _SMALLEST = 0.6, 8  # a partition is three fifths of the remaining nodes; below 8 nodes there is one. Chosen

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Stop:
    """A fault stops the jobs on some nodes at `at` s; the nodes are out of service for `out` s.

    job: number of a job that ends wherever it runs.   waits: jobs wait for these nodes and take no spare ones.
    """

    at: float
    nodes: tuple[int, ...]
    out: float
    job: int | None = None
    waits: bool = False


@dataclass(frozen=True)
class Job:
    """A training job: `ranks` workers in `stages` pipeline stages of consecutive ranks."""

    number: int
    name: str
    ranks: int
    stages: int
    kind: str = "dense"
    hooked: bool = True  # its ranks report
    width: int = 8  # GPUs of a node

    @property
    def trains(self) -> bool:
        """Whether it makes steps."""
        return self.kind != "serving"

    @property
    def networked(self) -> bool:
        """Whether its ranks talk over the fabric."""
        return self.ranks > self.width and self.trains

    @property
    def entity(self) -> str:
        """Returns the entity of the job."""
        return f"job:{self.name}"

    @cached_property
    def stage_of_rank(self) -> Index:
        """Returns the (ranks,) stage of each rank."""
        return np.asarray(np.arange(self.ranks) * self.stages // self.ranks, np.intp)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the entities of its ranks."""
        return tuple(f"rank:{self.name}.{i}" for i in range(self.ranks))


@dataclass(frozen=True)
class Allocation:
    """The GPUs of a job in [begin, end); a job that moves has several allocations. Rank i runs on gpus[i]."""

    job: Job
    gpus: Index
    begin: float
    end: float
    warm: bool = False  # it ran long before second 0: no warm-up
    last: bool = True  # the job ends with it, and does not move


@dataclass(frozen=True)
class Schedule:
    """All jobs and allocations, in order of their start."""

    jobs: tuple[Job, ...]
    allocations: tuple[Allocation, ...]

    def allocations_within(self, since: float, until: float) -> list[Allocation]:
        """Returns the allocations that overlap (since, until]."""
        begins, ends = self._times
        return [self.allocations[i] for i in np.flatnonzero((begins <= until) & (ends > since)).tolist()]

    @cached_property
    def _times(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Starts and ends of the allocations, cached: a long run has thousands, and every block reads them."""
        return np.array([s.begin for s in self.allocations]), np.array([s.end for s in self.allocations])

    def running_jobs(self, time: NDArray[np.float64], gpus: int) -> NDArray[np.int32]:
        """Returns the (ticks, GPUs) number of the job on each GPU; -1: none."""
        out = np.full((len(time), gpus), -1, np.int32)
        for allocation in self.allocations_within(float(time[0]) - 1e-9, float(time[-1])):
            on = (time >= allocation.begin) & (time < allocation.end)
            out[np.ix_(on, allocation.gpus)] = allocation.job.number
        return out

    def job_at(self, gpu: int, time: float) -> Allocation | None:
        """Returns the job on a GPU at a time, or None."""
        return next((s for s in self.allocations_within(time, time) if gpu in s.gpus), None)


JobEvent = Callable[[Sequence[Job]], Stop | None]
"""An event on a job: receives the jobs that run at its time, and returns the stop that it causes, if any."""


def plan(
    layout: Layout,
    mean_hours: float,
    stops: Sequence[Stop],
    seed: int,
    horizon: float,
    job_events: Sequence[tuple[float, JobEvent]] = (),
) -> Schedule:
    """Plans the schedule up to `horizon` s; jobs that run then never end. Calls each of `job_events` at its second."""
    return _Planner(layout, mean_hours, seed).run(stops, job_events, horizon)


@dataclass(frozen=True)
class Partition:
    """Nodes with one job at a time. mean_hours, pause (s): of its jobs; 0 h: one that never ends."""

    nodes: tuple[int, ...]
    kind: str
    mean_hours: float
    pause: tuple[float, float] = _PAUSE_S
    shortest: float = _SHORTEST_H
    gpus: int = 8  # of each node


def partitions(layout: Layout, mean_hours: float, seed: int) -> list[Partition]:
    """Returns the busy nodes in partitions, by kind of job as the world shares them."""
    work, busy = layout.world.work, layout.busy_nodes
    few_rng = generator(seed, 18, 1)
    order = generator(seed, 18).permutation(busy) if work.scattered else np.arange(busy)
    found: list[Partition] = []
    begin, share = 0, 0.0
    for kind, part in work.shares:
        share += part
        end = min(busy, round(busy * share))
        for some in _GROUPS[kind](end - begin, mean_hours > 0):
            nodes = tuple(order[begin : begin + some].tolist())
            few = _FEW[int(few_rng.integers(len(_FEW)))] if kind in ("single", "swarm") else 1
            gpus = max(1, layout.gpus_per_node // few)
            lengths = _LENGTHS.get(kind, (mean_hours, _PAUSE_S, _SHORTEST_H))
            found.append(Partition(nodes, kind, *lengths, gpus=gpus))
            begin += some
    return found


def _large(busy: int, many: bool) -> Iterator[int]:
    """Yields the sizes of partitions of large jobs: one below 8 nodes, else two or more of 8."""
    begin = 0
    while busy - begin >= _SMALLEST and (many or begin == 0):
        size = round((busy - begin) * _SPLIT)
        yield size
        begin += size
    if begin < busy:
        yield busy - begin


def _replicas(busy: int, many: bool) -> Iterator[int]:
    """Yields the sizes of services: 1, 2 or 4 nodes in turn."""
    begin, number = 0, 0
    while begin < busy:
        size = min((1, 2, 4)[number % 3], busy - begin)
        yield size
        begin, number = begin + size, number + 1


def _singles(busy: int, many: bool) -> Iterator[int]:
    """Yields one node at a time."""
    yield from [1] * busy


_GROUPS = {"dense": _large, "moe": _large, "serving": _replicas, "single": _singles, "swarm": _singles}
_FEW = (1, 1, 1, 2, 4, 8)  # jobs of one node use all its GPUs, half, a quarter or one of them; chosen
_LENGTHS: dict[str, tuple[float, tuple[float, float], float]] = {
    "serving": (0.0, _PAUSE_S, _SHORTEST_H),
    "single": (6.0, (60.0, 3600.0), 0.2),
    "swarm": (0.4, (10.0, 300.0), 0.1),
}
"""Kind of job -> mean hours, pause and shortest hours of a partition; chosen."""


@dataclass
class _JobRun:
    """A job that is being planned; `nodes` are those that it has or waits for."""

    part: int
    job: Job
    nodes: list[int]
    begin: float
    ends: float
    warm: bool = False


Action = Callable[[float], Iterator[tuple[float, "Action"]]]


class _Planner:
    """Processes starts, ends and stops in order of time."""

    def __init__(self, layout: Layout, mean_hours: float, seed: int) -> None:
        self.width, self.work = layout.gpus_per_node, layout.world.work
        self.parts = partitions(layout, mean_hours, seed)
        self.rngs = [generator(seed, 15, number) for number in range(len(self.parts))]
        self.hooks = generator(seed, 19)
        self.spare = list(range(layout.busy_nodes, layout.nodes))
        self.out: dict[int, float] = {}  # node -> when it is in service again
        self.awaited: set[int] = set()  # nodes that are not replaced by spare ones
        self.now: dict[int, _JobRun] = {}
        self.jobs: list[Job] = []
        self.allocations: list[Allocation] = []

    def run(self, stops: Sequence[Stop], job_events: Sequence[tuple[float, JobEvent]], horizon: float) -> Schedule:
        """Plans the allocations of all jobs until the horizon."""
        queue: list[tuple[float, int, Action]] = []
        for number, part in enumerate(self.parts):
            queue.append((0.0, number, partial(self._start, number, list(part.nodes))))
        queue += [(stop.at, len(queue) + n, partial(self._stop, stop, None)) for n, stop in enumerate(stops)]
        queue += [
            (at, len(queue) + n, partial(self._apply_job_event, job_event))
            for n, (at, job_event) in enumerate(job_events)
        ]
        heapq.heapify(queue)
        serial = len(queue)
        while queue and queue[0][0] < horizon:
            time, _, action = heapq.heappop(queue)
            for moment, later in action(time):
                heapq.heappush(queue, (moment, serial := serial + 1, later))
        for run in self.now.values():
            self._leave(run, np.inf, True)
        return Schedule(tuple(self.jobs), tuple(sorted(self.allocations, key=lambda s: (s.begin, s.job.number))))

    def _start(self, part: int, nodes: list[int], time: float) -> Iterator[tuple[float, Action]]:
        """Starts a new job on a partition."""
        rng, mine = self.rngs[part], self.parts[part]
        ranks = len(nodes) * mine.gpus
        churn, number = mine.mean_hours > 0, len(self.jobs)
        if mine.kind == "serving":
            stages = 1
        else:
            stages = min(int(rng.choice((2, 4, 8))), max(1, ranks // 8)) if churn else min(STAGES, ranks)
        hooked = mine.kind != "serving" and bool(self.hooks.random() < self.work.hooked)
        self.jobs.append(Job(number, f"sim-{FIRST_JOB + number}", ranks, stages, mine.kind, hooked, self.width))
        hours = max(mine.shortest, float(rng.exponential(mine.mean_hours))) if churn else np.inf
        yield from self._begin(_JobRun(part, self.jobs[-1], nodes, time, time + hours * 3600, time == 0), time)

    def _begin(self, run: _JobRun, time: float) -> Iterator[tuple[float, Action]]:
        """Gives a job its nodes as soon as all are in service."""
        ready = self._ready(run.nodes, time)
        if ready > time:
            yield ready, partial(self._begin, run)
            return
        run.begin, run.ends = time, max(run.ends, time + self.parts[run.part].shortest * 3600)
        self.now[run.part] = run
        if run.ends < np.inf:
            yield run.ends, partial(self._end, run)

    def _end(self, run: _JobRun, time: float) -> Iterator[tuple[float, Action]]:
        """Ends a job, unless it was stopped before; the next one follows."""
        if self.now.get(run.part) is run:
            self._leave(run, time, True)
            del self.now[run.part]
            yield (
                time + float(self.rngs[run.part].uniform(*self.parts[run.part].pause)),
                partial(self._start, run.part, run.nodes),
            )

    def _apply_job_event(self, job_event: JobEvent, time: float) -> Iterator[tuple[float, Action]]:
        """Calls an event on a job; a stop that it returns ends the current allocation, not a later one."""
        running = sorted(self.now.values(), key=lambda run: run.job.number)
        stop = job_event([run.job for run in running])
        for run in running:
            if stop is not None and run.job.number == stop.job:
                yield max(stop.at, time), partial(self._stop, stop, run)

    def _stop(self, stop: Stop, only: _JobRun | None, time: float) -> Iterator[tuple[float, Action]]:
        """Ends the allocations that use the nodes, or only that of `only`, and plans the restart of their jobs."""
        self.out |= {node: max(time + stop.out, self.out.get(node, 0.0)) for node in stop.nodes}
        self.awaited = self.awaited | set(stop.nodes) if stop.waits else self.awaited - set(stop.nodes)
        for part, run in list(self.now.items()):
            affected = run.job.number == stop.job or not set(stop.nodes).isdisjoint(run.nodes)
            if affected and only in (None, run):
                self._leave(run, time, False)
                del self.now[part]
                back = _JobRun(part, run.job, list(run.nodes), time, run.ends)
                yield time + float(self.rngs[part].uniform(*_RESTART_S)), partial(self._begin, back)

    def _ready(self, nodes: list[int], time: float) -> float:
        """Returns when all nodes are in service, after replacing nodes that are out of service by spare ones."""
        for place, node in enumerate(nodes):
            if self.out.get(node, 0.0) > time and node not in self.awaited:
                healthy = next((s for s in self.spare if self.out.get(s, 0.0) <= time), None)
                if healthy is not None:
                    self.spare[self.spare.index(healthy)] = node
                    nodes[place] = healthy
        return max([time, *(self.out.get(node, 0.0) for node in nodes)])

    def _leave(self, run: _JobRun, end: float, last: bool) -> None:
        mine = np.arange(self.parts[run.part].gpus)
        gpus = (np.asarray(run.nodes, np.intp)[:, None] * self.width + mine).ravel()
        self.allocations.append(Allocation(run.job, gpus, run.begin, end, run.warm, last))
