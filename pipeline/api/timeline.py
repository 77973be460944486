"""What happened to an entity, its node and everything above it: events, findings and gaps, newest first."""

from __future__ import annotations

import json
from typing import Any

import duckdb

from pipeline.api.places import above
from pipeline.api.series import Span
from pipeline.model.records import iso
from pipeline.model.topology import Topology, kind_of

# Canary digests and inventory come all the time; a digest tells something only where a finding quotes it.
_ITEMS = """
SELECT epoch_us(e.time) AS moment, 'event' AS kind, e.entity, e.kind AS subject, e.data AS text FROM events e
WHERE list_contains($who, e.entity) AND e.time >= make_timestamptz($start) AND e.time < make_timestamptz($end)
  AND (e.kind NOT IN ('digest', 'inventory') OR (e.kind = 'digest' AND EXISTS (
        FROM findings f WHERE f.entity = e.entity AND json_extract_string(f.evidence, '$.digest') IS NOT NULL
        AND json_extract_string(f.evidence, '$.digest') = json_extract_string(e.data, '$.digest'))))
UNION ALL
SELECT epoch_us(f.onset), 'finding', f.entity, f.level || ' ' || f.detector || CASE
         WHEN json_extract_string(f.evidence, '$.muted.id') IS NOT NULL THEN ' (muted)'
         WHEN json_extract_string(f.evidence, '$.mode') = 'record' THEN ' (only recorded)' ELSE '' END, f.summary
FROM findings f
WHERE list_contains($who, f.entity) AND f.onset >= make_timestamptz($start) AND f.onset < make_timestamptz($end)
UNION ALL
SELECT epoch_us(g.time), 'gap', 'node:' || g.source, g.topic,
       (g.next_sequence - g.first_sequence)::VARCHAR || ' messages lost: ' || g.cause FROM gaps g
WHERE list_contains($nodes, g.source) AND g.time >= make_timestamptz($start) AND g.time < make_timestamptz($end)
ORDER BY moment DESC, kind, entity, subject LIMIT $limit"""


def timeline(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, entity: str, span: Span, limit: int
) -> dict[str, Any]:
    """The answer of GET /api/v1/timeline."""
    who = above(topology, entity)
    rows = cursor.execute(
        _ITEMS,
        {
            "who": list(who),
            "nodes": [e.partition(":")[2] for e in who if kind_of(e) == "node"],
            "start": span.start,
            "end": span.end,
            "limit": limit,
        },
    ).fetchall()
    return {
        "items": [
            {"time": iso(time), "kind": kind, "entity": about, "text": _text(kind, subject, text)}
            for time, kind, about, subject, text in rows
        ]
    }


def _text(kind: str, subject: str, text: str) -> str:
    """One line for a person."""
    if kind != "event":
        return f"{subject}: {text}"
    data = json.loads(text)
    facts = ", ".join(f"{k} {_fact(v)}" for k, v in data.items()) if isinstance(data, dict) else _fact(data)
    return f"{subject.replace('_', ' ')}: {facts}" if facts else subject.replace("_", " ")


def _fact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
