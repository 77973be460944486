"""Walks an OTLP ExportMetricsServiceRequest: flattens it to one value per entry, with every bound checked.

A number point has one value; a point of a histogram, an exponential histogram or a summary has several (its count, sum,
minimum, maximum, quantiles), one entry each. Exemplars and buckets are counted and skipped. Everything except values,
times and flags goes into a hash per resource, so that a known layout needs no look at names and attributes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.foreign.compiled import (
    HASH_KEYS,
    Bytes,
    Words,
    hash_span,
    mix,
    read_field,
    read_word,
)
from pipeline.model.compiling import compiled, inlined
from pipeline.model.errors import WireError

_LIMITS = (1 << 20, 1 << 18, 1 << 16)
"""Most values, metrics and resources of one message: 84 MB of tables. Chosen: a message of 4 MiB with real points has
at most 200,000."""
Table = NDArray[np.int64]
_START = 1 << 14  # capacity at first; it doubles when a message needs more

VALUE, COUNT, SUM, MINIMUM, MAXIMUM, QUANTILE_PART = range(6)
"""Parts of a point."""
NO_VALUE, DOUBLE, INTEGER = range(3)
"""Forms of a value."""
GAUGE_KIND, SUM_KIND, HISTOGRAM_KIND, EXPONENTIAL_KIND, SUMMARY_KIND = 5, 7, 9, 10, 11
"""Kinds of metric: the number of the field of Metric that has the points."""
VALUES, METRICS, RESOURCES, EXEMPLARS, BUCKETS, ERROR, WHERE, STALE = range(8)
AT, END, BITS, FORM, TIME, PART, QUANTILE, METRIC = range(8)  # columns of values
KIND, DELTA, RESOURCE, SCOPE = range(2, 6)  # columns of metrics, after AT and END
FIRST, HASH = 2, 3  # columns of resources, after AT and END
_MALFORMED, _FULL = 1, 2
_RESOURCE, _NAME, _UNIT, _POINT, _SCOPE = range(1, 6)  # what a hashed span is


class Flat(NamedTuple):
    """A flattened message. Reused: valid until the next `walk`. Few arrays, because each costs at every call.

    values: per value BITS (of a double or integer), FORM, TIME (ns), PART (of its point), QUANTILE (bits; of a
    summary), METRIC (number) and the bytes AT to END of its point.
    metrics: bytes AT to END, KIND, DELTA (temporality), RESOURCE, SCOPE.
    resources: bytes AT to END, FIRST value, and both lanes of the hash.
    """

    values: Table
    metrics: Table
    resources: Table
    counts: Table
    hash: Words


def _make_flat(values: int, metrics: int, resources: int) -> Flat:
    def table(rows: int) -> Table:
        return np.zeros((rows, 8), np.int64)

    state = np.concatenate((np.zeros(2, np.uint64), HASH_KEYS))
    return Flat(table(values), table(metrics), table(resources + 1), np.zeros(8, np.int64), state)


class Walker:
    """Flattens messages into arrays that it keeps. For one thread."""

    def __init__(self) -> None:
        self._sizes = [_START, _START // 4, 256]
        self._flat = _make_flat(*self._sizes)

    def walk(self, message: bytes | memoryview) -> Flat:
        """The flattened message, valid until the next call. Raises WireError if it is malformed or too large."""
        b = np.frombuffer(message, np.uint8)
        while True:
            flat = self._flat
            flat.counts[:] = 0
            walk_request(b, len(b), *flat)
            error, where = flat.counts[ERROR], flat.counts[WHERE]
            if error == _MALFORMED:
                raise WireError(f"not an OTLP metrics request: malformed at byte {where} of {len(b)}")
            if error != _FULL:
                return flat
            if all(size >= most for size, most in zip(self._sizes, _LIMITS, strict=True)):
                most = "{} values, {} metrics and {} resources".format(*_LIMITS)
                raise WireError(f"message of {len(b)} bytes: at most {most} are accepted")
            self._sizes = [min(2 * size, most) for size, most in zip(self._sizes, _LIMITS, strict=True)]
            self._flat = _make_flat(*self._sizes)


@compiled
def _fail(c: Table, error: int, where: int) -> bool:
    if c[ERROR] == 0:
        c[ERROR], c[WHERE] = error, where
    return False


@inlined
def _add_value(v: Table, c: Table, part: int, form: int, bits: Any) -> bool:
    """Adds one value; its time and point follow with _end_point. False if the table is full."""
    n = c[VALUES]
    if n < len(v):
        v[n, BITS], v[n, FORM], v[n, PART] = np.int64(bits), form, part
        c[VALUES] = n + 1
    return bool(n < len(v))


@inlined
def _end_point(v: Table, c: Table, first: int, at: int, end: int, time: Any, flags: int) -> None:
    """Completes the values from `first` on, which are those of one point. flags: 1 is "no recorded value"."""
    for n in range(first, c[VALUES]):
        v[n, METRIC], v[n, TIME], v[n, AT], v[n, END] = c[METRICS] - 1, np.int64(time), at, end
        if flags & 1:
            v[n, FORM] = NO_VALUE
            c[STALE] += 1


@inlined
def _walk_number(b: Bytes, at: int, end: int, v: Table, c: Table, h: Words) -> bool:
    """NumberDataPoint: time_unix_nano = 3, as_double = 4, exemplars = 5, as_int = 6, attributes = 7, flags = 8."""
    time = bits = np.uint64(0)
    form, p, run, run_end = NO_VALUE, at, at, at
    flags: Any = np.int64(0)
    while p < end:
        tag, number, start, after = read_field(b, p, end)
        if tag == 58:
            if run_end != p:
                if run_end > run:
                    hash_span(b, run, run_end, _POINT, h)
                run = p
            run_end = after
        elif tag == 25:
            time = read_word(b, start)
        elif tag == 33 or tag == 49:
            bits, form = read_word(b, start), DOUBLE if tag == 33 else INTEGER
        elif tag == 64:
            flags = number
        elif tag == 42:
            c[EXEMPLARS] += 1
        elif tag < 0:
            return _fail(c, _MALFORMED, p)
        p = after
    hash_span(b, run, run_end, _POINT, h)
    n = c[VALUES]
    if n >= len(v):
        return _fail(c, _FULL, at)
    row = v[n]
    row[AT], row[END], row[BITS], row[FORM] = at, end, np.int64(bits), NO_VALUE if flags & 1 else form
    row[TIME], row[PART], row[METRIC] = np.int64(time), VALUE, c[METRICS] - 1
    c[STALE] += flags & 1
    c[VALUES] = n + 1
    return True


@compiled
def _walk_distribution(b: Bytes, at: int, end: int, v: Table, c: Table, h: Words, exponential: bool) -> bool:
    """HistogramDataPoint or ExponentialHistogramDataPoint: time = 3, count = 4, sum = 5, flags = 10.

    attributes = 9 or 1; min, max = 11, 12 or 12, 13; exemplars = 8 or 11; buckets = 6 or 8, 9.
    """
    flags: Any = np.int64(0)
    time, p, first = np.uint64(0), at, c[VALUES]
    attributes, least, most, exemplars = (10, 97, 105, 90) if exponential else (74, 89, 97, 66)
    while p < end:
        tag, number, start, after = read_field(b, p, end)
        if tag < 0:
            return _fail(c, _MALFORMED, p)
        if tag == 25:
            time = read_word(b, start)
        elif tag == attributes:
            hash_span(b, start, after, _POINT, h)
        elif tag == 33 or tag == 41 or tag in (least, most):
            part = COUNT if tag == 33 else SUM if tag == 41 else MINIMUM if tag == least else MAXIMUM
            mix(h, np.uint64(part), np.uint64(part), 4)
            if not _add_value(v, c, part, INTEGER if tag == 33 else DOUBLE, read_word(b, start)):
                return _fail(c, _FULL, at)
        elif tag == 80:
            flags = number
        elif tag == exemplars:
            c[EXEMPLARS] += 1
        elif tag == 50 or tag == 66 or tag == 74:
            c[BUCKETS] += 1 if exponential else number // 8
        p = after
    hash_span(b, end, end, _POINT, h)
    _end_point(v, c, first, at, end, time, flags)
    return True


@compiled
def _walk_quantile(b: Bytes, p: int, end: int, v: Table, c: Table, h: Words) -> bool:
    """ValueAtQuantile: quantile = 1, value = 2."""
    quantile = bits = np.uint64(0)
    while p < end:
        tag, _, start, after = read_field(b, p, end)
        if tag < 0:
            return _fail(c, _MALFORMED, p)
        if tag == 9:
            quantile = read_word(b, start)
        elif tag == 17:
            bits = read_word(b, start)
        p = after
    if not _add_value(v, c, QUANTILE_PART, DOUBLE, bits):
        return _fail(c, _FULL, p)
    v[c[VALUES] - 1, QUANTILE] = np.int64(quantile)
    mix(h, quantile, quantile, 6)
    return True


@compiled
def _walk_summary(b: Bytes, at: int, end: int, v: Table, c: Table, h: Words) -> bool:
    """SummaryDataPoint: time = 3, count = 4, sum = 5, quantile_values = 6, attributes = 7, flags = 8."""
    flags: Any = np.int64(0)
    time, p, first = np.uint64(0), at, c[VALUES]
    while p < end:
        tag, number, start, after = read_field(b, p, end)
        if tag < 0:
            return _fail(c, _MALFORMED, p)
        if tag == 25:
            time = read_word(b, start)
        elif tag == 58:
            hash_span(b, start, after, _POINT, h)
        elif tag == 33 or tag == 41:
            part = COUNT if tag == 33 else SUM
            mix(h, np.uint64(part), np.uint64(part), 4)
            if not _add_value(v, c, part, INTEGER if tag == 33 else DOUBLE, read_word(b, start)):
                return _fail(c, _FULL, at)
        elif tag == 50:
            if not _walk_quantile(b, start, after, v, c, h):
                return False
        elif tag == 64:
            flags = number
        p = after
    hash_span(b, end, end, _POINT, h)
    _end_point(v, c, first, at, end, time, flags)
    return True


@compiled
def _walk_data(b: Bytes, p: int, end: int, v: Table, m: Table, c: Table, h: Words, kind: int) -> bool:
    """Gauge, Sum, Histogram, ExponentialHistogram or Summary: data_points = 1, aggregation_temporality = 2."""
    metric = c[METRICS] - 1
    m[metric, KIND] = kind
    while p < end:
        tag, number, start, after = read_field(b, p, end)
        good = tag >= 0
        if tag == 10:
            if kind in (GAUGE_KIND, SUM_KIND):
                good = _walk_number(b, start, after, v, c, h)
            elif kind == SUMMARY_KIND:
                good = _walk_summary(b, start, after, v, c, h)
            else:
                good = _walk_distribution(b, start, after, v, c, h, kind == EXPONENTIAL_KIND)
        elif tag == 16:
            m[metric, DELTA] = number == 1
        if not good:
            return _fail(c, _MALFORMED, p)
        p = after
    return True


@compiled
def _walk_metric(b: Bytes, at: int, end: int, v: Table, m: Table, c: Table, h: Words, scope: int) -> bool:
    """Metric: name = 1, unit = 3, and the points in field `kind`."""
    metric, p = c[METRICS], at
    if metric >= len(m):
        return _fail(c, _FULL, at)
    c[METRICS] = metric + 1
    m[metric, AT], m[metric, END], m[metric, KIND], m[metric, DELTA] = at, end, 0, 0
    m[metric, RESOURCE], m[metric, SCOPE] = c[RESOURCES] - 1, scope
    while p < end:
        tag, _, start, after = read_field(b, p, end)
        good = tag >= 0
        if tag == 10 or tag == 26:
            hash_span(b, start, after, _NAME if tag == 10 else _UNIT, h)
        elif tag == 42 or tag == 58 or tag == 74 or tag == 82 or tag == 90:
            good = _walk_data(b, start, after, v, m, c, h, tag >> 3)
        if not good:
            return _fail(c, _MALFORMED, p)
        p = after
    word = np.uint64(m[metric, KIND] << 8 | m[metric, DELTA])
    mix(h, word, word, 8)
    return True


@compiled
def _walk_scope(b: Bytes, p: int, end: int, v: Table, m: Table, c: Table, h: Words, scope: int) -> bool:
    """ScopeMetrics: scope = 1, metrics = 2."""
    while p < end:
        tag, _, start, after = read_field(b, p, end)
        good = tag >= 0
        if tag == 10:
            hash_span(b, start, after, _SCOPE, h)
        elif tag == 18:
            good = _walk_metric(b, start, after, v, m, c, h, scope)
        if not good:
            return _fail(c, _MALFORMED, p)
        p = after
    return True


@compiled
def _walk_resource(b: Bytes, at: int, end: int, v: Table, m: Table, r: Table, c: Table, h: Words) -> bool:
    """ResourceMetrics: resource = 1, scope_metrics = 2."""
    resource, p, scope = c[RESOURCES], at, 0
    if resource + 1 >= len(r):
        return _fail(c, _FULL, at)
    c[RESOURCES] = resource + 1
    r[resource, AT], r[resource, END], r[resource, FIRST] = at, end, c[VALUES]
    h[0], h[1] = h[12], h[13]
    while p < end:
        tag, _, start, after = read_field(b, p, end)
        good = tag >= 0
        if tag == 10:
            hash_span(b, start, after, _RESOURCE, h)
        elif tag == 18:
            scope += 1
            good = _walk_scope(b, start, after, v, m, c, h, scope)
        if not good:
            return _fail(c, _MALFORMED, p)
        p = after
    r[resource, HASH], r[resource, HASH + 1], r[resource + 1, FIRST] = np.int64(h[0]), np.int64(h[1]), c[VALUES]
    return True


@compiled
def walk_request(b: Bytes, end: int, v: Table, m: Table, r: Table, c: Table, h: Words) -> bool:
    """ExportMetricsServiceRequest: resource_metrics = 1. False with an error in `c`."""
    p = 0
    while p < end:
        tag, _, start, after = read_field(b, p, end)
        if tag < 0:
            return _fail(c, _MALFORMED, p)
        if tag == 10 and not _walk_resource(b, start, after, v, m, r, c, h):
            return False
        p = after
    return True
