"""Events as rows, inventories as entities, and queries over events that a start needs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Sequence

import duckdb
import pyarrow as pa

from pipeline.model.membership import ATTRIBUTE, parse_inventory
from pipeline.model.records import SECOND, Event, EventBatch, Origin
from pipeline.model.topology import kind_of
from pipeline.store.append import NEVER, TIME, insert_columns, register_columns, to_timestamps
from pipeline.store.database import Database
from pipeline.store.job_membership import update_job_ranks
from pipeline.store.topology_lines import keep_past

_Lines = list[tuple[str, list[str], dict[str, object]]]
_Reported = tuple[Event, Origin, _Lines]
"""An inventory with its sender and (entity, parents, attributes)."""
UPGRADE_WINDOW = 1800 * SECOND
"""Time within which an upgrade of agents may explain their silence (us). Chosen."""
_FIND_UPGRADE = """
WITH reported AS (
    SELECT entity, data::JSON -> 'entities' -> entity -> 'attributes' ->> 'agent' AS version, time
    FROM events WHERE kind = 'inventory' AND list_contains($1::VARCHAR[], entity)),
changed AS (
    SELECT entity, version, time, lag(version) OVER (PARTITION BY entity ORDER BY time) AS before
    FROM reported WHERE version IS NOT NULL)
