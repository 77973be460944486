"""Inserts columns into tables: the hot path of the store, through Arrow, without a loop over rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.model.records import Rows
from pipeline.model.signals import column_of

TIME = pa.timestamp("us", "UTC")
_SPARSE = 64  # from so many ids per row sorting is cheaper than an array over all ids; chosen
_INCOMING = "incoming_columns"
NEVER = -(1 << 62)
"""A time before all others: no frame is closed."""


def insert_columns(
    connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Any], conflict: str = ""
) -> None:
    """Inserts columns of equal length by name (Arrow arrays or sequences). `conflict` is appended to the statement."""
    with register_columns(connection, _INCOMING, columns):
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM {_INCOMING} {conflict}')


@contextlib.contextmanager
def register_columns(connection: duckdb.DuckDBPyConnection, name: str, columns: Mapping[str, Any]) -> Iterator[None]:
    """Makes columns available as a table `name` within the block."""
    connection.register(name, pa.table(dict(columns)))
    try:
        yield
    finally:
        # after an error the aborted transaction refuses this too; the first error counts
        with contextlib.suppress(duckdb.Error):
            connection.unregister(name)


def to_timestamps(values: Sequence[int] | NDArray[np.int64]) -> pa.Array:
    """A timestamp column from UTC microseconds."""
    return pa.array(np.asarray(values, np.int64), pa.int64()).cast(TIME)


def append_rows(connection: duckdb.DuckDBPyConnection, rows: Rows, closed: int = NEVER) -> None:
    """Stores telemetry rows and updates the latest row of each device. The class and its columns must exist.

    closed: frames before it are closed; earlier rows are marked as late.
    """
    columns: dict[str, pa.Array] = {"time": to_timestamps(rows.time), "device": pa.array(rows.device)}
    for name, values in rows.columns.items():
        columns[column_of(name, rows.device_class)] = to_nullable(values)
    late = rows.time < closed
    insert_columns(connection, f"hot_{rows.device_class}", columns | ({"late": pa.array(late)} if late.any() else {}))
    last = _last_rows(rows.device)
    newest = {name: column.take(last) for name, column in columns.items()}
    table = f"latest_{rows.device_class}"
    renew = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name != "device")
    insert_columns(
        connection, table, newest, f'ON CONFLICT (device) DO UPDATE SET {renew} WHERE excluded.time >= "{table}".time'
    )


def to_nullable(values: NDArray[Any]) -> pa.Array:
    """An Arrow array with null for NaN and for the highest unsigned value."""
    if values.dtype.kind != "u":
        return pa.array(values, from_pandas=True)
    missing = values == np.iinfo(values.dtype).max
    return pa.array(values, mask=missing if missing.any() else None)


def _last_rows(device: NDArray[np.int32]) -> pa.Array:
    """Positions of the last row of each device; rows of a device are in order of time."""
    if int(device.max()) > _SPARSE * len(device):
        _, first = np.unique(device[::-1], return_index=True)
        return pa.array(np.sort(len(device) - 1 - first))
    place = np.full(int(device.max()) + 1, -1)
    place[device] = np.arange(len(device))
    return pa.array(place[place >= 0])
