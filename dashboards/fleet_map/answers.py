"""Answers of the API for the fleet map and for "what do these share?", as types."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dashboards.answers import NODE_STATES, Fleet, parse_fleet, require_list

By = Literal["rack", "rail", "leaf", "loop", "job"]
Colour = Literal["state", "temperature", "power", "ber", "step"]
GROUPINGS: tuple[By, ...] = get_args(By)
COLOURS: tuple[Colour, ...] = get_args(Colour)
AFFECTED, SIMULATED, DRAINED = 8, 16, 32
"""Bits of a look: only affected by a fault elsewhere; simulated; drained, held by an act."""
FILTERS = ("critical", "degraded", "watch", "affected", "drained", "no_data", "ok")
"""States of the map, worst first: as in input.js."""


@dataclass(frozen=True, slots=True)
class FleetMap:
    """The map at one moment; arrays are base64 of one byte per cell. head: state of the pipeline, without nodes.

    nodes: on this map.  fleet: in the whole fleet.  counts: nodes per state, `affected`, and `drained`, which have a
    state too.  changes: of the counts within an hour, where they changed and the count of then is known.
    """

    head: Fleet
    by: str
    colour: str
    within: str
    layout: str
    nodes: int
    fleet: int
    simulated: int
    counts: Mapping[str, int]
    changes: Mapping[str, int]
    causes: tuple[str, ...]
    looks: str
    ages: str
    levels: str | None
    scale: Mapping[str, Any] | None
    missing: int
    incident_sets: tuple[tuple[str, ...], ...]
    incident_of: str

    def look_array(self) -> NDArray[np.uint8]:
        """Returns the looks of the cells."""
        return np.frombuffer(base64.b64decode(self.looks), np.uint8)


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """Names of the cells. groups: (entity, number of cells) in order; an empty entity: nodes without one."""

    layout: str
    groups: tuple[tuple[str, int], ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A value that selected nodes have, and how many others have it. p: corrected for the values compared."""

    attribute: str
    value: str
    inside: int
    outside: int
    p: float
    separates: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What separates `selected` nodes from the `others`, best evidence first. unknown: entities without any node."""

    selected: int
    others: int
    compared: int
    threshold: float
    unknown: tuple[str, ...]
    shared: tuple[SharedValue, ...]


def parse_map(table: Mapping[str, Any]) -> FleetMap:
    """Parses GET /api/v1/fleet/map."""
    scale = table["scale"]
    return FleetMap(
        head=replace(parse_fleet({**table, "nodes": []}), total=int(table["nodes"])),
        by=str(table["by"]),
        colour=str(table["colour"]),
        within=str(table.get("within") or ""),
        layout=str(table["layout"]),
        nodes=int(table["nodes"]),
        fleet=int(table["fleet"]),
        simulated=int(table["simulated"]),
        counts={name: int(table["counts"].get(name, 0)) for name in (*NODE_STATES, "affected", "drained")},
        changes=_changes(table),
        causes=tuple(map(str, require_list(table["causes"]))),
        looks=str(table["looks"]),
        ages=str(table["ages"]),
        levels=None if table["levels"] is None else str(table["levels"]),
        scale=None if scale is None else dict(scale),
        missing=int(table["missing"]),
        incident_sets=tuple(tuple(map(str, ids)) for ids in require_list(table["incident_sets"])),
        incident_of=str(table["incident_of"]),
    )


def _changes(table: Mapping[str, Any]) -> dict[str, int]:
    """Returns state -> how many nodes more it has than an hour before, without those that are as they were."""
    before = (table.get("before") or {}).get("counts") or {}
    found = {str(name): int(table["counts"].get(name, 0)) - int(number) for name, number in before.items()}
    return {name: change for name, change in found.items() if change}


def parse_layout(table: Mapping[str, Any]) -> FleetLayout:
    """Parses GET /api/v1/fleet/layout."""
    groups = tuple((str(entity), int(count)) for entity, count in require_list(table["groups"]))
    return FleetLayout(str(table["layout"]), groups, tuple(map(str, require_list(table["names"]))))


def parse_share(table: Mapping[str, Any]) -> Share:
    """Parses POST /api/v1/share."""
    return Share(
        selected=int(table["selected"]),
        others=int(table["others"]),
        compared=int(table["compared"]),
        threshold=float(table["threshold"]),
        unknown=tuple(map(str, require_list(table["unknown"]))),
        shared=tuple(_shared(row) for row in require_list(table["shared"])),
    )


def _shared(row: Mapping[str, Any]) -> SharedValue:
    return SharedValue(
        attribute=str(row["attribute"]),
        value=str(row["value"]),
        inside=int(row["inside"]),
        outside=int(row["outside"]),
        p=float(row["p_corrected"]),
        separates=bool(row["separates"]),
    )


def selected_entities(layout: FleetLayout, ranges: Sequence[Sequence[int]]) -> list[str]:
    """Returns the selected cells as entities: a group of which all cells are selected as itself."""
    chosen = np.zeros(len(layout.names), bool)
    for first, last in ranges:
        chosen[max(0, int(first)) : int(last) + 1] = True
    found: dict[str, None] = {}
    start = 0
    for entity, count in layout.groups:
        own = np.flatnonzero(chosen[start : start + count])
        if entity and len(own) == count > 1:
            found[entity] = None
        else:
            found |= dict.fromkeys(layout.names[start + i] for i in own.tolist())
        start += count
    return list(found)
