"""Sealed history: Parquet files beside the store, and the table `sealed` that names them.

A file counts only if `sealed` names it, so one transaction both deletes hot rows and adds their file, and one
transaction exchanges files. A file that nothing names is removed: at the next start, or KEEP_UNNAMED after it was
replaced, when no reader has it in a plan any more.

    STORE.history/CLASS/site=SITE/day=DAY/HOUR-TOKEN.parquet              rows, sorted by entity and time
    STORE.history/rollup_60/CLASS/site=SITE/day=DAY/HOUR-TOKEN.parquet    per 60 s; rollup_600 likewise

Integers are signed, so that every Parquet reader can read them: u8 and u16 as INTEGER, u32 and u64 as BIGINT.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from pipeline.model.records import SECOND
from pipeline.runtime import private_files

log = logging.getLogger("fleetpulse.store")

STEPS = (60, 600)
"""Seconds of a row of each rollup."""
SIGNED: Mapping[str, str] = {
    "UTINYINT": "INTEGER",
    "USMALLINT": "INTEGER",
    "UINTEGER": "BIGINT",
    "UBIGINT": "BIGINT",
}
"""Type in a hot table -> type in a sealed file."""
KEEP_UNNAMED = 600 * SECOND
"""How long a replaced file stays (us); chosen: sixty times the time limit of a query."""
PARTIAL = ".partial"
"""Suffix of a file that is being written."""
_FOLDER = ".history"

TABLE = """
CREATE TABLE IF NOT EXISTS sealed (
    path VARCHAR PRIMARY KEY, class VARCHAR NOT NULL, step INTEGER NOT NULL, site VARCHAR NOT NULL, day DATE NOT NULL,
    first TIMESTAMPTZ NOT NULL, last TIMESTAMPTZ NOT NULL, rows BIGINT NOT NULL, bytes BIGINT NOT NULL);
