"""GET /api/v1/quality: whether silence can be trusted. GET /api/v1/quality/{group}: the members of one row.

Sources and blind spots come from memory; the store is read at low priority, at most once in KEPT for all callers.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import duckdb
import numpy as np
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.fleet import find_last_seen, list_nodes
from pipeline.api.models import Time
from pipeline.api.quality.blind import BlindSpots
from pipeline.api.quality.groups import MAX_GROUPS, ProblemGroup, find_rack, group_problems
from pipeline.api.quality.losses import read_losses, read_versions
from pipeline.api.quality.sources import find_problems, find_silent, read_reports
from pipeline.api.quality.space import Growth, find_full, read_growth
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.ingest.topic_lag import WINDOW
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import Topology
from pipeline.store.database import reserved_bytes
from pipeline.store.devices import Devices

quality_router = APIRouter(prefix="/api/v1/quality")
KEPT = 5 * SECOND
"""How long an answer about the sources is kept (us). Chosen: a refresh of the dashboard."""
KEPT_LOSSES = 15 * SECOND
"""The same for reads from the store: reasons, losses and versions. Chosen: rows that change slowly."""
MAX_EXAMPLES, MAX_MEMBERS = 12, 200
"""Members named in a row, and most in one page of its members. Chosen."""
UNSENT = 100
"""Unsent messages from which an agent has a backlog. Chosen: 10 min of messages, each of 5 s."""


class Strict(BaseModel):
    """A model without other fields."""

    model_config = ConfigDict(extra="forbid")


class Blinds(Strict):
    """What a problem blinds. devices: kind -> number of devices without a value that is needed."""

    detectors: list[str]
    signals: list[str]
    devices: dict[str, int]


class ProblemRow(Strict):
    """Sources that do not report, with one cause. since, until: when the first and the last of them began.

    expected: nothing to read, as is normal without the hardware.  shared: what all are part of.
    """

    id: str
    kind: str
    part: str
    state: str
    reason: str
    count: int
    nodes: int
    racks: int
    shared: str
    since: Time | None
    until: Time | None
    expected: bool
    examples: list[str]
    incidents: list[str]
    blinds: Blinds


class AgentCounts(Strict):
    """Agents by state, and the age of the newest telemetry of those that report (s)."""

    known: int
    reporting: int
    silent: int
    age_p50: float | None
    age_p99: float | None
    age_worst: float | None
    worst: str


class Backlog(Strict):
    """What waits in the spools of agents. lag_s: age of the oldest unread input of the pipeline."""

    watermark: Time | None
    backlog: bool
    lag_s: float | None
    stalled: bool
    unready: list[str]
    unsent: int
    agents: int
    examples: list[str]


class DetectorSight(Strict):
    """A detector, and the devices that it cannot judge now. missing: the signal that most of them lack."""

    detector: str
    kind: str
    devices: int
    blind: int
    missing: str
    off: list[str]
    errors: int


class GapRow(Strict):
    """Messages lost for one cause."""

    cause: str
    topic: str
    senders: int
    messages: int
    last_day: int
    first: Time
    last: Time
    examples: list[str]


class RejectedRow(Strict):
    """Messages of one sender that one rule rejected, as far as they are kept."""

    rule: str
    topic: str
    sender: str
    messages: int
    first: Time
    last: Time
    reason: str


class EarlierRow(Strict):
    """Losses whose rows were removed by retention."""

    kind: str
    cause: str
    topic: str
    number: int
    messages: int
    first: Time
    last: Time


class VersionRow(Strict):
    """Nodes that run a version of some software."""

    name: str
    version: str
    nodes: int
    examples: list[str]


class Disk(Strict):
    """The disk of the store (bytes). minimum: kept free; below it only events are stored.   per_day: growth of the
    history in a day, null before an hour is sealed.   full_s: until only events are stored at that growth, null if that
    is not known or the retention comes first."""

    free: int
    total: int
    minimum: int
    per_day: int | None
    full_s: int | None


class LagRow(Strict):
    """How long messages of a topic took from their newest reading to the store, of those stored within `lag_window_s`
    (s). longest: of all; the others: of an even sample."""

    topic: str
    messages: int
    p50: float
    p99: float
    longest: float


class Quality(Strict):
    """The answer of GET /api/v1/quality. late: class -> rows too late to be evaluated, since the start. rejected_total:
    rule -> messages rejected since the start. duplicates: messages that arrived again since the start, and are stored
    once. more: rows that are left out."""

    as_of: Time
    agents: AgentCounts
    backlog: Backlog
    problems: list[ProblemRow]
    more: int
    detectors: list[DetectorSight]
    gaps: list[GapRow]
    gap_hours: list[int]
    late: dict[str, int]
    rejected: list[RejectedRow]
    rejected_total: dict[str, int]
    duplicates: int
    earlier: list[EarlierRow]
    lags: list[LagRow]
    lag_window_s: float
    versions: list[VersionRow]
    disk: Disk | None


class Member(Strict):
    """One source of a row."""

    entity: str
    node: str
    rack: str
    since: Time | None
    reason: str


class Members(Strict):
    """One page of the sources of a row."""

    id: str
    total: int
    members: list[Member]


@dataclass(frozen=True)
class _Sources:
    """What one reading of memory found."""

    groups: list[ProblemGroup]
    rows: list[dict[str, Any]]
    detectors: list[dict[str, Any]]
    agents: dict[str, Any]


@quality_router.get("", response_model=Quality)
def quality(request: Request) -> Response:
    """Silent and failing sources, since when and why; detectors that these disable; lost, late or rejected data."""
    service = get_context(request)
    now, health = service.now(), service.backend.read_health()
    sources = _read_sources(service)
    stored = _remember_store(service, "losses", lambda cursor: read_losses(cursor, now))
    counters = service.backend.read_counters()
    return json_response(
        {
            "as_of": iso(now),
            "agents": sources.agents,
            "backlog": {
                "watermark": None if health["watermark"] is None else iso(health["watermark"]),
                **{key: health[key] for key in ("backlog", "lag_s", "stalled")},
                "unready": service.backend.list_unready_reasons(),
                **_read_unsent(service),
            },
            "problems": sources.rows[:MAX_GROUPS],
            "more": max(0, len(sources.rows) - MAX_GROUPS),
            "detectors": sources.detectors,
            **stored,
            "lags": [{"topic": topic, **asdict(lag)} for topic, lag in service.backend.read_lags().items()],
            "lag_window_s": WINDOW / SECOND,
            "late": _by_label(counters, "fleetpulse_rows_late_total"),
            "rejected_total": _by_label(counters, "fleetpulse_ingest_rejected_total"),
            "duplicates": int(counters.get("fleetpulse_ingest_duplicates_total", 0)),
            "versions": _remember_store(service, "versions", read_versions),
            "disk": _read_disk(service, _remember_store(service, "growth", read_growth)),
        }
    )


@quality_router.get("/{group}", response_model=Members)
def members(
    request: Request,
    group: str,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_MEMBERS)] = 50,
) -> Response:
    """The sources of one row, by name."""
    service = get_context(request)
    found = next((g for g in _read_sources(service).groups if g.id == group), None)
    if found is None:
        raise HTTPException(404, f"no problem {group!r}: it is over, or its cause changed")
    topology = service.topology_copy.get()
    page = found.problems[offset : offset + limit]
    rows = [
        {
            "entity": p.entity,
            "node": f"node:{p.node}",
            "rack": find_rack(p, topology),
            "since": None if p.since is None else iso(p.since),
            "reason": p.reason,
        }
        for p in page
    ]
    return json_response({"id": group, "total": len(found.problems), "members": rows})


def _remember_store(service: ApiContext, what: str, read: Any) -> Any:
    """Returns what `read` finds in the store, read at low priority and kept for KEPT_LOSSES."""
    return service.remember(f"quality {what}", service.now() // KEPT_LOSSES, lambda: service.reads.run(read))


def _read_sources(service: ApiContext) -> _Sources:
    found: _Sources = service.remember("quality", service.now() // KEPT, lambda: _find_sources(service))
    return found


def _find_sources(service: ApiContext) -> _Sources:
    now, backend, topology = service.now(), service.backend, service.topology_copy.get()
    senders, devices = backend.read_senders(), backend.devices
    reports = _remember_store(service, "reports", lambda cursor: read_reports(cursor, now))
    nodes = _remember_store(service, "nodes", list_nodes)
    seen = find_last_seen(devices, service.names, backend.read_current)
    known = sorted(entity.partition(":")[2] for entity, _ in nodes)
    absent = [node for node in known if node not in seen]
    racks = Counter(topology.ancestor_of_kind(f"node:{node}", "rack") or "" for node in known)
    problems = find_problems(backend.read_current, devices, senders, reports, absent, now)
    groups = group_problems(problems, topology, racks)
    blind = BlindSpots.read(backend.read_current, devices, service.names, backend.list_detectors(), now)
    incidents = _remember_store(service, "incidents", _list_telemetry_incidents)
    rows = [_row(group, blind, incidents, topology) for group in groups[:MAX_GROUPS]]
    rows += [{}] * (len(groups) - len(rows))
    silent = find_silent(senders, now)
    agents = {"known": len(senders.arrivals), "reporting": len(senders.arrivals) - len(silent), "silent": len(silent)}
    ages = {n: max(0.0, (now - t) / SECOND) for n, t in senders.newest.items() if n not in silent}
    return _Sources(groups, rows, list(blind.list_detectors()), {**agents, **_ages(ages)})


def _ages(ages: Mapping[str, float]) -> dict[str, Any]:
    """Returns the middle and the highest ages of the newest telemetry (s), and the node with the highest."""
    if not ages:
        return {"age_p50": None, "age_p99": None, "age_worst": None, "worst": ""}
    middle, high = np.percentile(list(ages.values()), [50, 99]).tolist()
    worst = max(ages, key=lambda node: ages[node])
    return {"age_p50": middle, "age_p99": high, "age_worst": ages[worst], "worst": f"node:{worst}"}


_OPEN = """SELECT id, cause, members FROM incidents
           WHERE state <> 'resolved' AND starts_with(detector, 'telemetry') ORDER BY opened DESC LIMIT 1000"""


def _list_telemetry_incidents(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, frozenset[str]]]:
    """Returns (id, entities) of the unresolved incidents about telemetry itself."""
    return [(id_, frozenset((cause, *members))) for id_, cause, members in cursor.execute(_OPEN).fetchall()]


def _row(
    group: ProblemGroup, blind: BlindSpots, incidents: Sequence[tuple[str, frozenset[str]]], topology: Topology
) -> dict[str, Any]:
    first, nodes = group.problems[0], group.nodes
    times = [p.since for p in group.problems if p.since is not None]
    about = {*(f"node:{node}" for node in nodes), *(p.entity for p in group.problems)} | {group.shared}
    blinded = None if group.expected else blind.find_blinded(frozenset(nodes))
    return {
        "id": group.id,
        **{key: getattr(first, key) for key in ("kind", "part", "state", "reason")},
        "count": len(group.problems),
        "nodes": len(nodes),
        "racks": len({find_rack(p, topology) for p in group.problems} - {""}),
        "shared": group.shared,
        "since": iso(min(times)) if times else None,
        "until": iso(max(times)) if times else None,
        "expected": group.expected,
        "examples": [p.entity for p in group.problems[:MAX_EXAMPLES]],
        "incidents": [] if group.expected else [id_ for id_, of in incidents if of & about][:MAX_EXAMPLES],
        "blinds": asdict(blinded) if blinded else {"detectors": [], "signals": [], "devices": {}},
    }


def _read_unsent(service: ApiContext) -> dict[str, Any]:
    """Returns the messages that wait in the spools of agents, and the agents with the most."""
    found = service.backend.read_current("agent", ["unsent"])
    devices: Devices = service.backend.devices
    waiting = {}
    if "unsent" in found.values:
        names = devices.names("agent")
        at = np.flatnonzero((found.slot >= 0) & (np.nan_to_num(found.values["unsent"]) >= UNSENT))
        waiting = {names[found.slot[i]]: int(found.values["unsent"][i]) for i in at.tolist()}
    worst = sorted(waiting, key=lambda name: -waiting[name])[:MAX_EXAMPLES]
    return {"unsent": sum(waiting.values()), "agents": len(waiting), "examples": worst}


def _by_label(counters: Mapping[str, float], name: str) -> dict[str, int]:
    """Returns label -> value of the counters of a name with one label, without those at 0."""
    start = f"{name}{{"
    return {key.split('"')[1]: int(n) for key, n in counters.items() if key.startswith(start) and n}


def _read_disk(service: ApiContext, growth: Growth) -> dict[str, int | None] | None:
    """Returns free and total bytes of the store's disk, and when it is full; None if it cannot be read."""
    store = service.config.store
    try:
        usage = shutil.disk_usage(store.path.parent)
    except OSError:
        return None
    minimum = reserved_bytes(store.free_bytes, usage.total)
    full = find_full(growth, store, usage.free, usage.total, minimum)
    known: dict[str, int | None] = {"free": usage.free, "total": usage.total, "minimum": minimum}
    return {**known, "per_day": growth.per_day, "full_s": full}
