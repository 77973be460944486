"""Routes for pages about one thing: an entity, the newest values of its parts, comparisons over time, its events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api import models
from pipeline.api.compare import MAX_DEVICES, MAX_SIGNALS, read_comparison
from pipeline.api.device_values import MAX_SIGNALS as MAX_VALUES
from pipeline.api.device_values import read_values
from pipeline.api.entity_detail import read_entity, read_events
from pipeline.api.history import Peers
from pipeline.api.service import get_context, json_response
from pipeline.model.records import iso

Entity = Annotated[str, Query(min_length=3, max_length=512, pattern=r"^[^:]+:.+$", description="kind:name")]
From = Annotated[str | None, Query(alias="from", description="ISO 8601; an hour before `to` by default")]
To = Annotated[str | None, Query(description="ISO 8601; now by default")]
Incident = models.Incident


class Part(models.Strict):
    """A part of an entity."""

    entity: str
    parents: list[str]
    attributes: dict[str, Any]


class Work(models.Strict):
    """A job that runs on an entity now, with its ranks there."""

    job: str
    ranks: list[str]


class OwnIncident(Incident):
    """An incident of an entity. relation: `cause`, `member` (it has findings of it), `affected` (a cause above it)."""

    relation: Literal["cause", "member", "affected"]


class EntityDetail(models.Strict):
    """One entity. above: all that it is part of or supplied by, nearest first. links: port -> port at the far end."""

    entity: str
    kind: str
    simulated: bool
    site: str | None
    parents: list[str]
    above: list[str]
    attributes: dict[str, Any]
    parts: list[Part]
    left_out: int
    work: list[Work]
    incidents: list[OwnIncident]
    links: dict[str, str]


class ValueSignal(models.SignalBrief):
    """A signal; states: names of the values of a state. normal: those that are no faults."""

    states: list[str]
    normal: list[str]


class SignalValues(models.Strict):
    """Newest values in the order of `entities`, null without one, and those of peers on other nodes."""

    signal: ValueSignal
    values: list[float | None]
    median: float | None
    low: float | None
    high: float | None
    peers: int
    peer_kind: Literal["group", "class", "none"]


class ClassValues(models.Strict):
    """Newest values of the devices of one class. left_out: devices beyond the most that are listed."""

    device_class: str
    entities: list[str]
    last_seen: list[models.Time | None]
    left_out: int
    signals: list[SignalValues]


class Values(models.Strict):
    """Newest values of an entity and its parts."""

    as_of: models.Time
    classes: list[ClassValues]


class Line(models.Strict):
    """One device over time; low and high: of each bucket, null where they are the values."""

    entity: str
    values: list[float | None]
    low: list[float | None] | None
    high: list[float | None] | None


class Band(models.Strict):
    """Median, 10th and 90th percentile of peers over time."""

    median: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Compared(models.Strict):
    """One signal of several devices. step: seconds of the rollup read, 0 for rows. width: seconds of a bucket."""

    signal: models.SignalBrief
    states: list[str]
    step: int
    start: models.Time
    width: float
    peer_kind: str
    peers: int
    left_out: int
    lines: list[Line]
    band: Band | None


class Comparison(models.Strict):
    """Several signals of several devices over one time range. simulated: whether any of the devices is."""

    start: models.Time = Field(alias="from")
    to: models.Time
    simulated: bool
    signals: list[Compared]


class EventItem(models.Strict):
    """What happened. subject: the kind of event, the detector of a finding, the topic of a gap."""

    time: models.Time
    type: Literal["event", "finding", "gap"]
    entity: str
    subject: str
    data: Any


class EventItems(BaseModel):
    """Events, newest first. truncated: older ones are missing."""

    items: list[EventItem]
    truncated: bool


device_router = APIRouter(prefix="/api/v1")


@device_router.get("/entity", response_model=EntityDetail)
def one_entity(request: Request, entity: Entity) -> Response:
    """One entity with attributes, parents, parts, jobs that run on it now, and incidents."""
    service = get_context(request)
    topology = service.topology_copy.get()
    try:
        return json_response(service.reads.run(lambda cursor: read_entity(cursor, topology, entity)))
    except KeyError as error:
        raise HTTPException(404, f"entity {entity!r} is not known; GET /api/v1/entities lists all") from error


@device_router.get("/values", response_model=Values)
def newest_values(
    request: Request,
    entity: Entity,
    signal: Annotated[list[str], Query(description=f"at most {MAX_VALUES}, of any device class")],
    max_age: Annotated[float, Query(gt=0, le=86_400, description="seconds until a value counts as missing")] = 60.0,
) -> Response:
    """Newest values of an entity and its parts from memory, beside those of peers on other nodes."""
    service = get_context(request)
    backend, topology, now = service.backend, service.topology_copy.get(), service.now()
    found = read_values(backend.read_current, backend.devices, service.names, topology, entity, signal, now, max_age)
    return json_response({"as_of": iso(now), **found})


@device_router.get("/compare", response_model=Comparison)
def comparison(
    request: Request,
    entity: Annotated[list[str], Query(max_length=MAX_DEVICES, description="kind:name; parts of a node are found")],
    signal: Annotated[list[str], Query(description=f"at most {MAX_SIGNALS}, of any device class")],
    start: From = None,
    to: To = None,
    peers: Peers = "auto",
    points: Annotated[int, Query(ge=1, le=2000)] = 300,
) -> Response:
    """Several signals of several devices over one time range, each beside the band of the first device's peers."""
    service = get_context(request)
    span, topology = service.parse_span(start, to, points), service.topology_copy.get()
    for one in entity:
        if not 3 <= len(one) <= 512 or not 0 < one.find(":") < len(one) - 1:
            raise HTTPException(400, f"entity = {one[:80]!r}: expected kind:name, at most 512 characters")
    return json_response(
        service.reads.run(lambda cursor: read_comparison(cursor, topology, entity, signal, span, peers))
    )


@device_router.get("/events", response_model=EventItems)
def own_events(
    request: Request,
    entity: Entity,
    start: From = None,
    to: To = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """Events, findings and gaps of an entity, its parts and the work on it, newest first, with all data."""
    service = get_context(request)
    span, topology = service.parse_span(start, to), service.topology_copy.get()
    return json_response(service.reads.run(lambda cursor: read_events(cursor, topology, entity, span, limit)))
