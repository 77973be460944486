"""Requests and answers as in /openapi.json. The tests check every answer against its model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pipeline.api.impact_models import Impact, ImpactShort
from pipeline.api.strict_model import Strict as Strict
from pipeline.api.strict_model import Time as Time
from pipeline.model.plain_text import strip_codes

COMMENT_CHARACTERS = 4000
"""Longest comment (chosen: two pages; a log belongs elsewhere)."""
Text = Annotated[str, BeforeValidator(lambda given: strip_codes(given) if isinstance(given, str) else given)]
"""What a person wrote: lines, without control characters and marks that change the direction of text."""


class Note(Strict):
    """The body of acknowledge and comment."""

    comment: Text = Field("", max_length=COMMENT_CHARACTERS)


class Verdict(Note):
    """The body of resolve. not_a_fault: a false alarm; learning detectors accept the state as normal."""

    not_a_fault: bool = False


class NewMute(Strict):
    """A mute to add: a detector (* for all) on a scope (an entity and all below it, * for all entities)."""

    detector: str = Field(max_length=64)
    scope: str = Field(max_length=512)
    seconds: float = Field(gt=0, allow_inf_nan=False)
    reason: Text = Field(max_length=COMMENT_CHARACTERS)


class Mute(Strict):
    """One mute. ended: time at which a user ended it early. warning: set on creation if the scope is not known."""

    id: str
    detector: str
    scope: str
    since: Time
    until: Time
    ended: Time | None
    reason: str
    user: str
    ended_by: str | None
    version: int
    warning: str = ""


class Mutes(Strict):
    """All mutes, newest first."""

    mutes: list[Mute]


class ModeRule(Strict):
    """An entry of [[modes]]: the mode of a detector (* for all) on a scope (* for all entities)."""

    detector: str
    scope: str
    mode: Literal["record", "notify", "act"]


class Detector(Strict):
    """One detector.

    settings: as configured. budget: expected false alarms, one line per metric. modes: rules that apply to it; without
    one it notifies. off: missing inputs that disable it. errors: frames on which it failed.
    """

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)
    name: str
    family: str
    device_class: str = Field(alias="class")
    needs: list[str]
    wants: list[str]
    blind: str
    about: str
    settings: dict[str, Any]
    budget: list[str]
    modes: list[ModeRule]
    off: list[str]
    errors: int


class Detectors(Strict):
    """All detectors, and the rules of [[modes]] in their order."""

    detectors: list[Detector]
    modes: list[ModeRule]


class CalibrationRow(Strict):
    """A statistic of a detector on one kind of device (its product; empty: all).

    factor: on the shipped threshold and least effect, from quiet devices.   threshold, least_effect: in force.
    devices, hours: that it was learnt from; evidence fades within a week.   suspects: quiet devices that passed it in
    about a week.   pages: of the detector, in the last week.   other_...: with an earlier version; of `pages` those
    whose effect would have been large enough.
    """

    detector: str
    statistic: str
    kind: str
    devices: int
    hours: float
    factor: float
    threshold: float | None
    least_effect: float | None
    pinned: bool
    suspects: int
    pages: int
    other_factor: float | None
    other_least_effect: float | None
    other_suspects: int | None
    other_pages: int | None


class CalibrationVersion(Strict):
    """A version of the calibration (`learned`, daily), or what a person did to version `of`."""

    version: int
    time: Time
    action: Literal["learned", "pin", "unpin", "rollback"]
    of: int | None
    user: str
    in_force: bool


class Calibration(Strict):
    """The calibration in force, and the versions, newest first."""

    rows: list[CalibrationRow]
    versions: list[CalibrationVersion]


class CalibrationVersions(Strict):
    """The versions, newest first."""

    versions: list[CalibrationVersion]


class CalibrationChange(Strict):
    """pin keeps the thresholds of a version (null: of now), unpin follows the site again, rollback forgets the rest."""

    action: Literal["pin", "unpin", "rollback"]
    version: int | None = Field(None, ge=1)


class NodeReason(Strict):
    """Why a node is taken out of service."""

    reason: Text = Field(min_length=1, max_length=COMMENT_CHARACTERS)


class Decommissioned(Strict):
    """A node that was taken out of service; `incidents`: how many that resolved."""

    node: str
    since: Time
    user: str
    reason: str
    returned: Time | None
    returned_by: str | None
    incidents: int = 0


class DecommissionedNodes(Strict):
    """Nodes that were taken out of service, also returned ones; newest first."""

    nodes: list[Decommissioned]


class StoreMoment(Strict):
    """One moment of the store, for `fleetpulse backup`. time: UTC us; history: path and bytes of each sealed file;
    offsets: topic, partition, incarnation and next offset."""

    id: str
    store: str
    site: str
    duckdb: str
    time: int
    schema_version: int
    store_bytes: int
    log_bytes: int
    state: str
    history: list[tuple[str, int]]
    offsets: list[tuple[str, str, str, int]]


class Held(Strict):
    """Whether checkpoints were held back until the end of a backup."""

    held: bool


class Query(Strict):
    """One SELECT."""

    query: str


class Rows(Strict):
    """The answer of a query. truncated: rows at the end are missing."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool


class Readiness(Strict):
    """Whether the pipeline is ready, and if not, the reasons."""

    ready: bool
    reasons: list[str]


class Health(Strict):
    """The process runs."""

    status: Literal["ok"]


class Version(Strict):
    """Program, store and site."""

    version: str
    schema_version: int
    site: str


