"""The list of incidents: filtered, sorted, grouped and in pages, from rows in memory.

The rows are read from the store after each change of an incident, not for each caller. Filters are matchers as in
Alertmanager, over the labels that silences match too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api import models
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.incidents import ledger
from pipeline.incidents.impact_rows import read_affected, read_short_impacts
from pipeline.incidents.matchers import Labels, Matcher, parse_matcher
from pipeline.incidents.silences import collect_labels
from pipeline.model.entity_names import add_to_title
from pipeline.model.errors import UsageError
from pipeline.model.records import Incident, State, iso
from pipeline.model.topology import Topology

Show = Literal["unresolved", "pending", "acknowledged", "silenced", "resolved", "all"]
OldShow = Literal["muted"]
"""The name of `silenced` in scripts and addresses of before; accepted, and neither counted nor printed."""
Sort = Literal["severity", "newest", "oldest", "members", "confidence", "cause", "detector", "assignee"]
MAX_ROWS = 1000
"""Most rows of a page. Chosen: 1 MB of JSON."""
_SEVERITY = {"page": 0, "ticket": 1, "watch": 2}
_STATE = {"open": 0, "acknowledged": 1, "silenced": 2, "resolved": 3}
_SHOWN: Mapping[Show, Callable[[Incident], bool]] = {
    "unresolved": lambda i: i.resolved is None,
    "pending": lambda i: i.state == "open" and not i.life.inhibited_by and not i.life.inhibitor,
    "acknowledged": lambda i: i.state == "acknowledged",
    "silenced": lambda i: i.resolved is None and (i.is_held_back or bool(i.life.inhibitor)),
    "resolved": lambda i: i.resolved is not None,
    "all": lambda i: True,
}
_KEYS: Mapping[Sort, Callable[[Incident], Any]] = {
    "severity": lambda i: (i.resolved is not None, _SEVERITY[i.severity], _STATE[i.state]),
    "newest": lambda i: 0,
    "oldest": lambda i: i.opened,
    "members": lambda i: -len(i.members),
    "confidence": lambda i: -(i.confidence or 0.0),
    "cause": lambda i: i.cause,
    "detector": lambda i: i.detector,
    "assignee": lambda i: (not i.life.assignee, i.life.assignee),
}
Labelled = Mapping[str, Labels]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller asks for. text: all its words must occur. group: a label; groups with many incidents come first."""

    show: Show
    text: str
    matchers: tuple[Matcher, ...]
    assignee: str | None
    sort: Sort
    group: str
    limit: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class Selection:
    """A page of incidents. total: without pages; counts: of each `show`, with the same filters; groups: all."""

    rows: Sequence[Incident]
    total: int
    counts: Mapping[Show, int]
    groups: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, eq=False)
class StoredIncidents:
    """All stored incidents, newest first; equal only to itself. impact, versions: by incident."""

    rows: Sequence[Incident]
    impact: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, int]


def load_incidents(service: ApiContext) -> StoredIncidents:
    """Returns all stored incidents; read again after a change."""

    def read() -> StoredIncidents:
        with service.cursor() as cursor:
            rows = sorted(ledger.load_lives(cursor, 0), key=lambda i: (-i.opened, i.id))
            affected = read_affected(cursor)
            for incident in rows:
                incident.summary = add_to_title(incident.summary, affected.get(incident.id, ""))
            return StoredIncidents(rows, read_short_impacts(cursor), ledger.count_histories(cursor))

    return service.remember("incident rows", service.backend.read_revision(), read)


def load_labels(service: ApiContext, stored: StoredIncidents, topology: Topology) -> Labelled:
    """Returns the labels of each incident by id; found again after a change of incidents or topology."""
    site = service.config.site.name
    return service.remember(
        "incident labels", (stored, topology), lambda: {i.id: collect_labels(i, topology, site) for i in stored.rows}
    )


