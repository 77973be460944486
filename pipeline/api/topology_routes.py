"""Where an entity is and what runs on it, now or at an earlier time."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.models import Strict, Time
from pipeline.api.service import ApiContext, get_context, json_response, parse_time
from pipeline.model.records import iso
from pipeline.model.topology import kind_of
from pipeline.store.job_membership import Membership, find_memberships

topology_router = APIRouter(prefix="/api/v1")
Entity = Annotated[str, Query(min_length=3, max_length=300, pattern=r"^[^:]+:.+$", description="kind:name")]
At = Annotated[str | None, Query(alias="time", description="ISO 8601; now by default")]
MOST_RANKS = 10_000
"""Most ranks of an answer. Chosen: a rack has 72 GPUs, a leaf switch about as many; more are a table for SQL."""
_HOLDS_RANKS = frozenset({"gpu", "node", "rank", "stage", "job"})


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
        lambda cursor: find_memberships(cursor, list_places(service, entity), time, time, MOST_RANKS + 1)
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


def list_places(service: ApiContext, entity: str) -> list[str]:
    """The entity, if ranks run on or as it; the node or GPU of a part; the nodes and GPUs below a group.

    A group also counts the nodes of the parts below it: a leaf switch has ports below it.
    """
    if kind_of(entity) in _HOLDS_RANKS:
        return [entity]
    topology = service.topology_copy.get()
    inside = topology.ancestor_of_kind(entity, "gpu") or topology.ancestor_of_kind(entity, "node")
    if inside is not None:
        return [inside]
    below = topology.descendants(entity)
    nodes = {node for e in below if (node := topology.ancestor_of_kind(e, "node")) is not None}
    return [e for e in dict.fromkeys((*below, *sorted(nodes))) if kind_of(e) in _HOLDS_RANKS]


def describe_membership(row: Membership) -> dict[str, Any]:
    """A row of the answer, in the form of `RankAt`."""
    times = {"since": iso(row.since), "until": None if row.until is None else iso(row.until)}
    names = ("job", "rank", "stage", "entity", "node", "exact", "source", "simulated")
    return {**{name: getattr(row, name) for name in names}, **times}
