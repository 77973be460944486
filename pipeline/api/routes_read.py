"""Routes that read: entities, the fleet, series, timelines, the catalogue, and SQL.

Sends a query's answer in pieces and within a deadline; the query's slot is free only when it is sent.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.api import models
from pipeline.api.fleet import build_fleet
from pipeline.api.history import Peers, read_series, read_timeline
from pipeline.api.query import QueryAnswer
from pipeline.api.result_formats import ARROW, TRUNCATED_HEADER, table_rows
from pipeline.api.service import get_context, json_response
from pipeline.model.signals import CATALOGUE

SEND_SECONDS = 30.0
"""Within which a caller takes an answer (chosen: 64 MiB at 2.2 MB/s; who takes longer holds the memory of others)."""
PIECE = 256 * 1024
"""Bytes given to the connection at once (chosen: it waits between pieces for a caller who reads slowly)."""


class QueryResponse(Response):
    """One answer. What a caller does not take in time is dropped with the connection."""

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


router = APIRouter(prefix="/api/v1")
Entity = Annotated[str, Query(min_length=3, max_length=200, pattern=r"^[^:]+:.+$", description="kind:name")]
From = Annotated[str | None, Query(alias="from", description="ISO 8601; an hour before `to` by default")]
To = Annotated[str | None, Query(description="ISO 8601; now by default")]

# a job has no telemetry of its own: what runs in it has, or at least the node that names that in its inventory
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


@router.get("/entities", response_model=models.Entities)
def entities(request: Request, kind: str | None = None) -> Response:
    """Everything known, or all of one kind."""
    with get_context(request).cursor() as cursor:
        found = cursor.sql(
            _ENTITIES,
            params=[kind],
        ).to_arrow_table()
    return json_response({"entities": table_rows(found)})


@router.get("/fleet", response_model=models.Fleet)
def fleet_now(request: Request) -> Response:
    """One state per node, and where the pipeline stands."""
    service = get_context(request)
    health, unready = service.backend.read_health(), service.backend.list_unready_reasons()
    with service.cursor() as cursor:
        return json_response(build_fleet(cursor, service.topology_copy.get(), health, unready, service.now()))


@router.get("/series", response_model=models.Series)
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


@router.get("/timeline", response_model=models.Timeline)
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


@router.get("/signals", response_model=models.Signals)
def signals() -> Response:
    """The signal catalogue."""
    names = ("name", "unit", "help", "kind", "device_class", "type", "source", "column", "states")
    return json_response({"signals": [{name: getattr(s, name) for name in names} for s in CATALOGUE.values()]})


@router.post(
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
