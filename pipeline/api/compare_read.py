"""Reads values over time of several signals of one class in one scan, which costs as much as for one signal."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import duckdb

from pipeline.api.history import Span, quote_entities, rate_sql, select_sealed, select_values, select_within
from pipeline.model.signals import Signal
from pipeline.store import history_files, rollups, schema

Row = tuple[int, str | None, float | None, float | None, float | None]
"""Bucket, device, value, lowest and highest; without a device: median, 10th and 90th percentile of the peers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to read. step: seconds of the rollup, 0 for rows."""

    span: Span
    step: int
    devices: Sequence[str]
    peers: Sequence[str]


def read_rows(cursor: duckdb.DuckDBPyConnection, signals: Sequence[Signal], wanted: Wanted) -> Iterator[list[Row]]:
    """Yields the rows of each signal. All are of one class; counters are read one by one, as rates need an order."""
    levels = [signal for signal in signals if signal.kind != "counter"]
    found = dict(zip((s.name for s in levels), _read_levels(cursor, levels, wanted), strict=True)) if levels else {}
    for signal in signals:
        yield found[signal.name] if signal.name in found else _read_rates(cursor, signal, wanted)


def _read_levels(cursor: duckdb.DuckDBPyConnection, signals: Sequence[Signal], wanted: Wanted) -> list[list[Row]]:
    each = [_aggregates(i, signal, wanted.step) for i, signal in enumerate(signals)]
    names = range(len(signals))
    rows = (_select_rollups if wanted.step else _select_raw)(cursor, signals, wanted)
    peers = ", ".join(f"median(x{i}), quantile_cont(x{i}, 0.1), quantile_cont(x{i}, 0.9)" for i in names)
    found = cursor.execute(
        f"""
        WITH bucketed AS MATERIALIZED (
             SELECT (epoch_us(time) - $start) // $width AS bucket, entity, {", ".join(each)} FROM ({rows})
             WHERE time >= make_timestamptz($start) AND time < make_timestamptz($end) GROUP BY ALL)
        SELECT bucket, entity, {", ".join(f"x{i}, low{i}, high{i}" for i in names)} FROM bucketed
        WHERE list_contains($devices, entity)
        UNION ALL
        SELECT bucket, NULL, {peers} FROM bucketed WHERE NOT list_contains($devices, entity) GROUP BY bucket""",
        {**_limits(wanted), "end": wanted.span.end},
    ).fetchall()
    return [[(r[0], r[1], *r[2 + 3 * i : 5 + 3 * i]) for r in found if r[2 + 3 * i] is not None] for i in names]


def _limits(wanted: Wanted) -> dict[str, object]:
    return {"start": wanted.span.start, "width": wanted.span.width, "devices": list(wanted.devices)}


def _aggregates(i: int, signal: Signal, step: int) -> str:
    """Returns SQL for value, lowest and highest of a bucket; a state has no extremes."""
    if signal.kind == "state":
        last = f"arg_max(v{i}, time) FILTER (v{i} IS NOT NULL)"
        return f"{last} AS x{i}, NULL::DOUBLE AS low{i}, NULL::DOUBLE AS high{i}"
    if step:
        mean = f"sum(v{i} * n{i}) / sum(n{i}) FILTER (v{i} IS NOT NULL)"
        return f"{mean} AS x{i}, min(low{i}) AS low{i}, max(high{i}) AS high{i}"
    return f"avg(v{i}) AS x{i}, min(v{i}) AS low{i}, max(v{i}) AS high{i}"


def _select_raw(cursor: duckdb.DuckDBPyConnection, signals: Sequence[Signal], wanted: Wanted) -> str:
    """Returns SQL for time, entity and a value `v0`, `v1`, ... of each signal, from recent and sealed rows."""
    device_class, span = signals[0].device_class, wanted.span
    columns = list(dict.fromkeys(signal.column for signal in signals))
    entities, within = [*wanted.devices, *wanted.peers], select_within(span)
    layout = schema.read_layout(cursor, device_class)
    ids = cursor.execute(
        "SELECT id FROM device WHERE class = $1 AND entity IN (SELECT unnest($2))", [device_class, entities]
    ).fetchall()
    listed = ", ".join(str(number) for (number,) in ids) or "-1"
    tables = {name: have for name, have in layout.items() if not have.keys().isdisjoint(columns)}
    each = " UNION ALL ".join(
        f'SELECT time, device, {_own_columns(columns, have)} FROM "{name}" WHERE {within} AND device IN ({listed})'
        for name, have in tables.items()
    )
    named = ", ".join(f'h."{c}"' for c in columns)
    join = f"JOIN device d ON d.id = h.device AND d.class = '{device_class}'"
    rows = f"SELECT h.time, d.entity, {named} FROM ({each}) h {join}"
    kinds = layout[f"hot_{device_class}"]
    types = {c: history_files.SIGNED.get(kinds[c], kinds[c]) for c in columns}
    rows += select_sealed(cursor, device_class, 0, span, entities, types)
    return f"SELECT time, entity, {', '.join(_finite(i, s) for i, s in enumerate(signals))} FROM ({rows})"


def _own_columns(columns: Sequence[str], have: Container[str]) -> str:
    return ", ".join(f'"{c}"' if c in have else f'NULL AS "{c}"' for c in columns)


def _finite(i: int, signal: Signal) -> str:
    value = f'"{signal.column}"::DOUBLE'
    return f"CASE WHEN isfinite({value}) THEN {value} END AS v{i}"


def _select_rollups(cursor: duckdb.DuckDBPyConnection, signals: Sequence[Signal], wanted: Wanted) -> str:
    """Returns SQL as `_select_raw`, from rollups; of gauges also number, lowest and highest value of a row."""
    span, parts, names = wanted.span, [], ["time", "entity"]
    for i, signal in enumerate(signals):
        column = signal.column
        if signal.kind == "state":
            names.append(f"{column}_last")
            parts.append(f'"{column}_last"::DOUBLE AS v{i}')
            continue
        names += [f"{column}_{part}" for part in ("mean", "count", "min", "max")]
        parts.append(
            f'"{column}_mean"::DOUBLE AS v{i}, "{column}_count" AS n{i}, "{column}_min"::DOUBLE AS low{i}, '
            f'"{column}_max"::DOUBLE AS high{i}'
        )
    view = f"rollup_{wanted.step}_{signals[0].device_class}"
    rows = rollups.select_view(cursor, view, list(dict.fromkeys(names)), span.start, span.end)
    listed = quote_entities([*wanted.devices, *wanted.peers])
    return f"SELECT time, entity, {', '.join(parts)} FROM ({rows}) WHERE entity IN ({listed})"


def _read_rates(cursor: duckdb.DuckDBPyConnection, signal: Signal, wanted: Wanted) -> list[Row]:
    rows = select_values(cursor, signal, wanted.step, wanted.span, [*wanted.devices, *wanted.peers])
    return cursor.execute(
        f"""
        WITH measured AS (SELECT time, entity, {rate_sql(signal)} AS x FROM ({rows}) WHERE v IS NOT NULL
                          WINDOW w AS (PARTITION BY entity ORDER BY time)),
             bucketed AS MATERIALIZED (
                          SELECT (epoch_us(time) - $start) // $width AS bucket, entity, avg(x)::DOUBLE AS x
                          FROM measured WHERE x IS NOT NULL GROUP BY ALL)
        SELECT bucket, entity, x, NULL, NULL FROM bucketed WHERE list_contains($devices, entity)
        UNION ALL
        SELECT bucket, NULL, median(x), quantile_cont(x, 0.1), quantile_cont(x, 0.9) FROM bucketed
        WHERE NOT list_contains($devices, entity) GROUP BY bucket""",
        _limits(wanted),
    ).fetchall()