class Incident(BaseModel):
    """One incident as in incidents.jsonl, with its state."""

    id: str
    cause: str
    opened: Time
    onset: Time
    resolved: Time | None
    severity: Literal["watch", "ticket", "page"]
    members: list[str]
    confidence: float | None
    state: Literal["open", "acknowledged", "silenced", "resolved"]
    summary: str
    simulated: bool
    detector: str
    entity: str
    assignee: str | None = None
    acknowledged_by: str | None = None
    acknowledged_until: Time | None = None
    silenced_by: list[str] = []
    inhibited_by: list[str] = []
    escalation: int = 0
    flaps: int = 0
    feedback: Literal["useful", "wrong", "known"] | None = None
    merged_into: str | None = None
    represents: list[str] = []
    represented: int = 0
    inhibitor: str | None = None
    inhibit_rule: str | None = None
    labels: dict[str, list[str]] | None = None


class IncidentGroup(Strict):
    """Incidents with the same value of a label; empty: their members share none."""

    value: str
    total: int


class ListedIncident(Incident):
    """One incident of the list. impact: null for one of an older version. version: for `If-Match`."""

    impact: ImpactShort | None = None
    version: int


class Incidents(Strict):
    """Incidents, newest first. While `stalled`, no data after `judged` is evaluated; `unready` has the reasons.

    total: without pages.   counts: of each `show`, with the same filters.   groups: with `group`, the largest first.
    """

    incidents: list[ListedIncident]
    judged: Time | None
    stalled: bool
    unready: list[str]
    total: int | None = None
    counts: dict[str, int] = Field(default_factory=dict)
    groups: list[IncidentGroup] = Field(default_factory=list)


class CoOccurring(Strict):
    """Another incident that began within two minutes. shared: the nearest entity that both causes are part of."""

    id: str
    cause: str
    severity: Literal["watch", "ticket", "page"]
    summary: str
    onset: Time
    shared: str


class IncidentDetail(Incident):
    """One incident in full. above: ancestors of its first entity, nearest first. co_occurring: not a cause of it."""

    findings: list[dict[str, Any]]
    history: list[dict[str, Any]]
    notifications: list[dict[str, Any]]
    blast_radius: dict[str, Any]
    impact: Impact | None
    above: list[str]
    co_occurring: list[CoOccurring]
    version: int
    similar: list[dict[str, Any]]
    advice: str | None
    runbook_url: str | None
    explanation: dict[str, Any]


class Entity(Strict):
    """One known entity. last_seen: null without telemetry (for a job: of its ranks)."""

    entity: str
    kind: str
    parents: list[str]
    simulated: bool
    last_seen: Time | None


class Entities(Strict):
    """Entities by name."""

    entities: list[Entity]


class FleetNode(Strict):
    """One node on the map. state: by its own faults.  affected_by: those of its incidents whose cause is elsewhere,
    such as its coolant loop, its leaf switch or a job."""

    entity: str
    rack: str | None
    state: Literal["ok", "watch", "degraded", "critical", "no_data"]
    last_seen: Time | None
    simulated: bool
    incidents: list[str]
    affected_by: list[str]


class Fleet(Strict):
    """All nodes at one time, and the progress of the pipeline. newest: time of the newest stored row.  affected: nodes
    in state ok that suffer from a fault elsewhere.  simulated: nodes whose data is simulated."""

    as_of: Time
    watermark: Time | None
    backlog: bool
    lag_s: float | None
    newest: Time | None
    unready: list[str]
    stalled: bool
    counts: dict[Literal["ok", "watch", "degraded", "critical", "no_data"], int]
    affected: int
    simulated: int
    nodes: list[FleetNode]
    sources: dict[Literal["agents", "silent", "gaps", "dead_letters"], int]


class SignalBrief(Strict):
    """A signal as charts show it; the unit of a counter is per second."""

    name: str
    unit: str
    help: str
    kind: Literal["gauge", "counter", "state"]


class SignalFull(SignalBrief):
    """One line of the catalogue."""

    device_class: str
    type: str
    source: str
    column: str
    states: list[str]


class Signals(Strict):
    """The catalogue."""

    signals: list[SignalFull]


class Point(Strict):
    """A value of a device, and those of its peers; null where nothing was measured."""

    time: Time
    value: float | None
    median: float | None
    low: float | None
    high: float | None


class Series(Strict):
    """One signal of one device against its peers."""

    entity: str
    signal: SignalBrief
    peer_kind: str
    peers: int
    points: list[Point]


class HeatmapSignal(Strict):
    """Values in the order of `entities`. low, high: of the devices of a node, by=node. missing: devices without one."""

    signal: SignalBrief
    missing: int
    values: list[float | None]
    low: list[float | None] | None
    high: list[float | None] | None


class Heatmap(Strict):
    """One value per device or node. from, to: null for current values; step: seconds of the rollup read, 0 for rows."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)
    as_of: Time
    start: Time | None = Field(alias="from")
    to: Time | None
    step: int | None
    by: Literal["device", "node"]
    entities: list[str]
    signals: list[HeatmapSignal]


class FurthestDevice(Strict):
    """A device beside its peers. deviation: from their median, in standard deviations that fit their quartiles."""

    entity: str
    node: str
    value: float
    median: float
    low: float
    high: float
    deviation: float
    peers: int


class Furthest(Strict):
    """The devices furthest from their peers. compared: devices with a value and peers; missing: without a value."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)
    as_of: Time
    start: Time | None = Field(alias="from")
    to: Time | None
    step: int | None
    signal: SignalBrief
    peers: str
    compared: int
    missing: int
    devices: list[FurthestDevice]


class Item(Strict):
    """One line of a timeline."""

    time: Time
    kind: Literal["event", "finding", "gap"]
    entity: str
    text: str


class Timeline(Strict):
    """Events, findings and gaps, newest first."""

    items: list[Item]