def select_incidents(incidents: Iterable[Incident], labels: Labelled, wanted: Wanted) -> Selection:
    """Returns the page that a caller asks for."""
    words = wanted.text.lower().split()
    found = [
        i
        for i in incidents
        if (wanted.assignee is None or wanted.assignee in (i.life.assignee, i.life.acknowledged_by))
        and all(word in _text_of(i) for word in words)
        and all(m.matches(labels[i.id]) for m in wanted.matchers)
    ]
    counts = {show: sum(map(test, found)) for show, test in _SHOWN.items()}
    shown = sorted(filter(_SHOWN[wanted.show], found), key=lambda i: (_KEYS[wanted.sort](i), -i.opened, i.id))
    groups: list[tuple[str, int]] = []
    if wanted.group:
        number = Counter(_group_of(labels[i.id], wanted.group) for i in shown)
        groups = sorted(number.items(), key=lambda pair: (-pair[1], pair[0]))
        place = {value: n for n, (value, _) in enumerate(groups)}
        shown.sort(key=lambda i: place[_group_of(labels[i.id], wanted.group)])
    end = None if wanted.limit is None else wanted.offset + wanted.limit
    return Selection(shown[wanted.offset : end], len(shown), counts, groups)


def _group_of(labels: Labels, name: str) -> str:
    """Returns the value of a label, empty if all members share none."""
    return next(iter(labels.get(name, ())), "")


def _text_of(i: Incident) -> str:
    return f"{i.id} {i.summary} {i.cause} {i.entity} {i.detector} {i.life.assignee} {i.life.acknowledged_by}".lower()


incident_list_router = APIRouter(prefix="/api/v1/incidents")
Filters = Annotated[list[str] | None, Query(alias="filter", max_length=20, description='matchers: rack=~"r1|r2"')]


@incident_list_router.get("", response_model=models.Incidents)
def list_incidents(
    request: Request,
    state: State | None = None,
    show: Show | OldShow | None = None,
    q: Annotated[str, Query(max_length=300)] = "",
    matchers: Filters = None,
    assignee: Annotated[str | None, Query(max_length=200)] = None,
    sort: Sort = "newest",
    group: Annotated[str, Query(max_length=64)] = "",
    labels: bool = False,
    limit: Annotated[int | None, Query(ge=1, le=MAX_ROWS)] = None,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Incidents, newest first: all or those of one state; filtered, sorted, grouped and in pages. While `stalled`, no
    data after `judged` is evaluated."""
    service = get_context(request)
    shown: Show = "silenced" if show == "muted" else show or "all"
    wanted = Wanted(shown, q, tuple(map(parse_matcher, matchers or ())), assignee, sort, group, limit, offset)
    stored = load_incidents(service)
    labelled: Labelled = {}
    if wanted.matchers or group or labels:
        labelled = load_labels(service, stored, service.topology_copy.get())
    chosen = stored.rows if state is None else [i for i in stored.rows if i.state == state]
    found = select_incidents(chosen, labelled, wanted)
    rows = [
        {
            **i.as_json(),
            "impact": stored.impact.get(i.id),
            "version": stored.versions.get(i.id, 0),
            **({"labels": labelled[i.id]} if labels else {}),
        }
        for i in found.rows
    ]
    groups = [{"value": value, "total": total} for value, total in found.groups]
    page = {"incidents": rows, "total": found.total, "counts": found.counts, "groups": groups}
    return json_response({**page, **read_progress(service)})


def read_progress(service: ApiContext) -> dict[str, Any]:
    """Returns up to when data is evaluated, and why no further."""
    health = service.backend.read_health()
    judged = None if health["watermark"] is None else iso(health["watermark"])
    return {"judged": judged, "stalled": health["stalled"], "unready": service.backend.list_evaluation_faults()}


def labels_of(service: ApiContext, incident: str) -> dict[str, list[str]]:
    """Returns the labels of one incident that matchers of silences compare. Raises UsageError if it is not stored."""
    with service.cursor() as cursor:
        found = ledger.load_incident(cursor, incident)
    if found is None:
        raise UsageError(f"incident {incident!r}: is not stored")
    labels = collect_labels(found, service.topology_copy.get(), service.config.site.name)
    return {name: list(values) for name, values in labels.items()}
