"""The rows of `owner`: which sender holds which entity by claim (pipeline/ownership.py)."""

from __future__ import annotations

import duckdb

from pipeline.config.sections import Admission
from pipeline.ownership import Claim, Owners
from pipeline.store.append import insert, times
from pipeline.store.database import Database

_STORED = """
SELECT o.entity, o.node, o.former, epoch_us(o.since), o.released, epoch_us(e.last_seen)
FROM owner o LEFT JOIN entities e ON e.entity = o.entity
"""
_BEFORE = """
SELECT d.entity, any_value(d.node), '', 0, false, epoch_us(max(e.last_seen))
FROM device d LEFT JOIN entities e ON e.entity = d.entity
WHERE NOT starts_with(split_part(d.entity, ':', 2) || '.', d.node || '.') AND d.entity NOT IN (SELECT entity FROM owner)
GROUP BY d.entity
"""
"""Devices that are not called like their sender, from before there were claims: who reported them first has them."""


def load_owners(database: Database, rules: Admission | None = None) -> Owners:
    """What the store knows of owners. A claim was last seen when its entity's newest row was measured."""
    with database.lock:
        connection = database.connection
        rows = connection.execute(_STORED).fetchall() + connection.execute(_BEFORE).fetchall()
        senders = dict(connection.execute("SELECT DISTINCT node, 0 FROM device").fetchall())
        senders |= dict(connection.execute("SELECT node, epoch_us(least(newest, arrived)) FROM sender").fetchall())
    claims = {
        entity: Claim(node, since, max(since, seen or 0), seen is not None, released, former)
        for entity, node, former, since, released, seen in rows
    }
    return Owners(rules, claims, senders)


def save_claims(connection: duckdb.DuckDBPyConnection, owners: Owners) -> None:
    """Writes what changed since the last save that became durable."""
    if owners.gone:
        connection.execute("DELETE FROM owner WHERE list_contains(?, entity)", [sorted(owners.gone)])
    if not owners.changed:
        return
    entities = sorted(owners.changed)
    claims = [owners.claims[entity] for entity in entities]
    columns = {
        "entity": entities,
        "node": [claim.owner for claim in claims],
        "former": [claim.former for claim in claims],
        "since": times([claim.since for claim in claims]),
        "released": [claim.released for claim in claims],
    }
    renew = "node = excluded.node, former = excluded.former, since = excluded.since, released = excluded.released"
    insert(connection, "owner", columns, f"ON CONFLICT (entity) DO UPDATE SET {renew}")
    connection.execute(
        """UPDATE device SET node = owner.node FROM owner
           WHERE owner.entity = device.entity AND owner.node <> device.node AND list_contains(?, device.entity)""",
        [entities],
    )
