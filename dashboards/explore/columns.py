"""Columns of a result of SQL, as tables, charts and files can hold them: a query may return any type and any name."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

_ENDS = {"s": ".000000Z", "ms": "000Z", "us": "Z", "ns": "Z"}
"""Unit of a time -> end of its text: each has at least 6 decimal places."""


def plain_table(table: pa.Table) -> pa.Table:
    """Returns the table with a name for each column (`x`, `x_2`), and what Parquet has no type for, such as intervals,
    as text."""
    columns = [
        table.column(i) if _is_storable(field) else as_text(table.column(i)) for i, field in enumerate(table.schema)
    ]
    return pa.Table.from_arrays(columns, names=unique_names(table.column_names))


_LATEST = {"s": 8_640_000_000_000, "ms": 8_640_000_000_000_000, "us": 8_640_000_000_000_000_000}
"""Unit of a time -> latest time that a browser has. Source: ECMAScript, time values (1e8 days around 1970)."""


def shown_table(table: pa.Table) -> pa.Table:
    """Returns the table with times and dates that no browser has, such as infinite ones, as text."""
    columns = []
    for i, field in enumerate(table.schema):
        column = table.column(i)
        if pa.types.is_timestamp(field.type) and _is_beyond(column.cast(pa.int64()), _LATEST.get(field.type.unit)):
            column = times_as_text(column)
        elif pa.types.is_date32(field.type) and _is_beyond(column.cast(pa.int32()), 100_000_000):
            column = dates_as_text(column)
        columns.append(column)
    return pa.Table.from_arrays(columns, names=table.column_names)


def _is_beyond(numbers: pa.ChunkedArray, latest: int | None) -> bool:
    if latest is None:
        return False
    found = pa.compute.min_max(numbers).as_py()
    return found["max"] is not None and (found["max"] > latest or found["min"] < -latest)


def unique_names(names: list[str]) -> list[str]:
    """Returns the names, the second of equal ones as `name_2`. No new name is one that the query gave."""
    taken, found = set(names), []
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique = name
        while seen[name] > 1 and (unique := f"{name}_{seen[name]}") in taken:
            seen[name] += 1
        taken.add(unique)
        found.append(unique)
    return found


def _is_storable(field: pa.Field) -> bool:
    """Returns whether Parquet has a type for the column."""
    try:
        pyarrow.parquet.write_table(pa.schema([field]).empty_table(), io.BytesIO())
    except pa.ArrowException:
        return False
    return True


def as_text(column: pa.ChunkedArray) -> pa.Array:
    """Returns each value as text: intervals such as `1 month 5 days 01:00:00`, lists and structs as Python does."""
    return pa.array([_text(value) for value in column], pa.string())


def _text(value: Any) -> str | None:
    if not value.is_valid:
        return None
    try:
        found = value.as_py()
    except (OverflowError, ValueError):  # a time that Python has no date for, in a list or struct
        return str(pa.array([value]).to_string(skip_new_lines=True))[1:-1]
    return interval_text(found) if isinstance(found, pa.MonthDayNano) else str(found)


def interval_text(value: pa.MonthDayNano) -> str:
    """Returns an interval as DuckDB writes it: `1 year 2 months 3 days 04:05:06.5`."""
    years, months = divmod(abs(value.months), 12)
    if value.months < 0:
        years, months = -years, -months
    numbers = ((years, "year"), (months, "month"), (value.days, "day"))
    parts = [f"{n} {name}{'' if abs(n) == 1 else 's'}" for n, name in numbers if n]
    seconds, nanoseconds = divmod(abs(value.nanoseconds), 1_000_000_000)
    if value.nanoseconds or not parts:
        hours, rest = divmod(seconds, 3600)
        clock = f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
        part = f".{nanoseconds:09d}".rstrip("0") if nanoseconds else ""
        parts.append(f"{'-' * (value.nanoseconds < 0)}{clock}{part}")
    return " ".join(parts)


def times_as_text(column: pa.ChunkedArray) -> pa.Array:
    """Returns times as ISO 8601 in UTC, `2026-01-31T08:00:00.000000Z`, with 9 decimal places if they have nanoseconds.

    Years after 9999 have a sign (`+290000-01-01T...`). An infinite time is empty.
    """
    unit = column.type.unit
    numbers = column.cast(pa.timestamp(unit)).cast(pa.int64())
    values = np.asarray(numbers.fill_null(0).to_numpy(), np.int64)
    limit = np.iinfo(np.int64).max  # DuckDB: infinity, and -infinity as the number below zero
    missing = np.asarray(numbers.is_null().to_numpy(), bool) | (values >= limit) | (values <= -limit)
    texts = np.datetime_as_string(np.where(missing, 0, values).view(f"datetime64[{unit}]"), unit=unit).tolist()
    return pa.array(
        [None if gone else _iso(text, unit) for text, gone in zip(texts, missing, strict=True)], pa.string()
    )


def _iso(text: str, unit: str) -> str:
    return f"{'+' * (text.index('-', 1) > 4 and text[0] != '-')}{text}{_ENDS[unit]}"


def dates_as_text(column: pa.ChunkedArray) -> pa.Array:
    """Returns dates as ISO 8601, `2026-01-31`; years after 9999 have a sign. An infinite date is empty."""
    days = column.cast(pa.date32()).cast(pa.int32())
    values = np.asarray(days.fill_null(0).to_numpy(), np.int64)
    limit = np.iinfo(np.int32).max
    missing = np.asarray(days.is_null().to_numpy(), bool) | (values >= limit) | (values <= -limit)
    texts = np.datetime_as_string(np.where(missing, 0, values).view("datetime64[D]")).tolist()
    rows = zip(texts, missing, strict=True)
    return pa.array([None if gone else "+" * (len(t) > 10 and t[0] != "-") + t for t, gone in rows], pa.string())
