"""What a scheduler says about its nodes and jobs, in one form for Slurm and Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OWNER = "fleetpulse:"
"""How every reason begins that we write; a node with another reason belongs to others."""


@dataclass(frozen=True, slots=True)
class SchedulerNode:
    """One node. out: gets no new work, by any author.  reason: as stored.  jobs: ids of jobs on it.
    version: a number that changes with each change, where the scheduler has one.
    absent: out only because it does not answer. No person took it out, and the scheduler gives it work once it answers.
    unusable: gets no work now though nothing marks it as out: it does not answer yet, or no GPU of it is healthy."""

    name: str
    out: bool
    state: str
    reason: str = ""
    jobs: tuple[str, ...] = ()
    version: str = ""
    absent: bool = False
    unusable: bool = False

    @property
    def is_taken(self) -> bool:
        """Whether it was taken out of service, here or elsewhere."""
        return self.out and not self.absent

    @property
    def mark(self) -> str:
        """The owner mark in the reason ("fleetpulse:ACT-..."), "" if it belongs to others or there is none."""
        return self.reason.split()[0] if self.reason.startswith(OWNER) and self.reason.split() else ""


@dataclass(frozen=True, slots=True)
class SchedulerJob:
    """One running job: its nodes, GPUs over all nodes, and account or namespace."""

    id: str
    nodes: tuple[str, ...]
    gpus: int = 0
    account: str = ""
    requeues: bool = False


def list_jobs_by_node(jobs: Mapping[str, SchedulerJob]) -> dict[str, tuple[str, ...]]:
    """Returns the ids of the jobs that run on each node, sorted."""
    found: dict[str, set[str]] = {}
    for job in jobs.values():
        for name in job.nodes:
            found.setdefault(name, set()).add(job.id)
    return {name: tuple(sorted(ids)) for name, ids in found.items()}


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All nodes and running jobs at one moment. taken: when (UTC us)."""

    taken: int
    nodes: Mapping[str, SchedulerNode]
    jobs: Mapping[str, SchedulerJob] = field(default_factory=dict)

    @property
    def out(self) -> frozenset[str]:
        """Names of the nodes that get no new work, from all causes."""
        return frozenset(name for name, node in self.nodes.items() if node.out or node.unusable)

    def jobs_on(self, names: frozenset[str]) -> tuple[SchedulerJob, ...]:
        """The jobs that run on any of the nodes, by id."""
        ids = {job for name in names if name in self.nodes for job in self.nodes[name].jobs}
        return tuple(self.jobs.get(id_, SchedulerJob(id_, ())) for id_ in sorted(ids))
