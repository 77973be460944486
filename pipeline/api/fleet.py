"""The state of each node, from its unresolved incidents and the age of its data, which are in memory; the topology for
API threads; the blast radius of an incident: everything below its cause and members, and the jobs that run there."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from pipeline.api.backend import Health
from pipeline.api.heatmap import FleetNames
from pipeline.incidents.factors import FACTOR_KINDS
from pipeline.incidents.reach import NodesBelow, split_nodes
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology, kind_of
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues


class TopologyCopy:
    """Returns copies of a topology that another thread changes.

    A Topology caches the ancestors it has looked up, so two threads must not use the same one. Its `parents` mapping is
    replaced on every change and never modified, so reading it needs no lock.
    """

    def __init__(self, source: Topology) -> None:
        self._source, self._lock = source, threading.Lock()
        self._parents: Mapping[str, tuple[str, ...]] | None = None
        self._copy = Topology()

    def get(self) -> Topology:
        """Returns the current copy. All callers share it until the source changes; lookups only add to its cache."""
        with self._lock:
            parents = self._source.parents
            if parents is not self._parents:
                self._copy, self._parents = Topology.from_checked(parents), parents
            return self._copy


def find_node(topology: Topology, entity: str, senders: Mapping[str, str] = {}) -> str | None:
    """Returns the node that the entity is or runs on: by inventory, else its sender; None if there is none."""
    node = topology.ancestor_of_kind(entity, "node")
    return node if node is not None else senders.get(entity)


SILENT = 60 * SECOND
"""Age of a node's newest row from which it counts as silent (chosen: six frames of 10 s)."""
STATES = ("ok", "watch", "degraded", "critical", "no_data")
STATE_OF: Mapping[str, str] = {"page": "critical", "ticket": "degraded", "watch": "watch"}
_NOT_ON_NODES = ["power", "coolant"]
"""Device classes outside the nodes, whichever agent sends them."""


@dataclass(frozen=True, slots=True)
class UnresolvedIncidents:
    """faulty, affected: node -> ids of incidents of which it is the cause or has it, and of those whose cause is
    elsewhere. severity: by id."""

    faulty: Mapping[str, Sequence[str]]
    affected: Mapping[str, Sequence[str]]
    severity: Mapping[str, str]


def read_unresolved(cursor: duckdb.DuckDBPyConnection, topology: Topology) -> UnresolvedIncidents:
    """Returns the unresolved incidents and the nodes that they affect."""
    incidents = list_unresolved(cursor)
    faulty, affected = find_affected_nodes(incidents, topology, find_senders(cursor, incidents))
    return UnresolvedIncidents(faulty, affected, {incident: severity for incident, severity, _, _ in incidents})


def build_fleet(
    nodes_known: Iterable[tuple[str, bool]],
    unresolved: UnresolvedIncidents,
    seen: Mapping[str, int],
    topology: Topology,
    health: Health,
    unready: list[str],
    now: int,
    listed: Container[str] | None = None,
) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/fleet. nodes_known: with `simulated`. seen: node -> time of its newest row.

    listed: the nodes that the answer lists; None: all. Counts are always of all.
    """
    counts, only_affected, nodes = Counter(dict.fromkeys(STATES, 0)), 0, []
    all_simulated = 0
    for entity, simulated, last, state in _judge_nodes(nodes_known, unresolved, seen, now):
        others = unresolved.affected.get(entity, [])
        counts[state] += 1
        all_simulated += simulated
        only_affected += state == "ok" and bool(others)
        if listed is None or entity in listed:
            known = {"state": state, "last_seen": None if last is None else iso(last), "simulated": simulated}
            causes = {"incidents": [*unresolved.faulty.get(entity, []), *others], "affected_by": others}
            nodes.append({"entity": entity, "rack": topology.ancestor_of_kind(entity, "rack"), **known, **causes})
    return {
        "as_of": iso(now),
        "watermark": None if health["watermark"] is None else iso(health["watermark"]),
        "backlog": health["backlog"],
        "lag_s": health["lag_s"],
        "newest": iso(max(seen.values())) if seen else None,
        "unready": unready,
        "stalled": health["stalled"],
        "counts": dict(counts),
        "affected": only_affected,
        "simulated": all_simulated,
        "nodes": nodes,
        "sources": health["sources"],
    }


def _judge_nodes(
    nodes_known: Iterable[tuple[str, bool]], unresolved: UnresolvedIncidents, seen: Mapping[str, int], now: int
) -> Iterator[tuple[str, bool, int | None, str]]:
    """Yields (node, whether it is simulated, time of its newest row, state)."""
    for entity, simulated in nodes_known:
        last = seen.get(entity.partition(":")[2])
        severities = [unresolved.severity[incident] for incident in unresolved.faulty.get(entity, [])]
        yield entity, simulated, last, node_state(severities, last, now)


def node_state(severities: Iterable[str], last_seen: int | None, now: int) -> str:
    """Returns one of STATES. Critical comes before no_data, no_data before all others: no data is never shown as ok."""
    worst = max((STATES.index(STATE_OF[s]) for s in severities), default=0)
    if STATES[worst] != "critical" and (last_seen is None or now - last_seen > SILENT):
        return "no_data"
    return STATES[worst]


Row = tuple[str, str, str, list[str]]


def find_affected_nodes(
    incidents: Iterable[Row], topology: Topology, senders: Mapping[str, str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns node -> ids of the incidents that have their cause on it, and of those it only suffers from.

    An incident is (id, severity, cause, members).
    """
    faulty: dict[str, list[str]] = defaultdict(list)
    affected: dict[str, list[str]] = defaultdict(list)
    below = NodesBelow(topology)
    for incident, _, cause, members in incidents:
        own, others = split_nodes(cause, members, topology, below, senders)
        for nodes, found in ((own, faulty), (others, affected)):
            for node in sorted(nodes):
                found[node].append(incident)
    return dict(faulty), dict(affected)


