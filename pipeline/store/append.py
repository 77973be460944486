"""Inserts columns into tables: the hot path of the store, through Arrow, without a loop over rows."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

TIME = pa.timestamp("us", "UTC")
NEVER = -(1 << 62)
"""A time before all others: no frame is closed."""


class Source:
    """Rows that DuckDB reads under a registered name; each statement reads the present `table`."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self._empty = table, table.schema.empty_table()

    def clear(self) -> None:
        """Forgets the rows; a slice without any would keep them in memory."""
        self.table = self._empty

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


_SOURCES: weakref.WeakKeyDictionary[duckdb.DuckDBPyConnection, dict[str, Source]] = weakref.WeakKeyDictionary()
"""Registered sources of each connection by name, without rows between statements."""


def insert_columns(
    connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Any] | pa.Table, conflict: str = ""
) -> None:
    """Inserts columns of equal length by name (Arrow arrays or sequences). `conflict` is appended to the statement."""
    name = f"rows_of_{table}"
    with provide_columns(connection, name, columns):
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM "{name}" {conflict}')


@contextlib.contextmanager
def provide_columns(
    connection: duckdb.DuckDBPyConnection, name: str, columns: Mapping[str, Any] | pa.Table
) -> Iterator[None]:
    """Makes columns available as a table `name` within the block, under a name that stays registered: to register it
    and to remove it costs as much as a small insert. After a ROLLBACK `forget_sources` is due."""
    table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
    known = _SOURCES.setdefault(connection, {})
    source = known.get(name)
    if source is None or source.table.schema != table.schema:
        connection.register(name, source := Source(table))
        known[name] = source
    source.table = table
    try:
        yield
    finally:
        source.clear()


def forget_sources(connection: duckdb.DuckDBPyConnection) -> None:
    """Forgets what `provide_columns` registered: a transaction that is rolled back takes the names with it."""
    _SOURCES.pop(connection, None)


@contextlib.contextmanager
def register_columns(
    connection: duckdb.DuckDBPyConnection, name: str, columns: Mapping[str, Any] | pa.Table | pa.RecordBatchReader
) -> Iterator[None]:
    """Makes columns available as a table `name` within the block; those of a reader can be read once."""
    ready = isinstance(columns, pa.Table | pa.RecordBatchReader)
    connection.register(name, columns if ready else pa.table(dict(columns)))
    try:
        yield
    finally:
        # after an error the aborted transaction refuses this too; the first error counts
        with contextlib.suppress(duckdb.Error):
            connection.unregister(name)


def to_timestamps(values: Sequence[int] | NDArray[np.int64]) -> pa.Array:
    """A timestamp column from UTC microseconds."""
    return pa.array(np.asarray(values, np.int64), pa.int64()).cast(TIME)


def to_nullable(values: NDArray[Any]) -> pa.Array:
    """An Arrow array with null for NaN and for the highest unsigned value."""
    if values.dtype.kind != "u":
        return pa.array(values, from_pandas=True)
    missing = values == np.iinfo(values.dtype).max
    return pa.array(values, mask=missing if missing.any() else None)
