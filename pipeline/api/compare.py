"""Several signals of several devices over one time range, each beside the band of the peers of its first device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import duckdb

from pipeline.api.compare_read import Row, Wanted, read_rows
from pipeline.api.history import MAX_ROWS, Peers, Span, choose_step, find_peers, find_signal, signal_brief
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CLASS_OF_KIND, Signal
from pipeline.model.topology import Topology, kind_of

MAX_SIGNALS = 8
"""Signals of one request (chosen: charts that fit on a screen)."""
MAX_DEVICES = 16
"""Devices of one signal (chosen: a node has eight GPUs; more lines look the same)."""
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
    groups: dict[tuple[str, int, int], list[Signal]] = {}
    for signal in signals:
        own = replace(span, points=_count_points(span, signal))
        groups.setdefault((signal.device_class, own.points, choose_step(cursor, signal, own)), []).append(signal)
    entities = list(dict.fromkeys(entities))
    found: dict[str, dict[str, Any]] = {}
    for (device_class, points, step), own_signals in groups.items():
        own = replace(span, points=points)
        rows = max(1, (span.end - span.start) // int((step or own_signals[0].interval or 1) * SECOND))
        most = max(_MIN_PEERS, min(MAX_PEERS, MAX_ROWS // len(signals) // rows))
        chosen = _choose(cursor, topology, entities, device_class, peers, most)
        wanted = Wanted(own, step, chosen.devices, chosen.peers)
        read = read_rows(cursor, own_signals, wanted) if chosen.devices else repeat([])
        for signal, lines in zip(own_signals, read, strict=False):
            found[signal.name] = _write_signal(signal, chosen, wanted, lines)
    shown = [found[signal.name] for signal in signals]
    return {"from": iso(span.start), "to": iso(span.end), "simulated": _is_simulated(cursor, shown), "signals": shown}


def _is_simulated(cursor: duckdb.DuckDBPyConnection, shown: Iterable[dict[str, Any]]) -> bool:
    """Returns whether any device with a line is simulated."""
    devices = sorted({line["entity"] for signal in shown for line in signal["lines"]})
    query = "SELECT count(*) > 0 FROM device WHERE simulated AND entity IN (SELECT unnest($1))"
    row = cursor.execute(query, [devices]).fetchone()
    return bool(row and row[0])


def _write_signal(signal: Signal, chosen: _Chosen, wanted: Wanted, rows: Iterable[Row]) -> dict[str, Any]:
    span = wanted.span
    count = math.ceil((span.end - span.start) / span.width)
    lines = {name: _Line.empty(count) for name in chosen.devices}
    band = _Line.empty(count)
    for bucket, entity, value, low, high in rows:
        if 0 <= bucket < count:
            (band if entity is None else lines[entity]).put(bucket, value, low, high)
    return {
        "signal": signal_brief(signal),
        "states": list(signal.states),
        "step": wanted.step,
        "start": iso(span.start),
        "width": span.width / SECOND,
        "peer_kind": chosen.peer_kind,
        "peers": len(chosen.peers),
        "left_out": chosen.left_out,
        "lines": [{"entity": e, **line.as_json(signal.kind == "gauge")} for e, line in lines.items()],
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
    device_class: str,
    peers: Peers,
    most: int,
) -> _Chosen:
    """Returns the entities of a class; without any, the parts of that class of the others, such as of a node."""
    found = [e for e in entities if CLASS_OF_KIND.get(kind_of(e)) == device_class]
    if not found:  # with one, hundreds of parts of a CDU would hide the GPU beside it
        below = (e for entity in entities for e in sorted(topology.descendants(entity), key=natural_key))
        found = list(dict.fromkeys(e for e in below if CLASS_OF_KIND.get(kind_of(e)) == device_class))
    devices = found[:MAX_DEVICES]
    if not devices or peers == "none":
        return _Chosen(devices, len(found) - len(devices), "none", [])
    kind, others = find_peers(cursor, topology, devices[0], device_class, peers, most + len(devices))
    others = [e for e in others if e not in devices][:most]
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