def list_unresolved(cursor: duckdb.DuckDBPyConnection) -> list[Row]:
    """Returns the unresolved incidents, the oldest first."""
    return cursor.execute(
        "SELECT id, severity, cause, members FROM incidents WHERE state <> 'resolved' ORDER BY opened, id"
    ).fetchall()


def list_unresolved_at(cursor: duckdb.DuckDBPyConnection, time: int) -> list[Row]:
    """Returns the incidents that were open at a time (UTC us), with their severity of now, the oldest first."""
    query = """SELECT id, severity, cause, members FROM incidents
               WHERE opened <= make_timestamptz($time) AND (resolved IS NULL OR resolved > make_timestamptz($time))
               ORDER BY opened, id"""
    return cursor.execute(query, {"time": time}).fetchall()


def find_senders(cursor: duckdb.DuckDBPyConnection, incidents: Iterable[Row]) -> dict[str, str]:
    """Returns entity -> the node that sends it, for entities on nodes that are in no inventory."""
    wanted = sorted({entity for _, _, cause, members in incidents for entity in (cause, *members)})
    rows = cursor.execute(
        "SELECT entity, 'node:' || node FROM device WHERE NOT list_contains(?, class) AND list_contains(?, entity)",
        [_NOT_ON_NODES, wanted],
    ).fetchall()
    return dict(rows)


def list_nodes(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, bool]]:
    """Returns (entity, simulated) of the nodes in service: of inventories, and of telemetry without one.

    The view `entities` would read the newest rows of all devices for it.
    """
    return cursor.execute(
        """WITH known AS (SELECT entity, simulated FROM entity WHERE kind = 'node'),
                sent AS (SELECT entity, bool_and(simulated) AS simulated FROM device
                         WHERE starts_with(entity, 'node:') GROUP BY entity)
           SELECT entity, coalesce(k.simulated, s.simulated) FROM known k FULL JOIN sent s USING (entity)
           WHERE entity NOT IN (SELECT 'node:' || node FROM decommissioned WHERE returned IS NULL) ORDER BY entity"""
    ).fetchall()


def find_last_seen(
    devices: Devices, names: FleetNames, read: Callable[[str, Sequence[str]], CurrentValues]
) -> dict[str, int]:
    """Returns name of the sending node -> time of the newest row of its devices. read: newest rows of a class."""
    seen: dict[str, int] = {}
    for device_class in CLASSES:
        found = read(device_class, ())
        place, nodes = names.nodes(devices, device_class)
        at = np.flatnonzero((found.slot >= 0) & (found.slot < len(place)))
        newest = np.full(len(nodes), -1)
        np.maximum.at(newest, place[found.slot[at]], found.time[at])
        for i in np.flatnonzero(newest >= 0).tolist():
            node = nodes[i].partition(":")[2]
            seen[node] = max(int(newest[i]), seen.get(node, -1))
    return seen


MOST_CO_OCCURRING = 50
"""Most co-occurring incidents that are listed. Chosen: what a person reads."""


_PARTS = frozenset({"nvlink", "neuroncore", "sensor", "dimm", "disk", "filesystem", "service", "agent", "collector"})
"""Parts without work of their own: a node has hundreds, which would hide the number of GPUs."""


@dataclass(frozen=True, slots=True)
class BlastRadius:
    """entities: kind -> number of affected entities. jobs: those with an affected rank, by name.

    Affected: the cause, the members and all below them. Of the kinds in _PARTS only the cause and members count.
    """

    entities: dict[str, int]
    jobs: tuple[str, ...]


def compute_blast_radius(cause: str, members: Iterable[str], topology: Topology) -> BlastRadius:
    """Counts the cause, the members and all entities below them, and finds their jobs."""
    roots = {cause, *members}
    reached = roots | {e for e in topology.descendants(*roots) if kind_of(e) not in _PARTS}
    jobs = {job for e in reached if (job := topology.ancestor_of_kind(e, "job")) is not None}
    return BlastRadius(dict(sorted(Counter(map(kind_of, reached)).items())), tuple(sorted(jobs)))


def list_co_occurring(cause: str, others: Iterable[Mapping[str, Any]], topology: Topology) -> list[dict[str, Any]]:
    """Returns those of other incidents whose causes have something in common with this one, at most MOST_CO_OCCURRING.

    shared: what they have in common, the nearest first: one is part of the other, or both are part of it.
    """
    mine = (cause, *topology.ancestors(cause))
    found = []
    for other in others:
        theirs = {other["cause"], *topology.ancestors(other["cause"])}
        shared = next((e for e in mine if e in theirs and kind_of(e) in (kind_of(cause), *FACTOR_KINDS)), None)
        if shared is not None:
            keys = ("id", "cause", "severity", "summary", "onset")
            found.append({**{key: other[key] for key in keys}, "shared": shared})
    return found[:MOST_CO_OCCURRING]
