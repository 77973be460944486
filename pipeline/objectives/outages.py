"""When each node was out of service: held here, faulty, or dead.

Out of service is a node while (a) an act of ours holds it, (b) a page is open whose cause is the node or a part of it,
(c) a page of the detector `telemetry` names it among its members: it is dead, whatever the cause. Overlapping reasons
count once. A node that only suffers, such as 32 nodes of a warm loop, is in service and loses goodput instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import duckdb

from pipeline.model.records import SECOND
from pipeline.model.topology import kind_of

HOUR = 3600 * SECOND
NodeOf = Callable[[str], str | None]
"""Returns the node (`node:NAME`) of an entity, None if it is on none."""
FAULTS = """
SELECT id, cause, detector, members, epoch_us(onset), coalesce(epoch_us(resolved), $2), severity, summary
FROM incidents
WHERE onset < make_timestamptz($2::BIGINT) AND (resolved IS NULL OR resolved > make_timestamptz($1::BIGINT))
  AND coalesce(json_extract_string(life, '$.merged_into'), '') = ''
  AND coalesce(json_extract_string(life, '$.feedback'), '') <> 'wrong'
ORDER BY onset, id
"""
_HOLDS = """
SELECT a.id, a.targets, epoch_us(min(h.time) FILTER (h.state IN ('executed', 'verifying', 'verified'))),
       a.document -> '$.released', epoch_us(max(h.time))
FROM acts a JOIN act_history h ON h.act = a.id
WHERE a.verb = 'hold' AND a.document ->> '$.mode' = 'on' GROUP BY ALL
"""
_RELEASES = """
SELECT a.targets, epoch_us(min(h.time)) FROM acts a JOIN act_history h ON h.act = a.id
WHERE a.verb = 'release' AND a.document ->> '$.mode' = 'on' AND h.state = 'executed' GROUP BY a.id, a.targets
"""


@dataclass(frozen=True, slots=True)
class Outages:
    """Node name -> spans (us) out of service, sorted and disjoint."""

    spans: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def hours_of(self, node: str, start: int, end: int) -> float:
        """Returns the hours of a node out of service between two times."""
        return sum(max(0, min(b, end) - max(a, start)) for a, b in self.spans.get(node, ())) / HOUR


def read_outages(cursor: duckdb.DuckDBPyConnection, start: int, end: int, node_of: NodeOf) -> Outages:
    """Returns the nodes out of service between two times."""
    found: dict[str, list[tuple[int, int]]] = {}
    for _, cause, detector, members, a, b, severity, _summary in cursor.execute(FAULTS, [start, end]).fetchall():
        if severity != "page":
            continue
        nodes = {node_of(cause)} | ({m for m in members if kind_of(m) == "node"} if detector == "telemetry" else set())
        for node in nodes - {None}:
            found.setdefault(str(node).removeprefix("node:"), []).append((max(a, start), min(b, end)))
    for node, a, b in list_holds(cursor, end):
        if b > start and a < end:
            found.setdefault(node, []).append((max(a, start), min(b, end)))
    return Outages({node: merge_spans(spans) for node, spans in found.items()})


def list_holds(cursor: duckdb.DuckDBPyConnection, now: int) -> list[tuple[str, int, int]]:
    """Returns (node, from, until) of each hold that was carried out; until `now` while it is in force."""
    released: dict[str, list[int]] = {}
    for targets, time in cursor.execute(_RELEASES).fetchall():
        for target in targets:
            released.setdefault(target, []).append(time)
    spans = []
    for _, targets, begun, over, last in cursor.execute(_HOLDS).fetchall():
        if begun is None:
            continue
        ended = set(_parse_names(over))
        for target in targets:
            later = [time for time in released.get(target, ()) if time >= begun]
            until = min(later, default=last) if target in ended else now
            spans.append((target.removeprefix("node:"), begun, max(begun, until)))
    return spans


def _parse_names(text: str | None) -> list[str]:
    return [str(name) for name in json.loads(text or "[]")]


def merge_spans(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns spans sorted, with overlapping ones joined."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted(span for span in spans if span[1] > span[0]):
        if merged and a <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], b)
        else:
            merged.append((a, b))
    return tuple(merged)
