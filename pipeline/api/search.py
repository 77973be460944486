"""Search over names of entities, serial numbers and incidents, answered from memory.

The index is one text with a line per name, sorted: a search is a scan of that text, 10 ms per million names, and a
name that is complete is found by bisection. It is made again when entities came or went, at most every INDEX_FOR.
Names as pages show them (`GPU 3 of n042`) and whole titles of incidents are searched for too, in any case.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import duckdb
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.incident_list import StoredIncidents, load_incidents
from pipeline.api.models import Strict
from pipeline.api.service import ApiContext, get_context, json_response
from pipeline.incidents.silences import alert_name
from pipeline.model.entity_names import entity_name, parse_entity_name, split_part
from pipeline.model.records import SECOND, Incident
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology, kind_of

MAX_CHARACTERS = 300
"""Longest text to search for. Chosen: a name of a host has at most 253."""
MAX_RESULTS = 100
MAX_SCANNED = 20_000
"""Names that match and are ranked; the rest is counted. Chosen: ranking them takes 20 ms."""
MAX_HEADS = 3
"""Beginnings of a title that are tried as the name of a device. Chosen: a name seldom has a colon, never three."""
_MARKS = re.compile(r"^(?:\[[^\[\]]{1,20}\] ?){1,4}")
"""`[simulated] ` and the like, which messages have in front of a title."""
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")
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
    """text: case-folded lines, sorted, in front of each a newline. starts: place of each line. entries: (entity, match)
    of each line."""

    text: str
    starts: Sequence[int]
    entries: Sequence[tuple[str, str]]

    def find(self, wanted: str) -> Iterator[tuple[str, str]]:
        """Returns (entity, match) of each line with `wanted`, which is case-folded."""
        at = self.text.find(wanted)
        while at >= 0:
            line = bisect.bisect_right(self.starts, at) - 1
            yield self.entries[line]
            if line + 1 == len(self.starts):
                return
            at = self.text.find(wanted, self.starts[line + 1])

    def find_exact(self, wanted: str) -> Iterator[tuple[str, str]]:
        """Returns (entity, match) of each line that is `wanted`, which is case-folded."""
        line = bisect.bisect_left(range(len(self.starts)), wanted, key=self._line)
        while line < len(self.starts) and self._line(line) == wanted:
            yield self.entries[line]
            line += 1

    def _line(self, number: int) -> str:
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[number] + 1 : end]


def make_index(entries: Iterable[tuple[str, str]]) -> Index:
    """Returns the index of (entity, match)."""
    folded = sorted(((match.casefold().replace("\n", " "), entity, match) for entity, match in entries))
    starts, at = [], 0
    for line, _, _ in folded:
        starts.append(at)
        at += len(line) + 1
    text = "".join(f"\n{line}" for line, _, _ in folded)
    return Index(text, starts, [(entity, match) for _, entity, match in folded])


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
    low, kind = match.casefold(), kind_of(entity)
    place = 0 if low == wanted else 1 if low.startswith(wanted) else 2
    return place, _KINDS.index(kind) if kind in _KINDS else len(_KINDS), len(match), match


def find_entities(index: Index, topology: Topology, wanted: str, most: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the best entities by name or serial number, and how many there are. `gpu:n1` searches one kind, and so
    does a name as pages show it: `GPU 3 of n1`, or its beginning. Entities of the whole name are first."""
    kind, colon, name = wanted.partition(":")
    of_kind = bool(colon) and kind.isidentifier()
    key = name if of_kind else wanted
    exact = dict(islice(find_exact(index, wanted), MAX_SCANNED))
    found, total = dict(exact), len(exact)
    for entity, match in index.find(key):
        if of_kind and kind_of(entity) != kind:
            continue
        total += entity not in found
        if total <= MAX_SCANNED:
            found.setdefault(entity, match)
    if not found:
        found, total = find_partial(index, wanted)
    ranked = sorted(found.items(), key=lambda pair: (pair[0] not in exact, rank_match(pair[1], pair[0], key)))
    return [
        {
            "kind": kind_of(entity),
            "id": entity,
            "match": entity if match == entity.partition(":")[2] else match,
            "text": ", ".join(topology.parents.get(entity, ())[:3]),
            "state": None,
        }
        for entity, match in ranked[:most]
    ], total


