"""Responses of the API as types.

The parsers raise KeyError, TypeError or ValueError if a response does not have the expected shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dashboards.detail_answers import (
    Explanation,
    Impact,
    Similar,
    parse_explanation,
    parse_impact,
    parse_similar,
)
from dashboards.json_values import parse_names, parse_number
from dashboards.json_values import parse_time as parse_time
from dashboards.json_values import require_list as require_list
from pipeline.model.records import LEVELS, Finding, Incident, Life, Severity, State, from_iso

NodeState = Literal["ok", "watch", "degraded", "critical", "no_data"]
NODE_STATES: tuple[NodeState, ...] = get_args(NodeState)
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Node:
    """One node on the map. `last_seen` is None if it never sent data.

    affected_by: those of its incidents whose cause is elsewhere.
    """

    entity: str
    rack: str
    state: NodeState
    last_seen: int | None
    simulated: bool
    incidents: tuple[str, ...] = ()
    affected_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes at one moment, and the state of the pipeline.

    watermark: event time up to which data was evaluated.  newest: time of the newest stored data.
    unready: reasons why the pipeline is not ready.  stalled: no new telemetry is evaluated.
    total, simulated: number of nodes, and of those with simulated data; `nodes` may list only some.
    """

    as_of: int
    watermark: int | None
    backlog: bool
    lag_s: float | None
    nodes: tuple[Node, ...]
    sources: Mapping[str, int] = field(default_factory=dict)
    newest: int | None = None
    unready: tuple[str, ...] = ()
    stalled: bool = False
    total: int = 0
    simulated: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One row of an incident's history."""

    time: int
    kind: str
    actor: str
    comment: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Notification:
    """One message to one receiver, with its delivery status."""

    receiver: str
    kind: str
    state: str
    attempts: int
    created: int | None
    next_attempt: int | None
    answer: str
    remote: str = ""


@dataclass(frozen=True, slots=True)
class CoOccurring:
    """Another incident that began at about the same time on something that both are part of."""

    id: str
    severity: str
    summary: str
    shared: str


@dataclass(frozen=True, slots=True)
class IncidentDetail:
    """An incident with findings, history, notifications and blast radius (empty if the API has none).

    impact, explanation: None if the API has none.  labels: those that matchers of silences compare.
    """

    incident: Incident
    findings: tuple[Finding, ...]
    history: tuple[Change, ...]
    notifications: tuple[Notification, ...]
    blast_radius: Mapping[str, Any]
    above: tuple[str, ...] = ()
    co_occurring: tuple[CoOccurring, ...] = ()
    version: int | None = None
    similar: tuple[Similar, ...] = ()
    advice: str = ""
    runbook_url: str = ""
    impact: Impact | None = None
    explanation: Explanation | None = None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """Values of a device and of its peers at one time; None if not measured."""

    time: int
    value: float | None
    median: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """One signal of one device, with the median and the 10th to 90th percentile of its peers."""

    entity: str
    signal: str
    unit: str
    help: str
    peer_kind: str
    peers: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class TimelineItem:
    """One entry of the timeline."""

    time: int
    kind: str
    entity: str
    text: str


def parse_fleet(table: Mapping[str, Any]) -> Fleet:
    """Parses GET /api/v1/fleet. An unknown node state becomes `no_data`, never `ok`."""
    return Fleet(
        as_of=from_iso(table["as_of"]),
        watermark=parse_time(table.get("watermark")),
        backlog=bool(table.get("backlog")),
        lag_s=parse_number(table.get("lag_s")),
        nodes=tuple(_node(n) for n in require_list(table["nodes"])),
        sources={str(k): _count(v) for k, v in (table.get("sources") or {}).items()},
        newest=parse_time(table.get("newest")),
        unready=tuple(map(str, require_list(table.get("unready") or []))),
        stalled=bool(table.get("stalled")),
        total=sum(_count(v) for v in (table.get("counts") or {}).values()),
        simulated=_count(table.get("simulated")),
    )


def _node(table: Mapping[str, Any]) -> Node:
    state = table["state"]
    return Node(
        entity=str(table["entity"]),
        rack=str(table.get("rack") or ""),
        state=state if state in NODE_STATES else "no_data",
        last_seen=parse_time(table.get("last_seen")),
        simulated=bool(table["simulated"]),
        incidents=tuple(map(str, require_list(table.get("incidents") or []))),
        affected_by=tuple(map(str, require_list(table.get("affected_by") or []))),
    )


