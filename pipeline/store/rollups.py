"""Rollups: of each signal the minimum, maximum, mean and number of values per device in 60 s and 600 s.

Columns are `time` (start of the interval), `entity`, and of each signal `NAME_min`, `NAME_max`, `NAME_mean`,
`NAME_count`; of counters and states also `NAME_last`, the newest value, since a mean of them means nothing. In files it
is NULL where it equals `NAME_max`, as that of a counter nearly always does: a quarter fewer bytes.

Files of an hour are sorted, so their rollups are sums of neighbouring rows (`roll_up_sorted`): half of the CPU of a
GROUP BY. Recent rows and merged days are in no order, and are grouped by SQL (`select_rollup`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE, CLASSES
from pipeline.store import history_files, schema
from pipeline.store.history_files import SIGNED, STEPS

_FIXED = ("time", "entity", "node", "simulated", "late")
_WITH_LAST = frozenset((s.device_class, s.column) for s in CATALOGUE.values() if s.kind != "gauge")
_ORDER = " ORDER BY entity, 1"
_EXACT = frozenset({"BIGINT", "UBIGINT", "UINTEGER", "DOUBLE"})  # a mean as FLOAT would lose digits

VIEWS = frozenset(f"rollup_{step}_{device_class}" for step in STEPS for device_class in CLASSES)
"""Tables that queries can read: the rollups of sealed rows, and of recent rows, which are summarized when read."""


def select_view(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    columns: Iterable[str] | None = None,
    start: int | None = None,
    end: int | None = None,
) -> str:
    """SQL for columns of one of VIEWS (None: all), from only the files that may have rows in [start, end).

    Rows of an interval that are in several files, or partly recent, are added up. Run it in the transaction in which it
    was made.
    """
    _, step, device_class = view.split("_")
    types = schema.class_types(connection, device_class)
    parts = {
        c: part for name, kind in types.items() if name not in _FIXED for c, part in _parts(device_class, name, kind)
    }
    names = ["time", "entity", *parts] if columns is None else list(columns)
    wanted = {parts[c][0]: types[parts[c][0]] for c in names if c in parts}
    stored = {c: kind for c, (name, kind) in parts.items() if name in wanted}
    recent = _select_recent(device_class, wanted, int(step), start, end)
    files = history_files.list_files(connection, device_class, int(step), start, end)
    folder = history_files.folder_of(connection) if files else None
    if folder is not None:
        sealed = history_files.select_files(folder, files, {"time": "TIMESTAMPTZ", "entity": "VARCHAR", **stored})
        values = "".join(f", {merge_signal(name, f'{name}_last' in stored)}" for name in wanted)
        recent = f'SELECT "time", entity{values} FROM ({recent} UNION ALL BY NAME {sealed}) GROUP BY ALL'
    lasts = {f"{name}_last": f'{_last(name)} AS "{name}_last"' for name in wanted}
    return f"SELECT {', '.join(lasts.get(c, _quoted(c)) for c in names)} FROM ({recent})"


def view_types(connection: duckdb.DuckDBPyConnection, view: str) -> dict[str, str]:
    """Column -> SQL type of one of VIEWS, in order."""
    _, _, device_class = view.split("_")
    types = schema.class_types(connection, device_class)
    parts = (p for name, kind in types.items() if name not in _FIXED for p in _parts(device_class, name, kind))
    return {"time": types["time"], "entity": "VARCHAR", **{column: kind for column, (_, kind) in parts}}


def _quoted(name: str) -> str:
    return f'"{name}"'


def _parts(device_class: str, name: str, kind: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(column of the rollup, (signal, SQL type)) of one signal."""
    value, mean = SIGNED.get(kind, kind), mean_type(SIGNED.get(kind, kind))
    parts = {"min": value, "max": value, "mean": mean, "count": "INTEGER"}
    parts |= {"last": value} if (device_class, name) in _WITH_LAST else {}
    for part, sql in parts.items():
        yield f"{name}_{part}", (name, sql)


def _select_recent(device_class: str, types: Mapping[str, str], step: int, start: int | None, end: int | None) -> str:
    """SQL for the rollup of the rows in hot tables. types: SQL types of the signals."""
    signed = {name: SIGNED.get(kind, kind) for name, kind in types.items()}
    columns = "".join(f", {history_files.select_signed(name, kind)}" for name, kind in types.items())
    limits = [] if start is None else [f'"time" >= make_timestamptz({start})']
    limits += [] if end is None else [f'"time" < make_timestamptz({end + step * SECOND})']
    where = f" WHERE {' AND '.join(limits)}" if limits else ""
    rows = f'SELECT "time", entity{columns} FROM "recent_{device_class}"{where}'
    rollup = select_rollup(rows, {"time": "", "entity": "", **signed}, step, device_class, again=False)
    return rollup.removesuffix(_ORDER)


