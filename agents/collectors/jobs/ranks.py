"""Which ranks of which jobs are on this node now, from what each source saw.

A rank is all the processes that say so (its data loaders have its environment). Where no source tells a job's ranks,
the job's share of this node is one member, `rank:JOB.NODE` (`rank:JOB.POD` of a pod): its GPUs still belong to it.
What the prolog says counts alone only where environments may not be read: a job without a process has not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents.collectors.jobs import gpu_assignment
from agents.collectors.jobs.gpu_assignment import Gpus
from agents.collectors.jobs.kubernetes import Pod
from agents.collectors.jobs.process_identity import Identity, clean, identify
from agents.collectors.jobs.processes import Process
from agents.collectors.jobs.slurm_prolog import Facts

MAX_RANKS = 512
"""Most ranks of one node that are told; chosen: as many as a node of 512 processors runs without a GPU."""


Member = tuple[Process, Identity, Pod | None]
"""A process of a job, who it is, and the pod that it is in."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a job on this node. pid: its first process, 0 where none is known; start: when that began, ticks."""

    entity: str
    job: str
    stage: str
    gpus: tuple[str, ...]
    pid: int = 0
    start: int = 0
    slurm_job: str = ""
    title: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def parents(self, node: str) -> tuple[str, ...]:
        """Stage, job, GPUs; the node for a rank without a GPU."""
        stage = (f"stage:{self.job}.{self.stage}",) if self.stage else ()
        return (*stage, f"job:{self.job}", *(self.gpus or (f"node:{node}",)))


@dataclass(frozen=True, slots=True)
class Sources:
    """What one look saw. facts: by Slurm's job id; blind: whether there are environments that may not be read."""

    processes: Iterable[Process]
    facts: Mapping[str, Facts]
    pods: tuple[Pod, ...]
    gpus: Gpus
    node: str
    blind: bool = False


def ranks(sources: Sources) -> dict[str, Rank]:
    """Entity -> rank, of all jobs on this node."""
    by_job: dict[str, list[Member]] = {}
    uids = {pod.uid: pod for pod in sources.pods if pod.uid}
    containers = {container: pod for pod in sources.pods for container in pod.containers}
    unnumbered = {pod.name: pod for pod in sources.pods if not pod.uid}  # without labels the kubelet tells names alone
    for process in sources.processes:
        place = process.place
        pod = uids.get(place.pod) or containers.get(place.container) or unnumbered.get(process.host)
        who = _who(process, pod, sources)
        if who is not None:
            by_job.setdefault(who.job, []).append((process, who, pod))
    found: dict[str, Rank] = {}
    for job, everybody in by_job.items():
        together = _of_its_users(job, everybody, sources.facts)
        best = max((who.claim for _, who, _ in together), default=0)
        for process, who, pod in sorted(together, key=lambda one: (one[0].start, one[0].pid)):
            if who.claim == best and (rank := _rank(process, who, pod, sources)).entity not in found:
                found[rank.entity] = rank
    for pod in sources.pods:
        if not any(rank.attributes.get("pod") == pod.name for rank in found.values()):
            rank = _of_pod(pod, sources)
            found.setdefault(rank.entity, rank)
    for job, facts in sources.facts.items() if sources.blind else ():
        if not any(rank.slurm_job == job for rank in found.values()):
            rank = _of_facts(job, facts, sources)
            found.setdefault(rank.entity, rank)
    return dict(list(found.items())[:MAX_RANKS])


def _of_its_users(job: str, together: list[Member], facts: Mapping[str, Facts]) -> list[Member]:
    """The processes of a job that its users run: an environment can be made up, so any user can claim any job.

    The users of a job are whom Slurm's prolog names; else who runs in its pods; else who was first: in its control
    group, in another one of Slurm under this name, or at all. Root may run for anybody.
    """
    uid = facts.get(job, {}).get("SLURM_JOB_UID", "")
    uids = {int(uid)} if uid.isdecimal() else {process.uid for process, _, pod in together if pod is not None}
    if not uids:
        surest = max(_sureness(job, *member) for member in together)
        mine = [process for process, who, pod in together if _sureness(job, process, who, pod) == surest]
        uids = {min(mine, key=lambda process: (process.start, process.pid)).uid}
    return [member for member in together if member[0].uid in uids | {0}]


