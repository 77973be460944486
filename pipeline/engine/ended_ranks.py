"""Ranks that ended lose their columns in frames, and the detectors keep what they learned.

Each start of a job gives its ranks new names: a busy site has ten times as many ended ranks as running ones within
days, and each frame of ranks would have a column for all of them. Other devices come and go rarely; for them see
`retention.drop_silent_devices`.

The columns are dropped between two engines, as in a restart: the state file of the detectors is written again without
these ranks, and one transaction names it and deletes the ranks. A process that is killed before it keeps both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
    """Drops the ranks that ended before all hot rows, if there are many; returns how many.

    The judge has no usable state afterwards: the caller starts an engine, which restores it. Raises duckdb.Error.
    """
    with database.lock:
        ids, kept = _find_kept(database.connection, now)
    gone = ids[~kept].tolist()
    if len(gone) <= MIN_SILENT_DEVICES + SHARE * (len(kept) - len(gone)):
        return 0
    state = _keep_state(database, judge, kept)
    with database.transaction() as connection:
        _delete(connection, gone)
        connection.execute("UPDATE snapshot SET state = $1 WHERE key = 'judge'", [state])
    return len(gone)


def _delete(connection: duckdb.DuckDBPyConnection, ids: Sequence[int]) -> None:
    connection.execute("DELETE FROM device WHERE class = 'rank' AND id IN (SELECT unnest($1::BIGINT[]))", [ids])
    connection.execute("DELETE FROM latest_rank WHERE device IN (SELECT unnest($1::BIGINT[]))", [ids])


def _find_kept(connection: duckdb.DuckDBPyConnection, now: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns by column of the frames (N,) the id of each rank, and whether it stays.

    It ended if its newest row is older than LEAST_SILENCE and than every hot row: then it has none there.
    """
    before = find_newest_row(connection, now) - LEAST_SILENCE
    for table in schema.list_hot_tables(connection):
        if schema.class_of_table(table) == "rank":
            [(oldest,)] = connection.execute(f'SELECT epoch_us(min(time)) FROM "{table}"').fetchall()
            before = before if oldest is None else min(before, oldest)
    rows = connection.execute(
        """SELECT d.id, coalesce(l.time >= make_timestamptz($1::BIGINT), true)
           FROM device d LEFT JOIN latest_rank l ON l.device = d.id WHERE d.class = 'rank' ORDER BY d.id""",
        [before],
    ).fetchall()
    return np.array([id_ for id_, _ in rows], np.int64), np.array([stays for _, stays in rows], bool)


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
