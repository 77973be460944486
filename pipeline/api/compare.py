"""Several signals of several devices over one time range, each beside the band of the peers of its first device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from pipeline.api.history import (
    MAX_ROWS,
    Peers,
    Span,
    choose_step,
    find_peers,
    find_signal,
    rate_sql,
    select_values,
    signal_brief,
)
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CLASS_OF_KIND, Signal
from pipeline.model.topology import Topology, kind_of

MAX_SIGNALS = 8
"""Signals of one request (chosen: charts that a person sees at once)."""
MAX_DEVICES = 16
"""Devices of one signal (chosen: a node has eight GPUs; more lines cannot be told apart)."""
MAX_PEERS = 64
"""Peers whose band is read (chosen: its ends are exact to 2 %; of more, an even sample)."""
_MIN_PEERS = 4


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The devices of one signal, how many of them were left out, and their peers."""

    devices: list[str]
    left_out: int
    peer_kind: str
    peers: list[str]


def read_comparison(
    cursor: duckdb.DuckDBPyConnection,
    topology: Topology,
    entities: Sequence[str],
    names: Sequence[str],
    span: Span,
    peers: Peers,
) -> dict[str, Any]:
    """Returns the answer of GET /api/v1/compare. Raises UsageError for too many or unknown signals."""
    signals = [find_signal(name) for name in dict.fromkeys(names)]
    if not 0 < len(signals) <= MAX_SIGNALS:
        raise UsageError(f"signal: found {len(signals)}; expected 1 to {MAX_SIGNALS}")
    found = [_read_signal(cursor, topology, list(dict.fromkeys(entities)), signal, span, peers) for signal in signals]
    return {"from": iso(span.start), "to": iso(span.end), "signals": found}


