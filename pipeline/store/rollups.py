"""Rollups: of each signal the minimum, maximum, mean and number of values per device in 60 s and 600 s.

Columns are `time` (start of the interval), `entity`, and of each signal `NAME_min`, `NAME_max`, `NAME_mean`,
`NAME_count`; of counters and states also `NAME_last`, the newest value, since a mean of them means nothing. In files it
is NULL where it equals `NAME_max`, as that of a counter nearly always does: a quarter fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import duckdb

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


def _quoted(name: str) -> str:
    return f'"{name}"'


def _parts(device_class: str, name: str, kind: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(column of the rollup, (signal, SQL type)) of one signal."""
    value, mean = SIGNED.get(kind, kind), _mean_type(SIGNED.get(kind, kind))
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
    mean = _mean_type(kind)
    last = f', nullif(arg_max({value}, "time"), max({value})) AS "{name}_last"' if with_last else ""
    return (
        f'min({value}) AS "{name}_min", max({value}) AS "{name}_max", avg({value})::{mean} AS "{name}_mean", '
        f'count({value})::INTEGER AS "{name}_count"{last}'
    )


def _last(name: str) -> str:
    """SQL for the newest value of a signal of a rollup."""
    return f'coalesce("{name}_last", "{name}_max")'


def _mean_type(kind: str) -> str:
    return "DOUBLE" if kind in _EXACT else "FLOAT"


def merge_signal(name: str, with_last: bool) -> str:
    """SQL expressions for one signal of a rollup."""
    last = f', nullif(arg_max({_last(name)}, "time"), max("{name}_max")) AS "{name}_last"' if with_last else ""
    return (
        f'min("{name}_min") AS "{name}_min", max("{name}_max") AS "{name}_max", '
        f'sum("{name}_mean"::DOUBLE * "{name}_count") / nullif(sum("{name}_count"), 0) AS "{name}_mean", '
        f'coalesce(sum("{name}_count"), 0)::INTEGER AS "{name}_count"{last}'
    )
