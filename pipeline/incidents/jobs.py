"""The jobs of the fleet: their ranks with GPUs and nodes, when they began and ended, and their pace.

Ranks come from the topology (inventories and job_start events), names and users from the same. Memory: a place per
rank, and KEPT of ended jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.incidents.job_listings import JobListings
from pipeline.incidents.job_pace import MINUTE, REPORTED_FOR, JobPace, Minute, PaceBook
from pipeline.model.records import SECOND, Frame, Instant
from pipeline.model.topology import WORK, Topology, kind_of

KEPT = 24 * 3600 * SECOND
"""Time for which an ended job is kept in memory (us). Chosen: asked for in the next shift."""
Parts = tuple[frozenset[str], frozenset[str], frozenset[str]]
"""GPUs, nodes and ranks of a job."""
REFRESH = 10 * SECOND
"""Least time between two readings of the ranks from the topology (us). Chosen: a frame."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. job: its entity; node: `node:NAME`, empty if unknown."""

    job: str
    gpus: tuple[str, ...]
    node: str


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a job. Times are event times (us).  account: of the scheduler, or its namespace.  missing: when its
    ranks were no longer there.  checkpoint: the newest."""

    entity: str
    started: int
    name: str = ""
    account: str = ""
    user: str = ""
    scheduler: str = ""
    ended: int | None = None
    ranks: int = 0
    gpus: int = 0
    nodes: tuple[str, ...] = ()
    checkpoint: int | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Pulse:
    """The newest step of a running job, and when its ranks reported their step last, new or not (us). hangs: it makes
    none for longer than it ever does."""

    moved: int
    reported: int
    hangs: bool

    @property
    def lasts(self) -> bool:
        """Whether its ranks reported the old step for as long as agents do."""
        return self.reported - self.moved >= REPORTED_FOR


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step of a job as it is stored: when it was made, its number, and when its ranks reported it last."""

    moved: int
    step: float = float("nan")
    reported: int = 0


@dataclass(slots=True)
class Places:
    """The ranks of the topology. ranks: job -> its ranks.  on: GPU or node -> ranks on it."""

    of: dict[str, Place] = field(default_factory=dict)
    job_of: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, list[str]] = field(default_factory=dict)
    on: dict[str, list[str]] = field(default_factory=dict)
    version: int = 0
    _parts: dict[str, Parts] = field(default_factory=dict)

    def parts_of(self, job: str) -> Parts:
        """Returns GPUs, nodes and ranks of a job; found once, since many incidents may concern one large job."""
        if job not in self._parts:
            ranks = self.ranks.get(job, ())
            self._parts[job] = frozenset(self.gpus_of(job)), frozenset(self.nodes_of(job)), frozenset(ranks)
        return self._parts[job]

    def gpus_of(self, job: str) -> set[str]:
        """Returns the GPUs of a job."""
        return {gpu for rank in self.ranks.get(job, ()) for gpu in self.of[rank].gpus}

    def nodes_of(self, job: str) -> set[str]:
        """Returns the nodes of a job."""
        return {node for rank in self.ranks.get(job, ()) if (node := self.of[rank].node)}


