"""Parts of an incident's detail as types: impact, explanation, similar incidents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.json_values import parse_names, parse_number, parse_time, require_list
from pipeline.model.records import from_iso


@dataclass(frozen=True, slots=True)
class ImpactedJob:
    """A job that an incident reaches. slowdown: excess of its step time (0.31: 31 % slower), None if not measured."""

    job: str
    name: str
    gpus: int
    ranks: int
    slowdown: float | None
    basis: str
    state: str
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float


@dataclass(frozen=True, slots=True)
class Impact:
    """Who suffers. jobs: at most 50 of job_count.  affected: nodes that only suffer.  cost: amount, amount per hour,
    currency.  unlisted: nodes whose jobs are not known."""

    gpus: int
    nodes: int
    ranks: int
    jobs: tuple[ImpactedJob, ...]
    job_count: int
    lost_gpu_hours: float
    lost_gpu_hours_per_hour: float
    cost: tuple[float, float, str] | None
    affected: tuple[str, ...]
    affected_count: int
    unlisted: int = 0


@dataclass(frozen=True, slots=True)
class Explained:
    """A finding that the cause explains, with the way of the fault from the cause to it."""

    entity: str
    detector: str
    onset: int
    path: tuple[str, ...]
    step: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why this cause. alternatives: (other cause, or "" for none in common; probability)."""

    root: str
    probability: float | None
    evidence: str
    alternatives: tuple[tuple[str, float], ...]
    explained: tuple[Explained, ...]
    explained_count: int


@dataclass(frozen=True, slots=True)
class Similar:
    """A past incident of the same device, cause or detector. note: what a person wrote last."""

    id: str
    summary: str
    onset: int
    resolved: int | None
    feedback: str
    note: str
    why: str


def parse_impact(table: Any) -> Impact | None:
    """Parses `impact`; None if the API has none."""
    if not isinstance(table, Mapping) or "jobs" not in table:
        return None
    jobs = tuple(map(_job, require_list(table["jobs"])))
    affected = parse_names(table.get("affected"))
    return Impact(
        gpus=int(table["gpus"]),
        nodes=int(table["nodes"]),
        ranks=int(table["ranks"]),
        jobs=jobs,
        job_count=int(table.get("job_count") or len(jobs)),
        lost_gpu_hours=float(table["lost_gpu_hours"]),
        lost_gpu_hours_per_hour=float(table["lost_gpu_hours_per_hour"]),
        cost=_cost(table.get("cost")),
        affected=affected,
        affected_count=int(table.get("affected_count") or len(affected)),
        unlisted=int(table.get("nodes_without_job_list") or 0),
    )


def _cost(table: Any) -> tuple[float, float, str] | None:
    """Returns amount, amount per hour and currency; None without a price."""
    if not isinstance(table, Mapping):
        return None
    return float(table["amount"]), float(table["per_hour"]), str(table["currency"])


def _job(table: Mapping[str, Any]) -> ImpactedJob:
    return ImpactedJob(
        job=str(table["job"]),
        name=str(table.get("name") or ""),
        gpus=int(table["gpus"]),
        ranks=int(table["ranks"]),
        slowdown=parse_number(table.get("slowdown")),
        basis=str(table.get("basis") or ""),
        state=str(table.get("state") or "unknown"),
        lost_gpu_hours=float(table["lost_gpu_hours"]),
        lost_gpu_hours_per_hour=float(table["lost_gpu_hours_per_hour"]),
    )


def parse_explanation(table: Any) -> Explanation | None:
    """Parses `explanation`; None if the API has none."""
    if not isinstance(table, Mapping) or "root" not in table:
        return None
    explained = tuple(
        Explained(
            str(e["entity"]), str(e["detector"]), from_iso(e["onset"]), parse_names(e.get("path")), str(e["step"])
        )
        for e in require_list(table.get("explained") or [])
    )
    others = require_list(table.get("alternatives") or [])
    return Explanation(
        root=str(table["root"]),
        probability=parse_number(table.get("probability")),
        evidence=str(table.get("evidence") or ""),
        alternatives=tuple((str(a.get("cause") or ""), float(a["probability"])) for a in others),
        explained=explained,
        explained_count=int(table.get("explained_count") or len(explained)),
    )


def parse_similar(rows: Any) -> tuple[Similar, ...]:
    """Parses `similar`."""
    return tuple(
        Similar(
            id=str(row["id"]),
            summary=str(row["summary"]),
            onset=from_iso(row["onset"]),
            resolved=parse_time(row.get("resolved")),
            feedback=str(row.get("feedback") or ""),
            note=str(row.get("note") or ""),
            why=str(row.get("why") or ""),
        )
        for row in require_list(rows or [])
    )
