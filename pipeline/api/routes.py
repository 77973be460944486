"""The routes of the API.

    read       entities, the fleet, series, timelines, the catalogue, and SQL
    incidents  list and detail with blast radius, and the actions of people: acknowledge, comment, resolve
    mutes      detectors with their modes; list, add and end mutes
    operation  nodes out of service, and what a backup needs
    process    liveness, readiness, version, and /metrics in the Prometheus text format, version 0.0.4

The blast radius of an incident: everything below its cause and members, and the jobs that run there. A query's answer
is sent in pieces and within a deadline; its slot is free only when it is sent.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pipeline.api import models
from pipeline.api.fleet import build_fleet
from pipeline.api.guard import USER
from pipeline.api.history import Peers, read_series, read_timeline
from pipeline.api.query import QueryAnswer
from pipeline.api.result_formats import ARROW, TRUNCATED_HEADER, table_rows
from pipeline.api.service import get_context, json_response
from pipeline.incidents import ledger
from pipeline.incidents.causes import EXPLAINED_FAMILIES
from pipeline.model.records import State, iso
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology, kind_of
from pipeline.store.schema import SCHEMA_VERSION

SEND_SECONDS = 30.0
"""Time limit for sending an answer (s). Chosen: 64 MiB at 2.2 MB/s; slower callers would hold memory for longer."""
PIECE = 256 * 1024
"""Bytes per write to the connection (chosen: between pieces it waits for a slow reader)."""

MOST_CO_OCCURRING = 50
"""Most co-occurring incidents that are listed. Chosen: what a person reads."""


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
def fleet_now(request: Request) -> Response:
    """One state per node, and the progress of the pipeline."""
    service = get_context(request)
    health, unready = service.backend.read_health(), service.backend.list_unready_reasons()
    with service.cursor() as cursor:
        return json_response(build_fleet(cursor, service.topology_copy.get(), health, unready, service.now()))


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
    with service.cursor() as cursor:
        return json_response(read_series(cursor, service.topology_copy.get(), entity, signal, span, peers))


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
    span = service.parse_span(start, to)
    with service.cursor() as cursor:
        return json_response(read_timeline(cursor, service.topology_copy.get(), entity, span, limit))


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


_PARTS = frozenset({"nvlink", "neuroncore", "sensor", "dimm", "disk", "filesystem", "service", "agent", "collector"})
"""Parts without work of their own: a node has hundreds, which would hide the number of GPUs."""


@dataclass(frozen=True, slots=True)
class BlastRadius:
    """entities: kind -> number of affected entities. jobs: those with an affected rank, by name.

    Affected: the cause, the members and all below them. Of the kinds in _PARTS only the cause and members count.
    """

    entities: dict[str, int]
    jobs: tuple[str, ...]


def compute_blast_radius(cause: str, members: Iterable[str], topology: Topology) -> BlastRadius:
    """Counts the cause, the members and all entities below them, and finds their jobs."""
    roots = {cause, *members}
    reached = roots | {e for e in topology.descendants(*roots) if kind_of(e) not in _PARTS}
    jobs = {job for e in reached if (job := topology.ancestor_of_kind(e, "job")) is not None}
    return BlastRadius(dict(sorted(Counter(map(kind_of, reached)).items())), tuple(sorted(jobs)))


def list_co_occurring(cause: str, others: Iterable[Mapping[str, Any]], topology: Topology) -> list[dict[str, Any]]:
    """Returns those of other incidents whose causes have something in common with this one, at most MOST_CO_OCCURRING.

    shared: what they have in common, the nearest first: one is part of the other, or both are part of it.
    """
    mine = (cause, *topology.ancestors(cause))
    found = []
    for other in others:
        theirs = {other["cause"], *topology.ancestors(other["cause"])}
        shared = next((e for e in mine if e in theirs and kind_of(e) in (kind_of(cause), *EXPLAINED_FAMILIES)), None)
        if shared is not None:
            keys = ("id", "cause", "severity", "summary", "onset")
            found.append({**{key: other[key] for key in keys}, "shared": shared})
    return found[:MOST_CO_OCCURRING]


incident_router = APIRouter(prefix="/api/v1/incidents")
Write = Callable[[str, str, str], Mapping[str, Any]]


@incident_router.get("", response_model=models.Incidents)
def incidents(request: Request, state: State | None = None) -> Response:
    """All incidents, also resolved ones, or those in one state; newest first. While `stalled`, no data after `judged`
    is evaluated."""
    service = get_context(request)
    health = service.backend.read_health()
    judged = None if health["watermark"] is None else iso(health["watermark"])
    known = {"judged": judged, "stalled": health["stalled"], "unready": service.backend.list_unready_reasons()}
    with service.cursor() as cursor:
        return json_response({"incidents": ledger.list_incidents(cursor, state), **known})


@incident_router.get("/{incident}", response_model=models.IncidentDetail)
def incident_detail(request: Request, incident: str) -> Response:
    """One incident with its findings, history, notifications, blast radius and co-occurring incidents."""
    service = get_context(request)
    with service.cursor() as cursor:
        try:
            found = ledger.read_incident(cursor, incident)
        except KeyError as error:
            raise _unknown(incident) from error
        others = ledger.list_incidents_near(cursor, incident)
    topology = service.topology_copy.get()
    blast = compute_blast_radius(found["cause"], found["members"], topology)
    impact = {"entities": blast.entities, "jobs": list(blast.jobs)}
    near = list_co_occurring(found["cause"], others, topology)
    above = list(topology.ancestors(found["entity"]))
    return json_response({**found, "blast_radius": impact, "above": above, "co_occurring": near})


@incident_router.post("/{incident}/acknowledge", response_model=models.Incident)
def acknowledge(request: Request, incident: str, note: models.Note) -> Response:
    """Acknowledges an incident."""
    return _write(request, get_context(request).backend.acknowledge, incident, note)


@incident_router.post("/{incident}/comment", response_model=models.Incident)
def comment(request: Request, incident: str, note: models.Note) -> Response:
    """Adds a comment; the state does not change."""
    if not note.comment.strip():
        raise HTTPException(400, "body.comment: is empty; expected a text")
    return _write(request, get_context(request).backend.comment, incident, note)


@incident_router.post("/{incident}/resolve", response_model=models.Incident)
def resolve(request: Request, incident: str, note: models.Verdict) -> Response:
    """Resolves an incident. not_a_fault: it was a false alarm; learning detectors accept the state as normal."""
    backend = get_context(request).backend
    return _write(request, backend.mark_normal if note.not_a_fault else backend.resolve, incident, note)


def _write(request: Request, write: Write, incident: str, note: models.Note) -> Response:
    user = cast(str, request.scope[USER])
    try:
        return json_response(write(incident, user, note.comment))
    except KeyError as error:
        raise _unknown(incident) from error


def _unknown(incident: str) -> HTTPException:
    return HTTPException(404, f"incident {incident!r} is not known")


mute_router = APIRouter(prefix="/api/v1")


@mute_router.get("/detectors", response_model=models.Detectors)
def detectors(request: Request) -> Response:
    """All detectors: needed signals, blind spots, settings, expected false alarms and modes."""
    backend = get_context(request).backend
    return json_response({"detectors": backend.list_detectors(), "modes": backend.list_modes()})


@mute_router.get("/budget", response_model=models.PageBudgets)
def budget(request: Request) -> Response:
    """Page budgets: how many wrong pages each detector had in the window, and which are lowered to tickets."""
    return json_response({"budgets": get_context(request).backend.list_budgets()})


@mute_router.post("/budget/{detector}/reset", response_model=models.PageBudgets)
def reset_budget(request: Request, detector: str) -> Response:
    """Forgets the wrong pages of a detector until now, so that it pages again."""
    return json_response({"budgets": get_context(request).backend.reset_budget(detector)})


Version = Annotated[int | None, Query(ge=1, description="number of a version")]


@mute_router.get("/calibration", response_model=models.Calibration)
def calibration(request: Request, version: Version = None) -> Response:
    """Thresholds learnt from the site, what passed them in a week, beside an earlier version; and all versions."""
    return json_response(_of_version(lambda: get_context(request).backend.read_calibration(version), version))


@mute_router.get("/calibration/export")
def export_calibration(request: Request, version: Version = None) -> Response:
    """A version, or what is in force, as a document for `fleetpulse replay --calibration`."""
    return json_response(_of_version(lambda: get_context(request).backend.export_calibration(version), version))


@mute_router.post("/calibration", response_model=models.CalibrationVersions)
def change_calibration(request: Request, wanted: models.CalibrationChange) -> Response:
    """Pins a version, or what is in force; unpins; or rolls back to a version."""
    if wanted.action == "rollback" and wanted.version is None:
        raise HTTPException(400, "version: missing; expected the version to return to")
    arguments = (wanted.action, wanted.version, cast(str, request.scope[USER]))
    made = _of_version(lambda: get_context(request).backend.change_calibration(*arguments), wanted.version)
    return json_response({"versions": made})


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
    return json_response(get_context(request).backend.add_mute(*arguments))


@mute_router.post("/mutes/{mute}/end", response_model=models.Mute)
def end(request: Request, mute: str) -> Response:
    """Ends a mute now."""
    try:
        return json_response(get_context(request).backend.end_mute(mute, cast(str, request.scope[USER])))
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
    return json_response(asdict(get_context(request).backend.backups.begin()))


@operation_router.post("/backup/{moment}/end", response_model=models.Held)
def end_backup(request: Request, moment: str) -> Response:
    """Lets checkpoints go on."""
    return json_response({"held": get_context(request).backend.backups.end(moment)})


MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(counters: Mapping[str, float]) -> str:
    """One HELP and one TYPE line per family, then its samples. A family named `..._total` is a counter."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in counters.items():
        families.setdefault(name.partition("{")[0], []).append((name, value))
    lines: list[str] = []
    for family, samples in sorted(families.items()):
        kind = "counter" if family.endswith("_total") else "gauge"
        lines += [f"# HELP {family} {_help(family)}", f"# TYPE {family} {kind}"]
        lines += [f"{name} {_number(value)}" for name, value in samples]
    return "\n".join(lines) + "\n"


def _help(family: str) -> str:
    """Returns the family's name in words: fleetpulse_rows_total -> 'Rows, since the start.'"""
    words = family.removeprefix("fleetpulse_").removesuffix("_total").replace("_", " ")
    since = ", since the start." if family.endswith("_total") else ", now."
    return words[:1].upper() + words[1:] + since


def _number(value: float) -> str:
    """Formats a sample: whole numbers without a point, infinities in Prometheus syntax."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


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
    return Response(render_metrics(get_context(request).backend.read_counters()), media_type=MEDIA_TYPE)


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