"""
"""path: below the history folder. step: 0 for rows, else the seconds of a rollup. first, last: times of the rows."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A row of `sealed`. first, last: UTC us; day: as in the path."""

    path: str
    device_class: str
    step: int
    site: str
    day: str
    first: int
    last: int
    rows: int
    bytes: int

    def insert(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Adds the row to the table."""
        connection.execute(
            "INSERT INTO sealed VALUES (?, ?, ?, ?, ?, make_timestamptz(?), make_timestamptz(?), ?, ?)",
            [
                self.path,
                self.device_class,
                self.step,
                self.site,
                self.day,
                self.first,
                self.last,
                self.rows,
                self.bytes,
            ],
        )


def history_folder(store: Path) -> Path:
    """The folder of the sealed files of a store."""
    return store.with_name(store.name + _FOLDER)


def folder_of(connection: duckdb.DuckDBPyConnection) -> Path | None:
    """The history folder of an open store; None for a database in memory."""
    query = "SELECT path FROM duckdb_databases() WHERE database_name = current_database()"
    [(path,)] = connection.execute(query).fetchall()
    return history_folder(Path(path)) if path else None


def restrict_access(connection: duckdb.DuckDBPyConnection, store: Path) -> None:
    """Locks the configuration; from then on only the history folder of the store can be read and written."""
    folder = str(history_folder(store).absolute()).replace("'", "''")
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    connection.execute(f"SET GLOBAL allowed_directories = ['{folder}/']")
    connection.execute("SET GLOBAL enable_external_access = false")
    connection.execute("SET GLOBAL lock_configuration = true")


def list_classes(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """The classes that have sealed files."""
    return {name for (name,) in connection.execute("SELECT DISTINCT class FROM sealed WHERE step = 0").fetchall()}


def list_files(
    connection: duckdb.DuckDBPyConnection,
    device_class: str,
    step: int = 0,
    start: int | None = None,
    end: int | None = None,
) -> list[str]:
    """Paths of the files of a class that may have rows in [start, end)."""
    query = "SELECT path FROM sealed WHERE class = ? AND step = ?"
    query += "" if start is None else f" AND last >= make_timestamptz({start})"
    query += "" if end is None else f" AND first < make_timestamptz({end})"
    return [p for (p,) in connection.execute(query + " ORDER BY first, path", [device_class, step]).fetchall()]


def select_files(folder: Path, paths: Iterable[str], columns: Mapping[str, str]) -> str:
    """SQL that selects columns (name -> SQL type) of sealed files; a file without a column has NULL there.

    With the types given, DuckDB opens a file only when it reads it.
    """
    fields = ", ".join(
        f"{_text(c)}: {{'name': {_text(c)}, 'type': '{t}', 'default_value': NULL}}" for c, t in columns.items()
    )
    names = ", ".join(map(_quoted, columns))
    files = ", ".join(_text(str(folder.absolute() / path)) for path in paths)
    return f"SELECT {names} FROM read_parquet([{files}], schema = MAP {{{fields}}}, hive_partitioning = false)"


def select_signed(column: str, kind: str, table: str = "") -> str:
    """SQL expression for a column of a hot table (kind: its SQL type) as it is sealed; NULL if it does not fit.

    table: its alias and a dot, where another table of the query has columns too.
    """
    return f'TRY_CAST({table}"{column}" AS {SIGNED[kind]}) AS "{column}"' if kind in SIGNED else f'{table}"{column}"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# --- files and names agree ------------------------------------------------------------------------------------------


def forget_missing(connection: duckdb.DuckDBPyConnection, folder: Path) -> int:
    """Removes names of files that do not exist, counted in `losses`; returns their number. Others stay readable."""
    named = connection.execute("SELECT path, class, rows, step FROM sealed").fetchall()
    missing = [
        (path, device_class, rows, step) for path, device_class, rows, step in named if not (folder / path).is_file()
    ]
    for path, device_class, rows, step in missing:
        log.error("store: sealed file %s is missing: %d rows of history are lost", folder / path, rows)
        connection.execute("DELETE FROM sealed WHERE path = ?", [path])
        if not step:
            connection.execute(
                """INSERT INTO losses VALUES ('history', ?, 'sealed file missing', 1, ?, now(), now())
                   ON CONFLICT (kind, topic, cause) DO UPDATE SET number = losses.number + 1,
                   messages = losses.messages + excluded.messages, last = excluded.last""",
                [device_class, rows],
            )
    return len(missing)


def match_files(connection: duckdb.DuckDBPyConnection, folder: Path, new: bool) -> int:
    """Makes names and files agree at the start: forgets missing files, removes files that a kill left unnamed.
    Returns how many names it forgot.

    new: the store is empty. Then, or if a file is missing, the store is not the one that the files belong to (a copy
    was restored, or the file was lost): files are kept aside in `FOLDER.aside`, for a person.
    """
    missing = forget_missing(connection, folder)
    aside = folder.with_name(folder.name + ".aside") if new or missing else None
    remove_unnamed(connection, folder, aside)
    return missing


def remove_unnamed(connection: duckdb.DuckDBPyConnection, folder: Path, aside: Path | None = None) -> list[str]:
    """Removes files that `sealed` does not name, and empty folders; returns their paths. aside: move finished files."""
    named = {path for (path,) in connection.execute("SELECT path FROM sealed").fetchall()}
    removed = []
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(parent, name).relative_to(folder)
            if str(path) in named:
                continue
            removed.append(str(path))
            if aside is None or name.endswith(PARTIAL):
                (folder / path).unlink()
            else:
                private_files.make_folder((aside / path).parent)
                (folder / path).rename(aside / path)
        if Path(parent) != folder and not os.listdir(parent):
            os.rmdir(parent)
    if aside is not None and removed:
        log.error("store: %d files of history that this store does not know were moved to %s", len(removed), aside)
    return removed


def find_expired(
    connection: duckdb.DuckDBPyConnection, rows_before: int, rollups_before: int, most_bytes: int
) -> Sequence[str]:
    """Paths over the bounds: rows and rollups that are too old, then the oldest until `most_bytes` are left.

    Rows go before rollups: a rollup of the same time needs a tenth of the bytes.
    """
    found = connection.execute(
        """SELECT path FROM (
               SELECT path, last < make_timestamptz(CASE WHEN step = 0 THEN $rows ELSE $rollups END) AS old,
                      sum(CASE WHEN last < make_timestamptz(CASE WHEN step = 0 THEN $rows ELSE $rollups END) THEN 0
                          ELSE bytes END) OVER (ORDER BY step > 0 DESC, last DESC, path) AS held
               FROM sealed)
           WHERE old OR held > $bytes ORDER BY path""",
        {"rows": rows_before, "rollups": rollups_before, "bytes": most_bytes},
    ).fetchall()
    return [path for (path,) in found]
