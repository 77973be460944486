"""The routes of the API.

    read       entities, the fleet, series, timelines, the catalogue, and SQL
    incidents  list and detail with blast radius, and the actions of people: acknowledge, comment, resolve
    mutes      detectors with their modes; list, add and end mutes
    operation  nodes out of service, and what a backup needs
    process    liveness, readiness, version; /metrics and /federate for Prometheus

A query's answer is sent in pieces and within a deadline; its slot is free only when it is sent.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar, cast

import duckdb
from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pipeline.api import federate, models
from pipeline.api.fleet import (
    build_fleet,
    compute_blast_radius,
    find_last_seen,
    list_co_occurring,
    list_nodes,
    read_unresolved,
)
from pipeline.api.guard import USER
from pipeline.api.heatmap import (
    MAX_DEVICES,
    MAX_SIGNALS,
    RECENT,
    By,
    DeviceValues,
    find_furthest,
    find_signals,
    read_range,
    select_current,
    write_heatmap,
)
from pipeline.api.history import Peers, Span, find_signal, read_series, read_timeline
from pipeline.api.incident_list import labels_of
from pipeline.api.people_routes import (
    Acknowledgement,
    act_on_incident,
    answer_versioned,
    find_newest,
    read_version,
)
from pipeline.api.query import QueryAnswer
from pipeline.api.result_formats import ARROW, TRUNCATED_HEADER, table_rows
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.api.titles import add_affected
from pipeline.api.topology_reads import list_above, load_topology_at
from pipeline.incidents import ledger
from pipeline.incidents.handover import list_similar
from pipeline.incidents.impact_rows import read_impact
from pipeline.incidents.paths import explain_incident
from pipeline.model.entity_names import add_to_title
from pipeline.model.records import SECOND, Caller, from_iso, iso
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.store.schema import SCHEMA_VERSION

T = TypeVar("T")
NODES_FOR = 10 * SECOND
"""How long the list of nodes is kept (us). Chosen: as often as the newest rows are written."""
SEND_SECONDS = 30.0
"""Time limit for sending an answer (s). Chosen: 64 MiB at 2.2 MB/s; slower callers would hold memory for longer."""
PIECE = 256 * 1024
"""Bytes per write to the connection (chosen: between pieces it waits for a slow reader)."""


class QueryResponse(Response):
    """The answer of a query. After SEND_SECONDS the connection is closed and the rest dropped."""

    def __init__(self, answer: QueryAnswer, media_type: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(None, media_type=media_type, headers=headers)
        self.headers["Content-Length"] = str(len(answer.body))
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                body = memoryview(self._answer.body)
                for start in range(0, len(body), PIECE):
                    piece = bytes(body[start : start + PIECE])
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._answer.release()


read_router = APIRouter(prefix="/api/v1")
Entity = Annotated[str, Query(min_length=3, max_length=200, pattern=r"^[^:]+:.+$", description="kind:name")]
From = Annotated[str | None, Query(alias="from", description="ISO 8601; an hour before `to` by default")]
To = Annotated[str | None, Query(description="ISO 8601; now by default")]

# jobs and stages send no telemetry: last_seen is that of their ranks, or of the nodes that list the ranks
_ENTITIES = """
    WITH known AS MATERIALIZED (SELECT * FROM entities),
         rank AS (SELECT r.entity, r.parents, coalesce(r.last_seen, n.last_seen) AS seen
                  FROM known r LEFT JOIN known n ON n.entity = 'node:' || (r.attributes ->> '$.node')
                  WHERE r.kind = 'rank'),
         work AS (SELECT entity, max(seen) AS seen
                  FROM (SELECT entity, seen FROM rank UNION ALL SELECT unnest(parents), seen FROM rank)
                  WHERE starts_with(entity, 'rank:') OR starts_with(entity, 'stage:') OR starts_with(entity, 'job:')
                  GROUP BY entity)
    SELECT k.entity, k.kind, k.parents, k.simulated, coalesce(k.last_seen, w.seen) AS last_seen
    FROM known k LEFT JOIN work w ON w.entity = k.entity
    WHERE $1 IS NULL OR k.kind = $1 ORDER BY k.entity"""


@read_router.get("/entities", response_model=models.Entities)
def entities(request: Request, kind: str | None = None) -> Response:
    """All known entities, or those of one kind."""
    with get_context(request).cursor() as cursor:
        found = cursor.sql(
            _ENTITIES,
            params=[kind],
        ).to_arrow_table()
    return json_response({"entities": table_rows(found)})


@read_router.get("/fleet", response_model=models.Fleet)
def fleet_now(
    request: Request,
    entity: Annotated[list[str] | None, Query(description="only these nodes are listed", max_length=1000)] = None,
    nodes: Annotated[bool, Query(description="false: no node is listed")] = True,
) -> Response:
    """One state per node, and the progress of the pipeline. Counts are of all nodes."""
    service = get_context(request)
    backend, topology, now = service.backend, service.topology_copy.get(), service.now()
    health, unready = backend.read_health(), backend.list_unready_reasons()

    def read(what: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        with service.cursor() as cursor:
            return what(cursor)

    known = (topology, backend.read_revision(), len(backend.devices.names("node")), now // NODES_FOR)
    all_nodes = service.remember("nodes", known, lambda: read(list_nodes))
    changed = (topology, backend.read_revision())
    unresolved = service.remember("unresolved", changed, lambda: read(lambda c: read_unresolved(c, topology)))
    seen = find_last_seen(backend.devices, service.names, backend.read_current)
    listed = (None if entity is None else frozenset(entity)) if nodes else frozenset()
    return json_response(build_fleet(all_nodes, unresolved, seen, topology, health, unready, now, listed))


@read_router.get("/series", response_model=models.Series)
def one_series(
    request: Request,
    entity: Entity,
    signal: str,
    start: From = None,
    to: To = None,
    peers: Peers = "auto",
    points: Annotated[int, Query(ge=1, le=2000)] = 300,
) -> Response:
    """One signal of one device over time, against its peers. Counters are rates per second."""
    service = get_context(request)
    span = service.parse_span(start, to, points)
    topology = service.topology_copy.get()
    return json_response(service.reads.run(lambda cursor: read_series(cursor, topology, entity, signal, span, peers)))


Signals = Annotated[list[str], Query(description=f"signals of one device class, at most {MAX_SIGNALS}")]
MaxAge = Annotated[float, Query(gt=0, le=86_400, description="seconds from which a current value counts as missing")]


@read_router.get("/heatmap", response_model=models.Heatmap)
def heatmap(
    request: Request,
    signal: Signals,
    start: From = None,
    to: To = None,
    by: By = "device",
    max_age: MaxAge = 60.0,
) -> Response:
    """One value per device or node of the fleet: current ones from memory, or over a time range."""
    service = get_context(request)
    found = [_read_values(service, s, start, to, max_age) for s in find_signals(signal)]
    body = write_heatmap(found, service.names, service.backend.devices, by, service.now())
    return Response(body, media_type="application/json")


@read_router.get("/furthest", response_model=models.Furthest)
def furthest(
    request: Request,
    signal: str,
    start: From = None,
    to: To = None,
    peers: Peers = "auto",
    k: Annotated[int, Query(ge=1, le=MAX_DEVICES)] = 50,
    max_age: MaxAge = 60.0,
) -> Response:
    """The k devices that are furthest from the median of their peers, with the peers' band."""
    service = get_context(request)
    wanted = find_signal(signal)
    if wanted.kind == "state":
        raise HTTPException(400, f"signal {signal!r} is a state: it has no distance; expected a gauge or a counter")
    found = _read_values(service, wanted, start, to, max_age)
    topology, devices = service.topology_copy.get(), service.backend.devices
    return json_response(
        {"as_of": iso(service.now()), **find_furthest(found, service.names, devices, topology, peers, k)}
    )