def find_exact(index: Index, wanted: str) -> Iterator[tuple[str, str]]:
    """Yields (entity, match) of names and serial numbers that are the text, of entities that pages name so, and of
    those that a title begins with."""
    yield from index.find_exact(wanted)
    for text in (wanted, *list_heads(wanted)):
        for candidate in parse_entity_name(text):
            kind, _, name = candidate.partition(":")
            yield from (row for row in index.find_exact(name) if row[0].casefold() == candidate and kind)


def find_partial(index: Index, wanted: str) -> tuple[dict[str, str], int]:
    """Returns entity -> match by the beginning of a name as pages show it, `GPU 3 of n0`, and how many there are."""
    kind, part, owner = split_part(wanted.removesuffix(" of"))
    found: dict[str, str] = {}
    numbered: dict[str, str] = {}  # `GPU 3`: the third of a node, not those of a node with a 3 in its name
    total = 0
    for entity, match in index.find(owner) if kind and owner else ():
        own = match.casefold().partition(".")[2]
        if kind_of(entity) != kind or (part and own != part):
            continue
        total += entity not in found
        if total <= MAX_SCANNED:
            found.setdefault(entity, match)
            if not part and own.startswith(owner):
                numbered[entity] = match
    return (numbered, len(numbered)) if numbered else (found, total)


def list_heads(title: str) -> list[str]:
    """Returns what stands before each `: ` of a title, the first MAX_HEADS: the name of a device may have one too."""
    bare = _MARKS.sub("", title)
    ends = islice(re.finditer(": ", bare), MAX_HEADS)
    return [bare[: end.start()] for end in ends]


def fold_text(text: str) -> str:
    """Returns a title or what a person typed without case, marks, separators of thousands and ellipsis."""
    return _THOUSANDS.sub("", _MARKS.sub("", text.casefold())).rstrip("….").strip()


def find_incidents(stored: StoredIncidents, texts: Sequence[str], wanted: str) -> list[dict[str, Any]]:
    """Returns incidents with all words in `texts`: id, title, cause, detector, alert; of the whole title first, then
    unresolved ones, then the newest. Without any, those of the device that a title begins with: its numbers change."""
    folded = fold_text(wanted)
    for tried in (folded, *list_heads(folded)):
        words = [bare for word in tried.split() if (bare := word.strip(".,;:…"))]
        found = [i for i, text in zip(stored.rows, texts, strict=True) if words and all(w in text for w in words)]
        if found:
            break
    found.sort(key=lambda i: (not is_titled(i, folded), i.resolved is not None, -i.opened, i.id))
    return [{"kind": "incident", "id": i.id, "match": i.id, "text": i.summary, "state": i.state} for i in found]


def is_titled(incident: Incident, folded: str) -> bool:
    """Returns whether a folded text is the id, or the title or more than half of its beginning."""
    title = fold_text(incident.summary)
    return folded == incident.id.casefold() or (title.startswith(folded) and 2 * len(folded) > len(title))


def write_texts(incidents: Iterable[Incident]) -> list[str]:
    """Returns of each incident the text in which words are found, with names of its entities as they are shown, and of
    its alert."""
    return [
        fold_text(
            f"{i.id} {i.summary} {i.cause} {i.detector} {alert_name(i.detector)} {entity_name(i.cause)} "
            f"{entity_name(i.entity)}"
        )
        for i in incidents
    ]


search_router = APIRouter(prefix="/api/v1")
Text = Annotated[str, Query(min_length=1, max_length=MAX_CHARACTERS, description="part of a name or serial number")]


@search_router.get("/search", response_model=Results)
def search(request: Request, q: Text, limit: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = 20) -> Response:
    """Nodes, racks, jobs and all other entities by name or serial number, and incidents."""
    service, wanted = get_context(request), q.strip().casefold()
    if not wanted:
        return json_response({"query": q, "results": [], "total": 0})
    topology = service.topology_copy.get()
    entities, total = find_entities(_get_index(service), topology, wanted, limit)
    stored = load_incidents(service)
    texts = service.remember("incident texts", stored, lambda: write_texts(stored.rows))
    incidents = find_incidents(stored, texts, wanted)
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
