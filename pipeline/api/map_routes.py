"""The routes of the fleet page: the map as bytes, its layout, and what a selection of nodes has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pipeline.acts.ledger import load_acts
from pipeline.api.fleet_groups import By, find_within
from pipeline.api.fleet_map import (
    Colour,
    ages_of,
    count_states,
    encode_bytes,
    encode_incidents,
    find_looks,
    find_newest,
    list_causes,
)
from pipeline.api.map_reader import MapReader
from pipeline.api.models import Strict, Time
from pipeline.api.service import get_context, json_response
from pipeline.api.share import compare_shares
from pipeline.model.errors import UsageError
from pipeline.model.records import iso

MAX_SELECTED = 10_000
"""Entities in one question (chosen: what fits a body of 256 KiB). A group counts as one."""


class MapScale(Strict):
    """The ends of the colours: level 0 is `low`, level 250 is `high`. diverging: the middle is normal."""

    label: str
    unit: str
    low: float
    high: float
    diverging: bool
    logarithmic: bool


class CountsBefore(Strict):
    """Nodes of now by their states an hour before. Without `no_data` if nothing is stored of that time."""

    time: Time
    counts: dict[str, int]


class FleetMap(Strict):
    """The map as bytes (base64), one per cell in the order of the layout.

    looks: state in bits 0-2 (ok, watch, degraded, critical, no_data), 8: only affected by a fault elsewhere,
    16: simulated, 32: drained, held by an act.   levels: 0-250 from `low` to `high` of the scale, 255: no value.
    ages: 0: below 30 s, to 59: seconds, 60-119: minutes + 59, 120-254: hours + 119, 255: never.   incident_of: number
    of the set from 1, 0: none, 255: a set that is left out.   counts: nodes per state, `affected`, and `drained`, which
    have a state too.   causes: of all unresolved incidents.
    """

    as_of: Time
    watermark: Time | None
    backlog: bool
    lag_s: float | None
    newest: Time | None
    unready: list[str]
    stalled: bool
    sources: dict[str, int]
    by: By
    colour: Colour
    within: str | None
    layout: str
    nodes: int
    fleet: int
    simulated: int
    counts: dict[str, int]
    before: CountsBefore
    causes: list[str]
    looks: str
    ages: str
    levels: str | None
    scale: MapScale | None
    missing: int
    incident_sets: list[list[str]]
    incident_of: str


class FleetLayout(Strict):
    """Names of the cells. groups: (entity, number of cells) in order; an empty entity: nodes without one."""

    layout: str
    by: By
    within: str | None
    groups: list[tuple[str, int]]
    names: list[str]


Name = Annotated[str, Field(min_length=3, max_length=512)]


class ShareQuestion(Strict):
    """Nodes to compare with all others. entities: nodes, devices, or groups with all their nodes.   incident: those
    that it reaches.   within: compare only with nodes of this entity."""

    entities: list[Name] = Field([], max_length=MAX_SELECTED)
    incident: str | None = Field(None, max_length=200)
    within: Name | None = None


class SharedValue(Strict):
    """A value that selected nodes have. outside: others that have it.   p_corrected: p times the values compared."""

    attribute: str
    value: str
    inside: int
    outside: int
    p: float
    p_corrected: float
    separates: bool


class Share(Strict):
    """What separates the selection from the others, best evidence first, and the nearest values that do not."""

    as_of: Time
    selected: int
    others: int
    compared: int
    threshold: float
    statistic: Literal["hypergeometric tail, Bonferroni"]
    unknown: list[str]
    shared: list[SharedValue]


map_router = APIRouter(prefix="/api/v1")
Within = Annotated[str | None, Query(min_length=3, max_length=512, pattern=r"^[^:]+:.+$", description="kind:name")]


@map_router.get("/fleet/map", response_model=FleetMap)
def fleet_map(request: Request, by: By = "rack", colour: Colour = "state", within: Within = None) -> Response:
    """State, age and one value of every node as bytes; from memory, except acts and rates of link errors."""
    service = get_context(request)
    backend, now, topology = service.backend, service.now(), service.topology_copy.get()
    health, unready = backend.read_health(), backend.list_unready_reasons()
    view = MapReader(service, topology, now)
    layout = view.layout(by, within)
    incidents, roles = view.roles()
    seen = find_newest(backend.devices, view.places, view.index, backend.read_current)
    with service.cursor() as cursor:  # not from the board, which waits for a commit of the store
        drained = {target for act in load_acts(cursor, only_open=True) for target in act.held}
    looks = find_looks(view.index, roles, seen, drained, now)
    levels, scale, missing = view.levels(colour, layout)
    return json_response(
        {
            "as_of": iso(now),
            "watermark": None if health["watermark"] is None else iso(health["watermark"]),
            "backlog": health["backlog"],
            "lag_s": health["lag_s"],
            "newest": iso(int(seen.max())) if len(seen) and seen.max() >= 0 else None,
            "unready": unready,
            "stalled": health["stalled"],
            "sources": health["sources"],
            "by": by,
            "colour": colour,
            "within": within,
            "layout": layout.id,
            "nodes": int(layout.own.sum()),
            "fleet": len(view.index.nodes),
            "simulated": int(view.index.simulated[layout.own].sum()),
            "counts": count_states(looks[layout.own]),
            "before": view.counts_before(layout),
            "causes": list_causes(incidents),
            "looks": encode_bytes(looks[layout.nodes]),
            "ages": encode_bytes(ages_of(seen, now)[layout.nodes]),
            "levels": levels,
            "scale": scale,
            "missing": missing,
            **encode_incidents(view.index, layout, roles),
        }
    )


@map_router.get("/fleet/layout", response_model=FleetLayout)
def fleet_layout(request: Request, by: By = "rack", within: Within = None) -> Response:
    """Names and groups of the cells of the map; it changes with the topology only."""
    service = get_context(request)
    view = MapReader(service, service.topology_copy.get(), service.now())
    layout = view.layout(by, within)
    names = view.index.nodes
    return json_response(
        {
            "layout": layout.id,
            "by": by,
            "within": within,
            "groups": layout.groups,
            "names": [names[i] for i in layout.nodes.tolist()],
        }
    )


@map_router.post("/share", response_model=Share)
def share(request: Request, body: ShareQuestion) -> Response:
    """What do these nodes have in common that others have not?"""
    service = get_context(request)
    topology, now = service.topology_copy.get(), service.now()
    view = MapReader(service, topology, now)
    selected, unknown = _select(view, body.entities)
    if body.incident is not None:
        selected |= view.reached(body.incident)
    if not body.entities and body.incident is None:
        raise UsageError("entities, incident: both are missing; expected nodes, groups or an incident")
    universe = np.ones(len(view.index.nodes), bool)
    if body.within:
        universe = find_within(view.index, topology, view.senders(), body.within)
    found = compare_shares(view.attributes(), selected & universe, universe)
    statistic = {"statistic": "hypergeometric tail, Bonferroni", "unknown": unknown[:20]}
    return json_response({"as_of": iso(now), **statistic, **found})


def _select(view: MapReader, entities: Sequence[str]) -> tuple[NDArray[np.bool_], list[str]]:
    """Returns which nodes are, hold or are part of the entities, and the entities without any node."""
    selected, unknown = np.zeros(len(view.index.nodes), bool), []
    for entity in dict.fromkeys(entities):
        number = view.index.number.get(entity)
        if number is not None:
            selected[number] = True
            continue
        own = find_within(view.index, view.topology, view.senders(), entity)
        selected |= own
        if not own.any():
            unknown.append(entity)
    return selected, unknown
