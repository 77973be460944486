"""Reads of the topology at a time: parents with their sources, children by kind, cables with both ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import duckdb

from pipeline.model.records import iso
from pipeline.model.topology import WORK, Topology, kind_of
from pipeline.store.latest import CurrentValues
from pipeline.store.topology_lines import (
    Line,
    has_changed_since,
    list_ancestors,
    list_descendants,
    read_lines,
    read_links,
)

MOST_NAMED = 1_000
"""Most cables of an answer, and names of children. Chosen: a switch has up to 256 ports, a rack up to 72 GPUs."""
SHOWN = 100
"""Names of the children of a kind. Chosen: what a page shows; the view `topology` has all."""
PORT_COLUMNS = ("state", "speed")
_HOLDS_RANKS = frozenset({"gpu", "node", "rank", "stage", "job"})
_MODULE = ("module_vendor", "module_part", "module_serial", "module_type")
"""Attributes of a port that describe its optics (agents/collectors/nic/ethtool.py)."""


def list_places(topology: Topology, cursor: duckdb.DuckDBPyConnection, entity: str, time: int, now: int) -> list[str]:
    """The entity, if ranks run on or as it; the node or GPU of a part; the nodes and GPUs below a group, at a time.

    A group also counts the nodes of the parts below it: a leaf switch has ports below it. The present topology is read
    from memory, unless it changed after `time`.
    """
    if kind_of(entity) in _HOLDS_RANKS:
        return [entity]
    if time < now and has_changed_since(cursor, time):
        above = list_ancestors(cursor, entity, time)
        below = list_descendants(cursor, entity, time)
        lines = read_lines(cursor, [e for e in below if kind_of(e) not in _HOLDS_RANKS], time)
        nodes = {line.parent for line in lines if kind_of(line.parent) == "node"}
    else:
        above, below = list(topology.ancestors(entity)), list(topology.descendants(entity))
        nodes = {node for e in below if (node := topology.ancestor_of_kind(e, "node")) is not None}
    inside = next((e for kind in ("gpu", "node") for e in above if kind_of(e) == kind), None)
    if inside is not None:
        return [inside]
    return [e for e in dict.fromkeys((*below, *sorted(nodes))) if kind_of(e) in _HOLDS_RANKS]


def list_above(topology: Topology, cursor: duckdb.DuckDBPyConnection, entity: str, time: int) -> list[str]:
    """All ancestors of an entity at a time, nearest first: from memory, unless the topology changed after it."""
    if kind_of(entity) not in WORK and has_changed_since(cursor, time):
        return list_ancestors(cursor, entity, time)
    return list(topology.ancestors(entity))


def load_topology_at(
    topology: Topology, cursor: duckdb.DuckDBPyConnection, entities: Collection[str], time: int
) -> Topology:
    """Returns the topology above and below some entities as it was at a time; the present one if none of it changed.

    Ranks are those of the present: they are not kept by time.
    """
    if not has_changed_since(cursor, time):
        return topology
    lines: list[Line] = []
    for below in (True, False):
        known, level = set(entities), list(entities)
        while level:
            found = read_lines(cursor, level, time, below)
            lines += found
            reached = dict.fromkeys(line.entity if below else line.parent for line in found)
            level = [e for e in reached if e not in known]
            known.update(level)
        if below:
            entities = known  # devices below have other parents too
    parents: dict[str, list[str]] = {}
    for line in dict.fromkeys((line.entity, line.parent) for line in lines):
        parents.setdefault(line[0], []).append(line[1])
    for rank in topology.descendants(*entities):
        if kind_of(rank) in WORK:
            parents[rank] = list(topology.parents.get(rank, ()))
    return Topology(parents, topology.attributes)


def describe_topology(cursor: duckdb.DuckDBPyConnection, entity: str, time: int) -> dict[str, Any]:
    """The answer of GET /api/v1/topology."""
    parents, below = read_lines(cursor, [entity], time), read_lines(cursor, [entity], time, below=True)
    children = dict.fromkeys(line.entity for line in below)
    kinds = Counter(map(kind_of, children))
    attributes = cursor.execute("SELECT attributes FROM entity WHERE entity = ?", [entity]).fetchone()
    return {
        "entity": entity,
        "time": iso(time),
        "known": bool(parents or children or attributes),
        "parents": [_describe_parent(line) for line in parents],
        "above": list_ancestors(cursor, entity, time),
        "children": [
            {"kind": kind, "count": count, "entities": [c for c in sorted(children) if kind_of(c) == kind][:SHOWN]}
            for kind, count in sorted(kinds.items())
        ],
        "peers": _count_peers(cursor, entity, [line.parent for line in parents], time),
        "attributes": _parse_facts(attributes[0] if attributes else "{}"),
    }


def _describe_parent(line: Line) -> dict[str, Any]:
    times = {"since": line.since, "until": line.until}
    shown = {name: None if value is None else iso(value) for name, value in times.items()}
    return {"entity": line.parent, "source": line.source, **shown}


def _count_peers(
    cursor: duckdb.DuckDBPyConnection, entity: str, parents: Collection[str], time: int
) -> list[dict[str, Any]]:
    """How many others of its kind each parent has."""
    together = read_lines(cursor, parents, time, below=True)
    alike = {(x.parent, x.entity) for x in together if kind_of(x.entity) == kind_of(entity) and x.entity != entity}
    counts = Counter(parent for parent, _ in alike)
    return [{"parent": parent, "count": counts[parent]} for parent in dict.fromkeys(parents)]


def _parse_facts(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # damaged rows are reported at the start of the pipeline
        return {}
    return found if isinstance(found, dict) else {}


def describe_links(
    cursor: duckdb.DuckDBPyConnection, entity: str, now: int, nics: CurrentValues
) -> list[dict[str, Any]]:
    """The cables of a port, or of the ports below a node or switch; a port without a known far end is listed too.

    nics: the newest values of PORT_COLUMNS.
    """
    ports = [entity]
    if kind_of(entity) != "port":
        ports = sorted({x.entity for x in read_lines(cursor, [entity], now, below=True) if kind_of(x.entity) == "port"})
        ports = _own_ports(cursor, entity, ports, now)
    pairs: dict[str, tuple[str, str, str]] = {}
    for near, far, source, facts in read_links(cursor, ports, now):
        if near not in pairs or pairs[near][1] == "agents":
            pairs[near] = far, source, facts
    ends = _read_ends(cursor, sorted({*ports, *(far for far, _, _ in pairs.values())}), now, nics)
    return [
        {
            "near": ends[port],
            "far": ends[pairs[port][0]] if port in pairs else None,
            "source": pairs[port][1] if port in pairs else None,
            "facts": _parse_facts(pairs[port][2]) if port in pairs else {},
        }
        for port in ports
    ]


def _own_ports(cursor: duckdb.DuckDBPyConnection, entity: str, ports: list[str], now: int) -> list[str]:
    """Ports of the device itself: those of nodes hang below their switch as well."""
    if kind_of(entity) == "node":
        return ports
    on_nodes = {x.entity for x in read_lines(cursor, ports, now) if kind_of(x.parent) == "node"}
    return [port for port in ports if port not in on_nodes] or ports


def _read_ends(
    cursor: duckdb.DuckDBPyConnection, ports: list[str], now: int, nics: CurrentValues
) -> Mapping[str, dict[str, Any]]:
    """The known facts of ports, in the form of `LinkEnd`."""
    rows = cursor.execute(
        """SELECT p.port, d.id, e.attributes FROM (SELECT unnest($1::VARCHAR[]) AS port) p
           LEFT JOIN device d ON d.class = 'nic' AND d.entity = p.port LEFT JOIN entity e ON e.entity = p.port""",
        [ports],
    ).fetchall()
    owners: dict[str, str] = {}
    for line in read_lines(cursor, ports, now):
        owners.setdefault(line.entity, line.parent)
    ends = {}
    for port, device, attributes in rows:
        facts = _parse_facts(attributes or "{}")
        state, speed, seen = nics.of_device(device, PORT_COLUMNS)
        ends[port] = {
            "port": port,
            "device": owners.get(port),
            "state": None if state is None else ("down", "up")[bool(state)],
            "speed": speed,
            "last_seen": None if seen is None else iso(seen),
            "module": {name: str(facts[name]) for name in _MODULE if name in facts},
        }
    return ends
