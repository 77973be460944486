"""Charts and results of queries as CSV and Parquet, of the rows that were read: bounded like the charts and queries."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dashboards.devices.answers import Compared, Comparison, Numbers
from dashboards.explore import columns
from pipeline.model.records import SECOND


def chart_table(found: Comparison) -> pa.Table:
    """Returns a row per signal, device and point with a value, with the band of the peers at that time.

    Columns: time (UTC, start of the point), signal, unit, entity, value, low, high, and median, low and high of the
    peers. At most 8 x 16 x 2,000 rows.
    """
    tables = [_line_table(signal, i) for signal in found.signals for i in range(len(signal.lines))]
    return pa.concat_tables(tables) if tables else _SCHEMA.empty_table()


_SCHEMA = pa.schema(
    [
        ("time", pa.timestamp("us", "UTC")),
        ("signal", pa.string()),
        ("unit", pa.string()),
        ("entity", pa.string()),
        ("value", pa.float32()),
        ("low", pa.float32()),
        ("high", pa.float32()),
        ("peers_median", pa.float32()),
        ("peers_low", pa.float32()),
        ("peers_high", pa.float32()),
    ]
)


def _line_table(signal: Compared, i: int) -> pa.Table:
    line = signal.lines[i]
    at = np.flatnonzero(np.isfinite(line.values))
    times = signal.start + (at * signal.width * SECOND).astype(np.int64)
    band: tuple[Numbers | None, ...] = signal.band or (None, None, None)
    numbers = (line.values, line.low, line.high, *band)
    texts = (signal.name, signal.unit, line.entity)
    arrays = [
        pa.array(times, pa.timestamp("us", "UTC")),
        *(pa.array([text] * len(at), pa.string()) for text in texts),
        *(_floats(one, at) for one in numbers),
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _floats(values: Numbers | None, at: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> pa.Array:
    if values is None:
        return pa.nulls(len(at), pa.float32())
    return pa.array(values[at], pa.float32(), from_pandas=True)


def write_csv(table: pa.Table) -> bytes:
    """Returns a table as CSV, times as `2026-01-31T08:00:00.000000Z`; nested values and others as text."""
    fields = enumerate(table.schema)
    plain = pa.Table.from_arrays([_csv_column(table.column(i), f.type) for i, f in fields], table.column_names)
    sink = io.BytesIO()
    pyarrow.csv.write_csv(plain, sink)
    return sink.getvalue()


def _csv_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if pa.types.is_timestamp(kind):
        return columns.times_as_text(column)
    if pa.types.is_date(kind):
        return columns.dates_as_text(column)
    if any(is_kind(kind) for is_kind in _WRITTEN):
        return column
    texts = columns.as_text(column).to_pylist()
    return pa.array([_harmless(text) for text in texts], pa.string())


_WRITTEN = (
    pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_time,
    pa.types.is_duration, pa.types.is_null,
)  # fmt: skip
"""Types that are written as they are; of others the text is written."""


def _harmless(text: str | None) -> str | None:
    """Returns a text that a spreadsheet does not take for a formula: names of jobs come from outside."""
    return f"'{text}" if text and text[0] in "=+-@\t\r" else text


def write_parquet(table: pa.Table) -> bytes:
    """Returns a table as Parquet with zstd."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()
