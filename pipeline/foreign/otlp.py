"""Decodes OTLP metrics requests, with a cache of layouts: names and attributes are checked one time per layout.

A message is flattened by the walker. Each resource has a hash of everything but its values, times and flags; the cache
has the plan for it, with the place of each value. A new layout costs a pass in Python over its bytes.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pipeline.foreign import walker
from pipeline.foreign.plan import Plan, Samples, build_plan
from pipeline.foreign.repeats import PlanKey, RepeatedMessages
from pipeline.foreign.series import Series
from pipeline.foreign.walker import Flat, Walker
from pipeline.model.errors import WireError

CACHED_VALUES = 4_000_000
"""Most values in cached plans, 200 bytes each. Chosen: 5,000 nodes of 800 signals; a plan that is dropped is built
again when it is needed."""
OWN_SERVICE = "fleetpulse-agent"
"""service.name of our agents, which send the same samples natively: theirs are skipped."""

_KINDS = {
    walker.GAUGE_KIND: "gauge",
    walker.SUM_KIND: "sum",
    walker.HISTOGRAM_KIND: "histogram",
    walker.EXPONENTIAL_KIND: "exponential histogram",
    walker.SUMMARY_KIND: "summary",
}
_SUFFIXES = {walker.COUNT: "_count", walker.SUM: "_sum", walker.MINIMUM: "_min", walker.MAXIMUM: "_max"}
_ATTRIBUTES = {walker.HISTOGRAM_KIND: 9, walker.EXPONENTIAL_KIND: 1}  # field of the points' attributes; else 7


class OtlpDecoder:
    """Decodes messages; keeps the plans of known layouts. For one thread.

    site: of all rows.  node_attributes: of a resource, the first of which is its node.
    """

    def __init__(self, site: str, node_attributes: Sequence[str]) -> None:
        self._site, self._node_attributes = site, tuple(node_attributes)
        self._walker, self._repeats = Walker(), RepeatedMessages()
        self._plans: OrderedDict[PlanKey, Plan] = OrderedDict()
        self._cached = 0

    def decode(self, message: bytes | memoryview, node: str = "") -> Iterator[Samples]:
        """The samples of each resource of a message. Raises WireError if any part of it is malformed.

        node: the one that all of it belongs to; "" if its attributes give the node.
        """
        if (repeated := self._repeats.find(message, node)) is not None:
            known, values = repeated
            if all(key in self._plans for key, _, _ in known.parts):
                for key, first, after in known.parts:
                    self._plans.move_to_end(key)
                    yield self._plans[key].read(values[first:after])
                return
        flat = self._walker.walk(message)
        resources, values = flat.resources, flat.values
        parts: list[tuple[PlanKey, int, int]] = []
        for r in range(int(flat.counts[walker.RESOURCES])):
            first, after = int(resources[r, walker.FIRST]), int(resources[r + 1, walker.FIRST])
            key = (int(resources[r, walker.HASH]), int(resources[r, walker.HASH + 1]), after - first, node)
            plan = self._plans.get(key)
            if plan is None:
                plan = self._add_plan(key, message, flat, r)
            else:
                self._plans.move_to_end(key)
            parts.append((key, first, after))
            yield plan.read(values[first:after])
        self._repeats.keep(message, node, flat, parts)
        dropped = {"exemplars": walker.EXEMPLARS, "buckets": walker.BUCKETS, "stale": walker.STALE}
        yield Samples(dropped={what: int(flat.counts[position]) for what, position in dropped.items()})

    def _add_plan(self, key: PlanKey, message: bytes | memoryview, flat: Flat, resource: int) -> Plan:
        series = list(read_series(bytes(message), flat, resource))
        own = bool(series) and series[0][0].resource.get("service.name") == OWN_SERVICE
        plan = build_plan([] if own else series, self._site, self._node_attributes, node=key[-1])
        if own:
            plan.skipped = "own"
        self._plans[key] = plan
        self._cached += plan.size
        while self._cached > CACHED_VALUES and len(self._plans) > 1:
            _, dropped = self._plans.popitem(last=False)
            self._cached -= dropped.size
        return plan


# --- names and attributes, read when a layout is new ----------------------------------------------------------------


def read_series(message: bytes, flat: Flat, resource: int) -> Iterator[tuple[Series, str]]:
    """(series, scope) of each value of a resource, in the walker's order. Raises WireError."""
    first, after = flat.resources[resource : resource + 2, walker.FIRST].tolist()
    at, end = flat.resources[resource, : walker.END + 1].tolist()
    about, scopes = _read_resource(message, at, end)
    heads: dict[int, tuple[str, str]] = {}
    rows = flat.values[first:after].tolist()
    points: dict[int, dict[str, str]] = {}
    for row in rows:
        number = row[walker.METRIC]
        metric = flat.metrics[number].tolist()
        if number not in heads:
            heads[number] = _read_head(message, metric[walker.AT], metric[walker.END])
        name, unit = heads[number]
        kind = metric[walker.KIND]
        start = row[walker.AT]
        if start not in points:
            points = {start: _read_attributes(message, start, row[walker.END], _ATTRIBUTES.get(kind, 7))}
        labels = points[start]
        if row[walker.PART] == walker.QUANTILE_PART:
            (quantile,) = struct.unpack("<d", struct.pack("<q", row[walker.QUANTILE]))
            labels = {**labels, "quantile": f"{quantile:g}"}
        suffix = _SUFFIXES.get(row[walker.PART], "")
        series = Series(name + suffix, unit, _KINDS[kind], bool(metric[walker.DELTA]), labels, about)
        yield series, scopes[metric[walker.SCOPE] - 1]


