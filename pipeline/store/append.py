"""Columns -> tables: the hot path of the store, through Arrow and without a loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.records import Rows
from pipeline.signals import column_of

_TIME = pa.timestamp("us", "UTC")
_INCOMING = "incoming_columns"


def insert(connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, Any], conflict: str = "") -> None:
    """INSERT BY NAME of equally long columns (Arrow arrays or sequences); `conflict` is appended to the statement."""
    connection.register(_INCOMING, pa.table(dict(columns)))
    try:
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM {_INCOMING} {conflict}')
    finally:
        connection.unregister(_INCOMING)


def times(values: Sequence[int] | NDArray[np.int64]) -> pa.Array:
    """UTC microseconds as a timestamp column."""
    return pa.array(np.asarray(values, np.int64), pa.int64()).cast(_TIME)


def append_rows(connection: duckdb.DuckDBPyConnection, rows: Rows) -> None:
    """Stores telemetry rows and renews the latest row of each device. The class and its columns must exist."""
    columns = {"time": times(rows.time), "device": pa.array(rows.device)}
    for name, values in rows.columns.items():
        columns[column_of(name, rows.device_class)] = nullable(values)
    insert(connection, f"hot_{rows.device_class}", columns)
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
    place = np.full(int(device.max()) + 1, -1)
    place[device] = np.arange(len(device))
    return pa.array(place[place >= 0])