def parse_incident(table: Mapping[str, Any]) -> Incident:
    """Parses one incident as in incidents.jsonl, with state, summary and simulated."""
    return Incident(
        id=str(table["id"]),
        cause=str(table["cause"]),
        opened=from_iso(table["opened"]),
        onset=from_iso(table["onset"]),
        resolved=parse_time(table.get("resolved")),
        severity=_one_of(table["severity"], get_args(Severity), "severity"),
        members=tuple(map(str, require_list(table["members"]))),
        confidence=parse_number(table.get("confidence")),
        state=_one_of(table["state"], STATES, "state"),
        summary=str(table["summary"]),
        simulated=bool(table["simulated"]),
        detector=str(table.get("detector") or ""),
        entity=str(table.get("entity") or table["cause"]),
        life=_life(table),
    )


def _life(table: Mapping[str, Any]) -> Life:
    """Returns what people and the clock did; empty for an API without it."""
    return Life(
        acknowledged_by=str(table.get("acknowledged_by") or ""),
        acknowledged_until=parse_time(table.get("acknowledged_until")),
        assignee=str(table.get("assignee") or ""),
        silenced_by=parse_names(table.get("silenced_by")),
        inhibited_by=parse_names(table.get("inhibited_by")),
        escalation=int(table.get("escalation") or 0),
        feedback=str(table.get("feedback") or ""),
        merged_into=str(table.get("merged_into") or ""),
        represents=parse_names(table.get("represents")),
        represented=int(table.get("represented") or 0),
        inhibitor=str(table.get("inhibitor") or ""),
        inhibit_rule=str(table.get("inhibit_rule") or ""),
    )


def parse_detail(table: Mapping[str, Any]) -> IncidentDetail:
    """Parses GET /api/v1/incidents/{id}."""
    blast = table.get("blast_radius")
    return IncidentDetail(
        incident=parse_incident(table),
        findings=tuple(_finding(f) for f in require_list(table.get("findings") or [])),
        history=tuple(
            Change(
                *(from_iso(h["time"]), str(h["kind"]), str(h.get("actor") or ""), str(h.get("comment") or "")),
                int(h.get("number") or 0),
            )
            for h in require_list(table.get("history") or [])
        ),
        notifications=tuple(_notification(n) for n in require_list(table.get("notifications") or [])),
        blast_radius=blast if isinstance(blast, dict) else {},
        above=tuple(map(str, require_list(table.get("above") or []))),
        co_occurring=tuple(
            CoOccurring(str(c["id"]), str(c["severity"]), str(c["summary"]), str(c["shared"]))
            for c in require_list(table.get("co_occurring") or [])
        ),
        version=None if table.get("version") is None else int(table["version"]),
        similar=parse_similar(table.get("similar")),
        advice=str(table.get("advice") or ""),
        runbook_url=str(table.get("runbook_url") or ""),
        impact=parse_impact(table.get("impact")),
        explanation=parse_explanation(table.get("explanation")),
        labels={str(k): parse_names(v) for k, v in (table.get("labels") or {}).items()},
    )


def _finding(table: Mapping[str, Any]) -> Finding:
    return Finding(
        time=from_iso(table["time"]),
        onset=from_iso(table["onset"]),
        entity=str(table["entity"]),
        detector=str(table["detector"]),
        level=_one_of(table["level"], LEVELS, "level"),
        score=parse_number(table.get("score")) or 0.0,
        summary=str(table["summary"]),
        evidence=dict(table.get("evidence") or {}),
        signals=tuple(map(str, require_list(table.get("signals") or []))),
    )


def _notification(table: Mapping[str, Any]) -> Notification:
    return Notification(
        receiver=str(table["receiver"]),
        kind=str(table["kind"]),
        state=str(table["state"]),
        attempts=int(table.get("attempts") or 0),
        created=parse_time(table.get("created")),
        next_attempt=parse_time(table.get("next_attempt")),
        answer=str(table.get("answer") or ""),
        remote=str(table.get("remote") or ""),
    )


