"""The messages of OTLP's metrics in protobuf's wire format.

Field numbers are those of opentelemetry/proto/metrics/v1/metrics.proto, common.proto and resource.proto (1.x, stable).
Written by hand because the generated classes cost a node 2 MiB and ten times the time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from agents.protobuf import LENGTH, Message, double, fixed, nested, tag, text, varint, whole

__all__ = [
    "CUMULATIVE",
    "LENGTH",
    "attributes",
    "double",
    "fixed",
    "gauge",
    "histogram",
    "metric",
    "nested",
    "packed_doubles",
    "packed_fixed",
    "rejected",
    "request",
    "tag",
    "text",
    "total",
    "total_tail",
    "varint",
    "whole",
]

CUMULATIVE = 2
"""AggregationTemporality: counters grow since their start."""


def attributes(number: int, facts: Mapping[str, str | bool]) -> bytes:
    """KeyValue messages; a value is text or a bool."""
    found = b""
    for key, value in facts.items():
        any_value = whole(2, int(value)) if isinstance(value, bool) else text(1, value)
        found += nested(number, text(1, key) + nested(2, any_value))
    return found


def metric(name: str, help: str, unit: str, data: bytes) -> bytes:
    """A Metric with its data, which `gauge`, `total` or `histogram` made."""
    return text(1, name) + text(2, help) + text(3, unit) + data


def gauge(points: bytes) -> bytes:
    return nested(5, points)


def total(points: bytes, monotonic: bool) -> bytes:
    """A cumulative Sum."""
    return nested(7, points + total_tail(monotonic))


def total_tail(monotonic: bool) -> bytes:
    """What stands behind the points of a cumulative Sum."""
    return whole(2, CUMULATIVE) + whole(3, int(monotonic))


def histogram(points: bytes) -> bytes:
    """A cumulative Histogram."""
    return nested(9, points + whole(2, CUMULATIVE))


def packed_doubles(number: int, values: Sequence[float]) -> bytes:
    return nested(number, struct.pack(f"<{len(values)}d", *values))


def packed_fixed(number: int, values: Sequence[int]) -> bytes:
    return nested(number, struct.pack(f"<{len(values)}Q", *values))


def request(resource: bytes, scope: str, version: str, schema: str, metrics: Sequence[bytes]) -> bytes:
    """An ExportMetricsServiceRequest of one resource and one scope; `resource` is its attributes."""
    about = text(1, scope) + text(2, version)
    inside = nested(1, about) + b"".join(nested(2, one) for one in metrics)
    return nested(1, nested(1, resource) + nested(2, inside) + text(3, schema))


def rejected(answer: bytes) -> tuple[int, str]:
    """(points refused, why) of an ExportMetricsServiceResponse. Raises ValueError if it is none."""
    partial = Message(answer).message(1)
    return partial.signed(1), partial.text(2)