def select_rollup(source: str, columns: Mapping[str, str], step: int, device_class: str, again: bool) -> str:
    """SQL for the rollup of rows, sorted by entity and time. again: `source` is a rollup of shorter or equal steps.

    columns: those of `source` with their SQL types.
    """
    values = (
        (merge_signal(name, f"{name}_last" in columns) for name in find_signals(columns))
        if again
        else (
            summarize_signal(name, kind, (device_class, name) in _WITH_LAST)
            for name, kind in columns.items()
            if name not in _FIXED
        )
    )
    labels = "".join(f', any_value("{name}") AS "{name}"' for name in ("node", "simulated") if name in columns)
    width = step * SECOND
    return (
        f'SELECT make_timestamptz(epoch_us("time") // {width} * {width}) AS "time", entity{labels}'
        f"{''.join(f', {value}' for value in values)} FROM ({source}) GROUP BY ALL{_ORDER}"
    )


def find_signals(columns: Iterable[str]) -> list[str]:
    """Names of the signals in a rollup."""
    names = list(columns)
    known = set(names)
    return [
        base
        for name in names
        if name.endswith("_count") and {f"{(base := name[:-6])}_{part}" for part in ("min", "max", "mean")} <= known
    ]


def summarize_signal(name: str, kind: str, with_last: bool) -> str:
    """SQL expressions for one signal of rows. kind: its SQL type."""
    value = f'CASE WHEN isfinite("{name}") THEN "{name}" END' if kind in ("FLOAT", "DOUBLE") else f'"{name}"'
    mean = mean_type(kind)
    last = f', nullif(arg_max({value}, "time"), max({value})) AS "{name}_last"' if with_last else ""
    return (
        f'min({value}) AS "{name}_min", max({value}) AS "{name}_max", avg({value})::{mean} AS "{name}_mean", '
        f'count({value})::INTEGER AS "{name}_count"{last}'
    )


def _last(name: str) -> str:
    """SQL for the newest value of a signal of a rollup."""
    return f'coalesce("{name}_last", "{name}_max")'


def mean_type(kind: str) -> str:
    return "DOUBLE" if kind in _EXACT else "FLOAT"


def merge_signal(name: str, with_last: bool) -> str:
    """SQL expressions for one signal of a rollup."""
    last = f', nullif(arg_max({_last(name)}, "time"), max("{name}_max")) AS "{name}_last"' if with_last else ""
    return (
        f'min("{name}_min") AS "{name}_min", max("{name}_max") AS "{name}_max", '
        f'sum("{name}_mean"::DOUBLE * "{name}_count") / nullif(sum("{name}_count"), 0) AS "{name}_mean", '
        f'coalesce(sum("{name}_count"), 0)::INTEGER AS "{name}_count"{last}'
    )


# --- rollups of sorted files -----------------------------------------------------------------------------------------

BATCH_VALUES = 4_000_000
"""Values that are rolled up together. Chosen: 32 MB; smaller batches cost more calls per value."""
_LABELS = ("entity", "node", "simulated")


