"""Responses of GET /api/v1/quality and /api/v1/quality/{group} as types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.answers import parse_time, require_list
from pipeline.model.records import from_iso


@dataclass(frozen=True, slots=True)
class Problem:
    """Sources with one cause. See `ProblemRow` of the API."""

    id: str
    kind: str
    part: str
    state: str
    reason: str
    count: int
    nodes: int
    racks: int
    shared: str
    since: int | None
    until: int | None
    expected: bool
    examples: tuple[str, ...]
    incidents: tuple[str, ...]
    detectors: tuple[str, ...]
    signals: tuple[str, ...]
    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents by state, and ages of their newest telemetry (s)."""

    known: int
    reporting: int
    silent: int
    age_p50: float | None
    age_p99: float | None
    age_worst: float | None
    worst: str


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits to be read and sent."""

    watermark: int | None
    backlog: bool
    lag_s: float | None
    stalled: bool
    unsent: int
    agents: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sight:
    """A detector and the devices that it cannot judge."""

    detector: str
    kind: str
    devices: int
    blind: int
    missing: str
    off: tuple[str, ...]
    errors: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages that were lost or rejected. what: cause of a gap or rule."""

    what: str
    topic: str
    messages: int
    last_day: int | None
    first: int
    last: int
    senders: tuple[str, ...]
    total_senders: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lag:
    """How long the messages of a topic took from their newest reading to the store (s)."""

    topic: str
    messages: int
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class Version:
    """Nodes that run a version."""

    name: str
    version: str
    nodes: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """GET /api/v1/quality. `disk`: free, total and minimum bytes. `lags`, `duplicates`: None if the API does not
    report them."""

    as_of: int
    agents: Agents
    backlog: Backlog
    problems: tuple[Problem, ...]
    more: int
    sights: tuple[Sight, ...]
    gaps: tuple[Loss, ...]
    gap_hours: tuple[int, ...]
    late: Mapping[str, int]
    rejected: tuple[Loss, ...]
    rejected_total: Mapping[str, int]
    duplicates: int | None
    versions: tuple[Version, ...]
    disk: Mapping[str, int] | None
    lags: tuple[Lag, ...] | None
    lag_window_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """One source of a row."""

    entity: str
    node: str
    rack: str
    since: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Members:
    """One page of the sources of a row."""

    total: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Destination:
    """One endpoint of a receiver of alerts, with its messages that wait and that are dead."""

    receiver: str
    state: str
    answer: str
    delivered: int | None
    pending: int
    dead: int


def parse_quality(table: Mapping[str, Any]) -> Quality:
    """Parses GET /api/v1/quality."""
    agents, backlog = table["agents"], table["backlog"]
    return Quality(
        as_of=from_iso(table["as_of"]),
        agents=Agents(**{name: agents[name] for name in Agents.__slots__}),
        backlog=Backlog(
            **{name: backlog[name] for name in ("backlog", "lag_s", "stalled", "unsent", "agents")},
            watermark=parse_time(backlog["watermark"]),
            examples=_texts(backlog["examples"]),
        ),
        problems=tuple(_problem(row) for row in require_list(table["problems"])),
        more=int(table["more"]),
        sights=tuple(Sight(**{**row, "off": _texts(row["off"])}) for row in require_list(table["detectors"])),
        gaps=tuple(_gap(row) for row in require_list(table["gaps"])),
        gap_hours=tuple(map(int, require_list(table["gap_hours"]))),
        late={str(k): int(v) for k, v in table["late"].items()},
        rejected=tuple(_rejected(row) for row in require_list(table["rejected"])),
        rejected_total={str(k): int(v) for k, v in table["rejected_total"].items()},
        duplicates=None if table.get("duplicates") is None else int(table["duplicates"]),
        versions=tuple(
            Version(str(v["name"]), str(v["version"]), int(v["nodes"]), _texts(v["examples"]))
            for v in require_list(table["versions"])
        ),
        disk=None if table["disk"] is None else {str(k): int(v) for k, v in table["disk"].items() if v is not None},
        lags=None if table.get("lags") is None else tuple(Lag(**row) for row in require_list(table["lags"])),
        lag_window_s=float(table.get("lag_window_s") or 0.0),
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, require_list(value)))


def _problem(row: Mapping[str, Any]) -> Problem:
    blinds = row["blinds"]
    return Problem(
        id=str(row["id"]),
        kind=str(row["kind"]),
        part=str(row["part"]),
        state=str(row["state"]),
        reason=str(row["reason"]),
        shared=str(row["shared"]),
        count=int(row["count"]),
        nodes=int(row["nodes"]),
        racks=int(row["racks"]),
        since=parse_time(row["since"]),
        until=parse_time(row["until"]),
        expected=bool(row["expected"]),
        examples=_texts(row["examples"]),
        incidents=_texts(row["incidents"]),
        detectors=_texts(blinds["detectors"]),
        signals=_texts(blinds["signals"]),
        devices={str(kind): int(number) for kind, number in blinds["devices"].items()},
    )


def _gap(row: Mapping[str, Any]) -> Loss:
    return Loss(
        what=str(row["cause"]),
        topic=str(row["topic"]),
        messages=int(row["messages"]),
        last_day=int(row["last_day"]),
        first=from_iso(row["first"]),
        last=from_iso(row["last"]),
        senders=_texts(row["examples"]),
        total_senders=int(row["senders"]),
    )


def _rejected(row: Mapping[str, Any]) -> Loss:
    sender = str(row["sender"])
    return Loss(
        what=str(row["rule"]),
        topic=str(row["topic"]),
        messages=int(row["messages"]),
        last_day=None,
        first=from_iso(row["first"]),
        last=from_iso(row["last"]),
        senders=(sender,) if sender else (),
        total_senders=1,
        reason=str(row["reason"]),
    )


def parse_members(table: Mapping[str, Any]) -> Members:
    """Parses GET /api/v1/quality/{group}."""
    return Members(
        int(table["total"]),
        tuple(
            Member(str(m["entity"]), str(m["node"]), str(m["rack"]), parse_time(m["since"]), str(m["reason"]))
            for m in require_list(table["members"])
        ),
    )


def parse_destinations(table: Mapping[str, Any]) -> tuple[Destination, ...]:
    """Parses GET /api/v1/receivers."""
    return tuple(
        Destination(
            receiver=str(r["name"]),
            state=str(r["state"]),
            answer=str(r.get("answer") or ""),
            delivered=parse_time(r.get("delivered")),
            pending=int(r.get("pending") or 0),
            dead=int(r.get("dead") or 0),
        )
        for r in require_list(table["receivers"])
    )
