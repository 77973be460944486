"""Routes of incidents: read them, and write the notes that are no acts.

How far an incident's trouble can reach: everything below its cause and members, and the jobs that run there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api import models
from pipeline.api.guard import USER
from pipeline.api.service import get_context, json_response
from pipeline.incidents import ledger
from pipeline.model.records import State, iso
from pipeline.model.topology import Topology, kind_of

_PARTS = frozenset({"nvlink", "neuroncore", "sensor", "dimm", "disk", "filesystem", "service", "agent", "collector"})
"""Kinds that no work is placed on: hundreds of them lie below a node, and would hide how many GPUs do."""


@dataclass(frozen=True, slots=True)
class BlastRadius:
    """entities: kind -> how many are in trouble or below it; jobs: those with a rank among them, in order of name.

    Parts of a node that no work is placed on count only where they are in trouble themselves.
    """

    entities: dict[str, int]
    jobs: tuple[str, ...]


def compute_blast_radius(cause: str, members: Iterable[str], topology: Topology) -> BlastRadius:
    """Costs one visit of each entity below the cause and the members."""
    roots = {cause, *members}
    reached = roots | {e for e in topology.descendants(*roots) if kind_of(e) not in _PARTS}
    jobs = {job for e in reached if (job := topology.ancestor_of_kind(e, "job")) is not None}
    return BlastRadius(dict(sorted(Counter(map(kind_of, reached)).items())), tuple(sorted(jobs)))


router = APIRouter(prefix="/api/v1/incidents")
Write = Callable[[str, str, str], Mapping[str, Any]]


@router.get("", response_model=models.Incidents)
def incidents(request: Request, state: State | None = None) -> Response:
    """All incidents, resolved ones too, or those in one state; newest first. While `stalled`, nothing newer than
    `judged` is known."""
    service = get_context(request)
    health = service.backend.read_health()
    judged = None if health["watermark"] is None else iso(health["watermark"])
    known = {"judged": judged, "stalled": health["stalled"], "unready": service.backend.list_unready_reasons()}
    with service.cursor() as cursor:
        return json_response({"incidents": ledger.list_incidents(cursor, state), **known})


@router.get("/{incident}", response_model=models.IncidentDetail)
def incident_detail(request: Request, incident: str) -> Response:
    """One incident with its findings, history, notifications and blast radius."""
    service = get_context(request)
    with service.cursor() as cursor:
        try:
            found = ledger.read_incident(cursor, incident)
        except KeyError as error:
            raise _unknown(incident) from error
    topology = service.topology_copy.get()
    blast = compute_blast_radius(found["cause"], found["members"], topology)
    hurt = {"entities": blast.entities, "jobs": list(blast.jobs)}
    return json_response({**found, "blast_radius": hurt, "above": list(topology.ancestors(found["entity"]))})


@router.post("/{incident}/acknowledge", response_model=models.Incident)
def acknowledge(request: Request, incident: str, note: models.Note) -> Response:
    """Somebody has seen it."""
    return _write(request, get_context(request).backend.acknowledge, incident, note)


@router.post("/{incident}/comment", response_model=models.Incident)
def comment(request: Request, incident: str, note: models.Note) -> Response:
    """Somebody says something; the state stays."""
    if not note.comment.strip():
        raise HTTPException(400, "body.comment: is empty; wanted a text")
    return _write(request, get_context(request).backend.comment, incident, note)


@router.post("/{incident}/resolve", response_model=models.Incident)
def resolve(request: Request, incident: str, note: models.Verdict) -> Response:
    """Somebody holds that it is over; with `not_a_fault`, that nothing was wrong: this is normal there."""
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