def roll_up_sorted(
    path: Path, columns: Mapping[str, str], step: int, device_class: str, again: bool
) -> pa.RecordBatchReader:
    """Returns the rollup of a file that is sorted by entity and time, as it is read.

    columns: those of the file with their SQL types. again: it is a rollup of shorter intervals. pyarrow reads the file
    with a third of the CPU that DuckDB takes to return Arrow.
    """
    names = [name for name in columns if name not in _FIXED]
    rolled = find_signals(columns) if again else []
    labels = [name for name in _LABELS if name in columns]
    file = pyarrow.parquet.ParquetFile(path)
    rows = file.iter_batches(max(2048, BATCH_VALUES // len(columns)), use_threads=False)

    def summarize(table: pa.Table, starts: NDArray[np.intp]) -> pa.RecordBatch:
        out: dict[str, pa.Array] = {"time": _interval(table, step).take(pa.array(starts))}
        out |= {name: table[name].combine_chunks().take(pa.array(starts)) for name in labels}
        for name in rolled if again else names:
            if again:
                out |= _merge_sorted(table, name, starts, f"{name}_last" in columns)
            else:
                with_last = (device_class, name) in _WITH_LAST
                out |= _summarize_sorted(table[name], name, starts, with_last, mean_type(columns[name]))
        return pa.record_batch(out)

    batches = _split_intervals(rows, step, summarize)
    first = next(batches)
    return pa.RecordBatchReader.from_batches(first.schema, _with_first(first, batches))


def _with_first(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _split_intervals(
    rows: Iterable[pa.RecordBatch], step: int, summarize: Callable[[pa.Table, NDArray[np.intp]], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields the summary of each batch; the last interval of a batch may go on in the next, and waits for it."""
    held: list[pa.RecordBatch] = []
    for batch in rows:
        table = pa.Table.from_batches([*held, batch])
        starts = _find_starts(table, step)
        if len(starts) > 1:
            yield summarize(table.slice(0, starts[-1]), starts[:-1])
        held = table.slice(starts[-1]).combine_chunks().to_batches()
    if held:
        yield summarize(pa.Table.from_batches(held), np.zeros(1, np.intp))


def _interval(table: pa.Table, step: int) -> pa.Array:
    """Start of the interval of each row."""
    time = table["time"].combine_chunks()
    width = step * SECOND
    starts = np.asarray(time.cast(pa.int64())) // width * width
    return pa.array(starts).cast(time.type)


def _find_starts(table: pa.Table, step: int) -> NDArray[np.intp]:
    """Positions at which an interval or an entity begins."""
    interval = np.asarray(_interval(table, step).cast(pa.int64()))
    entity = table["entity"].combine_chunks()
    new = np.asarray(pa.compute.not_equal(entity[1:], entity[:-1]))
    return np.flatnonzero(np.concatenate([[True], new | (interval[1:] != interval[:-1])]))


def _summarize_sorted(
    column: pa.ChunkedArray, name: str, starts: NDArray[np.intp], with_last: bool, mean: str
) -> dict[str, pa.Array]:
    """The parts of one signal. Without a value in an interval: count 0, and NULL."""
    kinds = {"min": column.type, "max": column.type, "mean": pa.float64() if mean == "DOUBLE" else pa.float32()}
    if column.null_count == len(column):
        empty = {f"{name}_{part}": pa.nulls(len(starts), kind) for part, kind in kinds.items()}
        empty[f"{name}_count"] = pa.array(np.zeros(len(starts), np.int32))
        return empty | ({f"{name}_last": pa.nulls(len(starts), column.type)} if with_last else {})
    values, valid = _to_values(column)
    number = np.add.reduceat(valid, starts, dtype=np.int32)
    at, ends = _find_parts(number)
    values = values[valid]
    parts = {"min": np.minimum, "max": np.maximum}
    found = {part: reduce.reduceat(values, at) if len(at) else values for part, reduce in parts.items()}
    sums = np.add.reduceat(values, at, dtype=np.float64) if len(at) else values
    found["mean"] = sums / number[number > 0]
    out = {f"{name}_{part}": _spread(found[part], number > 0, kinds[part]) for part in kinds}
    out[f"{name}_count"] = pa.array(number)
    if with_last:
        newest = values[ends - 1] if len(at) else values
        out[f"{name}_last"] = _spread(newest, number > 0, column.type, newest != found["max"])
    return out


def _merge_sorted(table: pa.Table, name: str, starts: NDArray[np.intp], with_last: bool) -> dict[str, pa.Array]:
    """The parts of one signal of a rollup of shorter intervals."""
    counts = np.asarray(table[f"{name}_count"].combine_chunks(), np.int64)
    valid = counts > 0
    number = np.add.reduceat(counts, starts)
    at, ends = _find_parts(np.add.reduceat(valid, starts, dtype=np.int32))
    have, out = number > 0, {}
    parts = {part: _to_values(table[f"{name}_{part}"])[0][valid] for part in ("min", "max", "mean")}
    weighted = parts["mean"].astype(np.float64) * counts[valid]
    for part, reduce in (("min", np.minimum), ("max", np.maximum)):
        kind = table[f"{name}_{part}"].type
        parts[part + "s"] = reduce.reduceat(parts[part], at) if len(at) else parts[part]
        out[f"{name}_{part}"] = _spread(parts[part + "s"], have, kind)
    sums = np.add.reduceat(weighted, at) if len(at) else weighted
    out[f"{name}_mean"] = _spread(sums / number[have], have, table[f"{name}_mean"].type)
    out[f"{name}_count"] = pa.array(number.astype(np.int32))
    if with_last:
        last, stored = _to_values(table[f"{name}_last"])
        newest = np.where(stored[valid], last[valid], parts["max"])[ends - 1] if len(at) else parts["max"]
        out[f"{name}_last"] = _spread(newest, have, table[f"{name}_last"].type, newest != parts["maxs"])
    return out


def _to_values(column: pa.ChunkedArray) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(values, which of them exist): neither NULL nor, of floats, NaN and infinities."""
    array = column.combine_chunks()
    valid = np.asarray(array.is_valid()) if array.null_count else np.ones(len(array), bool)
    values = np.asarray(array.fill_null(0) if array.null_count else array)
    return values, valid & np.isfinite(values) if values.dtype.kind == "f" else valid


def _find_parts(number: NDArray[np.int32]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(begin, end) of each interval that has values, in the values that exist. number: of values per interval."""
    ends = np.cumsum(number[number > 0], dtype=np.intp)
    return ends - number[number > 0], ends


def _spread(
    values: NDArray[Any], have: NDArray[np.bool_], kind: pa.DataType, shown: NDArray[np.bool_] | None = None
) -> pa.Array:
    """A column with the values where there are some. shown: NULL instead of the other values."""
    out = np.zeros(len(have), kind.to_pandas_dtype())
    out[have] = values
    known = have.copy()
    if shown is not None:
        known[have] = shown
    return pa.array(out, mask=~known)
