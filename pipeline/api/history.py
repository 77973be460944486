"""Series: a signal of one device, with median and 10th to 90th percentile of its peers. Timeline: events, findings and
gaps of an entity, its node and all above it, newest first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb
import numpy as np

from pipeline.model.errors import UsageError
from pipeline.model.event_text import describe_facts
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE, CLASS_OF_KIND, Signal, kinds_of_class
from pipeline.model.topology import Topology, kind_of
from pipeline.store import history_files, rollups, schema
from pipeline.store.history_files import STEPS

Peers = Literal["auto", "rack", "stage", "loop", "class", "none"]
MAX_ROWS, LEAST_PEERS = 4_000_000, 8
"""Rows that one series reads, with fewer peers if necessary, but these (chosen: 0.5 s of CPU; 2,000 points of readings
each second of 512 peers would be 60 million rows)."""
MAX_PEERS = 512
"""Maximum number of peers (chosen: a percentile of 512 is exact to about 2 points); of more, an even sample."""
_AUTO = {"rank": "stage", "gpu": "rack", "port": "rack", "node": "rack"}
_KINDS = {"rack": ("rack",), "stage": ("stage",), "loop": ("loop", "cdu")}
# rate per second of a counter between two rows; NULL across a reset: a decrease, or another generation
_RATE = """CASE WHEN {rises} AND coalesce(life = lag(life) OVER w, true)
                THEN ({rise})::DOUBLE * 1e6 / nullif(epoch_us(time) - lag(epoch_us(time)) OVER w, 0) END"""
WRAPS_AT = {"gpu.pcie_tx_bytes": 1 << 32, "gpu.pcie_rx_bytes": 1 << 32}
"""Value at which a counter starts again at 0 (source: NVML fields 197 and 198 count 32 bits on an H100)."""


@dataclass(frozen=True)
class Span:
    """[start, end) in microseconds, cut into `points` buckets of at least a second."""

    start: int
    end: int
    points: int

    @property
    def width(self) -> int:
        """Returns the length of a bucket (us)."""
        return max(SECOND, math.ceil((self.end - self.start) / self.points))


def read_series(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, entity: str, name: str, span: Span, peers: Peers
) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/series."""
    signal = find_signal(name, entity)
    step = choose_step(cursor, signal, span)
    rows = (span.end - span.start) // int((step or signal.interval or 1) * SECOND) + 1
    most = max(LEAST_PEERS, min(MAX_PEERS, MAX_ROWS // rows))
    kind, others = find_peers(cursor, topology, entity, signal.device_class, peers, most)
    found = {row[0]: row[1:] for row in _read(cursor, signal, entity, others, span, step)}
    count = math.ceil((span.end - span.start) / span.width)
    return {
        "entity": entity,
        "signal": signal_brief(signal),
        "peer_kind": kind,
        "peers": len(others),
        "points": [_point(time, found.get(i)) for i, time in enumerate(_list_times(span, count))],
    }


def find_peers(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, entity: str, device_class: str, peers: Peers, most: int
) -> tuple[str, list[str]]:
    """Returns (kind of peers, at most so many of them without the entity). `auto`: the class if there is no group."""
    wanted = find_peer_kind(entity, peers)
    if wanted == "none":
        return wanted, []
    group = find_group(topology, entity, wanted)
    if group is None and peers == "auto":
        wanted = "class"
    rows = cursor.execute("SELECT DISTINCT entity FROM device WHERE class = ? ORDER BY entity", [device_class])
    others = [e for (e,) in rows.fetchall() if e != entity]
    if wanted != "class":
        others = [e for e in others if group is not None and find_group(topology, e, wanted) == group]
    return wanted, others[:: max(1, math.ceil(len(others) / most))]


def find_peer_kind(entity: str, peers: Peers) -> str:
    """Returns the kind of peers of an entity: `auto` depends on its own kind."""
    return _AUTO.get(kind_of(entity), "class") if peers == "auto" else peers


def find_group(topology: Topology, entity: str, wanted: str) -> str | None:
    """Returns the ancestor whose children are peers."""
    found = (topology.ancestor_of_kind(entity, kind) for kind in _KINDS.get(wanted, ()))
    return next((e for e in found if e is not None), None)


def find_signal(name: str, entity: str | None = None) -> Signal:
    """Returns a signal of the catalogue, which is one of the entity. Raises UsageError."""
    signal = CATALOGUE.get(name)
    if signal is None:
        raise UsageError(f"signal {name!r} is not in the catalogue; GET /api/v1/signals lists all")
    if entity is not None and CLASS_OF_KIND.get(kind_of(entity)) != signal.device_class:
        wanted = " or ".join(kinds_of_class(signal.device_class))
        raise UsageError(f"signal {name!r} belongs to {wanted} entities, not to {entity!r}")
    return signal


def signal_brief(signal: Signal) -> dict[str, str]:
    """Returns name, unit, help and kind of a signal; a counter is shown as its rate."""
    return {"name": signal.name, "unit": _unit(signal), "help": signal.help, "kind": signal.kind}


def _unit(signal: Signal) -> str:
    return f"{signal.unit}/s" if signal.kind == "counter" else signal.unit


def _read(
    cursor: duckdb.DuckDBPyConnection, signal: Signal, entity: str, others: list[str], span: Span, step: int
) -> list[tuple[Any, ...]]:
    """Returns (bucket, value, median, low, high) of every bucket in which the entity or a peer has a sample."""
    per_row, per_bucket = {
        "counter": (rate_sql(signal), "avg(x)"),
        "state": ("v", "arg_max(x, time)"),
        "gauge": ("v", "sum(x * n) / sum(n)" if step else "avg(x)"),
    }[signal.kind]
    if not others and signal.kind == "gauge":
        return _read_means(cursor, signal, entity, span, step)
    return cursor.execute(
        f"""
        WITH raw AS ({select_values(cursor, signal, step, span, [entity, *others])}),
             measured AS (SELECT time, entity, n, {per_row} AS x FROM raw WHERE v IS NOT NULL
                          WINDOW w AS (PARTITION BY entity ORDER BY time)),
             bucketed AS (SELECT (epoch_us(time) - $start) // $width AS bucket, entity, ({per_bucket})::DOUBLE AS x
                          FROM measured WHERE x IS NOT NULL GROUP BY ALL)
        SELECT bucket, any_value(x) FILTER (entity = $entity), median(x) FILTER (entity <> $entity),
               quantile_cont(x, 0.1) FILTER (entity <> $entity), quantile_cont(x, 0.9) FILTER (entity <> $entity)
        FROM bucketed GROUP BY bucket""",
        {
            "start": span.start,
            "width": span.width,
            "entity": entity,
        },
    ).fetchall()


def _read_means(
    cursor: duckdb.DuckDBPyConnection, signal: Signal, entity: str, span: Span, step: int
) -> list[tuple[Any, ...]]:
    """Returns the rows of `_read` for one gauge without peers. Summed here: planning a GROUP BY takes 3 ms of CPU."""
    rows = select_values(cursor, signal, step, span, [entity])
    found = cursor.execute(f"SELECT epoch_us(time) AS time, v::DOUBLE AS v, n FROM ({rows}) WHERE v IS NOT NULL")
    columns = {name: np.asarray(values) for name, values in found.fetchnumpy().items()}
    bucket = (columns["time"] - span.start) // span.width
    number = np.bincount(bucket, columns["n"])
    some = np.flatnonzero(number)
    means = np.bincount(bucket, columns["v"] * columns["n"])[some] / number[some]
    return [(i, mean, None, None, None) for i, mean in zip(some.tolist(), means.tolist(), strict=True)]


def rate_sql(signal: Signal) -> str:
    """SQL for the rate of a counter. Of one that wraps, less than a whole wrap may pass between two rows."""
    limit = WRAPS_AT.get(signal.name)
    rise = "v - lag(v) OVER w"
    if limit is None:
        return _RATE.format(rises="v >= lag(v) OVER w", rise=rise)
    low = f"v::BIGINT < {limit} AND (lag(v) OVER w)::BIGINT < {limit}"  # some products count 64 bits
    return _RATE.format(
        rises=f"(v >= lag(v) OVER w OR ({low}))",
        rise=f"v::BIGINT - (lag(v) OVER w)::BIGINT + CASE WHEN v < lag(v) OVER w THEN {limit} ELSE 0 END",
    )


def choose_step(cursor: duckdb.DuckDBPyConnection, signal: Signal, span: Span) -> int:
    """Returns the seconds of the coarsest rollup with a row in each bucket, two of a counter; 0 for rows.

    Without files in the range all rows are recent, and are read as they are. Of the oldest times only rollups are left.
    A counter that wraps is read as rows: it may wrap several times in an interval.
    """
    if signal.wraps:
        return 0
    device_class, least = signal.device_class, 2 if signal.kind == "counter" else 1
    fitting = [step for step in STEPS if least * step * SECOND <= span.width]
    if history_files.list_files(cursor, device_class, 0, span.start, span.end):
        return max(fitting, default=0)
    rolled = history_files.list_files(cursor, device_class, STEPS[0], span.start, span.end)
    return max(fitting, default=STEPS[0]) if rolled else 0


def select_values(
    cursor: duckdb.DuckDBPyConnection, signal: Signal, step: int, span: Span, entities: Sequence[str]
) -> str:
    """Returns SQL for time, entity, value v, number of values n and generation `life` of some devices."""
    if not step:
        return _select_rows(cursor, signal, span, entities)
    if signal.kind == "gauge":
        return _select_means(cursor, signal, step, span, entities)
    column, life = signal.column, _generation_of(signal)
    names = dict.fromkeys(["time", "entity", f"{column}_last", f"{column}_count", *([f"{life}_last"] if life else [])])
    view = f"rollup_{step}_{signal.device_class}"
    rows = rollups.select_view(cursor, view, names, span.start, span.end)
    newest = f'"{life}_last"' if life else "NULL"
    return (
        f'SELECT time, entity, "{column}_last" AS v, "{column}_count" AS n, {newest} AS life FROM ({rows}) '
        f"WHERE {select_within(span)} AND entity IN ({quote_entities(entities)})"
    )


def _select_rows(cursor: duckdb.DuckDBPyConnection, signal: Signal, span: Span, entities: Sequence[str]) -> str:
    """Returns the SQL of select_values for rows, hot and sealed."""
    life = _generation_of(signal)
    names = dict.fromkeys([signal.column, *([life] if life else [])])
    layout = schema.read_layout(cursor, signal.device_class)
    rows = schema.select_hot(cursor, signal.device_class, layout, list(names), select_within(span), entities)
    types = layout[f"hot_{signal.device_class}"]
    rows += select_sealed(cursor, signal.device_class, 0, span, entities, {c: types[c] for c in names})
    return f"SELECT time, entity, {_finite(signal)} AS v, 1 AS n, {life or 'NULL'} AS life FROM ({rows})"


def _select_means(
    cursor: duckdb.DuckDBPyConnection, signal: Signal, step: int, span: Span, entities: Sequence[str]
) -> str:
    """Returns the SQL of select_values for a gauge: means of intervals from files, and hot rows as they are.

    A mean over both is weighted by n, so hot rows need no rollup first, which was five sixths of the CPU.
    """
    layout = schema.read_layout(cursor, signal.device_class)
    hot = schema.select_hot(cursor, signal.device_class, layout, [signal.column], select_within(span), entities)
    mean, count = f"{signal.column}_mean", f"{signal.column}_count"
    kind = rollups.mean_type(layout[f"hot_{signal.device_class}"][signal.column])
    sealed = select_sealed(cursor, signal.device_class, step, span, entities, {mean: kind, count: "INTEGER"})
    return (
        f"SELECT time, entity, v, n, NULL AS life FROM "
        f"(SELECT time, entity, {_finite(signal)} AS v, 1 AS n FROM ({hot}){sealed})"
    )


def select_sealed(
    cursor: duckdb.DuckDBPyConnection,
    device_class: str,
    step: int,
    span: Span,
    entities: Sequence[str],
    types: Mapping[str, str],
) -> str:
    """Returns SQL that adds time, entity and columns (name -> SQL type) of sealed files; "" without files."""
    files = history_files.list_files(cursor, device_class, step, span.start, span.end)
    folder = history_files.folder_of(cursor) if files else None
    if folder is None:
        return ""
    sealed = history_files.select_files(folder, files, {"time": "TIMESTAMPTZ", "entity": "VARCHAR", **types})
    return f" UNION ALL SELECT * FROM ({sealed}) WHERE {select_within(span)} AND entity IN ({quote_entities(entities)})"


def _generation_of(signal: Signal) -> str:
    """Returns the column that counts the lives of the signal's device; "" if none does."""
    generation = CATALOGUE.get(f"{signal.device_class}.generation")
    return generation.column if generation is not None else ""


def _finite(signal: Signal) -> str:
    """Returns SQL for the column of the signal, NULL where it is no number."""
    column = f'"{signal.column}"'
    return f"CASE WHEN isfinite({column}) THEN {column} END" if signal.type.startswith("f") else column


def select_within(span: Span) -> str:
    """Returns the SQL condition that a row is in the span."""
    return f"time >= make_timestamptz({span.start}) AND time < make_timestamptz({span.end})"


def quote_entities(entities: Sequence[str]) -> str:
    """Returns names as a list of SQL strings."""
    return ", ".join("'" + e.replace("'", "''") + "'" for e in entities)


def _list_times(span: Span, count: int) -> list[str]:
    """Returns the start of each bucket as text."""
    starts = (span.start + np.arange(count, dtype=np.int64) * span.width).view("datetime64[us]")
    return np.char.add(np.datetime_as_string(starts, unit="us"), "Z").tolist()  # type: ignore[no-any-return]


def _point(time: str, found: tuple[Any, ...] | None) -> dict[str, Any]:
    """Returns one point. A bucket without samples has no values, so that a gap is visible."""
    value, median, low, high = found or (None,) * 4
    return {"time": time, "value": value, "median": median, "low": low, "high": high}


# Leaves out inventory, and canary digests that no finding quotes: both are sent all the time.
_ITEMS = """
SELECT epoch_us(e.time) AS moment, 'event' AS kind, e.entity, e.kind AS subject, e.data AS text FROM events e
WHERE list_contains($entities, e.entity) AND e.time >= make_timestamptz($start) AND e.time < make_timestamptz($end)
  AND (e.kind NOT IN ('digest', 'inventory') OR (e.kind = 'digest' AND EXISTS (
        FROM findings f WHERE f.entity = e.entity AND json_extract_string(f.evidence, '$.digest') IS NOT NULL
        AND json_extract_string(f.evidence, '$.digest') = json_extract_string(e.data, '$.digest'))))
UNION ALL
SELECT epoch_us(f.onset), 'finding', f.entity, f.level || ' ' || f.detector || CASE
         WHEN json_extract_string(f.evidence, '$.muted.id') IS NOT NULL THEN ' (muted)'
         WHEN json_extract_string(f.evidence, '$.mode') = 'record' THEN ' (only recorded)' ELSE '' END, f.summary
FROM findings f
WHERE list_contains($entities, f.entity) AND f.onset >= make_timestamptz($start) AND f.onset < make_timestamptz($end)
UNION ALL
SELECT epoch_us(g.time), 'gap', 'node:' || g.source, g.topic,
       (g.next_sequence - g.first_sequence)::VARCHAR || ' messages lost: ' || g.cause FROM gaps g
WHERE list_contains($nodes, g.source) AND g.time >= make_timestamptz($start) AND g.time < make_timestamptz($end)
ORDER BY moment DESC, kind, entity, subject LIMIT $limit"""


def read_timeline(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, entity: str, span: Span, limit: int
) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/timeline."""
    entities = (entity, *topology.ancestors(entity))
    rows = cursor.execute(
        _ITEMS,
        {
            "entities": list(entities),
            "nodes": [e.partition(":")[2] for e in entities if kind_of(e) == "node"],
            "start": span.start,
            "end": span.end,
            "limit": limit,
        },
    ).fetchall()
    return {
        "items": [
            {"time": iso(time), "kind": kind, "entity": about, "text": _text(kind, subject, text)}
            for time, kind, about, subject, text in rows
        ]
    }


def _text(kind: str, subject: str, text: str) -> str:
    """Returns the text of one item."""
    if kind != "event":
        return f"{subject}: {text}"
    data = json.loads(text)
    facts = describe_facts(data if isinstance(data, dict) else {"value": data})
    return f"{subject.replace('_', ' ')}: {facts}" if facts else subject.replace("_", " ")
