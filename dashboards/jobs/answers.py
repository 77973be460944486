"""Responses of GET /api/v1/jobs, /api/v1/jobs/{job} and /api/v1/rank-strip as types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.answers import parse_time, require_list
from pipeline.model.records import from_iso


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a job. See `Job` of the API."""

    job: str
    name: str
    account: str
    user: str
    scheduler: str
    state: str
    started: int
    ended: int | None
    ranks: int
    gpus: int
    nodes: tuple[str, ...]
    node_count: int
    simulated: bool
    step_time: float | None
    usual_step_time: float | None
    slowdown: float | None
    last_step: int | None
    last_report: int | None
    checkpoint: int | None
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float
    incidents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """A minute in which a job made steps. step_time: s."""

    time: int
    step_time: float


@dataclass(frozen=True, slots=True)
class Harm:
    """An incident that reached a job. detector: empty from an API that does not name it."""

    id: str
    summary: str
    severity: str
    onset: int
    resolved: int | None
    state: str
    slowdown: float | None
    basis: str
    lost_gpu_hours: float
    detector: str


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job with the history of its step time, incidents that reached it, and earlier runs."""

    job: Job
    history: tuple[Pace, ...]
    harmed_by: tuple[Harm, ...]
    runs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class JobList:
    """All runs, running ones first."""

    jobs: tuple[Job, ...]
    as_of: int


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is late. row: of the strip; now, mean: lateness; share: of the time."""

    rank: str
    row: int
    stage: str | None
    gpu: str | None
    node: str | None
    now: float | None
    mean: float
    share: float


@dataclass(frozen=True, slots=True)
class Strip:
    """Lateness of ranks over time. See `RankStrip` of the API."""

    start: int
    end: int
    width_s: float
    rows: int
    columns: int
    ranks: int
    first_rank: int
    per_row: int
    labels: tuple[str, ...]
    gpus: tuple[str, ...]
    levels: str
    low: float
    step: float
    late: float
    measured: str | None
    late_ranks: int
    slow: tuple[SlowRank, ...]


def parse_jobs(table: Mapping[str, Any]) -> JobList:
    """Parses GET /api/v1/jobs."""
    return JobList(tuple(_job(row) for row in require_list(table["jobs"])), from_iso(table["as_of"]))


def _job(row: Mapping[str, Any]) -> Job:
    given = {name: row[name] for name in Job.__slots__}
    times = ("ended", "last_step", "last_report", "checkpoint")
    return Job(
        **{
            **given,
            "started": from_iso(row["started"]),
            **{name: parse_time(row[name]) for name in times},
            "nodes": tuple(map(str, require_list(row["nodes"]))),
            "incidents": tuple(map(str, require_list(row["incidents"]))),
        }
    )


def parse_job(table: Mapping[str, Any]) -> JobDetail:
    """Parses GET /api/v1/jobs/{job}; its list of ranks is left out: the strip has the late ones."""
    return JobDetail(
        job=_job(table),
        history=tuple(Pace(from_iso(p["time"]), float(p["step_time"])) for p in require_list(table["history"])),
        harmed_by=tuple(_harm(row) for row in require_list(table["harmed_by"])),
        runs=tuple(_job(row) for row in require_list(table["runs"])),
    )


def _harm(row: Mapping[str, Any]) -> Harm:
    given = {name: row[name] for name in Harm.__slots__ if name != "detector"}
    detector = str(row.get("detector") or "")
    return Harm(
        **{**given, "detector": detector, "onset": from_iso(row["onset"]), "resolved": parse_time(row["resolved"])}
    )


def parse_strip(table: Mapping[str, Any]) -> Strip:
    """Parses GET /api/v1/rank-strip."""
    given = {name: table[name] for name in Strip.__slots__}
    return Strip(
        **{
            **given,
            "start": from_iso(table["start"]),
            "end": from_iso(table["end"]),
            "labels": tuple(map(str, require_list(table["labels"]))),
            "gpus": tuple(map(str, require_list(table["gpus"]))),
            "slow": tuple(SlowRank(**row) for row in require_list(table["slow"])),
        }
    )
