"""Which entity was part of, or supplied by, which, and when, as each source says.

The inventories of agents are the table `entity`; what they said before is in `inventory_past`. What the configured
sources say is in `site_line` and `site_link`. A change ends a row and begins another. The view `topology` shows all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from pipeline.model.topology import kind_of
from pipeline.store.append import register_columns

AGENTS = "agents"
TABLE = """
ALTER TABLE entity ADD COLUMN IF NOT EXISTS since TIMESTAMPTZ;
CREATE TABLE IF NOT EXISTS inventory_past (
    entity VARCHAR NOT NULL, parents VARCHAR[] NOT NULL, node VARCHAR, since TIMESTAMPTZ,
    "until" TIMESTAMPTZ NOT NULL);
CREATE TABLE IF NOT EXISTS site_line (
    entity VARCHAR NOT NULL, parent VARCHAR NOT NULL, source VARCHAR NOT NULL, since TIMESTAMPTZ NOT NULL,
    "until" TIMESTAMPTZ);
CREATE TABLE IF NOT EXISTS site_link (
    a VARCHAR NOT NULL, b VARCHAR NOT NULL, source VARCHAR NOT NULL, facts VARCHAR NOT NULL,
    since TIMESTAMPTZ NOT NULL, "until" TIMESTAMPTZ);
CREATE OR REPLACE VIEW topology AS
SELECT entity, split_part(entity, ':', 1) AS kind, parent, split_part(parent, ':', 1) AS parent_kind, source, since,
       "until"
FROM (SELECT entity, parent, source, since, "until" FROM site_line
      UNION ALL
      SELECT entity, unnest(parents), 'agents', since, NULL FROM entity WHERE kind NOT IN ('rank', 'stage', 'job')
      UNION ALL
      SELECT entity, unnest(parents), 'agents', since, "until" FROM inventory_past);
"""
_WORK = "('rank', 'stage', 'job')"
"""Kinds whose past is in `job_rank`."""


def keep_past(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    """Moves the parents of entities that inventories change into the past. table: the new lines, with `since`."""
    connection.execute(
        f"""INSERT INTO inventory_past
            SELECT e.entity, e.parents, e.node, e.since, i.since FROM entity e JOIN "{table}" i ON i.entity = e.entity
            WHERE e.parents <> i.parents AND len(e.parents) > 0 AND coalesce(e.since < i.since, true)
            AND e.kind NOT IN {_WORK}"""
    )


def keep_unnamed(connection: duckdb.DuckDBPyConnection, before: int) -> None:
    """Moves the parents of entities that no inventory named since `before` (us) into the past."""
    connection.execute(
        f"""INSERT INTO inventory_past
            SELECT entity, parents, node, since, named FROM entity
            WHERE named < make_timestamptz($1) AND len(parents) > 0 AND kind NOT IN {_WORK}""",
        [before],
    )


@dataclass(frozen=True, slots=True)
class SiteChange:
    """Number of lines that began and ended."""

    began: int
    ended: int


def write_site(
    connection: duckdb.DuckDBPyConnection,
    lines: Mapping[tuple[str, str], str],
    links: Collection[tuple[str, str, str, Mapping[str, str]]],
    now: int,
) -> SiteChange:
    """Makes these the lines and links of the sources from now on; what stays the same keeps its beginning.

    lines: (entity, parent) -> source.  links: (port, port, source, facts).
    """
    columns = {
        "entity": [entity for entity, _ in lines],
        "parent": [parent for _, parent in lines],
        "source": list(lines.values()),
    }
    cables = {
        "a": [a for a, _, _, _ in links],
        "b": [b for _, b, _, _ in links],
        "source": [source for _, _, source, _ in links],
        "facts": [json.dumps(dict(facts), sort_keys=True) for _, _, _, facts in links],
    }
    changed = [
        _replace(connection, table, {k: pa.array(v, pa.string()) for k, v in wanted.items()}, now)
        for table, wanted in (("site_line", columns), ("site_link", cables))
    ]
    return SiteChange(sum(c.began for c in changed), sum(c.ended for c in changed))


def _replace(connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, object], now: int) -> SiteChange:
    same = " AND ".join(f"w.{name} = t.{name}" for name in columns)
    names = ", ".join(columns)
    with register_columns(connection, "wanted_lines", columns):
        [(ended,)] = connection.execute(
            f"""UPDATE "{table}" AS t SET "until" = make_timestamptz($1) WHERE "until" IS NULL
                AND NOT EXISTS (SELECT 1 FROM wanted_lines w WHERE {same})""",
            [now],
        ).fetchall()
        [(began,)] = connection.execute(
            f"""INSERT INTO "{table}" ({names}, since) SELECT {names}, make_timestamptz($1) FROM wanted_lines w
                WHERE NOT EXISTS (SELECT 1 FROM "{table}" t WHERE t."until" IS NULL AND {same})""",
            [now],
        ).fetchall()
    connection.execute(f'DELETE FROM "{table}" WHERE "until" <= since')
    return SiteChange(int(began), int(ended))


def load_site(connection: duckdb.DuckDBPyConnection, source: str) -> dict[str, tuple[str, ...]]:
    """The lines that a source said last: entity -> parents."""
    found: dict[str, list[str]] = {}
    rows = connection.execute('SELECT entity, parent FROM site_line WHERE source = ? AND "until" IS NULL', [source])
    for entity, parent in rows.fetchall():
        found.setdefault(entity, []).append(parent)
    return {entity: tuple(parents) for entity, parents in found.items()}


@dataclass(frozen=True, slots=True)
class Line:
    """`entity` is part of, or supplied by, `parent`. since, until: us; None: from the beginning, until now."""

    entity: str
    parent: str
    source: str
    since: int | None
    until: int | None


def read_lines(
    connection: duckdb.DuckDBPyConnection, entities: Iterable[str], time: int, below: bool = False
) -> list[Line]:
    """The lines of entities that count at a time; below: those that have them as parents.

    An agent's parent of a kind does not count where a source of the site names one of that kind.
    """
    column = "parent" if below else "entity"
    rows = connection.execute(
        f"""SELECT entity, parent, source, epoch_us(since), epoch_us("until") FROM topology
            WHERE {column} IN (SELECT unnest($1::VARCHAR[])) AND (since IS NULL OR since <= make_timestamptz($2))
            AND ("until" IS NULL OR "until" > make_timestamptz($2))""",
        [sorted(entities), time],
    ).fetchall()
    found = [Line(*row) for row in rows]
    if below:
        decided = {(line.entity, kind_of(line.parent)) for line in _site_lines_of(connection, found, time)}
    else:
        decided = {(line.entity, kind_of(line.parent)) for line in found if line.source != AGENTS}
    kept = [x for x in found if x.source != AGENTS or (x.entity, kind_of(x.parent)) not in decided]
    return sorted(kept, key=lambda line: (line.entity, line.source == AGENTS))


def _site_lines_of(connection: duckdb.DuckDBPyConnection, found: Collection[Line], time: int) -> list[Line]:
    """What sources of the site say about the entities of agents' lines."""
    rows = connection.execute(
        """SELECT entity, parent, source, epoch_us(since), epoch_us("until") FROM site_line
           WHERE entity IN (SELECT unnest($1::VARCHAR[])) AND since <= make_timestamptz($2)
           AND ("until" IS NULL OR "until" > make_timestamptz($2))""",
        [sorted({line.entity for line in found}), time],
    ).fetchall()
    return [Line(*row) for row in rows]


