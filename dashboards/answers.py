"""What the API answers, as types. A text that does not fit raises KeyError, TypeError or ValueError, never passes.

Who may speak, as the API tells it: mutes, modes and detectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pipeline.model.records import LEVELS, Finding, Incident, Severity, State, from_iso

NodeState = Literal["ok", "watch", "degraded", "critical", "no_data"]
NODE_STATES: tuple[NodeState, ...] = get_args(NodeState)
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class Node:
    """One node on the map. `last_seen` is None if it never spoke."""

    entity: str
    rack: str
    state: NodeState
    last_seen: int | None
    simulated: bool
    incidents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes at one moment, and how far behind the judgement is.

    newest: time of the newest stored data.  unready: why the pipeline does not do its work.  stalled: nothing comes in.
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


@dataclass(frozen=True, slots=True)
class Change:
    """One row of an incident's history."""

    time: int
    kind: str
    actor: str
    comment: str


@dataclass(frozen=True, slots=True)
class Notification:
    """One message to one receiver, and what became of it."""

    receiver: str
    kind: str
    state: str
    attempts: int
    created: int | None
    next_attempt: int | None
    answer: str


@dataclass(frozen=True, slots=True)
class Detail:
    """An incident with everything that is known about it. `blast_radius` is empty where the API has none."""

    incident: Incident
    findings: tuple[Finding, ...]
    history: tuple[Change, ...]
    notifications: tuple[Notification, ...]
    blast_radius: Mapping[str, Any]
    above: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """One instant of a device beside its peers; what was not measured is None."""

    time: int
    value: float | None
    median: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """One signal of one device, and the band in which its peers lie."""

    entity: str
    signal: str
    unit: str
    help: str
    peer_kind: str
    peers: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Happening:
    """One line of the timeline."""

    time: int
    kind: str
    entity: str
    text: str


def fleet_of(table: Mapping[str, Any]) -> Fleet:
    """GET /api/v1/fleet. An unknown state of a node is shown as no data: never as ok."""
    return Fleet(
        as_of=from_iso(table["as_of"]),
        watermark=moment(table.get("watermark")),
        backlog=bool(table.get("backlog")),
        lag_s=_number(table.get("lag_s")),
        nodes=tuple(_node(n) for n in listed(table["nodes"])),
        sources={str(k): _count(v) for k, v in (table.get("sources") or {}).items()},
        newest=moment(table.get("newest")),
        unready=tuple(map(str, listed(table.get("unready") or []))),
        stalled=bool(table.get("stalled")),
    )


def _node(table: Mapping[str, Any]) -> Node:
    state = table["state"]
    return Node(
        entity=str(table["entity"]),
        rack=str(table.get("rack") or ""),
        state=state if state in NODE_STATES else "no_data",
        last_seen=moment(table.get("last_seen")),
        simulated=bool(table["simulated"]),
        incidents=tuple(map(str, listed(table.get("incidents") or []))),
    )


def incident_of(table: Mapping[str, Any]) -> Incident:
    """One incident as in incidents.jsonl, with state, summary and simulated."""
    return Incident(
        id=str(table["id"]),
        cause=str(table["cause"]),
        opened=from_iso(table["opened"]),
        onset=from_iso(table["onset"]),
        resolved=moment(table.get("resolved")),
        severity=_one_of(table["severity"], get_args(Severity), "severity"),
        members=tuple(map(str, listed(table["members"]))),
        confidence=_number(table.get("confidence")),
        state=_one_of(table["state"], STATES, "state"),
        summary=str(table["summary"]),
        simulated=bool(table["simulated"]),
        detector=str(table.get("detector") or ""),
        entity=str(table.get("entity") or table["cause"]),
    )


def detail_of(table: Mapping[str, Any]) -> Detail:
    """GET /api/v1/incidents/{id}."""
    blast = table.get("blast_radius")
    return Detail(
        incident=incident_of(table),
        findings=tuple(_finding(f) for f in listed(table.get("findings") or [])),
        history=tuple(
            Change(from_iso(h["time"]), str(h["kind"]), str(h.get("actor") or ""), str(h.get("comment") or ""))
            for h in listed(table.get("history") or [])
        ),
        notifications=tuple(_notification(n) for n in listed(table.get("notifications") or [])),
        blast_radius=blast if isinstance(blast, dict) else {},
        above=tuple(map(str, listed(table.get("above") or []))),
    )