def parse_series(table: Mapping[str, Any]) -> Series:
    """Parses GET /api/v1/series."""
    signal = table["signal"]
    return Series(
        entity=str(table["entity"]),
        signal=str(signal["name"]),
        unit=str(signal.get("unit") or ""),
        help=str(signal.get("help") or signal["name"]),
        peer_kind=str(table.get("peer_kind") or ""),
        peers=_count(table.get("peers")),
        points=tuple(
            Point(from_iso(p["time"]), *(parse_number(p.get(key)) for key in ("value", "median", "low", "high")))
            for p in require_list(table["points"])
        ),
    )


def parse_timeline(table: Mapping[str, Any]) -> tuple[TimelineItem, ...]:
    """Parses GET /api/v1/timeline."""
    return tuple(
        TimelineItem(from_iso(i["time"]), str(i["kind"]), str(i.get("entity") or ""), str(i.get("text") or ""))
        for i in require_list(table["items"])
    )


def parse_incidents(table: Mapping[str, Any]) -> tuple[Incident, ...]:
    """Parses GET /api/v1/incidents."""
    return tuple(parse_incident(i) for i in require_list(table["incidents"]))


def _count(value: Any) -> int:
    """Returns a number as int, or the length of a list or table."""
    return len(value) if isinstance(value, (list, dict)) else int(value or 0)


def _one_of(value: Any, allowed: Sequence[Any], what: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{what} {value!r}: expected one of {', '.join(map(str, allowed))}")
    return value


@dataclass(frozen=True, slots=True)
class Mute:
    """A mute of one detector (or *) on one scope (or *) until `until`, or until it was ended."""

    id: str
    detector: str
    scope: str
    since: int
    until: int
    ended: int | None
    reason: str
    user: str
    ended_by: str

    def is_active(self, now: int) -> bool:
        """Returns whether the mute is in force now."""
        return self.ended is None and self.until > now


@dataclass(frozen=True, slots=True)
class ModeRule:
    """A line of [[modes]]."""

    detector: str
    scope: str
    mode: str


@dataclass(frozen=True, slots=True)
class Detector:
    """One detector. `off`: required signals that are missing. `errors`: frames on which it failed."""

    name: str
    family: str
    device_class: str
    needs: tuple[str, ...]
    wants: tuple[str, ...]
    blind: str
    about: str
    settings: Mapping[str, Any]
    budget: tuple[str, ...]
    modes: tuple[ModeRule, ...]
    off: tuple[str, ...]
    errors: int


@dataclass(frozen=True, slots=True)
class DetectorList:
    """All detectors, and the rules of [[modes]] in their order."""

    detectors: tuple[Detector, ...]
    modes: tuple[ModeRule, ...]


def parse_mute(table: Mapping[str, Any]) -> Mute:
    """Parses one mute."""
    return Mute(
        id=str(table["id"]),
        detector=str(table["detector"]),
        scope=str(table["scope"]),
        since=from_iso(table["since"]),
        until=from_iso(table["until"]),
        ended=parse_time(table.get("ended")),
        reason=str(table["reason"]),
        user=str(table["user"]),
        ended_by=str(table.get("ended_by") or "hand"),
    )


def parse_mutes(table: Mapping[str, Any]) -> tuple[Mute, ...]:
    """Parses GET /api/v1/mutes."""
    return tuple(parse_mute(m) for m in require_list(table["mutes"]))


def parse_detector_list(table: Mapping[str, Any]) -> DetectorList:
    """Parses GET /api/v1/detectors."""
    return DetectorList(tuple(_detector(d) for d in require_list(table["detectors"])), _rules(table["modes"]))


def _detector(table: Mapping[str, Any]) -> Detector:
    names = ("needs", "wants", "budget", "off")
    needs, wants, budget, off = (tuple(map(str, require_list(table[name]))) for name in names)
    return Detector(
        name=str(table["name"]),
        family=str(table["family"]),
        device_class=str(table["class"]),
        needs=needs,
        wants=wants,
        blind=str(table["blind"]),
        about=str(table["about"]),
        settings=dict(table["settings"]),
        budget=budget,
        modes=_rules(table["modes"]),
        off=off,
        errors=int(table["errors"]),
    )


def _rules(value: Any) -> tuple[ModeRule, ...]:
    return tuple(ModeRule(str(r["detector"]), str(r["scope"]), str(r["mode"])) for r in require_list(value))
