"""Search over names of entities, serial numbers and incidents, answered from memory.

The index is one text with a line per name: a search is a scan of that text, 10 ms per million names. It is made again
when entities came or went, at most every INDEX_FOR.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import duckdb
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.incident_list import load_incidents
from pipeline.api.models import Strict
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.model.records import SECOND, Incident
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology, kind_of

MAX_CHARACTERS = 300
"""Longest text to search for. Chosen: a name of a host has at most 253."""
MAX_RESULTS = 100
MAX_SCANNED = 20_000
"""Names that match and are ranked; the rest is counted. Chosen: ranking them takes 20 ms."""
INDEX_FOR = 10 * SECOND
"""Shortest life of an index (us). Chosen: as for the list of nodes."""
_KINDS = ("node", "job", "rack", "gpu", "leaf", "rail", "cdu", "loop", "pdu", "row", "spine", "port", "nic", "rank")
"""Kinds in the order in which equal matches are listed; all others come after."""
_SERIALS = ("serial", "product_serial", "board_serial", "chassis_serial", "uuid", "product_uuid", "hostname", "address")
"""Attributes of the inventory by which people look for a part."""


class Result(Strict):
    """One result. kind: `incident`, or that of the entity. match: the text that was found, a name or a serial number.
    text: summary of an incident, or what an entity is part of."""

    kind: str
    id: str
    match: str
    text: str
    state: str | None


class Results(Strict):
    """The best results first; total: how many there are."""

    query: str
    results: list[Result]
    total: int


@dataclass(frozen=True, slots=True)
class Index:
    """text: lines of lower case, in front of each a newline. starts: place of each line. entries: (entity, match)."""

    text: str
    starts: Sequence[int]
    entries: Sequence[tuple[str, str]]

    def find(self, wanted: str) -> Iterator[tuple[str, str]]:
        """Returns (entity, match) of each line with `wanted`, which is in lower case."""
        at = self.text.find(wanted)
        while at >= 0:
            line = bisect.bisect_right(self.starts, at) - 1
            yield self.entries[line]
            if line + 1 == len(self.starts):
                return
            at = self.text.find(wanted, self.starts[line + 1])


def make_index(entries: Iterable[tuple[str, str]]) -> Index:
    """Returns the index of (entity, match)."""
    found, lines, starts, at = list(entries), [], [], 0
    for _, match in found:
        line = "\n" + match.lower().replace("\n", " ")
        lines.append(line)
        starts.append(at)
        at += len(line)
    return Index("".join(lines), starts, found)


def read_entries(cursor: duckdb.DuckDBPyConnection, service: ApiContext) -> list[tuple[str, str]]:
    """Returns each entity of inventories, topology and telemetry with its name, and with each of its serial numbers."""
    known = dict.fromkeys(service.backend.topology.parents)
    for above in service.backend.topology.parents.values():
        known.update(dict.fromkeys(above))
    for device_class in CLASSES:
        known.update(dict.fromkeys(list(service.backend.devices.names(device_class))))
    entries = []
    gone = "SELECT 'node:' || node FROM decommissioned WHERE returned IS NULL"
    named = cursor.execute(f"SELECT entity, attributes FROM entity WHERE entity NOT IN ({gone})").fetchall()
    for entity, attributes in named:
        known[entity] = None
        if attributes != "{}":
            about = json.loads(attributes)
            entries += [(entity, str(about[name])) for name in _SERIALS if about.get(name)]
    return [*((entity, entity.partition(":")[2]) for entity in known), *entries]


def rank_match(match: str, entity: str, wanted: str) -> tuple[int, int, int, str]:
    """Returns the sort key of a match: the whole name first, then its beginning; then the kind, and short names."""
    low, kind = match.lower(), kind_of(entity)
    place = 0 if low == wanted else 1 if low.startswith(wanted) else 2
    return place, _KINDS.index(kind) if kind in _KINDS else len(_KINDS), len(match), match


def find_entities(index: Index, topology: Topology, wanted: str, most: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the best entities by name or serial number, and how many there are. `gpu:n1` searches one kind."""
    kind, colon, name = wanted.partition(":")
    of_kind = bool(colon) and kind.isidentifier()
    found: dict[str, str] = {}
    total = 0
    for entity, match in index.find(name if of_kind else wanted):
        if of_kind and kind_of(entity) != kind:
            continue
        total += entity not in found
        if total <= MAX_SCANNED:
            found.setdefault(entity, match)
    key = name if of_kind else wanted
    best = sorted(found.items(), key=lambda pair: rank_match(pair[1], pair[0], key))[:most]
    return [
        {
            "kind": kind_of(entity),
            "id": entity,
            "match": entity if match == entity.partition(":")[2] else match,
            "text": ", ".join(topology.parents.get(entity, ())[:3]),
            "state": None,
        }
        for entity, match in best
    ], total


def find_incidents(incidents: Iterable[Incident], wanted: str) -> list[dict[str, Any]]:
    """Returns incidents with all words in id, title, cause or detector; unresolved ones first, then the newest."""
    words = wanted.split()
    found = [i for i in incidents if all(word in _text_of(i) for word in words)]
    found.sort(key=lambda i: (i.resolved is not None, -i.opened, i.id))
    return [{"kind": "incident", "id": i.id, "match": i.id, "text": i.summary, "state": i.state} for i in found]


def _text_of(incident: Incident) -> str:
    return f"{incident.id} {incident.summary} {incident.cause} {incident.detector}".lower()


search_router = APIRouter(prefix="/api/v1")
Text = Annotated[str, Query(min_length=1, max_length=MAX_CHARACTERS, description="part of a name or serial number")]


@search_router.get("/search", response_model=Results)
def search(request: Request, q: Text, limit: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = 20) -> Response:
    """Nodes, racks, jobs and all other entities by name or serial number, and incidents."""
    service, wanted = get_context(request), q.strip().lower()
    if not wanted:
        return json_response({"query": q, "results": [], "total": 0})
    topology = service.topology_copy.get()
    entities, total = find_entities(_get_index(service), topology, wanted, limit)
    incidents = find_incidents(load_incidents(service).rows, wanted)
    shown = _mix(entities, incidents, limit, wanted)
    return json_response({"query": q, "results": shown, "total": total + len(incidents)})


def _mix(
    entities: list[dict[str, Any]], incidents: list[dict[str, Any]], limit: int, wanted: str
) -> list[dict[str, Any]]:
    """Returns an incident of that id first, then entities, then incidents: at most a third of the places, if both
    have many."""
    exact = [row for row in incidents if row["id"].lower() == wanted]
    others = [row for row in incidents if row["id"].lower() != wanted]
    room = max(limit // 3, limit - len(entities) - len(exact))
    tail = others[:room]
    return [*exact, *entities[: max(0, limit - len(exact) - len(tail))], *tail][:limit]


def _get_index(service: ApiContext) -> Index:
    """Returns the index of now, at most INDEX_FOR old if entities came or went."""
    devices = service.backend.devices
    state = (service.topology_copy.get(), sum(len(devices.names(c)) for c in CLASSES), service.now() // INDEX_FOR)

    def make() -> Index:
        with service.cursor() as cursor:
            return make_index(read_entries(cursor, service))

    return service.remember("search", state, make)
