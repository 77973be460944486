"""The rows of mutes. Writes go into the caller's transaction."""

from __future__ import annotations

import duckdb

from pipeline.voice import Mute

_COLUMNS = 'id, detector, scope, epoch_us(since), epoch_us("until"), reason, "user", epoch_us(ended), ended_by'


def add(connection: duckdb.DuckDBPyConnection, mute: Mute) -> None:
    connection.execute(
        """INSERT INTO mutes VALUES ($1, $2, $3, make_timestamptz($4::BIGINT), make_timestamptz($5::BIGINT), $6, $7,
           NULL, NULL)""",
        [mute.id, mute.detector, mute.scope, mute.since, mute.until, mute.reason, mute.user],
    )


def end(connection: duckdb.DuckDBPyConnection, id_: str, user: str, time: int) -> None:
    """Somebody ends one now; one that was over stays as it was."""
    connection.execute(
        """UPDATE mutes SET ended = make_timestamptz($2::BIGINT), ended_by = $3
           WHERE id = $1 AND ended IS NULL AND "until" > make_timestamptz($2::BIGINT)""",
        [id_, time, user],
    )


def every(connection: duckdb.DuckDBPyConnection) -> list[Mute]:
    """All that ever were, newest first."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM mutes ORDER BY since DESC, id").fetchall()
    return [Mute(*row) for row in rows]


def standing(connection: duckdb.DuckDBPyConnection, time: int) -> list[Mute]:
    """Those that are not over at `time`, oldest first."""
    rows = connection.execute(
        f"""SELECT {_COLUMNS} FROM mutes WHERE least("until", coalesce(ended, "until")) > make_timestamptz(?::BIGINT)
            ORDER BY since, id""",
        [time],
    ).fetchall()
    return [Mute(*row) for row in rows]
