"""Finds the ranks of jobs on this node from processes, Slurm's prolog and pods.

A rank is the group of processes with the same job and rank number, such as a trainer with its data loaders. If no
source gives the ranks of a job, one placeholder represents the job on this node: `rank:JOB.NODE`, or `rank:JOB.POD`.
Its GPUs still belong to the job. The prolog alone counts only if environments may not be read: a job without a process
has not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents.collectors.jobs import gpu_assignment
from agents.collectors.jobs.gpu_assignment import GpuNumbers
from agents.collectors.jobs.kubernetes import Pod
from agents.collectors.jobs.process_identity import ProcessIdentity, clean_name, identify_process
from agents.collectors.jobs.processes import JobProcess
from agents.collectors.jobs.slurm_prolog import JobVariables

MAX_RANKS = 512
"""Most ranks of one node. Chosen: a node of 512 processors runs no more without a GPU."""


Member = tuple[JobProcess, ProcessIdentity, Pod | None]
"""A process of a job, its identity, and its pod."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """One rank of a job on this node. pid: its first process, 0 if unknown; start: in ticks since boot."""

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
        """Returns stage, job and GPUs; for a rank without a GPU the node."""
        stage = (f"stage:{self.job}.{self.stage}",) if self.stage else ()
        return (*stage, f"job:{self.job}", *(self.gpus or (f"node:{node}",)))


@dataclass(frozen=True, slots=True)
class JobSources:
    """Results of one scan. prolog: variables by Slurm job id; environments_refused: most are not readable."""

    processes: Iterable[JobProcess]
    prolog: Mapping[str, JobVariables]
    pods: tuple[Pod, ...]
    gpus: GpuNumbers
    node: str
    environments_refused: bool = False


def find_ranks(sources: JobSources) -> dict[str, JobRank]:
    """Returns entity -> rank of all jobs on this node."""
    by_job: dict[str, list[Member]] = {}
    uids = {pod.uid: pod for pod in sources.pods if pod.uid}
    containers = {container: pod for pod in sources.pods for container in pod.containers}
    unlabelled = {pod.name: pod for pod in sources.pods if not pod.uid}  # the kubelet alone gives names without uids
    for process in sources.processes:
        owner = process.cgroup
        pod = uids.get(owner.pod) or containers.get(owner.container) or unlabelled.get(process.pod_name)
        identity = _resolve_identity(process, pod, sources)
        if identity is not None:
            by_job.setdefault(identity.job, []).append((process, identity, pod))
    found: dict[str, JobRank] = {}
    for job, candidates in by_job.items():
        together = _keep_job_users(job, candidates, sources.prolog)
        best = max((identity.claim for _, identity, _ in together), default=0)
        for process, identity, pod in sorted(together, key=lambda one: (one[0].start, one[0].pid)):
            if identity.claim == best and (rank := _build_rank(process, identity, pod, sources)).entity not in found:
                found[rank.entity] = rank
    for pod in sources.pods:
        if not any(rank.attributes.get("pod") == pod.name for rank in found.values()):
            rank = _rank_of_pod(pod, sources)
            found.setdefault(rank.entity, rank)
    for job, facts in sources.prolog.items() if sources.environments_refused else ():
        if not any(rank.slurm_job == job for rank in found.values()):
            rank = _rank_of_prolog(job, facts, sources)
            found.setdefault(rank.entity, rank)
    return dict(list(found.items())[:MAX_RANKS])


def _keep_job_users(job: str, together: list[Member], facts: Mapping[str, JobVariables]) -> list[Member]:
    """Returns the processes that run as the job's users: environments can be forged, to claim any job.

    The users of a job are, in this order: the user named by Slurm's prolog; the users of its pods' processes; the user
    of the first process, by the surest placement (in the job's control group, in another of Slurm's, in none). Root
    counts as every user.
    """
    uid = facts.get(job, {}).get("SLURM_JOB_UID", "")
    uids = {int(uid)} if uid.isdecimal() else {process.uid for process, _, pod in together if pod is not None}
    if not uids:
        surest = max(_placement_confidence(job, *member) for member in together)
        mine = [
            process
            for process, identity, pod in together
            if _placement_confidence(job, process, identity, pod) == surest
        ]
        uids = {min(mine, key=lambda process: (process.start, process.pid)).uid}
    return [member for member in together if member[0].uid in uids | {0}]


def _placement_confidence(job: str, process: JobProcess, identity: ProcessIdentity, _: Pod | None) -> int:
    """Returns how surely a process belongs to a job, without its environment.

    2: same Slurm job; 1: the job has another name; 0: in no Slurm job, or a different one.
    """
    placed = process.cgroup.slurm_job
    return 0 if not placed else 2 if placed == job else int(identity.scheduler_id in ("", placed))


def _resolve_identity(process: JobProcess, pod: Pod | None, sources: JobSources) -> ProcessIdentity | None:
    """Returns the identity of a process: from its environment, completed by its pod or its Slurm control group."""
    identity, owner = process.identity, process.cgroup
    if pod is not None:
        if identity is not None and identity.scheduler_id:  # Slurm inside a pod
            return identity
        whole = identity or ProcessIdentity("", "kubernetes")
        return (
            whole
            if whole.job_named_by_user
            else replace(whole, job=pod.job, scheduler="kubernetes", title=whole.title or pod.title)
        )
    if identity is None and owner.slurm_job and owner.step not in ("extern", "4294967295"):
        facts = sources.prolog.get(owner.slurm_job, {})
        return identify_process({**facts, "SLURM_JOB_ID": owner.slurm_job}, sources.node)
    return identity if identity is None or identity.rank is not None or owner.slurm_job else None


def _build_rank(process: JobProcess, identity: ProcessIdentity, pod: Pod | None, sources: JobSources) -> JobRank:
    """Returns the rank of a process, or the placeholder of its job on this node or in its pod."""
    facts = sources.prolog.get(identity.scheduler_id or process.cgroup.slurm_job, {})
    held = process.devices
    if not held.tokens or held.assumed:
        given = (
            pod.devices if pod is not None else gpu_assignment.parse_device_list(facts.get("SLURM_JOB_GPUS", "")) or ()
        )
        held = gpu_assignment.HeldDevices(gpu_assignment.share_of_rank(given, identity)) if given else held
    number = identity.rank if identity.rank is not None else pod.rank if pod is not None else None
    stage = identity.stage or (pod.stage if pod is not None else "")
    return JobRank(
        f"rank:{identity.job}.{_member_name(number, pod, sources.node)}",
        identity.job,
        stage,
        sources.gpus.list_entities(sources.node, held.tokens, held.assumed),
        process.pid,
        process.start,
        identity.scheduler_id or process.cgroup.slurm_job,
        identity.title or facts.get("SLURM_JOB_NAME", ""),
        _rank_attributes(identity, pod, facts, {"pid": process.pid, "uid": process.uid}, sources.node),
    )


def _rank_of_pod(pod: Pod, sources: JobSources) -> JobRank:
    """Returns the rank of a pod without visible processes: another pid namespace, or none started yet."""
    identity = ProcessIdentity(pod.job, "kubernetes", rank=pod.rank, title=pod.title)
    entity = f"rank:{pod.job}.{_member_name(pod.rank, pod, sources.node)}"
    held = sources.gpus.list_entities(sources.node, pod.devices)
    attributes = _rank_attributes(identity, pod, {}, {}, sources.node)
    return JobRank(entity, pod.job, pod.stage, held, title=pod.title, attributes=attributes)


def _rank_of_prolog(job: str, facts: JobVariables, sources: JobSources) -> JobRank:
    """Returns the placeholder of a job that only Slurm's prolog reports."""
    identity = identify_process({**facts, "SLURM_JOB_ID": job}, sources.node) or ProcessIdentity(job, "slurm", job)
    held = sources.gpus.list_entities(
        sources.node, gpu_assignment.parse_device_list(facts.get("SLURM_JOB_GPUS", "")) or ()
    )
    entity = f"rank:{identity.job}.{_member_name(None, None, sources.node)}"
    attributes = _rank_attributes(identity, None, facts, {}, sources.node)
    return JobRank(entity, identity.job, "", held, slurm_job=job, title=identity.title, attributes=attributes)


def _member_name(number: int | None, pod: Pod | None, node: str) -> str:
    return str(number) if number is not None else clean_name(pod.name) if pod is not None else clean_name(node)


def _rank_attributes(
    identity: ProcessIdentity, pod: Pod | None, facts: JobVariables, more: Mapping[str, Any], node: str
) -> dict[str, Any]:
    """Returns the attributes of a rank. `node`: the reporting node; the rank is removed when it stops."""
    found: dict[str, Any] = {
        "node": node,
        "scheduler": identity.scheduler,
        "rank": identity.rank,
        "world_size": identity.world_size,
        "local_rank": identity.local_rank,
        "node_rank": identity.node_rank,
        "stage": identity.stage,
        "array": identity.array,
        "user": identity.user or facts.get("SLURM_JOB_USER", ""),
        **more,
    }
    if pod is not None:
        found |= {"pod": pod.name, "namespace": pod.namespace, "labels": dict(pod.labels)}
        found["container"] = next(iter(pod.containers), "")
    return {key: value for key, value in found.items() if value not in (None, "", {})}
