"""Retention of the hot window: what is older than the limit leaves the tables, and bookkeeping stays small."""

from __future__ import annotations

from pipeline.signals import CLASSES
from pipeline.store.database import Database


def expire(database: Database, before: int) -> int:
    """Removes telemetry and events older than `before` (us) and superseded commit rows; returns the telemetry rows.

    Incidents, history, gaps and dead letters stay. The newest commit row of each partition stays for ever: it is the
    offset, and the fence against a writer that slept.
    """
    removed = 0
    with database.transaction() as connection:
        for table in (f"hot_{c}" for c in CLASSES):
            removed += connection.execute(f'DELETE FROM "{table}" WHERE time < make_timestamptz({before})').fetchall()[
                0
            ][0]
        connection.execute(f"DELETE FROM events WHERE time < make_timestamptz({before})")
        connection.execute(f"""
            DELETE FROM ingest_commit WHERE committed < make_timestamptz({before}) AND
            (topic, partition, incarnation, next_offset) NOT IN (
                SELECT (topic, partition, incarnation, max(next_offset)) FROM ingest_commit
                GROUP BY topic, partition, incarnation)""")
    return removed
