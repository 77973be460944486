"""Columns -> tables: the hot path of the store, through Arrow and without a loop over rows."""

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
_SPARSE = 64  # ids per row from which on sorting the rows costs less than a cell for each id; chosen
_INCOMING = "incoming_columns"
NEVER = -(1 << 62)
"""Before all times: no frame is closed."""


def insert(connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Any], conflict: str = "") -> None:
    """INSERT BY NAME of equally long columns (Arrow arrays or sequences); `conflict` is appended to the statement."""
    with registered(connection, _INCOMING, columns):
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM {_INCOMING} {conflict}')


@contextlib.contextmanager
def registered(connection: duckdb.DuckDBPyConnection, name: str, columns: Mapping[str, Any]) -> Iterator[None]:
    """The columns as a table `name` within the block."""
    connection.register(name, pa.table(dict(columns)))
    try:
        yield
    finally:
        # after an error the transaction is aborted, and refuses this too: the error that counts is the first
        with contextlib.suppress(duckdb.Error):
            connection.unregister(name)


def times(values: Sequence[int] | NDArray[np.int64]) -> pa.Array:
    """UTC microseconds as a timestamp column."""
    return pa.array(np.asarray(values, np.int64), pa.int64()).cast(TIME)


def append_rows(connection: duckdb.DuckDBPyConnection, rows: Rows, closed: int = NEVER) -> None:
    """Stores telemetry rows and renews the latest row of each device. The class and its columns must exist.

    closed: frames before it are closed, so that rows before it are not judged any more.
    """
    columns: dict[str, pa.Array] = {"time": times(rows.time), "device": pa.array(rows.device)}
    for name, values in rows.columns.items():
        columns[column_of(name, rows.device_class)] = nullable(values)
    late = rows.time < closed
    insert(connection, f"hot_{rows.device_class}", columns | ({"late": pa.array(late)} if late.any() else {}))
    last = _last_of_each(rows.device)
    newest = {name: column.take(last) for name, column in columns.items()}
    table = f"latest_{rows.device_class}"
    renew = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name != "device")
    insert(
        connection, table, newest, f'ON CONFLICT (device) DO UPDATE SET {renew} WHERE excluded.time >= "{table}".time'
    )


def nullable(values: NDArray[Any]) -> pa.Array:
    """Arrow array with null where the value is NaN or the highest unsigned value."""
    if values.dtype.kind != "u":
        return pa.array(values, from_pandas=True)
    missing = values == np.iinfo(values.dtype).max
    return pa.array(values, mask=missing if missing.any() else None)


def _last_of_each(device: NDArray[np.int32]) -> pa.Array:
    """Positions of the last row of every device; rows of one device come in order of time."""
    if int(device.max()) > _SPARSE * len(device):
        _, first = np.unique(device[::-1], return_index=True)
        return pa.array(np.sort(len(device) - 1 - first))
    place = np.full(int(device.max()) + 1, -1)
    place[device] = np.arange(len(device))
    return pa.array(place[place >= 0])
