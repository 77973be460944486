"""Our own clock was far ahead and came back: what was judged then must not stop judging until that time is reached."""

from __future__ import annotations

import json
from typing import Any

import duckdb

from pipeline.model.records import SECOND
from pipeline.store.database import Database

FUTURE = 3600 * SECOND
"""Later times are of a clock that was wrong: the most that clock_bound may be. A smaller step back is waited for."""
_KEPT = frozenset({"mutes"})  # what a person set may well end later


def clamped(state: str, now: int) -> str:
    """The state of a Desk (JSON) in which no time is later than `now`, so that its incidents can end."""
    return json.dumps(_clamped(json.loads(state), now))


def _clamped(value: Any, now: int) -> Any:
    if isinstance(value, dict):
        return {key: inner if key in _KEPT else _clamped(inner, now) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clamped(inner, now) for inner in value]
    return min(value, now) if type(value) is int else value


def dated_later(database: Database, latest: int) -> int:
    """How many rows and events the store holds that are dated after `latest`: they are not judged any more."""
    with database.lock:
        connection: duckdb.DuckDBPyConnection = database.connection
        classes = [c for (c,) in connection.execute("SELECT DISTINCT class FROM device ORDER BY ALL").fetchall()]
        count = 0
        for table in (*(f"hot_{c}" for c in classes), "events"):
            query = f'SELECT count(*) FROM "{table}" WHERE time > make_timestamptz({latest})'
            count += connection.execute(query).fetchall()[0][0]
    return count