def _read_values(
    service: ApiContext, signal: Signal, start: str | None, to: str | None, max_age: float
) -> DeviceValues:
    """Returns current values from memory, or those over a time range; a counter has only rates."""
    devices, now = service.backend.devices, service.now()
    if start is None and to is None and signal.kind != "counter":
        found = service.backend.read_current(signal.device_class, [signal.column])
        return select_current(found, devices, signal, now, int(max_age * SECOND))
    span = Span(now - RECENT, now, 1) if start is None and to is None else service.parse_span(start, to)
    return service.reads.run(lambda cursor: read_range(cursor, devices, signal, span))


@read_router.get("/timeline", response_model=models.Timeline)
def one_timeline(
    request: Request,
    entity: Entity,
    start: From = None,
    to: To = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """Events, findings and gaps of an entity, its node and all above it, newest first."""
    service = get_context(request)
    span, topology = service.parse_span(start, to), service.topology_copy.get()
    return json_response(service.reads.run(lambda cursor: read_timeline(cursor, topology, entity, span, limit)))


@read_router.get("/signals", response_model=models.Signals)
def signals() -> Response:
    """The signal catalogue."""
    names = ("name", "unit", "help", "kind", "device_class", "type", "source", "column", "states")
    return json_response({"signals": [{name: getattr(s, name) for name in names} for s in CATALOGUE.values()]})


@read_router.post(
    "/sql",
    response_model=models.Rows,
    responses={200: {"content": {ARROW: {}}}, 400: {"description": "Not one SELECT over our own tables"}},
)
def sql(request: Request, body: models.Query) -> Response:
    """Runs one SELECT; JSON, or an Arrow IPC stream where the caller accepts that."""
    arrow = ARROW in request.headers.get("accept", "")
    found = get_context(request).queries.run(body.query, arrow)
    if arrow:
        return QueryResponse(found, ARROW, {TRUNCATED_HEADER: str(found.truncated).lower()})
    return QueryResponse(found, "application/json")


incident_router = APIRouter(prefix="/api/v1/incidents")


@incident_router.get("/{incident}", response_model=models.IncidentDetail)
def incident_detail(request: Request, incident: str) -> Response:
    """One incident with its findings, history, notifications, blast radius and co-occurring incidents."""
    service = get_context(request)
    with service.cursor() as cursor:
        try:
            found = ledger.read_incident(cursor, incident)
        except KeyError as error:
            raise _unknown(incident) from error
        others = add_affected(cursor, ledger.list_incidents_near(cursor, incident))
        similar = add_affected(cursor, list_similar(cursor, incident))
        impact = read_impact(cursor, incident)
        topology = service.topology_copy.get()
        above = list_above(topology, cursor, found["entity"], from_iso(found["onset"]))
        then = load_topology_at(topology, cursor, (found["cause"], *found["members"]), from_iso(found["onset"]))
    blast = compute_blast_radius(found["cause"], found["members"], then)
    radius = {"entities": blast.entities, "jobs": list(blast.jobs)}
    near = list_co_occurring(found["cause"], others, topology)
    version = max((row["number"] for row in found["history"]), default=0)
    more = {"blast_radius": radius, "above": above, "co_occurring": near, "version": version, "similar": similar}
    more |= {"labels": labels_of(service, incident), "impact": impact}
    more["summary"] = add_to_title(found["summary"], (impact or {}).get("title", ""))
    more["explanation"] = explain_incident(found, then)
    return answer_versioned({**found, **more, **service.advice.find(found["detector"], found["cause"])})


@incident_router.post("/{incident}/acknowledge", response_model=models.Incident)
def acknowledge(request: Request, incident: str, note: Acknowledgement) -> Response:
    """Acknowledges an incident until it expires or becomes worse."""
    return act_on_incident(request, "acknowledge", incident, note.model_dump())


@incident_router.post("/{incident}/comment", response_model=models.Incident)
def comment(request: Request, incident: str, note: models.Note) -> Response:
    """Adds a comment; the state does not change."""
    if not note.comment.strip():
        raise HTTPException(400, "body.comment: is empty; expected a text")
    return act_on_incident(request, "comment", incident, note.model_dump())


@incident_router.post("/{incident}/resolve", response_model=models.Incident)
def resolve(request: Request, incident: str, note: models.Verdict) -> Response:
    """Resolves an incident. not_a_fault: it was a false alarm; learning detectors accept the state as normal."""
    return act_on_incident(request, "not a fault" if note.not_a_fault else "resolve", incident, note.model_dump())


def _unknown(incident: str) -> HTTPException:
    return HTTPException(404, f"incident {incident!r} is not known")


mute_router = APIRouter(prefix="/api/v1")


@mute_router.get("/detectors", response_model=models.Detectors)
def detectors(request: Request) -> Response:
    """All detectors: needed signals, blind spots, settings, expected false alarms and modes."""
    backend = get_context(request).backend
    return json_response({"detectors": backend.list_detectors(), "modes": backend.list_modes()})


Version = Annotated[int | None, Query(ge=1, description="number of a version")]


@mute_router.get("/calibration", response_model=models.Calibration)
def calibration(request: Request, version: Version = None) -> Response:
    """Thresholds learnt from the site, what passed them in a week, beside an earlier version; and all versions."""
    found = _of_version(lambda: get_context(request).backend.read_calibration(version), version)
    return answer_versioned(found, find_newest(found["versions"]))


@mute_router.get("/calibration/export")
def export_calibration(request: Request, version: Version = None) -> Response:
    """A version, or the one in force, as a document for `fleetpulse replay --calibration`."""
    return json_response(_of_version(lambda: get_context(request).backend.export_calibration(version), version))


@mute_router.post("/calibration", response_model=models.CalibrationVersions)
def change_calibration(request: Request, wanted: models.CalibrationChange) -> Response:
    """Pins a version, or the one in force; unpins; or rolls back to a version."""
    if wanted.action == "rollback" and wanted.version is None:
        raise HTTPException(400, "version: missing; expected the version to return to")
    arguments = (wanted.action, wanted.version, cast(str, request.scope[USER]), read_version(request))
    made = _of_version(lambda: get_context(request).backend.change_calibration(*arguments), wanted.version)
    return answer_versioned({"versions": made}, find_newest(made))


def _of_version(read: Callable[[], Any], version: int | None) -> Any:
    try:
        return read()
    except KeyError as error:
        raise HTTPException(404, f"calibration {version} is not known, or names no thresholds") from error


@mute_router.get("/mutes", response_model=models.Mutes)
def list_mutes(request: Request) -> Response:
    """All mutes, also ended ones; newest first."""
    with get_context(request).cursor() as cursor:
        return json_response({"mutes": [mute.as_json() for mute in ledger.load_all_mutes(cursor)]})


@mute_router.post("/mutes", response_model=models.Mute)
def mute(request: Request, wanted: models.NewMute) -> Response:
    """Mutes one detector (* for all) on one scope (an entity and all below it, * for all entities) for some time."""
    user = cast(str, request.scope[USER])
    arguments = (wanted.detector, wanted.scope, wanted.seconds, wanted.reason, user)
    return answer_versioned(get_context(request).backend.add_mute(*arguments))


@mute_router.post("/mutes/{mute}/end", response_model=models.Mute)
def end(request: Request, mute: str) -> Response:
    """Ends a mute now."""
    try:
        arguments = (mute, cast(str, request.scope[USER]), read_version(request))
        return answer_versioned(get_context(request).backend.end_mute(*arguments))
    except KeyError as error:
        raise HTTPException(404, f"mute {mute!r} is not known or has ended") from error


operation_router = APIRouter(prefix="/api/v1")


@operation_router.get("/nodes/decommissioned", response_model=models.DecommissionedNodes)
def decommissioned(request: Request) -> Response:
    """Nodes that were taken out of service for good, also returned ones; newest first."""
    return json_response({"nodes": get_context(request).backend.list_decommissioned()})


@operation_router.post("/nodes/{node}/decommission", response_model=models.Decommissioned)
def decommission_node(request: Request, node: str, why: models.NodeReason) -> Response:
    """Takes a node out of service for good and resolves its incidents; can be repeated."""
    user = cast(str, request.scope[USER])
    return json_response(get_context(request).backend.decommission_node(node, user, why.reason))


@operation_router.post("/nodes/{node}/return", response_model=models.Decommissioned)
def return_node(request: Request, node: str) -> Response:
    """Puts a decommissioned node back into service."""
    try:
        return json_response(get_context(request).backend.return_node(node, cast(str, request.scope[USER])))
    except KeyError as error:
        raise HTTPException(404, f"node {node!r} is not decommissioned") from error


@operation_router.get("/backup", response_model=models.StoreMoment)
def describe_store(request: Request) -> Response:
    """The present moment of the store, for `fleetpulse backup`."""
    return json_response(asdict(get_context(request).backend.backups.describe()))


@operation_router.post("/backup/begin", response_model=models.StoreMoment)
def begin_backup(request: Request) -> Response:
    """Holds checkpoints back and returns the moment that can be copied now; for one backup at a time."""
    backend = get_context(request).backend
    moment = backend.backups.begin()
    try:
        backend.record_act(cast(Caller, request.scope[USER]), "backup", moment.store)
    except BaseException:
        backend.backups.end(moment.id)
        raise
    return json_response(asdict(moment))


@operation_router.post("/backup/{moment}/end", response_model=models.Held)
def end_backup(request: Request, moment: str) -> Response:
    """Lets checkpoints go on."""
    return json_response({"held": get_context(request).backend.backups.end(moment)})


process_router = APIRouter()


@process_router.get("/healthz", response_model=models.Health)
async def healthz() -> Response:
    """200 while the process runs. Needs no token."""
    return json_response({"status": "ok"})


@process_router.get("/readyz", response_model=models.Readiness, responses={503: {"model": models.Readiness}})
def readyz(request: Request) -> Response:
    """200 while the pipeline is ready, else 503 with the reasons."""
    reasons = get_context(request).backend.list_unready_reasons()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@process_router.get("/metrics", response_class=Response)
def prometheus(request: Request) -> Response:
    """Counters of the pipeline in the Prometheus text format."""
    return Response(federate.render_metrics(get_context(request).backend.read_counters()), media_type=federate.TEXT)


@process_router.get("/federate", response_class=Response)
def federation(
    request: Request,
    match: Annotated[list[str] | None, Query(alias="match[]", description="selectors, at least one")] = None,
) -> Response:
    """The newest values of all devices as a Prometheus page; OpenMetrics for a caller that accepts it."""
    service = get_context(request)
    devices, now = service.backend.devices, service.now()
    wide = "application/openmetrics-text" in request.headers.get("accept", "")
    page = federate.write_page(match or [], devices, service.backend.read_current, now, wide)
    return Response(page, media_type=federate.OPEN_METRICS if wide else federate.TEXT)


@process_router.get("/api/v1/version", response_model=models.Version)
def version(request: Request) -> Response:
    """Version of the program and of the store's schema."""
    site = get_context(request).config.site.name
    return json_response({"version": program_version(), "schema_version": SCHEMA_VERSION, "site": site})


def program_version() -> str:
    """The installed version; `0+source` for a tree that was never installed."""
    try:
        return importlib.metadata.version("fleetpulse")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
