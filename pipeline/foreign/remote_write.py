"""Decodes Prometheus remote write 1.0 (`WriteRequest`) and 2.0 (`io.prometheus.write.v2.Request`), without snappy.

A request has any series of any nodes, in batches that are cut anywhere. So values are never summed over several series,
as node_exporter's mapping does for processors: such series stay custom signals.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.foreign import walker
from pipeline.foreign.otlp import CACHED_VALUES, decode_text, decode_varint, iterate_fields
from pipeline.foreign.plan import Plan, Samples, build_plan
from pipeline.foreign.series import Series
from pipeline.model.errors import WireError

MAX_SAMPLES = 200_000
"""Most samples of a request. Chosen: a hundred of Prometheus' largest by default (2,000)."""
STALE = 0x7FF0000000000002
"""Bits of the NaN with which Prometheus ends a series (its package model/value, StaleNaN)."""
_STALE_NAN = struct.unpack("<d", struct.pack("<Q", STALE))[0]
_DOUBLE, _TIME = walker.DOUBLE, walker.TIME
Point = tuple[str, float, int]
"""(suffix of the metric's name, value, Unix ms)."""


class RemoteWriteDecoder:
    """Decodes requests; keeps the plans of series that came together before. For one thread."""

    def __init__(self, site: str, node_attributes: Sequence[str]) -> None:
        self._site, self._node_attributes = site, tuple(node_attributes)
        self._plans: OrderedDict[bytes, Plan] = OrderedDict()
        self._cached = 0

    def decode(self, data: bytes, version: int) -> list[Samples]:
        """The samples of a request. Raises WireError if any part of it is malformed."""
        series: list[Series] = []
        rows: list[tuple[float, int]] = []
        digest, exemplars = hashlib.blake2b(digest_size=16), 0
        for labels, points, extra in _read_plain(data) if version == 1 else _read_interned(data):
            name = labels.pop("__name__", "")
            if not name:
                raise WireError("series without a label __name__")
            exemplars += extra
            for suffix, value, time in points:
                series.append(Series(name + suffix, "", "unknown", False, labels))
                rows.append((value, time))
            digest.update(repr((name, sorted(labels.items()), [p[0] for p in points])).encode("utf-8", "replace"))
            if len(rows) > MAX_SAMPLES:
                raise WireError(f"more than {MAX_SAMPLES} samples in a request")
        values = np.zeros((len(rows), 8), np.int64)
        values[:, walker.BITS] = np.array([value for value, _ in rows], np.float64).view(np.int64)
        values[:, walker.FORM] = _DOUBLE
        values[:, _TIME] = np.array([time for _, time in rows], np.int64) * 1_000_000
        ended = values[:, walker.BITS] == STALE
        if stale := int(ended.sum()):
            digest.update(ended.tobytes())
            values, series = values[~ended], [one for one, end in zip(series, ended.tolist(), strict=True) if not end]
        plan = self._find_plan(digest.digest(), series)
        return [plan.read(values), Samples(dropped={"exemplars": exemplars, "stale": stale})]

    def _find_plan(self, key: bytes, series: Sequence[Series]) -> Plan:
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        plan = self._plans[key] = build_plan([(s, "") for s in series], self._site, self._node_attributes, merge=False)
        self._cached += plan.size
        while self._cached > CACHED_VALUES and len(self._plans) > 1:
            _, dropped = self._plans.popitem(last=False)
            self._cached -= dropped.size
        return plan


def _read_plain(data: bytes) -> Iterator[tuple[dict[str, str], list[Point], int]]:
    """(labels, points, exemplars) of each series of a WriteRequest: timeseries = 1.

    TimeSeries: labels = 1 (name = 1, value = 2), samples = 2, exemplars = 3, histograms = 4.
    """
    for tag, at, end in iterate_fields(data, 0, len(data)):
        if tag != 10:
            continue
        labels: dict[str, str] = {}
        points: list[Point] = []
        exemplars = 0
        for inner, start, after in iterate_fields(data, at, end):
            if inner == 10:
                pair = {t: decode_text(data, s, e) for t, s, e in iterate_fields(data, start, after) if t in (10, 18)}
                labels[pair.get(10, "")] = pair.get(18, "")
            elif inner == 18:
                points.append(_read_sample(data, start, after))
            elif inner == 34:
                points += _read_histogram(data, start, after)
            exemplars += inner == 26
        yield labels, points, exemplars


def _read_interned(data: bytes) -> Iterator[tuple[dict[str, str], list[Point], int]]:
    """The same of a v2 Request: symbols = 4, timeseries = 5.

    TimeSeries: labels_refs = 1 (packed), samples = 2, histograms = 3, exemplars = 4.
    """
    fields = [field for field in iterate_fields(data, 0, len(data)) if field[0] in (34, 42)]
    symbols = [decode_text(data, at, end) for tag, at, end in fields if tag == 34]
    for tag, at, end in fields:
        if tag != 42:
            continue
        refs: list[int] = []
        points: list[Point] = []
        exemplars = 0
        for inner, start, after in iterate_fields(data, at, end):
            if inner == 10:
                while start < after:
                    ref, start = decode_varint(data, start, after)
                    refs.append(ref)
            elif inner == 18:
                points.append(_read_sample(data, start, after))
            elif inner == 26:
                points += _read_histogram(data, start, after)
            exemplars += inner == 34
        if len(refs) % 2 or any(ref >= len(symbols) for ref in refs):
            raise WireError(f"series with {len(refs)} references to {len(symbols)} symbols: expected pairs within them")
        yield {symbols[k]: symbols[v] for k, v in zip(refs[::2], refs[1::2], strict=True)}, points, exemplars


def _read_sample(data: bytes, at: int, end: int) -> Point:
    """Sample: value = 1 double, timestamp = 2."""
    value, time = 0.0, 0
    for tag, start, after in iterate_fields(data, at, end):
        if tag == 9:
            (value,) = struct.unpack_from("<d", data, start)
        elif tag == 16:
            time = decode_varint(data, start, after)[0]
    return "", value, _limit_time(time)


def _read_histogram(data: bytes, at: int, end: int) -> list[Point]:
    """A native histogram: count_int = 1, count_float = 2, sum = 3, timestamp = 15; its buckets are dropped."""
    count: float | None = None
    total: float | None = None
    time = 0
    for tag, start, after in iterate_fields(data, at, end):
        if tag == 8:
            count = float(decode_varint(data, start, after)[0])
        elif tag in (17, 25):
            (number,) = struct.unpack_from("<d", data, start)
            count, total = (number, total) if tag == 17 else (count, number)
        elif tag == 120:
            time = decode_varint(data, start, after)[0]
    if total is not None and struct.pack("<d", total) == struct.pack("<Q", STALE):
        count = _STALE_NAN  # a histogram that ends has the count 0
    found = (("_count", count), ("_sum", total))
    return [(suffix, value, _limit_time(time)) for suffix, value in found if value is not None]


def _limit_time(time: int) -> int:
    """Unix ms that fit as ns into 64 bits; a negative time becomes 0, which admission refuses."""
    return 0 if time >> 63 else min(time, (1 << 63) // 1_000_000 - 1)