SELECT version FROM changed WHERE version <> before AND epoch_us(time) >= $2
GROUP BY version HAVING count(DISTINCT entity) >= $3 ORDER BY count(DISTINCT entity) DESC LIMIT 1
"""


def write_events(connection: duckdb.DuckDBPyConnection, batches: Sequence[EventBatch], closed: int = NEVER) -> None:
    """Writes events as rows; inventories also update the table `entity`, and those of jobs the table `job_rank`.

    closed: frames before it are closed; earlier events are evaluated in the first open frame.
    """
    flat = [(event, batch.origin) for batch in batches for event in batch.events]
    insert_columns(
        connection,
        "events",
        {
            "time": to_timestamps([event.time for event, _ in flat]),
            "entity": [event.entity for event, _ in flat],
            "kind": [event.kind for event, _ in flat],
            "data": [json.dumps(dict(event.data), sort_keys=True) for event, _ in flat],
            "site": [origin.site for _, origin in flat],
            "node": [origin.node for _, origin in flat],
            "simulated": [origin.simulated for _, origin in flat],
            "judged": pa.array([closed if event.time < closed else None for event, _ in flat], TIME),
        },
    )
    update_job_ranks(connection, flat)
    found = [(e, o) for e, o in flat if e.kind == "inventory" and isinstance(e.data.get("entities"), dict)]
    for together in _split_inventories((e, o, parse_inventory(e.data)) for e, o in found):
        _write_inventories(connection, together)


def _split_inventories(reported: Iterable[_Reported]) -> Iterable[list[_Reported]]:
    """Returns inventories by turns: written turn by turn, the tables are as after one by one. A commit of a backlog has
    many of each node. One with other ranks for its node, or other parents for an entity, comes after those before."""
    turns: dict[int, list[_Reported]] = {}
    of: dict[object, tuple[int, object]] = {}  # node or entity -> its newest turn, and the ranks or parents there
    for event, origin, lines in reported:
        says: dict[object, object] = {entity: parents for entity, parents, _ in lines}
        says[origin.site, event.entity] = {entity for entity, _, _ in lines if kind_of(entity) == "rank"}
        turn = max((of[key][0] + (of[key][1] != now) for key, now in says.items() if key in of), default=0)
        of |= {key: (turn, now) for key, now in says.items()}
        turns.setdefault(turn, []).append((event, origin, lines))
    return (turns[turn] for turn in sorted(turns))


def _write_inventories(connection: duckdb.DuckDBPyConnection, reported: Sequence[_Reported]) -> None:
    """Updates the table `entity` by inventories; of several lines for an entity the last one counts."""
    known: dict[str, tuple[str, str, str, bool, list[str], str, str, int, int]] = {}
    for event, origin, lines in reported:
        for entity, parents, attributes in lines:
            facts = json.dumps(attributes, sort_keys=True)
            since = known[entity][-1] if entity in known else event.time
            row = (origin.site, origin.simulated, parents, facts, origin.node, event.time, since)
            known[entity] = (entity, kind_of(entity), *row)
    left = _possibly_empty(connection, known)
    if known:
        names = ("entity", "kind", "site", "simulated", "parents", "attributes", "node", "named", "since")
        columns = dict(zip(names, map(list, zip(*known.values(), strict=True)), strict=True))
        columns["parents"] = pa.array(columns["parents"], pa.list_(pa.string()))
        columns |= {name: to_timestamps(columns[name]) for name in ("named", "since")}
        renew = ", ".join(f"{n} = excluded.{n}" for n in names[1:-1])
        begun = "since = CASE WHEN entity.parents = excluded.parents THEN entity.since ELSE excluded.since END"
        with register_columns(connection, "new_lines", columns):
            keep_past(connection, "new_lines")
        insert_columns(connection, "entity", columns, f"ON CONFLICT (entity) DO UPDATE SET {renew}, {begun}")
    senders = sorted({(o.site, e.entity.partition(":")[2]) for e, o, _ in reported})
    _remove_ended(connection, senders, known, left)


def _possibly_empty(connection: duckdb.DuckDBPyConnection, known: Collection[str]) -> set[str]:
    """Stages and jobs that the inventories may leave empty: former parents of ranks, and those that they name."""
    ranks = [e for e in known if kind_of(e) == "rank"]
    found = {e for e in known if kind_of(e) in ("stage", "job")}
    if ranks:
        rows = connection.execute("SELECT parents FROM entity WHERE list_contains(?, entity)", [ranks]).fetchall()
        found |= {parent for (parents,) in rows for parent in parents}
    return found


def _remove_ended(
    connection: duckdb.DuckDBPyConnection, reported: Sequence[tuple[str, str]], known: Collection[str], left: set[str]
) -> None:
    """Deletes ranks that their node no longer lists, and stages and jobs without ranks.

    reported: (site, node) of the inventories; known: all entities that they list; left: possibly empty stages and jobs.
    The same as pipeline/model/membership.py in memory.
    """
    gone = connection.execute(
        f"""DELETE FROM entity WHERE kind = 'rank' AND contains(attributes, '"{ATTRIBUTE}"')
            AND list_contains(?, site || ' ' || (attributes ->> '$.{ATTRIBUTE}')) AND NOT list_contains(?, entity)
            RETURNING parents""",
        [[f"{site} {node}" for site, node in reported], [e for e in known if kind_of(e) == "rank"]],
    ).fetchall()
    left = left | {parent for (parents,) in gone for parent in parents}
    if left:
        connection.execute(
            """DELETE FROM entity WHERE kind IN ('stage', 'job') AND list_contains(?, entity) AND entity NOT IN
               (SELECT unnest(parents) FROM entity WHERE kind = 'rank')""",
            [sorted(left)],
        )


def load_silent_sites(database: Database) -> dict[str, dict[str, object]]:
    """Site -> data of its last event, for sites whose last event is `site_silent`."""
    with database.lock:
        rows = database.connection.execute(
            "SELECT entity, arg_max(data, time) FROM events WHERE kind IN ('site_silent', 'site_heard') "
            "GROUP BY entity HAVING arg_max(kind, time) = 'site_silent'"
        ).fetchall()
    return {entity.partition(":")[2]: json.loads(data) for entity, data in rows}


def load_clock_errors(database: Database) -> dict[str, float]:
    """Entity -> clock error (s) of its newest `clock_error` event, for wrong clocks."""
    with database.lock:
        rows = database.connection.execute(
            "SELECT entity, arg_max(CAST(data ->> '$.seconds' AS DOUBLE), time) AS seconds FROM events "
            "WHERE kind = 'clock_error' GROUP BY entity HAVING seconds <> 0"
        ).fetchall()
    return dict(rows)


def find_upgrade(database: Database, nodes: Sequence[str], now: int) -> str:
    """The version to which the agents of at least half of `nodes` changed within UPGRADE_WINDOW; "" if none."""
    with contextlib.closing(database.cursor()) as cursor:
        rows = cursor.execute(
            _FIND_UPGRADE, [[f"node:{node}" for node in nodes], now - UPGRADE_WINDOW, max(1, len(nodes) / 2)]
        )
        return "".join(str(version) for (version,) in rows.fetchall())
