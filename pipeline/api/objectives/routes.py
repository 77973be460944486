"""Objectives, losses by cause, nodes that fail (`GET /api/v1/objectives`), and the RMA packet (`/api/v1/rma`)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.fleet import find_node
from pipeline.api.service import ApiContext, get_context, json_response, parse_time
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, from_iso
from pipeline.objectives.evaluated import describe_evaluated
from pipeline.objectives.rma import collect_packet, find_subject
from pipeline.objectives.rma_files import make_zip, name_file
from pipeline.objectives.summary import Fleet, summarize

DAY = 86_400 * SECOND
ROUND = 60 * SECOND
"""An answer is the same for a minute: what it is of is recorded once a minute."""

objectives_router = APIRouter(prefix="/api/v1")


@objectives_router.get("/objectives")
def read_objectives(
    request: Request, days: Annotated[float, Query(gt=0, le=90)] = 7.0, to: str | None = None
) -> Response:
    """Objectives with error budgets and burn rates; lost GPU-hours by cause, tenant and job, and energy, of the last
    `days` until `to` (default: now), and which part of it is `evaluated`; time to failure, nodes by frailty, burn-ins
    and spares of all history."""
    service = get_context(request)
    now = service.now() // ROUND * ROUND
    end = now if to is None else parse_time("to", to)
    if end > service.now():
        raise UsageError(f"to = {to!r}: is in the future")
    start = end - round(days * DAY)

    answers = service.remember("objectives", now, dict[tuple[int, int], dict[str, Any]])  # viewers choose other days
    if (start, end) not in answers:
        with service.cursor() as cursor:
            answers[start, end] = summarize(cursor, service.config, read_fleet(service), start, end)
    judged, unready = service.backend.read_health()["watermark"], service.backend.list_unready_reasons()
    known = from_iso(answers[start, end]["since"])
    return json_response({**answers[start, end], "evaluated": describe_evaluated(start, end, known, judged, unready)})


def read_fleet(service: ApiContext) -> Fleet:
    """Returns the nodes of the fleet, and whether all are simulated."""
    topology, devices = service.topology_copy.get(), service.backend.devices
    with service.cursor() as cursor:
        found = cursor.execute("SELECT bool_and(simulated) FROM device WHERE class = 'node'").fetchone()
    nodes = [entity.partition(":")[2] for entity in devices.names("node")]
    return Fleet(nodes, lambda entity: find_node(topology, entity), bool(found and found[0]))


@objectives_router.get("/rma")
def make_rma(
    request: Request,
    subject: Annotated[str, Query(min_length=1, max_length=253)],
    hours: Annotated[float, Query(gt=0, le=24 * 30)] = 24.0,
) -> Response:
    """A zip for a return to the vendor, of an incident, a device (`gpu:n042.3`) or a node: a summary of one page,
    serial numbers, slots, firmware, XIDs, counters before and after the onset, peers, canaries and diagnostics."""
    service = get_context(request)
    topology = service.topology_copy.get()
    with service.cursor() as cursor:
        try:
            found = find_subject(cursor, topology, subject, service.now())
        except KeyError as error:
            raise HTTPException(404, f"{subject!r} is no incident, device or node that is known") from error
        packet = collect_packet(cursor, topology, found, hours, service.now(), service.config.site.name)
    headers = {"Content-Disposition": f'attachment; filename="{name_file(packet)}"'}
    return Response(make_zip(packet), media_type="application/zip", headers=headers)