class JobBook:
    """All running jobs and those that ended within KEPT. For the thread of the evaluation; others read `pulses`, which
    each instant replaces."""

    def __init__(self, topology: Topology, is_simulated: Callable[[str], bool] = lambda entity: False) -> None:
        self.topology, self._is_simulated = topology, is_simulated
        self.jobs: dict[str, Job] = {}
        self.paces = PaceBook()
        self.places = Places()
        self.listings = JobListings(is_simulated)
        self.pulses: Mapping[str, Pulse] = {}
        self.changed: set[str] = set()  # jobs to be stored
        self.minutes: list[tuple[str, Minute]] = []  # to be stored
        self._places_of: dict[str, tuple[tuple[str, ...], Place]] = {}  # rank -> parents and its place
        self._read: tuple[int, int] = (-1, 0)  # version of the topology, event time
        self.time = 0  # event time of the newest instant (us)

    def observe(self, instant: Instant) -> None:
        """Adds an instant, whose events are in the topology already."""
        time = self.time = instant.end
        self._read_events(instant)
        version, at = self._read
        changed = version != self.topology.version or self.listings.is_waiting
        if changed and (time - at >= REFRESH or time < at or instant.ended):
            self._refresh(time)
        frame: Frame | None = instant.frames.get("rank")
        if frame is not None:
            self.minutes += self.paces.read(frame, self.places.job_of, self.places.version)
            self._renew_pulses()

    def _renew_pulses(self) -> None:
        """Replaces the pulses; a job that begins or ceases to hang is stored, though no minute of it ends, and so is
        one whose hang goes on without reports."""
        before = {(job, pulse.lasts) for job, pulse in self.pulses.items() if pulse.hangs}
        self.pulses = {job.entity: pulse for job in self.running() if (pulse := self._find_pulse(job)) is not None}
        now = {(job, pulse.lasts) for job, pulse in self.pulses.items() if pulse.hangs}
        self.changed |= {job for job, _ in before ^ now}

    def _find_pulse(self, job: Job) -> Pulse | None:
        pace = self.paces.jobs.get(job.entity)
        if pace is None or not pace.reported_at:  # nothing since the start: the stored row is as new
            return None
        return Pulse(pace.moved_at, pace.reported_at, pace.hangs_at(self.time))

    def load(
        self, jobs: Iterable[Job], minutes: Iterable[tuple[str, Minute]], time: int, newest: Mapping[str, Newest]
    ) -> None:
        """Restores stored jobs, and their minutes, oldest first. newest: job -> its newest step, of those with one."""
        self.time = max((found.moved for found in newest.values()), default=time)
        self.jobs = {job.entity: job for job in jobs}
        for job, minute in minutes:
            pace = self.paces.jobs.setdefault(job, JobPace())
            pace.append(minute)
            pace.first_at, pace.moved_at = pace.first_at or minute.time, minute.time + MINUTE
        for job, pace in self.paces.jobs.items():
            if (found := newest.get(job)) is not None:
                pace.moved_at, pace.step, pace.reported_at = found.moved, found.step, found.reported
                pace.restored = True
        self._refresh(time)

    def _read_events(self, instant: Instant) -> None:
        for event in instant.events:
            if event.kind == "checkpoint" and (job := self.jobs.get(event.entity)) is not None:
                self.jobs[job.entity] = replace(job, checkpoint=event.time)
            elif event.kind == "job_start" and kind_of(event.entity) == "job":
                self._start(event.entity, event.time, event.data)
            elif event.kind == "job_end" and not self.topology.descendants(event.entity):
                job = self.jobs.get(event.entity)
                if job is not None and job.ended is None:
                    self._set(replace(job, ended=max(event.time, job.started)))

    def _start(self, entity: str, time: int, data: Mapping[str, Any]) -> None:
        known = self.jobs.get(entity)
        if known is None or (known.ended is not None and time > known.ended):
            self._set(self._describe(Job(entity, time, simulated=self._is_simulated(entity)), data))
        elif time < known.started:
            self._set(replace(known, started=time))

    def _describe(self, job: Job, data: Mapping[str, Any]) -> Job:
        facts = {**self.topology.attributes.get(job.entity, {}), **data}
        text = {key: str(facts.get(key) or "") for key in ("name", "account", "namespace", "user", "scheduler")}
        account = text["account"] or text["namespace"]
        return replace(job, name=text["name"], account=account, user=text["user"], scheduler=text["scheduler"])

    def _set(self, job: Job) -> None:
        self.jobs[job.entity] = job
        self.changed.add(job.entity)

    def _refresh(self, time: int) -> None:
        """Reads the ranks from the topology: those with the same parents as before keep their place."""
        self._read = self.topology.version, time
        parents, before = self.topology.parents, self._places_of
        found: dict[str, tuple[tuple[str, ...], Place]] = {}
        for rank in [e for e in parents if e.startswith("rank:")]:
            over = parents[rank]
            known = before.get(rank)
            found[rank] = known if known is not None and known[0] is over else (over, self._find_place(over))
        self._places_of = found
        made = Places(version=self.places.version + 1)
        for rank, (_, place) in found.items():
            made.of[rank] = place
            for on in (*place.gpus, place.node):
                made.on.setdefault(on, []).append(rank)
            if place.job:
                made.job_of[rank] = place.job
                made.ranks.setdefault(place.job, []).append(rank)
        self.places = made
        self.listings.settle({place.node for place in made.of.values() if place.node}, time)
        self._follow_ranks(time)

    def _find_place(self, parents: tuple[str, ...]) -> Place:
        above = self.topology.ancestor_of_kind
        job = next((j for p in parents if kind_of(p) in WORK and (j := above(p, "job"))), "")
        node = next((n for p in parents if kind_of(p) not in WORK and (n := above(p, "node"))), "")
        return Place(job, tuple(p for p in parents if kind_of(p) not in (*WORK, "node")), node)

    def _follow_ranks(self, time: int) -> None:
        """Updates the sizes of jobs; one without ranks has ended, whether or not its end was reported."""
        for entity, ranks in self.places.ranks.items():
            job = self.jobs.get(entity)
            if job is None or job.ended is not None:
                job = self._describe(Job(entity, time, simulated=self._is_simulated(entity)), {})
            facts = self._describe(job, {}) if not job.name else job
            nodes = tuple(sorted(self.places.nodes_of(entity)))
            gpus = len(self.places.gpus_of(entity))
            new = replace(facts, ranks=len(ranks), gpus=gpus, nodes=nodes)
            if new != self.jobs.get(entity):
                self._set(new)
        for entity, job in list(self.jobs.items()):
            if job.ended is None and entity not in self.places.ranks and job.ranks:
                self._set(replace(job, ended=max(time, job.started)))
            elif job.ended is not None and time - job.ended > KEPT:
                del self.jobs[entity]
                self.paces.forget([entity])

    def count_unlisted(self, nodes: Iterable[str], time: int) -> int:
        """Returns of how many nodes it is not known at a time (us) whether a job is on them."""
        return self.listings.count_unlisted((node for node in nodes if node not in self.places.on), time)

    def running(self) -> Iterator[Job]:
        """Yields the jobs that have not ended."""
        return (job for job in self.jobs.values() if job.ended is None)
