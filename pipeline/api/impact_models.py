"""Answers about the impact of incidents and about jobs, as in /openapi.json."""

from __future__ import annotations

from typing import Literal

from pipeline.api.strict_model import Strict, Time
from pipeline.incidents.job_loss import JobState


class ImpactShort(Strict):
    """Who suffers from an incident, in numbers. cost: in the currency of [impact], null without a price.
    nodes_without_job_list: reached nodes whose jobs are not known; with 0 jobs and 0 of these no job is reached."""

    gpus: int
    nodes: int
    ranks: int
    jobs: int
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float
    cost: float | None
    nodes_without_job_list: int = 0


class ImpactedJob(Strict):
    """A job that an incident reaches. ranks: reached ones.  slowdown: excess of its step time over that before the
    onset; null if it is not measured, then `basis` says why.  lost_gpu_hours: of the whole job, by this incident."""

    job: str
    name: str
    account: str
    gpus: int
    ranks: int
    rank_names: list[str]
    slowdown: float | None
    basis: str
    state: JobState
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float


class Cost(Strict):
    """What lost GPU-hours cost."""

    amount: float
    per_hour: float
    currency: str


class Impact(Strict):
    """Who suffers from an incident, frozen when it is resolved. gpus, nodes, ranks: reached, and those of jobs that are
    slow, hang or are lost.  jobs: at most 50 of job_count.  affected: nodes that only suffer, at most 100 of
    affected_count; none of them is at fault.  nodes_without_job_list: reached nodes of which no inventory with their
    jobs has been read: their jobs are not known.  text: all of it in one line.  title: affected jobs in short."""

    gpus: int
    nodes: int
    ranks: int
    job_count: int
    jobs: list[ImpactedJob]
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float
    cost: Cost | None
    affected: list[str]
    affected_count: int
    nodes_without_job_list: int = 0
    text: str
    title: str = ""
    as_of: Time


class Job(Strict):
    """A run of a job. account: of the scheduler, or its namespace.  step_time, usual_step_time: s; null without steps.
    slowdown: of a running job against its usual step time.  last_step, checkpoint: newest ones.  last_report: when
    its ranks reported their step last, new or not; null if they have not since the pipeline started.  nodes: at most
    1,024 of node_count.  incidents: open ones that reach it.  lost_gpu_hours: by all incidents of this run."""

    job: str
    name: str
    account: str
    user: str
    scheduler: str
    state: Literal["running", "hanging", "ended"]
    started: Time
    ended: Time | None
    ranks: int
    gpus: int
    nodes: list[str]
    node_count: int
    simulated: bool
    step_time: float | None
    usual_step_time: float | None
    slowdown: float | None
    last_step: Time | None
    last_report: Time | None
    checkpoint: Time | None
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float
    incidents: list[str]


class Jobs(Strict):
    """Running jobs, the largest first, and those that ended."""

    jobs: list[Job]
    as_of: Time


class Rank(Strict):
    """A rank of a running job. slowdown: excess of its compute time over the median of its stage; null without one.
    suspect: it is slower than its peers by 3 % or more, so that the others wait for it."""

    rank: str
    stage: str | None
    gpu: str | None
    node: str | None
    step: int | None
    step_time: float | None
    compute_time: float | None
    slowdown: float | None
    suspect: bool
    as_of: Time | None


class PaceMinute(Strict):
    """A minute of a job in which it made steps. step_time: median (s).  steps: finished."""

    time: Time
    step_time: float
    steps: float


class JobIncident(Strict):
    """An incident that reached a job, open or resolved."""

    id: str
    detector: str
    summary: str
    severity: Literal["watch", "ticket", "page"]
    onset: Time
    resolved: Time | None
    state: JobState
    slowdown: float | None
    basis: str
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float


class JobDetail(Job):
    """A job: its newest run with its ranks now, the history of its step time, incidents, and earlier runs."""

    rank_list: list[Rank]
    history: list[PaceMinute]
    harmed_by: list[JobIncident]
    runs: list[Job]
    as_of: Time
