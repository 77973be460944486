"""How fast the history on the disk of the store grows, and when only events are stored."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from pipeline.config.sections import Store
from pipeline.model.records import SECOND

DAY, HOUR = 86_400 * SECOND, 3600 * SECOND
WINDOW = 7 * DAY
"""Newest sealed time over which growth is measured (us). Chosen: a week has its weekend."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Sealed files of the store, with their rollups. held: bytes.  per_day: bytes of a day; None before an hour of
    data is sealed."""

    held: int
    per_day: int | None


def read_growth(cursor: duckdb.DuckDBPyConnection) -> Growth:
    """Returns the bytes of all sealed files, and those of a day at the mean of the newest WINDOW."""
    query = """WITH newest AS (SELECT max(last) AS t FROM sealed)
               SELECT (SELECT coalesce(sum(bytes), 0) FROM sealed),
                      sum(bytes), epoch_us(min(first)), epoch_us(max(last))
               FROM sealed, newest WHERE first >= t - to_microseconds($window)"""
    [(held, recent, first, last)] = cursor.execute(query, {"window": WINDOW}).fetchall()
    if recent is None or last - first < HOUR // 2:
        return Growth(int(held), None)
    return Growth(int(held), int(recent * DAY / max(last - first, HOUR)))


def find_full(growth: Growth, store: Store, free: int, total: int, minimum: int) -> int | None:
    """Returns the seconds until only events are stored; None if the growth is not known, or [store] telemetry_days and
    telemetry_bytes bound the history before that."""
    room = max(0, free - minimum)
    if not growth.per_day:
        return None
    most = min(store.telemetry_bytes, total // 2, int(growth.per_day * store.telemetry_days))
    return None if most - growth.held <= room else int(room * 86_400 / growth.per_day)
