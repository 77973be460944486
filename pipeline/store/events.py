"""Events -> rows, and what inventory events say of entities."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import duckdb
import pyarrow as pa

from pipeline.ended import ATTRIBUTE
from pipeline.membership import inventory
from pipeline.records import EventBatch
from pipeline.store.append import insert, times
from pipeline.topology import kind_of


def write_events(connection: duckdb.DuckDBPyConnection, batches: Sequence[EventBatch]) -> None:
    """Events as rows; inventory also becomes what is known of the entities."""
    flat = [(event, batch.origin) for batch in batches for event in batch.events]
    insert(
        connection,
        "events",
        {
            "time": times([event.time for event, _ in flat]),
            "entity": [event.entity for event, _ in flat],
            "kind": [event.kind for event, _ in flat],
            "data": [json.dumps(dict(event.data), sort_keys=True) for event, _ in flat],
            "site": [origin.site for _, origin in flat],
            "node": [origin.node for _, origin in flat],
            "simulated": [origin.simulated for _, origin in flat],
        },
    )
    known: dict[str, tuple[str, str, str, bool, list[str], str]] = {}
    for event, origin in flat:
        if event.kind == "inventory":
            for entity, parents, attributes in inventory(event.data):
                facts = json.dumps(attributes, sort_keys=True)
                known[entity] = (entity, kind_of(entity), origin.site, origin.simulated, parents, facts)
    if known:
        names = ("entity", "kind", "site", "simulated", "parents", "attributes")
        columns = dict(zip(names, map(list, zip(*known.values(), strict=True)), strict=True))
        columns["parents"] = pa.array(columns["parents"], pa.list_(pa.string()))
        left = _over(connection, known)
        renew = ", ".join(f"{n} = excluded.{n}" for n in names[1:])
        insert(connection, "entity", columns, f"ON CONFLICT (entity) DO UPDATE SET {renew}")
        told = sorted({(o.site, e.entity.partition(":")[2]) for e, o in flat if e.kind == "inventory"})
        _end(connection, told, known, left)


def _over(connection: duckdb.DuckDBPyConnection, known: Collection[str]) -> set[str]:
    """Stages and jobs that may be empty once the inventories are in: where ranks were, and those that these name."""
    ranks = [e for e in known if kind_of(e) == "rank"]
    found = {e for e in known if kind_of(e) in ("stage", "job")}
    if ranks:
        rows = connection.execute("SELECT parents FROM entity WHERE list_contains(?, entity)", [ranks]).fetchall()
        found |= {parent for (parents,) in rows for parent in parents}
    return found


def _end(
    connection: duckdb.DuckDBPyConnection, told: Sequence[tuple[str, str]], known: Collection[str], left: set[str]
) -> None:
    """Takes out ranks that their node names no longer, and the stages and jobs that nobody is in any more.

    told: (site, node) of the inventories; known: all that these name; left: what nobody may be in by now. The same as
    pipeline/ended.py does in memory.
    """
    gone = connection.execute(
        f"""DELETE FROM entity WHERE kind = 'rank' AND contains(attributes, '"{ATTRIBUTE}"')
            AND list_contains(?, site || ' ' || (attributes ->> '$.{ATTRIBUTE}')) AND NOT list_contains(?, entity)
            RETURNING parents""",
        [[f"{site} {node}" for site, node in told], [e for e in known if kind_of(e) == "rank"]],
    ).fetchall()
    left = left | {parent for (parents,) in gone for parent in parents}
    if left:
        connection.execute(
            """DELETE FROM entity WHERE kind IN ('stage', 'job') AND list_contains(?, entity) AND entity NOT IN
               (SELECT unnest(parents) FROM entity WHERE kind = 'rank')""",
            [sorted(left)],
        )
