"""One entity: attributes, what it is part of, its parts, the work on it, its incidents, and what happened to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from pipeline.api.compare import natural_key
from pipeline.api.history import Span
from pipeline.api.titles import add_affected
from pipeline.incidents import ledger
from pipeline.model.records import iso
from pipeline.model.signals import CLASS_OF_KIND
from pipeline.model.topology import WORK, Topology, kind_of

MAX_PARTS = 2_000
"""Parts in an answer (chosen: a node of 8 GPUs has about 400; of a rack the first are listed)."""
MAX_INCIDENTS = 100
"""Incidents in an answer, unresolved ones first. Chosen: what a person reads."""
_INVENTORY = "SELECT entity, parents, attributes, simulated FROM entity WHERE list_contains(?, entity)"
_DEVICES = """SELECT entity, node, bool_and(simulated), site FROM device
              WHERE node = $node OR entity = $entity GROUP BY entity, node, site ORDER BY entity LIMIT 5000"""
_OFF_NODES = frozenset({*WORK, *(kind for kind, of in CLASS_OF_KIND.items() if of in ("power", "coolant"))})
"""Kinds that are no part of the node that sends them: its ranks, and a facility that its agent reads."""


def read_entity(cursor: duckdb.DuckDBPyConnection, topology: Topology, entity: str) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/entity without its state. Raises KeyError for an unknown entity."""
    name = entity.partition(":")[2] if kind_of(entity) == "node" else ""
    sent = cursor.execute(_DEVICES, {"node": name, "entity": entity}).fetchall()
    uninventoried = [e for e, node, _, _ in sent if node == name and e != entity and kind_of(e) not in _OFF_NODES]
    below = dict.fromkeys([*topology.descendants(entity), *uninventoried])
    above = topology.ancestors(entity)
    parts = sorted((e for e in below if kind_of(e) not in WORK), key=natural_key)
    work = [e for e in below if kind_of(e) == "rank"]
    listed = parts[:MAX_PARTS]
    known = {e: (p, a, s) for e, p, a, s in cursor.execute(_INVENTORY, [[entity, *listed, *above]]).fetchall()}
    own = [s for e, _, s, _ in sent if e == entity]
    if entity not in known and not own and not below and entity not in topology.parents:
        raise KeyError(entity)
    empty: tuple[tuple[str, ...], str, bool] = (topology.parents.get(entity, ()), "{}", bool(own and own[0]))
    parents, attributes, simulated = known.get(entity, empty)
    return {
        "entity": entity,
        "kind": kind_of(entity),
        "simulated": simulated,
        "site": next((site for _, _, _, site in sent), None),
        "parents": list(parents),
        "above": list(above),
        "attributes": json.loads(attributes),
        "parts": [_part(e, topology, known) for e in listed],
        "left_out": len(parts) - len(listed),
        "work": _work(topology, entity, work),
        "incidents": _incidents(cursor, entity, [entity, *parts, *work], above),
        "links": _links(cursor, [entity, *listed]),
    }


def _part(entity: str, topology: Topology, known: Mapping[str, tuple[Sequence[str], str, bool]]) -> dict[str, Any]:
    row = known.get(entity)
    return {
        "entity": entity,
        "parents": list(topology.parents.get(entity, ())),
        "attributes": json.loads(row[1]) if row else {},
    }


def _work(topology: Topology, entity: str, ranks: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the jobs with a rank on the entity, and of each the ranks."""
    jobs: dict[str, list[str]] = {}
    for rank in sorted(ranks, key=natural_key):
        job = topology.ancestor_of_kind(rank, "job")
        if job is not None:
            jobs.setdefault(job, []).append(rank)
    return [{"job": job, "ranks": found} for job, found in jobs.items()]


def _incidents(
    cursor: duckdb.DuckDBPyConnection, entity: str, own: Sequence[str], above: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns incidents of the entity and its parts, and those whose cause is above it: of what supplies or holds it
    also resolved ones above `watch`, of jobs and other work, which change, only unresolved ones.

    relation: `cause` (it or a part is the suspected cause), `member` (has findings of it), `affected` (cause above it).
    """
    where = """WHERE cause IN (SELECT unnest($own)) OR entity IN (SELECT unnest($own))
               OR list_has_any(members, $own) OR (cause IN (SELECT unnest($above))
                   AND (state <> 'resolved'
                        OR (severity <> 'watch' AND NOT list_contains($work, split_part(cause, ':', 1)))))
               ORDER BY state = 'resolved', opened DESC, id LIMIT $most"""
    ids = cursor.execute(
        f"SELECT id FROM incidents {where}",
        {"own": list(own), "above": list(above), "work": list(WORK), "most": MAX_INCIDENTS},
    ).fetchall()
    found = add_affected(cursor, ledger.list_incidents(cursor, ids=[i for (i,) in ids]))
    mine = set(own)
    return [
        {**row, "relation": _relation(row, mine)} for row in sorted(found, key=lambda row: row["state"] == "resolved")
    ]


def _relation(row: Mapping[str, Any], own: set[str]) -> str:
    if row["cause"] in own:
        return "cause"
    return "member" if row["entity"] in own or not own.isdisjoint(row["members"]) else "affected"


def _links(cursor: duckdb.DuckDBPyConnection, entities: Sequence[str]) -> dict[str, str]:
    """Returns port -> port at the far end, where inventories of both ends name it."""
    ports = [e for e in entities if kind_of(e) == "port"]
    if not ports:
        return {}
    query = "SELECT entity, min(peer) FROM links WHERE entity IN (SELECT unnest(?)) GROUP BY entity"
    return dict(cursor.execute(query, [ports]).fetchall())


_EVENTS = """
SELECT epoch_us(e.time) AS moment, 'event' AS type, e.entity, e.kind AS subject, e.data AS data FROM events e
WHERE e.entity IN (SELECT unnest($entities)) AND e.kind NOT IN ('inventory', 'digest')
  AND e.time >= make_timestamptz($start) AND e.time < make_timestamptz($end)
UNION ALL
SELECT epoch_us(f.onset), 'finding', f.entity, f.detector,
       json_object('level', f.level, 'summary', f.summary, 'incident', f.incident)::VARCHAR
FROM findings f WHERE f.entity IN (SELECT unnest($entities))
  AND f.onset >= make_timestamptz($start) AND f.onset < make_timestamptz($end)
UNION ALL
SELECT epoch_us(g.time), 'gap', 'node:' || g.source, g.topic,
       json_object('messages', g.next_sequence - g.first_sequence, 'cause', g.cause)::VARCHAR
FROM gaps g WHERE g.source IN (SELECT unnest($nodes))
  AND g.time >= make_timestamptz($start) AND g.time < make_timestamptz($end)
ORDER BY moment DESC, type, entity, subject LIMIT $limit"""


def read_events(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, entity: str, span: Span, limit: int
) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/events: what happened to the entity, its parts and the work on it."""
    entities = [entity, *topology.descendants(entity)]
    node = topology.ancestor_of_kind(entity, "node")
    arguments = {
        "entities": entities,
        "nodes": [] if node is None else [node.partition(":")[2]],
        "start": span.start,
        "end": span.end,
        "limit": limit + 1,
    }
    rows = cursor.execute(_EVENTS, arguments).fetchall()
    return {
        "items": [
            {"time": iso(time), "type": kind, "entity": about, "subject": subject, "data": json.loads(data)}
            for time, kind, about, subject, data in rows[:limit]
        ],
        "truncated": len(rows) > limit,
    }
