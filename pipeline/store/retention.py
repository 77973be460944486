"""Retention of the hot window: what is older than the limit leaves the tables, and bookkeeping stays small.

Also repairs what older versions stored in the future, since they believed every clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import duckdb

from pipeline.model.records import SECOND
from pipeline.model.signals import CLASSES
from pipeline.store.database import Database

DAY = 24 * 3600 * SECOND
LEAST = 4096
"""Silent devices of a class that are worth no renumbering (chosen: they cost the detectors about 20 MB)."""


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


def clamp_latest(database: Database, now: int, latest: int) -> int:
    """Sets the time of the newest row of a device to `now` where it is after `latest`; returns how many there were.

    A clock that was wrong would else keep its devices "just seen" until that time comes.
    """
    with database.transaction() as connection:
        return sum(
            connection.execute(
                f'UPDATE "latest_{c}" SET time = make_timestamptz({now}) WHERE time > make_timestamptz({latest})'
            ).fetchall()[0][0]
            for c in CLASSES
        )


def newest_row(connection: duckdb.DuckDBPyConnection, now: int) -> int:
    """Time of the newest telemetry, at most `now`; `now` if there is none. UTC us."""
    each = " UNION ALL ".join(f"SELECT max(time) AS time FROM latest_{c}" for c in CLASSES)
    [(newest,)] = connection.execute(f"SELECT epoch_us(max(time)) FROM ({each})").fetchall()
    return now if newest is None else min(now, newest)


def drop_silent(database: Database, keep: int, share: float, now: int) -> int:
    """Drops devices without a row in the last `keep` us of telemetry, if there are many; returns how many it dropped.

    Many: in some class LEAST plus `share` of the others. Devices in frames are numbered anew then, so that the
    detectors learn anew; what they knew is marked as void. Their rows go too, since their ids may be given again.
    """
    with database.lock:
        before = newest_row(database.connection, now) - keep
        counts = list(_counts(database.connection, before))
    if not any(silent > LEAST + share * (known - silent) for _, silent, known in counts):
        return 0
    with database.transaction() as connection:
        for device_class, silent, _ in counts:
            if silent:
                old = f"FROM latest_{device_class} WHERE time < make_timestamptz({before})"
                connection.execute(f"DELETE FROM device WHERE class = '{device_class}' AND id IN (SELECT device {old})")
                connection.execute(f"DELETE {old}")
                connection.execute(f"DELETE FROM hot_{device_class} WHERE time < make_timestamptz({before})")
        connection.execute("UPDATE snapshot SET state = '' WHERE key = 'judge'")
    return sum(silent for _, silent, _ in counts)


def _counts(connection: duckdb.DuckDBPyConnection, before: int) -> Iterator[tuple[str, int, int]]:
    """Class, its devices without a row since `before`, and all of them."""
    for device_class in CLASSES:
        [(silent, known)] = connection.execute(
            f"SELECT count(*) FILTER (time < make_timestamptz({before})), count(*) FROM latest_{device_class}"
        ).fetchall()
        yield device_class, silent, known


def drop_unnamed(database: Database, keep: int, now: int) -> int:
    """Drops entities that no inventory has named in the last `keep` us of telemetry; returns how many.

    Rows of an older version, which do not say when, count as named now.
    """
    with database.transaction() as connection:
        before = newest_row(connection, now) - keep
        connection.execute(f"UPDATE entity SET named = make_timestamptz({now}) WHERE named IS NULL")
        found = connection.execute(f"DELETE FROM entity WHERE named < make_timestamptz({before})").fetchall()
    return int(found[0][0])