def _read_resource(message: bytes, at: int, end: int) -> tuple[dict[str, str], list[str]]:
    """(attributes of the resource, name of each scope)."""
    about: dict[str, str] = {}
    scopes = []
    for tag, start, after in iterate_fields(message, at, end):
        if tag == 10:
            about |= _read_attributes(message, start, after, 1)
        elif tag == 18:
            names = [
                decode_text(message, a, z)
                for t, s, e in iterate_fields(message, start, after)
                if t == 10
                for t2, a, z in iterate_fields(message, s, e)
                if t2 == 10
            ]
            scopes.append(names[-1] if names else "")
    return about, scopes


def _read_head(message: bytes, at: int, end: int) -> tuple[str, str]:
    """(name, unit) of a metric."""
    found = {tag: (start, after) for tag, start, after in iterate_fields(message, at, end) if tag in (10, 26)}
    name, unit = (decode_text(message, *found[tag]) if tag in found else "" for tag in (10, 26))
    if not name:
        raise WireError(f"metric without a name at byte {at}")
    return name, unit


def _read_attributes(message: bytes, at: int, end: int, number: int) -> dict[str, str]:
    """The attributes in field `number`, with values as text."""
    tag = number << 3 | 2
    pairs = (message[start:after] for found, start, after in iterate_fields(message, at, end) if found == tag)
    return dict(_read_short_pair(pair) if len(pair) <= _SHORT else _read_pair(pair) for pair in pairs)


def _read_pair(pair: bytes) -> tuple[str, str]:
    """(key, value as text) of a KeyValue: key = 1, value = 2."""
    key, value = "", ""
    for tag, at, end in iterate_fields(pair, 0, len(pair)):
        if tag == 10:
            key = decode_text(pair, at, end)
        elif tag == 18:
            value = _read_value(pair, at, end)
    return key, value


_SHORT = 128
"""Bytes of pairs that are remembered, 16 MB in all; most series of a node share theirs."""
_read_short_pair = functools.lru_cache(65_536)(_read_pair)


def _read_value(message: bytes, at: int, end: int) -> str:
    """AnyValue as text: string = 1, bool = 2, int = 3, double = 4; a hash for arrays, lists of pairs and bytes."""
    value = ""
    for tag, start, after in iterate_fields(message, at, end):
        if tag == 10:
            value = decode_text(message, start, after)
        elif tag == 16:
            value = "true" if message[start] else "false"
        elif tag == 24:
            number, _ = decode_varint(message, start, after)
            value = str(number - (1 << 64) if number >> 63 else number)
        elif tag == 33:
            value = f"{struct.unpack_from('<d', message, start)[0]:g}"
        else:
            value = hashlib.sha256(message[start:after]).hexdigest()[:12]
    return value


def decode_text(message: bytes, at: int, end: int) -> str:
    try:
        return message[at:end].decode()
    except UnicodeDecodeError as error:
        raise WireError(f"text at byte {at} is not UTF-8: {error.reason}") from error


def iterate_fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(tag, start, end) of each field between two positions. Raises WireError."""
    while at < end:
        tag, start = decode_varint(message, at, end)
        kind, after = tag & 7, start
        if kind == 0:
            _, after = decode_varint(message, start, end)
        elif kind == 2:
            size, start = decode_varint(message, start, end)
            after = start + size
        elif kind in (1, 5):
            after = start + (8 if kind == 1 else 4)
        if tag < 8 or kind in (3, 4, 6, 7) or after > end:
            raise WireError(f"not a valid request: malformed at byte {at}")
        yield tag, start, after
        at = after


def decode_varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise WireError(f"not a valid request: malformed at byte {at}")
