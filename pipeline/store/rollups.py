"""Rollups: of each signal the minimum, maximum, mean and number of values per device in 60 s and 600 s.

Columns are `time` (start of the interval), `entity`, and of each signal `NAME_min`, `NAME_max`, `NAME_mean`,
`NAME_count`; of counters and states also `NAME_last`, the newest value, since a mean of them means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE

_FIXED = ("time", "entity", "node", "simulated", "late")
_WITH_LAST = frozenset((s.device_class, s.column) for s in CATALOGUE.values() if s.kind != "gauge")
_EXACT = frozenset({"BIGINT", "UBIGINT", "UINTEGER", "DOUBLE"})  # a mean as FLOAT would lose digits


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
        f"{''.join(f', {value}' for value in values)} FROM ({source}) GROUP BY ALL ORDER BY 2, 1"
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
    mean = "DOUBLE" if kind in _EXACT else "FLOAT"
    last = f', arg_max({value}, "time") AS "{name}_last"' if with_last else ""
    return (
        f'min({value}) AS "{name}_min", max({value}) AS "{name}_max", avg({value})::{mean} AS "{name}_mean", '
        f'count({value})::INTEGER AS "{name}_count"{last}'
    )


def merge_signal(name: str, with_last: bool) -> str:
    """SQL expressions for one signal of a rollup."""
    last = f', arg_max("{name}_last", "time") AS "{name}_last"' if with_last else ""
    return (
        f'min("{name}_min") AS "{name}_min", max("{name}_max") AS "{name}_max", '
        f'sum("{name}_mean"::DOUBLE * "{name}_count") / nullif(sum("{name}_count"), 0) AS "{name}_mean", '
        f'coalesce(sum("{name}_count"), 0)::INTEGER AS "{name}_count"{last}'
    )
