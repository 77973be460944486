"""The fleet at a glance: one state per node from its unresolved incidents and its silence.

The topology as the API needs it: a copy of its own, and which node an entity belongs to.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import duckdb

from pipeline.api.backend import Health
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology, kind_of


class TopologyCopy:
    """Hands out a copy of a topology that another thread goes on changing.

    A Topology remembers ancestors it has looked up, so two threads may not ask the same one. Its `parents` is replaced
    on every change and never written to, so that reading it needs no lock.
    """

    def __init__(self, source: Topology) -> None:
        self._source, self._lock = source, threading.Lock()
        self._parents: Mapping[str, tuple[str, ...]] | None = None
        self._copy = Topology()

    def get(self) -> Topology:
        """As of now. Every caller gets the same copy until the source changes; looking up ancestors only adds to it."""
        with self._lock:
            parents = self._source.parents
            if parents is not self._parents:
                self._copy, self._parents = Topology.from_checked(parents), parents
            return self._copy


def find_node(topology: Topology, entity: str, senders: Mapping[str, str] = {}) -> str | None:
    """The node that the entity is, is on or runs on; by who sends it where no inventory tells. None: there is none."""
    node = topology.ancestor_of_kind(entity, "node")
    return node if node is not None else senders.get(entity)


def with_ancestors(topology: Topology, entity: str) -> tuple[str, ...]:
    """The entity and all its ancestors, nearest first."""
    return (entity, *topology.ancestors(entity))


SILENT = 60 * SECOND
"""Age of a node's newest row from which it counts as silent (DESIGN: one minute; six frames of 10 s)."""
STATES = ("ok", "watch", "degraded", "critical", "no_data")
STATE_OF: Mapping[str, str] = {"page": "critical", "ticket": "degraded", "watch": "watch"}
_SPREADS = frozenset({"rack", "cdu", "loop", "pdu", "leaf", "spine", "switch", "rail", "row", "pod", "fabric"})
"""Kinds whose fault, where they are the cause, reaches every node below them; a job's or a site's does not."""

_NOT_ON_NODES = ["power", "coolant"]
"""Classes of what stands beside the nodes, whoever sends it."""


def build_fleet(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, health: Health, unready: list[str], now: int
) -> dict[str, Any]:
    """The answer of GET /api/v1/fleet."""
    incidents = _unresolved(cursor)
    touched = find_affected_nodes(incidents, topology, _senders(cursor, incidents))
    worst = {incident: severity for incident, severity, _, _ in incidents}
    seen = _last_seen(cursor)
    nodes = []
    for entity, simulated in _nodes(cursor):
        own, last = touched.get(entity, []), seen.get(entity.partition(":")[2])
        nodes.append(
            {
                "entity": entity,
                "rack": topology.ancestor_of_kind(entity, "rack"),
                "state": node_state([worst[incident] for incident in own], last, now),
                "last_seen": None if last is None else iso(last),
                "simulated": simulated,
                "incidents": own,
            }
        )
    return {
        "as_of": iso(now),
        "watermark": None if health["watermark"] is None else iso(health["watermark"]),
        "backlog": health["backlog"],
        "lag_s": health["lag_s"],
        "newest": iso(max(seen.values())) if seen else None,
        "unready": unready,
        "stalled": health["stalled"],
        "counts": {name: sum(node["state"] == name for node in nodes) for name in STATES},
        "nodes": nodes,
        "sources": health["sources"],
    }


def node_state(severities: Iterable[str], last_seen: int | None, now: int) -> str:
    """A critical incident wins over silence, silence over everything else: what is not seen is not known to be well."""
    worst = max((STATES.index(STATE_OF[s]) for s in severities), default=0)
    if STATES[worst] != "critical" and (last_seen is None or now - last_seen > SILENT):
        return "no_data"
    return STATES[worst]


Row = tuple[str, str, str, list[str]]


def find_affected_nodes(
    incidents: Iterable[Row], topology: Topology, senders: Mapping[str, str]
) -> dict[str, list[str]]:
    """node -> ids of the incidents that touch it. An incident is (id, severity, cause, members)."""
    touched: dict[str, list[str]] = defaultdict(list)
    nodes_under = _NodesBelow(topology)
    for incident, _, cause, members in incidents:
        reached = {find_node(topology, entity, senders) for entity in (cause, *members)}
        if kind_of(cause) in _SPREADS:
            reached |= nodes_under(cause)
        for node in sorted(reached - {None}, key=str):
            touched[str(node)].append(incident)
    return dict(touched)


class _NodesBelow:
    """The nodes below an entity, or with something on them that is below it (a port of a leaf). Indexed once."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._index: dict[str, set[str | None]] | None = None

    def __call__(self, entity: str) -> set[str | None]:
        if self._index is None:
            self._index = defaultdict(set)
            for child in self._topology.parents:
                node = find_node(self._topology, child)
                for parent in self._topology.ancestors(child) if node else ():
                    self._index[parent].add(node)
        return self._index.get(entity, set())


def _unresolved(cursor: duckdb.DuckDBPyConnection) -> list[Row]:
    return cursor.execute(
        "SELECT id, severity, cause, members FROM incidents WHERE state <> 'resolved' ORDER BY opened, id"
    ).fetchall()


def _senders(cursor: duckdb.DuckDBPyConnection, incidents: Iterable[Row]) -> dict[str, str]:
    """entity -> the node that sends it, of what runs on nodes: for entities that no inventory has announced."""
    wanted = sorted({entity for _, _, cause, members in incidents for entity in (cause, *members)})
    rows = cursor.execute(
        "SELECT entity, 'node:' || node FROM device WHERE NOT list_contains(?, class) AND list_contains(?, entity)",
        [_NOT_ON_NODES, wanted],
    ).fetchall()
    return dict(rows)


def _nodes(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, bool]]:
    return cursor.execute("SELECT entity, simulated FROM entities WHERE kind = 'node' ORDER BY entity").fetchall()


def _last_seen(cursor: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Name of the sending node -> time of the newest row of any of its devices."""
    seen = " UNION ALL ".join(
        f"SELECT d.node, l.time FROM latest_{c} l JOIN device d ON d.id = l.device AND d.class = '{c}'" for c in CLASSES
    )
    return dict(cursor.execute(f"SELECT node, epoch_us(max(time)) FROM ({seen}) GROUP BY node").fetchall())
