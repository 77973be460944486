"""Ranks that ended lose their columns in frames, and the detectors keep what they learned.

Each start of a job names its ranks anew, so that a busy site has ten times as many ended ranks as running ones within
days, and each frame of ranks would have a column for all of them. Other devices come and go rarely; for them see
`retention.drop_silent_devices`.

The columns are dropped between two engines, as in a restart: the state file of the detectors is written again without
these ranks, and one transaction names it and deletes the ranks. A process that is killed before it keeps both.
"""

from __future__ import annotations

import logging

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.engine.judge import Judge
from pipeline.engine.restart import keep_state
from pipeline.incidents.ledger import load_snapshot
from pipeline.model.records import SECOND, iso
from pipeline.store import schema
from pipeline.store.database import Database
from pipeline.store.detector_state import read_state
from pipeline.store.retention import MIN_SILENT_DEVICES, find_newest_row

log = logging.getLogger("fleetpulse.engine")

LEAST_SILENCE = 3600 * SECOND
"""Shortest time without a row after which a rank ended (us). Chosen: a stopped job that goes on reports within it, and
detectors remember ranks that are gone as long (detectors/straggler/rank_slots.py)."""
SHARE = 1.0
"""Ended ranks per other one above which they are dropped, beyond MIN_SILENT_DEVICES. Chosen: it takes as long as a
restart, and frames are at most twice as wide as the running jobs."""


def drop_ended_ranks(database: Database, judge: Judge, now: int) -> int:
    """Drops the ranks without telemetry among the hot rows, if there are many; returns how many.

    The judge has no usable state afterwards: the caller starts an engine, which restores it. Raises duckdb.Error.
    """
    with database.lock:
        kept = _find_kept(database.connection, now)
    ended = len(kept) - int(np.count_nonzero(kept))
    if ended <= MIN_SILENT_DEVICES + SHARE * (len(kept) - ended):
        return 0
    state = _keep_state(database, judge, kept)
    with database.transaction() as connection:
        _delete(connection, kept)
        connection.execute("UPDATE snapshot SET state = $1 WHERE key = 'judge'", [state])
    return ended


def _delete(connection: duckdb.DuckDBPyConnection, kept: NDArray[np.bool_]) -> None:
    ids = np.array([id_ for (id_,) in connection.execute(_RANKS).fetchall()], np.int64)
    gone = ids[~kept].tolist()
    connection.execute("DELETE FROM device WHERE class = 'rank' AND id IN (SELECT unnest($1::BIGINT[]))", [gone])
    connection.execute("DELETE FROM latest_rank WHERE device IN (SELECT unnest($1::BIGINT[]))", [gone])


_RANKS = "SELECT id FROM device WHERE class = 'rank' ORDER BY id"


def _find_kept(connection: duckdb.DuckDBPyConnection, now: int) -> NDArray[np.bool_]:
    """Returns (N,) by column of the frames whether a rank stays: it has hot rows, or had one within LEAST_SILENCE."""
    before = find_newest_row(connection, now) - LEAST_SILENCE
    tables = [t for t in schema.list_hot_tables(connection) if schema.class_of_table(t) == "rank"]
    hot = [f'SELECT device FROM "{table}"' for table in tables]
    recent = f"SELECT device FROM latest_rank WHERE time >= make_timestamptz({before})"
    living = {id_ for (id_,) in connection.execute(" UNION ".join([recent, *hot])).fetchall()}
    return np.array([id_ in living for (id_,) in connection.execute(_RANKS).fetchall()], bool)


def _keep_state(database: Database, judge: Judge, kept: NDArray[np.bool_]) -> str:
    """Writes the newest state of the detectors again, without the ranks that go; returns the name of its file.

    "": there is none, or it cannot be read or written, which is logged; the detectors then learn again.
    """
    found = load_snapshot(database.connection, "judge")
    if found is None or not found[1]:
        return ""
    time, name = found
    try:
        judge.restore(read_state(database.path, name))
    except (OSError, ValueError, KeyError) as error:
        log.warning("the detectors learn again: their snapshot of %s cannot be read: %s", iso(time), error)
        return ""
    judge.drop_ranks(kept)
    # under another name: the file that counts until the commit must not change
    return keep_state(database, time + 1, judge.snapshot())
