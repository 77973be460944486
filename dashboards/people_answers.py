"""Answers of the API about what people do, as types: silences, the handover of a shift, and the audit.

The parsers raise KeyError, TypeError or ValueError if a response does not have the expected shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.answers import parse_incident
from dashboards.json_values import parse_names, require_list
from pipeline.model.matcher_text import quote_value
from pipeline.model.records import Incident, from_iso


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence, maintenance window or mute. text: its matchers. until: its end, with the grace of maintenance."""

    id: str
    kind: str
    state: str
    text: str
    matchers: tuple[str, ...]
    starts: int
    ends: int
    until: int
    author: str
    reason: str
    version: int
    updated_by: str
    expired: int | None
    source: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that waits for a person or a time."""

    time: int
    id: str
    what: str
    about: str


@dataclass(frozen=True, slots=True)
class Changed:
    """An incident that changed since the shift began: its kinds of change, in order."""

    id: str
    changes: tuple[str, ...]
    time: int
    summary: str
    state: str
    severity: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The site at a change of shift. in_storms: unresolved incidents that are listed as a part of a storm alone."""

    since: int
    now: int
    open: tuple[Incident, ...]
    muted: tuple[Incident, ...]
    silences: tuple[Silence, ...]
    pending: tuple[Pending, ...]
    changed: tuple[Changed, ...]
    in_storms: int = 0


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One write through the API, or an attempt that was refused."""

    number: int
    time: int
    actor: str
    role: str
    origin: str
    action: str
    target: str
    reason: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Rows, newest first. broken: number of the first row that was changed or removed, None if none was."""

    rows: tuple[AuditRow, ...]
    broken: int | None


@dataclass(frozen=True, slots=True)
class IncidentPage:
    """A page of the list of incidents. counts: of each tab. groups: (value of the label, number). reach: incident ->
    jobs and nodes that it reaches, without those whose impact is not known. versions: of incidents, None for an API
    that does not list them."""

    incidents: tuple[Incident, ...]
    labels: Mapping[str, Mapping[str, tuple[str, ...]]]
    total: int
    counts: Mapping[str, int]
    groups: tuple[tuple[str, int], ...]
    reach: Mapping[str, tuple[int | None, int]]
    versions: Mapping[str, int | None]


def parse_silence(table: Mapping[str, Any]) -> Silence:
    """Parses one silence."""
    return Silence(
        id=str(table["id"]),
        kind=str(table["kind"]),
        state=str(table["state"]),
        text=str(table["text"]),
        matchers=tuple(map(write_matcher, require_list(table["matchers"]))),
        starts=from_iso(table["starts"]),
        ends=from_iso(table["ends"]),
        until=from_iso(table["until"]),
        author=str(table["author"]),
        reason=str(table["reason"]),
        version=int(table["version"]),
        updated_by=str(table.get("updated_by") or ""),
        expired=None if table.get("expired") is None else from_iso(table["expired"]),
        source=str(table.get("source") or ""),
        warning=str(table.get("warning") or ""),
    )


def write_matcher(table: Mapping[str, Any]) -> str:
    """Returns a matcher as text: `rack=~"r1|r2"`."""
    equal, regex = bool(table.get("isEqual", True)), bool(table.get("isRegex"))
    sign = ("=~" if regex else "=") if equal else ("!~" if regex else "!=")
    return f"{table['name']}{sign}{quote_value(str(table['value']))}"


def parse_silences(table: Mapping[str, Any]) -> tuple[Silence, ...]:
    """Parses GET /api/v1/silences."""
    return tuple(map(parse_silence, require_list(table["silences"])))


def parse_handover(table: Mapping[str, Any]) -> Handover:
    """Parses GET /api/v1/handover."""
    muted = table["muted"]
    return Handover(
        since=from_iso(table["since"]),
        now=from_iso(table["now"]),
        open=tuple(map(parse_incident, require_list(table["open"]))),
        muted=tuple(map(parse_incident, require_list(muted["incidents"]))),
        silences=tuple(map(parse_silence, require_list(muted["silences"]))),
        pending=tuple(
            Pending(from_iso(p["time"]), str(p["id"]), str(p["what"]), str(p["about"]))
            for p in require_list(table["pending"])
        ),
        changed=tuple(
            Changed(
                *(str(c["id"]), parse_names(c["changes"]), from_iso(c["time"]), str(c["summary"]), str(c["state"])),
                str(c["severity"]),
            )
            for c in require_list(table["changed"])
        ),
        in_storms=sum(int(storm["unresolved"]) for storm in require_list(table.get("storms", []))),
    )


def parse_audit(table: Mapping[str, Any]) -> Audit:
    """Parses GET /api/v1/audit."""
    names = ("actor", "role", "origin", "action", "target", "reason", "outcome")
    rows = tuple(
        AuditRow(int(row["number"]), from_iso(row["time"]), *(str(row.get(name) or "") for name in names))
        for row in require_list(table["audit"])
    )
    return Audit(rows, None if table.get("broken") is None else int(table["broken"]))


def _reach(impact: Mapping[str, Any]) -> tuple[int | None, int]:
    """Returns jobs and nodes that an incident reaches; None: jobs of some nodes are not known, and it reaches no other
    job."""
    jobs = int(impact["jobs"])
    return (None if not jobs and impact.get("nodes_without_job_list") else jobs), int(impact["nodes"])


def parse_incident_page(table: Mapping[str, Any]) -> IncidentPage:
    """Parses GET /api/v1/incidents with filters."""
    rows = require_list(table["incidents"])
    found = tuple(map(parse_incident, rows))
    labels = {str(r["id"]): {str(k): parse_names(v) for k, v in (r.get("labels") or {}).items()} for r in rows}
    return IncidentPage(
        incidents=found,
        labels=labels,
        total=len(found) if table.get("total") is None else int(table["total"]),
        counts={str(k): int(v) for k, v in (table.get("counts") or {}).items()},
        groups=tuple((str(g["value"]), int(g["total"])) for g in require_list(table.get("groups") or [])),
        reach={str(r["id"]): _reach(r["impact"]) for r in rows if r.get("impact")},
        versions={str(r["id"]): None if r.get("version") is None else int(r["version"]) for r in rows},
    )
