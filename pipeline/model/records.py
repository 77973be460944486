"""The records of the data flow, in its order: Event, Block, Batch, Rows, Frame, Finding, Incident.

Every `time`, `onset`, `opened` and the like is an int: UTC microseconds since 1970. Text form: `iso(time)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.model.roles import ROLES, Role
from pipeline.model.topology import Topology

SECOND = 1_000_000
Level = Literal["suspect", "ticket", "page"]
LEVELS: tuple[Level, ...] = ("suspect", "ticket", "page")
Severity = Literal["watch", "ticket", "page"]
State = Literal["open", "acknowledged", "silenced", "resolved"]
TELEMETRY = "telemetry.v1"
EVENTS = "events.v1"
OTLP = "otlp_metrics"

LAST_TIME = 253_402_300_799 * SECOND
"""The last second that a text of four digits for the year has (us)."""


def iso(time: int) -> str:
    """`YYYY-MM-DDTHH:MM:SS.ffffffZ`: always 27 characters, so that text order is time order."""
    return f"{datetime.fromtimestamp(time // SECOND, UTC).isoformat()[:19]}.{time % SECOND:06d}Z"


def from_iso(text: str) -> int:
    """UTC microseconds of an ISO 8601 text; UTC if it has no zone. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    whole = moment.replace(microsecond=0)
    return int(whole.timestamp()) * SECOND + moment.microsecond


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once to an entity: xid, link_state, digest, job_start, inventory, ..."""

    time: int
    entity: str
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """The sender of a message; constant for one run of one agent. `boot_id` is the kernel's, as 16 bytes."""

    site: str
    node: str
    boot_id: bytes
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """One device class of a batch. columns: signal -> (ticks, devices), in the signal's wire type.

    ticks: numbers of the batch's ticks in which these signals were read; None: in all.
    """

    device_class: str
    entities: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]
    ticks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One node, one or more ticks. times: (ticks,) int64, ascending. Blocks of one class may have different ticks."""

    origin: Origin
    times: NDArray[np.int64]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one node, in order of time."""

    origin: Origin
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one device class from one or many batches, ready for the store and the framer.

    time:    (R,) int64.   device: (R,) int32, the store's id of each row's device within its class.
    columns: signal -> (R,) in wire type; missing = NaN or the highest unsigned value.
    """

    device_class: str
    time: NDArray[np.int64]
    device: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]


def select_rows(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """The rows where `mask` is true."""
    columns = {name: column[mask] for name, column in rows.columns.items()}
    return Rows(rows.device_class, rows.time[mask], rows.device[mask], columns)


@dataclass(frozen=True, slots=True)
class Frame:
    """One instant of one device class, aligned and read-only.

    entities: stable order that only grows from frame to frame; an index always means the same device.
    values:   signal -> (N,) float64, NaN = not measured in this instant.
    events:   events of this instant whose entity is of this class.
    """

    time: int
    device_class: str
    entities: Sequence[str]
    values: Mapping[str, NDArray[np.float64]]
    topology: Topology
    events: tuple[Event, ...] = ()

    def __getitem__(self, signal: str) -> NDArray[np.float64]:
        found = self.values.get(signal)
        return found if found is not None else np.full(len(self.entities), np.nan)


Frames = Mapping[str, Frame]
"""The frames of one instant by device class: what a detector observes. A class without data is absent."""


@dataclass(frozen=True, slots=True)
class Instant:
    """All frames of one grid cell, by device class. `end` is the end of the cell; later state covers all before it.

    seen:  device class -> names of its devices by id, and a mask of those with a sample of any signal.
    ended: entities that ended in this instant, such as the ranks of a job (pipeline.model.membership).
    """

    time: int
    end: int
    frames: Mapping[str, Frame]
    seen: Mapping[str, tuple[Sequence[str], NDArray[np.bool_]]] = field(default_factory=dict)
    ended: tuple[str, ...] = ()

    @property
    def events(self) -> Iterator[Event]:
        """The events of all frames."""
        return (event for frame in self.frames.values() for event in frame.events)


@dataclass(frozen=True, slots=True)
class Finding:
    """A detector's report that an entity is faulty now. Its key is (detector, entity, onset).

    `time` is that of the newest sample used; `onset` is when the condition probably began, never after `time`. Scores
    are comparable within one detector only. `signals` are ordered by their weight in the finding.
    """

    time: int
    onset: int
    entity: str
    detector: str
    level: Level
    score: float
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    signals: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        """(detector, entity, onset): unique per finding."""
        return (self.detector, self.entity, self.onset)

    def as_json(self) -> dict[str, Any]:
        """The JSON object of findings.jsonl; non-finite numbers become null."""
        return {
            "time": iso(self.time),
            "onset": iso(self.onset),
            "entity": self.entity,
            "detector": self.detector,
            "level": self.level,
            "score": to_json(self.score),
            "summary": self.summary,
            "evidence": to_json(dict(self.evidence)),
            "signals": list(self.signals),
        }


@dataclass(frozen=True, slots=True)
class Life:
    """What people and the clock have done to an incident, beside its findings. Times are those of the clock.

    acknowledged_until: when the acknowledgement expires; None: never.   told: members (of a storm, what it represents)
    in the last message to receivers, or when it was acknowledged.   silenced_by: ids of silences and maintenance
    windows.   inhibited_by: incidents that represent it, such as a storm.   waits_since: since when a page waits for a
    person.   escalation: steps done.   returned: newest times at which it returned.   held_until: its
    findings ended, but it is shown until then.
    represents: of a storm, the incidents that it lists.   represented: how many it represents, also what its list has
    no room for.   inhibitor, inhibit_rule: the incident and the rule of [[notify.inhibit_rules]] for which receivers
    get no message.   page_waits: receivers get it when that ends, and the acknowledgement that it has by then.
    storm: of a storm, the `alertname` of its pages, and with routes the receivers that get them.
    """

    acknowledged_by: str = ""
    acknowledged_until: int | None = None
    assignee: str = ""
    silenced_by: tuple[str, ...] = ()
    inhibited_by: tuple[str, ...] = ()
    escalation: int = 0
    waits_since: int | None = None
    told: int = 0
    returned: tuple[int, ...] = ()
    held_until: int | None = None
    feedback: str = ""
    merged_into: str = ""
    represents: tuple[str, ...] = ()
    inhibitor: str = ""
    inhibit_rule: str = ""
    page_waits: bool = False
    storm: tuple[str, ...] = ()
    represented: int = 0

    def as_json(self) -> dict[str, Any]:
        """The fields of the API, a part of those of the incident."""
        return {
            "assignee": self.assignee or None,
            "acknowledged_by": self.acknowledged_by or None,
            "acknowledged_until": None if self.acknowledged_until is None else iso(self.acknowledged_until),
            "silenced_by": list(self.silenced_by),
            "inhibited_by": list(self.inhibited_by),
            "escalation": self.escalation,
            "flaps": len(self.returned),
            "feedback": self.feedback or None,
            "merged_into": self.merged_into or None,
            "represents": list(self.represents),
            "represented": max(self.represented, len(self.represents)),
            "inhibitor": self.inhibitor or None,
            "inhibit_rule": self.inhibit_rule or None,
        }


@dataclass(slots=True)
class Incident:
    """Findings with one suspected cause. The id comes from the first entity, detector and onset and never changes.

    confidence:  calibrated probability that the cause is right; None: nothing was weighed.
    explanation: why this cause: `evidence` (text), `faults_per_day` (prior), `alternatives` (cause, probability).
    """

    id: str
    cause: str
    opened: int
    onset: int
    severity: Severity
    summary: str
    detector: str
    entity: str
    members: tuple[str, ...]
    resolved: int | None = None
    confidence: float | None = None
    state: State = "open"
    simulated: bool = False
    updated: int = 0
    life: Life = field(default=Life(), compare=False)
    explanation: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_held_back(self) -> bool:
        """Whether receivers get no message: it is silenced, or another incident represents it."""
        return bool(self.life.silenced_by or self.life.inhibited_by)

    def as_json(self) -> dict[str, Any]:
        """The JSON object of incidents.jsonl and of the API."""
        return {
            "id": self.id,
            "cause": self.cause,
            "opened": iso(self.opened),
            "onset": iso(self.onset),
            "resolved": None if self.resolved is None else iso(self.resolved),
            "severity": self.severity,
            "members": list(self.members),
            "confidence": to_json(self.confidence),
            "state": self.state,
            "summary": self.summary,
            "simulated": self.simulated,
            "detector": self.detector,
            "entity": self.entity,
            **self.life.as_json(),
        }


class Caller(str):
    """The name of who calls the API, with the role that the token gives and where the call comes from.

    on_behalf_of: the token may name the person who acts.   is_person: a person who signed in, as such a
    program says.   is_executor: the token may carry out acts.   subject: what identifies the person at the provider
    of the login, "" if unknown; a name may change.   receiver: where the person acted, such as a PagerDuty; "": here.
    """

    __slots__ = ("is_executor", "is_person", "on_behalf_of", "origin", "receiver", "role", "subject")
    role: Role
    origin: str
    on_behalf_of: bool
    is_person: bool
    is_executor: bool
    subject: str
    receiver: str

    def __new__(
        cls,
        name: str,
        role: Role = "admin",
        origin: str = "",
        on_behalf_of: bool = False,
        is_person: bool = False,
        is_executor: bool = False,
        subject: str = "",
        receiver: str = "",
    ) -> Caller:
        made = super().__new__(cls, name)
        made.role, made.origin, made.on_behalf_of = role, origin, on_behalf_of
        made.is_person, made.is_executor, made.subject, made.receiver = is_person, is_executor, subject, receiver
        return made

    def may(self, role: Role) -> bool:
        """Returns whether its role includes another one."""
        return ROLES.index(self.role) >= ROLES.index(role)


def to_json(value: Any) -> Any:
    """`value` for JSON: NumPy scalars as Python numbers, non-finite numbers as None."""
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
