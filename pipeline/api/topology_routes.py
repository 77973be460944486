"""Where an entity is and what runs on it, now or at an earlier time."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.models import Strict, Time
from pipeline.api.service import get_context, json_response, parse_time
from pipeline.api.topology_reads import MOST_NAMED, PORT_COLUMNS, describe_links, describe_topology, list_places
from pipeline.model.records import iso
from pipeline.store.job_membership import Membership, find_memberships

topology_router = APIRouter(prefix="/api/v1")
Entity = Annotated[str, Query(min_length=3, max_length=300, pattern=r"^[^:]+:.+$", description="kind:name")]
At = Annotated[str | None, Query(alias="time", description="ISO 8601; now by default")]
MOST_RANKS = 10_000
"""Most ranks of an answer. Chosen: a rack has 72 GPUs, a leaf switch about as many; more are a table for SQL."""


class ParentAt(Strict):
    """A parent at the asked time. source: `agents`, or a source of [topology]. since: null: before it was recorded."""

    entity: str
    source: str
    since: Time | None
    until: Time | None


class ChildrenAt(Strict):
    """The children of one kind: how many, and the names of the first."""

    kind: str
    count: int
    entities: list[str]


class PeersAt(Strict):
    """How many others of the same kind a parent has."""

    parent: str
    count: int


class TopologyAt(Strict):
    """Where an entity is at a time. above: all ancestors, nearest first. known: whether anything names it."""

    entity: str
    time: Time
    known: bool
    parents: list[ParentAt]
    above: list[str]
    children: list[ChildrenAt]
    peers: list[PeersAt]
    attributes: dict[str, Any]


class LinkEnd(Strict):
    """One end of a cable. state: `up`, `down`, or null if it is not monitored; speed in Mbit/s; module: its optics."""

    port: str
    device: str | None
    state: str | None
    speed: float | None
    last_seen: Time | None
    module: dict[str, str]


class LinkAt(Strict):
    """A cable. source: what says that the ends belong together. facts: of the cable, such as label or serial."""

    near: LinkEnd
    far: LinkEnd | None
    source: str | None
    facts: dict[str, str]


class LinksAt(Strict):
    """The cables of a port, or of all ports of a node or switch."""

    entity: str
    links: list[LinkAt]
    truncated: bool


class RankAt(Strict):
    """A rank on a device. entity: its GPU; its node if the GPU is not known (`exact` false). until: null: it runs."""

    job: str
    rank: str
    stage: str | None
    entity: str
    node: str
    since: Time
    until: Time | None
    exact: bool
    source: str
    simulated: bool


class JobsAt(Strict):
    """The jobs and ranks on an entity, and on all below it, at a time. truncated: there are more ranks."""

    entity: str
    time: Time
    jobs: list[str]
    ranks: list[RankAt]
    truncated: bool


@topology_router.get("/jobs/at", response_model=JobsAt)
def jobs_at(request: Request, entity: Entity, at: At = None) -> Response:
    """The jobs and ranks on an entity at a time: a GPU, a node, or a group such as a rack or leaf switch."""
    service = get_context(request)
    time = service.now() if at is None else parse_time("time", at)
    found = service.reads.run(
        lambda cursor: find_memberships(
            cursor,
            list_places(service.topology_copy.get(), cursor, entity, time, service.now()),
            time,
            time,
            MOST_RANKS + 1,
        )
    )
    return json_response(
        {
            "entity": entity,
            "time": iso(time),
            "jobs": sorted({row.job for row in found}),
            "ranks": [describe_membership(row) for row in found[:MOST_RANKS]],
            "truncated": len(found) > MOST_RANKS,
        }
    )


def describe_membership(row: Membership) -> dict[str, Any]:
    """A row of the answer, in the form of `RankAt`."""
    times = {"since": iso(row.since), "until": None if row.until is None else iso(row.until)}
    names = ("job", "rank", "stage", "entity", "node", "exact", "source", "simulated")
    return {**{name: getattr(row, name) for name in names}, **times}


@topology_router.get("/topology", response_model=TopologyAt)
def topology_at(request: Request, entity: Entity, at: At = None) -> Response:
    """The groups and suppliers of an entity at a time, its members, and the source of each fact with its start."""
    service = get_context(request)
    time = service.now() if at is None else parse_time("time", at)
    return json_response(service.reads.run(lambda cursor: describe_topology(cursor, entity, time)))


@topology_router.get("/links", response_model=LinksAt)
def links_of(request: Request, entity: Entity) -> Response:
    """Both ends of the cables of a port, a node or a switch."""
    service = get_context(request)
    now = service.now()
    nics = service.backend.read_current("nic", PORT_COLUMNS)
    found = service.reads.run(lambda cursor: describe_links(cursor, entity, now, nics))
    return json_response({"entity": entity, "links": found[:MOST_NAMED], "truncated": len(found) > MOST_NAMED})
