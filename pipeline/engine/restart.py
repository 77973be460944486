"""What a restart needs: rows and events since the last checkpoint in order of time, and recovery from a clock that was
ahead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipeline.model.records import SECOND, Event, Rows, iso
from pipeline.model.signals import CATALOGUE, column_of
from pipeline.store.database import Database
from pipeline.store.detector_state import Piece, state_folder, write_state
from pipeline.store.schema import class_of_table, list_hot_tables

log = logging.getLogger("fleetpulse.engine")

CHUNK = 60 * SECOND
"""Event time per read (us): 0.6 MB for a node of 8 GPUs and 10 ports. Chosen: a restart rarely has more."""
_JUDGED = "coalesce(judged, time)"
Refill = Callable[[Sequence[Rows], Sequence[tuple[int, Event]], int], None]
"""(rows, events with the time of their cell, end) -> None."""


def read_since(database: Database, start: int, end: int, refill: Refill) -> None:
    """Calls `refill(rows, events, until)` for every non-empty chunk of event time from `start` to `end`.

    end: later rows have a wrong clock; old versions stored them.
    """
    cursor = database.cursor()
    try:
        classes = [c for (c,) in cursor.execute("SELECT DISTINCT class FROM device ORDER BY ALL").fetchall()]
        hot = [table for table in list_hot_tables(cursor) if class_of_table(table) in classes]
        tables = [(table, "time") for table in hot] + [("events", _JUDGED)]
        query = " UNION ALL ".join(
            f'SELECT DISTINCT epoch_us({time}) // {CHUNK} AS chunk FROM "{table}" '
            f"WHERE {time} >= make_timestamptz({start}) AND {time} < make_timestamptz({end})"
            for table, time in tables
        )
        for (chunk,) in cursor.execute(f"SELECT DISTINCT chunk FROM ({query}) ORDER BY 1").fetchall():
            first, until = max(start, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
            rows = [block for table in hot if (block := _read_rows(cursor, table, first, until)) is not None]
            refill(rows, _read_events(cursor, first, until), until)
    finally:
        cursor.close()


def _read_rows(cursor: duckdb.DuckDBPyConnection, hot: str, first: int, until: int) -> Rows | None:
    device_class = class_of_table(hot)
    table = cursor.sql(
        f'SELECT epoch_us(time) AS "time", * EXCLUDE (time, late) FROM "{hot}" '
        f"WHERE time >= make_timestamptz({first}) AND time < make_timestamptz({until}) AND late IS NOT TRUE"
    ).to_arrow_table()
    if not table.num_rows:
        return None
    names = {column_of(name, s.device_class): name for name, s in CATALOGUE.items() if s.device_class == device_class}
    columns = {
        names.get(c, f"{device_class}.{c}"): table[c].cast(pa.float64(), safe=False).to_numpy()
        for c in table.column_names
        if c not in ("time", "device")
    }
    device = table["device"].to_numpy().astype(np.int32)
    return Rows(device_class, table["time"].to_numpy(), device, columns)


def _read_events(cursor: duckdb.DuckDBPyConnection, first: int, until: int) -> list[tuple[int, Event]]:
    rows = cursor.execute(
        f"SELECT epoch_us({_JUDGED}), epoch_us(time), entity, kind, data FROM events WHERE kind <> 'inventory' "
        f"AND {_JUDGED} >= make_timestamptz(?) AND {_JUDGED} < make_timestamptz(?) ORDER BY ALL",
        [first, until],
    ).fetchall()
    return [(judged, Event(time, entity, kind, json.loads(data))) for judged, time, entity, kind, data in rows]


MAX_FUTURE = 3600 * SECOND
"""Times further ahead are from a wrong clock (us): the maximum of clock_bound. A smaller step back is waited for."""
_UNLIMITED_KEYS = frozenset({"mutes"})  # set by people; may end later


def clamp_state(state: str, now: int) -> str:
    """The state of a Desk (JSON) with no time later than `now`, so that its incidents can end."""
    return json.dumps(_clamp(json.loads(state), now))


def _clamp(value: Any, now: int) -> Any:
    if isinstance(value, dict):
        return {key: inner if key in _UNLIMITED_KEYS else _clamp(inner, now) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clamp(inner, now) for inner in value]
    return min(value, now) if type(value) is int else value


def count_later_rows(database: Database, latest: int) -> int:
    """Number of stored rows and events after `latest`, which are not evaluated any more."""
    with database.lock:
        connection: duckdb.DuckDBPyConnection = database.connection
        classes = [c for (c,) in connection.execute("SELECT DISTINCT class FROM device ORDER BY ALL").fetchall()]
        count = 0
        hot = [table for table in list_hot_tables(connection) if class_of_table(table) in classes]
        for table in (*hot, "events"):
            query = f'SELECT count(*) FROM "{table}" WHERE time > make_timestamptz({latest})'
            count += connection.execute(query).fetchall()[0][0]
    return count


@dataclass(slots=True)
class EngineProgress:
    """End of the last evaluated cell (`judged`), and of the last cell in the detectors' snapshot.

    tried: end of the last cell of which a snapshot was tried; on a full disk none is written.
    """

    judged: int = -(1 << 62)
    snapshot: int = -(1 << 62)
    tried: int = -(1 << 62)


def limit_to_now(progress: EngineProgress, database: Database, state: str, now: int) -> tuple[str, int]:
    """The state of the Desk, and how many rows are not evaluated again.

    If it was made by a clock far ahead, it is limited to now, where evaluation continues.
    """
    judged = progress.judged
    if judged <= now + MAX_FUTURE:
        return state, 0
    unjudged = count_later_rows(database, now)
    log.warning(
        "our clock was set back: judged up to %s, which is in the future; judging continues from %s. %d rows and "
        "events with later times are not judged again; rows that came too late in between are in late_rows",
        *(iso(judged), iso(now), unjudged),
    )
    progress.judged = now
    return clamp_state(state, now), unjudged


def keep_state(database: Database, end: int, pieces: Iterable[Piece]) -> str:
    """Writes the detectors' state and returns the name of its file; "" if the disk refuses it, which is logged.

    Without it evaluation goes on, and a restart evaluates more frames again.
    """
    try:
        return write_state(database.path, end, pieces)
    except OSError as error:
        log.warning(
            "the state of the detectors was not written to %s: %s; the newest one written stays valid",
            *(state_folder(database.path), error.strerror or error),
        )
        return ""
