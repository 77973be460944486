"""Inserts columns into tables: the hot path of the store, through Arrow, without a loop over rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

TIME = pa.timestamp("us", "UTC")
_INCOMING = "incoming_columns"
NEVER = -(1 << 62)
"""A time before all others: no frame is closed."""


def insert_columns(
    connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Any] | pa.Table, conflict: str = ""
) -> None:
    """Inserts columns of equal length by name (Arrow arrays or sequences). `conflict` is appended to the statement."""
    with register_columns(connection, _INCOMING, columns):
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM {_INCOMING} {conflict}')


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
