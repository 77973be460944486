"""Rows of the calibration: its versions, and what people did to them. Writes go into the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import duckdb

from pipeline.model.records import iso

CALIBRATIONS_KEPT = 100
"""Versions of the calibration that are kept: a quarter of daily ones. Chosen."""


def add_calibration(
    connection: duckdb.DuckDBPyConnection, time: int, action: str, user: str, of: int | None, document: str | None
) -> int:
    """Stores a version of the calibration, or what a person did to it (`of` a version); returns its number."""
    row = connection.execute(
        """INSERT INTO calibrations
           SELECT coalesce(max(version), 0) + 1, make_timestamptz($1::BIGINT), $2, $3, $4, $5 FROM calibrations
           RETURNING version""",
        [time, action, of, user, document],
    ).fetchone()
    assert row is not None
    connection.execute(
        'DELETE FROM calibrations c WHERE version <= $1 AND NOT EXISTS (FROM calibrations d WHERE d."of" = c.version)',
        [row[0] - CALIBRATIONS_KEPT],
    )
    return int(row[0])


def list_calibrations(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Returns the versions and their changes, newest first, in the form of the API."""
    rows = cursor.execute(
        'SELECT version, epoch_us(time), action, "of", "user" FROM calibrations ORDER BY version DESC'
    ).fetchall()
    acts = [(of, action) for _, _, action, of, _ in rows if action != "learned"]
    pinned = acts[0][0] if acts and acts[0][1] == "pin" else None
    names = ("version", "time", "action", "of", "user", "in_force")
    return [dict(zip(names, (v, iso(t), a, of, user, v == pinned), strict=True)) for v, t, a, of, user in rows]


def load_calibration(cursor: duckdb.DuckDBPyConnection, version: int) -> dict[str, Any]:
    """Returns the document of a version. Raises KeyError if there is none."""
    row = cursor.execute("SELECT document FROM calibrations WHERE version = $1", [version]).fetchone()
    if row is None or row[0] is None:
        raise KeyError(f"calibration {version}: not found")
    found: dict[str, Any] = json.loads(row[0])
    return found


def keep_calibration(
    connection: duckdb.DuckDBPyConnection, time: int, every: int, export: Callable[[], Mapping[str, Any]]
) -> None:
    """Stores the calibration in force as a version, if there is one and the newest version is older than `every` us."""
    row = connection.execute("SELECT epoch_us(max(time)) FROM calibrations WHERE action = 'learned'").fetchone()
    newest = int(row[0]) if row and row[0] is not None else 0
    if not 0 <= time - newest < every and (document := export()).get("detectors"):
        add_calibration(connection, time, "learned", "", None, json.dumps(document))


def list_pages(cursor: duckdb.DuckDBPyConnection, since: int) -> list[tuple[str, float | None]]:
    """Returns (detector, effect) of each page since a time; None where it compared nothing."""
    rows = cursor.execute(
        """SELECT detector, try_cast(evidence ->> '$.effect' AS DOUBLE) FROM findings
           WHERE level = 'page' AND time >= make_timestamptz($1::BIGINT)""",
        [since],
    ).fetchall()
    return [(str(name), None if effect is None else float(effect)) for name, effect in rows]