def list_ancestors(connection: duckdb.DuckDBPyConnection, entity: str, time: int) -> list[str]:
    """All that an entity was part of or supplied by at a time, nearest first."""
    found: dict[str, None] = {}
    level = [entity]
    while level:
        above = [line.parent for line in read_lines(connection, level, time)]
        level = [e for e in dict.fromkeys(above) if e not in found and e != entity]
        found.update(dict.fromkeys(level))
    return list(found)


def list_descendants(connection: duckdb.DuckDBPyConnection, entity: str, time: int) -> list[str]:
    """All that was part of an entity or supplied by it at a time, nearest first."""
    found: dict[str, None] = {}
    level = [entity]
    while level:
        below = [line.entity for line in read_lines(connection, level, time, below=True)]
        level = [e for e in dict.fromkeys(below) if e not in found and e != entity]
        found.update(dict.fromkeys(level))
    return list(found)


def has_changed_since(connection: duckdb.DuckDBPyConnection, time: int) -> bool:
    """Whether any line began or ended after a time; else the present topology is that of the time."""
    [(changed,)] = connection.execute(
        """SELECT EXISTS (FROM site_line WHERE since > make_timestamptz($1) OR "until" > make_timestamptz($1))
               OR EXISTS (FROM inventory_past WHERE "until" > make_timestamptz($1))""",
        [time],
    ).fetchall()
    return bool(changed)


def read_links(
    connection: duckdb.DuckDBPyConnection, ports: Collection[str], time: int
) -> list[tuple[str, str, str, str]]:
    """(port, port at the far end, source, facts as JSON) of cables with one of these ports at a time."""
    return connection.execute(
        """WITH valid AS (SELECT * FROM site_link WHERE since <= make_timestamptz($2)
                          AND ("until" IS NULL OR "until" > make_timestamptz($2)))
           SELECT a, b, source, facts FROM valid WHERE a IN (SELECT unnest($1::VARCHAR[]))
           UNION SELECT b, a, source, facts FROM valid WHERE b IN (SELECT unnest($1::VARCHAR[]))
           UNION SELECT entity, peer, 'agents', '{}' FROM links WHERE entity IN (SELECT unnest($1::VARCHAR[]))
           ORDER BY ALL""",
        [sorted(ports), time],
    ).fetchall()