def _read_signal(
    cursor: duckdb.DuckDBPyConnection,
    topology: Topology,
    entities: Sequence[str],
    signal: Signal,
    whole: Span,
    peers: Peers,
) -> dict[str, Any]:
    span = replace(whole, points=_count_points(whole, signal))
    step = choose_step(cursor, signal, span)
    rows = max(1, (span.end - span.start) // int((step or signal.interval or 1) * SECOND))
    most = max(_MIN_PEERS, min(MAX_PEERS, MAX_ROWS // MAX_SIGNALS // rows))
    chosen = _choose(cursor, topology, entities, signal, peers, most)
    count = math.ceil((span.end - span.start) / span.width)
    lines = {name: _Line.empty(count) for name in chosen.devices}
    band = _Line.empty(count)
    for bucket, entity, value, low, high in _read(cursor, signal, chosen, span, step):
        if 0 <= bucket < count:
            (band if entity is None else lines[entity]).put(bucket, value, low, high)
    outer = signal.kind == "gauge"
    return {
        "signal": signal_brief(signal),
        "states": list(signal.states),
        "step": step,
        "start": iso(span.start),
        "width": span.width / SECOND,
        "peer_kind": chosen.peer_kind,
        "peers": len(chosen.peers),
        "left_out": chosen.left_out,
        "lines": [{"entity": e, **line.as_json(outer)} for e, line in lines.items()],
        "band": {"median": band.value, "low": band.low, "high": band.high} if chosen.peers else None,
    }


@dataclass(frozen=True, slots=True)
class _Line:
    """Values, lowest and highest values by bucket; None: nothing was measured."""

    value: list[float | None]
    low: list[float | None]
    high: list[float | None]

    @classmethod
    def empty(cls, count: int) -> _Line:
        """Returns a line without values."""
        return cls([None] * count, [None] * count, [None] * count)

    def put(self, bucket: int, value: float | None, low: float | None, high: float | None) -> None:
        """Sets the values of a bucket, rounded to seven digits, as much as a float32 has."""
        for line, number in ((self.value, value), (self.low, low), (self.high, high)):
            known = number is not None and math.isfinite(number)
            line[bucket] = float(f"{number:.7g}") if known else None

    def as_json(self, outer: bool) -> dict[str, Any]:
        """Returns the values; outer: with the lowest and highest, unless they are the values."""
        if not outer or self.low == self.value == self.high:
            return {"values": self.value, "low": None, "high": None}
        return {"values": self.value, "low": self.low, "high": self.high}


def _count_points(span: Span, signal: Signal) -> int:
    """Returns the number of buckets: none is shorter than the interval of the signal."""
    return max(1, min(span.points, (span.end - span.start) // int((signal.interval or 1) * SECOND)))


def _choose(
    cursor: duckdb.DuckDBPyConnection,
    topology: Topology,
    entities: Sequence[str],
    signal: Signal,
    peers: Peers,
    most: int,
) -> _Chosen:
    """Returns the entities of the signal's class; of another entity, such as a node, its parts of that class."""
    found: dict[str, None] = {}
    for entity in entities:
        if CLASS_OF_KIND.get(kind_of(entity)) == signal.device_class:
            found[entity] = None
        else:
            below = (e for e in topology.descendants(entity) if CLASS_OF_KIND.get(kind_of(e)) == signal.device_class)
            found.update(dict.fromkeys(sorted(below, key=natural_key)))
    devices = list(found)[:MAX_DEVICES]
    if not devices or peers == "none":
        return _Chosen(devices, len(found) - len(devices), "none", [])
    kind, others = find_peers(cursor, topology, devices[0], signal.device_class, peers, most + len(devices))
    others = [e for e in others if e not in found][:most]
    return _Chosen(devices, len(found) - len(devices), kind, others)


def natural_key(entity: str) -> tuple[tuple[int, int, str], ...]:
    """Key by which `gpu:n1.10` comes after `gpu:n1.9`."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for sign in [*entity, ""]:
        if sign.isdecimal() and sign.isascii():
            digits += sign
            continue
        if digits:
            parts.append((0, int(digits), digits))
            digits = ""
        parts.append((1, 0, sign))
    return tuple(parts)


def _read(
    cursor: duckdb.DuckDBPyConnection, signal: Signal, chosen: _Chosen, span: Span, step: int
) -> list[tuple[int, str | None, float | None, float | None, float | None]]:
    """Returns (bucket, device, value, lowest, highest); without a device: median, 10th and 90th percentile of peers."""
    if not chosen.devices:
        return []
    outer = signal.kind == "gauge"
    per_row, per_bucket = {
        "counter": (rate_sql(signal), "avg(x)"),
        "state": ("v", "arg_max(x, time)"),
        "gauge": ("v", "sum(x * n) / sum(n)" if step else "avg(x)"),
    }[signal.kind]
    low, high = ("low", "high") if outer else ("NULL", "NULL")
    rows = select_values(cursor, signal, step, span, [*chosen.devices, *chosen.peers], extremes=outer)
    return cursor.execute(
        f"""
        WITH raw AS ({rows}),
             measured AS (SELECT time, entity, n, {low} AS low, {high} AS high, {per_row} AS x
                          FROM raw WHERE v IS NOT NULL WINDOW w AS (PARTITION BY entity ORDER BY time)),
             bucketed AS (SELECT (epoch_us(time) - $start) // $width AS bucket, entity, ({per_bucket})::DOUBLE AS x,
                                 min(low)::DOUBLE AS low, max(high)::DOUBLE AS high
                          FROM measured WHERE x IS NOT NULL GROUP BY ALL)
        SELECT bucket, entity, x, low, high FROM bucketed WHERE list_contains($devices, entity)
        UNION ALL
        SELECT bucket, NULL, median(x), quantile_cont(x, 0.1), quantile_cont(x, 0.9) FROM bucketed
        WHERE NOT list_contains($devices, entity) GROUP BY bucket""",
        {"start": span.start, "width": span.width, "devices": chosen.devices},
    ).fetchall()