def _finding(table: Mapping[str, Any]) -> Finding:
    return Finding(
        time=from_iso(table["time"]),
        onset=from_iso(table["onset"]),
        entity=str(table["entity"]),
        detector=str(table["detector"]),
        level=_one_of(table["level"], LEVELS, "level"),
        score=_number(table.get("score")) or 0.0,
        summary=str(table["summary"]),
        evidence=dict(table.get("evidence") or {}),
        signals=tuple(map(str, listed(table.get("signals") or []))),
    )


def _notification(table: Mapping[str, Any]) -> Notification:
    return Notification(
        receiver=str(table["receiver"]),
        kind=str(table["kind"]),
        state=str(table["state"]),
        attempts=int(table.get("attempts") or 0),
        created=moment(table.get("created")),
        next_attempt=moment(table.get("next_attempt")),
        answer=str(table.get("answer") or ""),
    )


def series_of(table: Mapping[str, Any]) -> Series:
    """GET /api/v1/series."""
    signal = table["signal"]
    return Series(
        entity=str(table["entity"]),
        signal=str(signal["name"]),
        unit=str(signal.get("unit") or ""),
        help=str(signal.get("help") or signal["name"]),
        peer_kind=str(table.get("peer_kind") or ""),
        peers=_count(table.get("peers")),
        points=tuple(
            Point(from_iso(p["time"]), *(_number(p.get(key)) for key in ("value", "median", "low", "high")))
            for p in listed(table["points"])
        ),
    )


def timeline_of(table: Mapping[str, Any]) -> tuple[Happening, ...]:
    """GET /api/v1/timeline."""
    return tuple(
        Happening(from_iso(i["time"]), str(i["kind"]), str(i.get("entity") or ""), str(i.get("text") or ""))
        for i in listed(table["items"])
    )


def incidents_of(table: Mapping[str, Any]) -> tuple[Incident, ...]:
    """GET /api/v1/incidents."""
    return tuple(incident_of(i) for i in listed(table["incidents"]))


def listed(value: Any) -> Sequence[Any]:
    """A list as it came. Raises TypeError on anything else."""
    if not isinstance(value, list):
        raise TypeError(f"a list was wanted, found {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    """A number, or how many there are of what is listed."""
    return len(value) if isinstance(value, (list, dict)) else int(value or 0)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def moment(text: Any) -> int | None:
    """A time of the API in microseconds, None for null."""
    return None if text is None else from_iso(text)


def _one_of(value: Any, allowed: Sequence[Any], what: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is none of {', '.join(map(str, allowed))}")
    return value


@dataclass(frozen=True, slots=True)
class Mute:
    """One detector (or *) says nothing about a scope (or *) until `until`, unless it was ended before."""

    id: str
    detector: str
    scope: str
    since: int
    until: int
    ended: int | None
    reason: str
    user: str
    ended_by: str

    def stands(self, now: int) -> bool:
        """Whether it silences anything now."""
        return self.ended is None and self.until > now


@dataclass(frozen=True, slots=True)
class ModeRule:
    """A line of [[modes]]."""

    detector: str
    scope: str
    mode: str


@dataclass(frozen=True, slots=True)
class Detector:
    """Who judges. `off` names the signals that it lacks, `errors` counts the frames on which it failed."""

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
class Panel:
    """All detectors, and the rules of [[modes]] in their order."""

    detectors: tuple[Detector, ...]
    modes: tuple[ModeRule, ...]


def mute_of(table: Mapping[str, Any]) -> Mute:
    """One mute."""
    return Mute(
        id=str(table["id"]),
        detector=str(table["detector"]),
        scope=str(table["scope"]),
        since=from_iso(table["since"]),
        until=from_iso(table["until"]),
        ended=moment(table.get("ended")),
        reason=str(table["reason"]),
        user=str(table["user"]),
        ended_by=str(table.get("ended_by") or "hand"),
    )


def mutes_of(table: Mapping[str, Any]) -> tuple[Mute, ...]:
    """GET /api/v1/mutes."""
    return tuple(mute_of(m) for m in listed(table["mutes"]))


def panel_of(table: Mapping[str, Any]) -> Panel:
    """GET /api/v1/detectors."""
    return Panel(tuple(_detector(d) for d in listed(table["detectors"])), _rules(table["modes"]))


def _detector(table: Mapping[str, Any]) -> Detector:
    names = ("needs", "wants", "budget", "off")
    needs, wants, budget, off = (tuple(map(str, listed(table[name]))) for name in names)
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
    return tuple(ModeRule(str(r["detector"]), str(r["scope"]), str(r["mode"])) for r in listed(value))