def _sureness(job: str, process: Process, who: Identity, _: Pod | None) -> int:
    """How sure it is without its environment that a process is of a job."""
    placed = process.place.slurm_job
    return 0 if not placed else 2 if placed == job else int(who.scheduler_id in ("", placed))


def _who(process: Process, pod: Pod | None, sources: Sources) -> Identity | None:
    """Who a process is: by its environment, placed by Slurm's or Kubernetes' word where it says nothing itself."""
    who, place = process.identity, process.place
    if pod is not None:
        if who is not None and who.scheduler_id:  # Slurm within a pod
            return who
        whole = who or Identity("", "kubernetes")
        return (
            whole
            if whole.named
            else replace(whole, job=pod.job, scheduler="kubernetes", title=whole.title or pod.title)
        )
    if who is None and place.slurm_job and place.step not in ("extern", "4294967295"):
        facts = sources.facts.get(place.slurm_job, {})
        return identify({**facts, "SLURM_JOB_ID": place.slurm_job}, sources.node)
    return who if who is None or who.rank is not None or place.slurm_job else None


def _rank(process: Process, who: Identity, pod: Pod | None, sources: Sources) -> Rank:
    """The rank that a process is, or the member that stands for its job on this node or in its pod."""
    facts = sources.facts.get(who.scheduler_id or process.place.slurm_job, {})
    held = process.devices
    if not held.tokens or held.assumed:
        given = pod.devices if pod is not None else gpu_assignment.listed(facts.get("SLURM_JOB_GPUS", "")) or ()
        held = gpu_assignment.Devices(gpu_assignment.share(given, who)) if given else held
    number = who.rank if who.rank is not None else pod.rank if pod is not None else None
    stage = who.stage or (pod.stage if pod is not None else "")
    return Rank(
        f"rank:{who.job}.{_member(number, pod, sources.node)}",
        who.job,
        stage,
        sources.gpus.entities(sources.node, held.tokens, held.assumed),
        process.pid,
        process.start,
        who.scheduler_id or process.place.slurm_job,
        who.title or facts.get("SLURM_JOB_NAME", ""),
        _attributes(who, pod, facts, {"pid": process.pid, "uid": process.uid}, sources.node),
    )


def _of_pod(pod: Pod, sources: Sources) -> Rank:
    """A pod none of whose processes is seen: another's process ids, or none yet."""
    who = Identity(pod.job, "kubernetes", rank=pod.rank, title=pod.title)
    entity = f"rank:{pod.job}.{_member(pod.rank, pod, sources.node)}"
    held = sources.gpus.entities(sources.node, pod.devices)
    told = _attributes(who, pod, {}, {}, sources.node)
    return Rank(entity, pod.job, pod.stage, held, title=pod.title, attributes=told)


def _of_facts(job: str, facts: Facts, sources: Sources) -> Rank:
    """A job of which only Slurm's prolog tells."""
    who = identify({**facts, "SLURM_JOB_ID": job}, sources.node) or Identity(job, "slurm", job)
    held = sources.gpus.entities(sources.node, gpu_assignment.listed(facts.get("SLURM_JOB_GPUS", "")) or ())
    entity = f"rank:{who.job}.{_member(None, None, sources.node)}"
    told = _attributes(who, None, facts, {}, sources.node)
    return Rank(entity, who.job, "", held, slurm_job=job, title=who.title, attributes=told)


def _member(number: int | None, pod: Pod | None, node: str) -> str:
    return str(number) if number is not None else clean(pod.name) if pod is not None else clean(node)


def _attributes(who: Identity, pod: Pod | None, facts: Facts, more: Mapping[str, Any], node: str) -> dict[str, Any]:
    """What is known of a rank beside its place; `node` marks who told of it, so that it goes when that one stops."""
    found: dict[str, Any] = {
        "node": node,
        "scheduler": who.scheduler,
        "rank": who.rank,
        "world_size": who.world_size,
        "local_rank": who.local_rank,
        "node_rank": who.node_rank,
        "stage": who.stage,
        "array": who.array,
        "user": who.user or facts.get("SLURM_JOB_USER", ""),
        **more,
    }
    if pod is not None:
        found |= {"pod": pod.name, "namespace": pod.namespace, "labels": dict(pod.labels)}
        found["container"] = next(iter(pod.containers), "")
    return {key: value for key, value in found.items() if value not in (None, "", {})}
