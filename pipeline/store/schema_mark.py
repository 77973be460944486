"""The mark of a store whose tables and views are those that this code creates: opening it creates none of them again.

Creating all of them takes 0.2 s of CPU, also where all exist: DuckDB binds each view of the wide tables. The mark is a
row of `meta`: a digest of all that decides what is created (this package's source, the signals, DuckDB's version, the
folder of the sealed files that views name), then the layouts of hot tables at that time. While the store is open, only
layouts of single classes change, with their views; a version that creates all tables replaces all layouts. So a store
that an older version has opened in between has none of the layouts, and is not taken for ours.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import duckdb

from pipeline.model.signals import Signal
from pipeline.store import history_files

_KEY = "schema_mark"


def write_mark(connection: duckdb.DuckDBPyConnection, catalogue: Mapping[str, Signal]) -> None:
    """Records that tables and views were just created by this code for these signals."""
    mark = " ".join([_digest(connection, catalogue), *sorted(_layouts(connection))])
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [_KEY, mark])


def has_mark(connection: duckdb.DuckDBPyConnection, catalogue: Mapping[str, Signal]) -> bool:
    """Returns whether the tables and views of a store of our version are already those for these signals."""
    found = connection.execute("SELECT value FROM meta WHERE key = ?", [_KEY]).fetchall()
    if not found:
        return False
    digest, *layouts = str(found[0][0]).split(" ")
    return digest == _digest(connection, catalogue) and not _layouts(connection).isdisjoint(layouts)


def _layouts(connection: duckdb.DuckDBPyConnection) -> set[str]:
    rows = connection.execute("SELECT value FROM meta WHERE starts_with(key, 'layout_')").fetchall()
    return {str(value) for (value,) in rows}


def _digest(connection: duckdb.DuckDBPyConnection, catalogue: Mapping[str, Signal]) -> str:
    digest = hashlib.sha256(_source())
    for name, signal in sorted(catalogue.items()):
        digest.update(f"{name} {signal.device_class} {signal.column} {signal.type}\n".encode())
    if history_files.list_classes(connection):
        digest.update(str(history_files.folder_of(connection)).encode())
    return digest.hexdigest()


@functools.cache
def _source() -> bytes:
    """The digest of this package's source and of DuckDB's version."""
    digest = hashlib.sha256(duckdb.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()
