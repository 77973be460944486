"""The messages of OTLP's metrics in protobuf's wire format.

Field numbers are those of opentelemetry/proto/metrics/v1/metrics.proto, common.proto and resource.proto (1.x, stable).
Written by hand because the generated classes cost a node 2 MiB and ten times the time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from agents.protobuf import (
    LENGTH,
    ProtobufMessage,
    encode_double,
    encode_fixed64,
    encode_nested,
    encode_tag,
    encode_text,
    encode_unsigned,
    encode_varint,
)

__all__ = [
    "CUMULATIVE",
    "LENGTH",
    "decode_rejected",
    "encode_attributes",
    "encode_double",
    "encode_fixed64",
    "encode_gauge",
    "encode_histogram",
    "encode_metric",
    "encode_nested",
    "encode_packed_doubles",
    "encode_packed_fixed64",
    "encode_request",
    "encode_sum",
    "encode_sum_tail",
    "encode_tag",
    "encode_text",
    "encode_unsigned",
    "encode_varint",
]

CUMULATIVE = 2
"""AggregationTemporality: counters grow since their start."""


def encode_attributes(number: int, facts: Mapping[str, str | bool]) -> bytes:
    """Encodes KeyValue messages; a value is text or a bool."""
    found = b""
    for key, value in facts.items():
        any_value = encode_unsigned(2, int(value)) if isinstance(value, bool) else encode_text(1, value)
        found += encode_nested(number, encode_text(1, key) + encode_nested(2, any_value))
    return found


def encode_metric(name: str, help: str, unit: str, data: bytes) -> bytes:
    """Encodes a Metric with its data from encode_gauge, encode_sum or encode_histogram."""
    return encode_text(1, name) + encode_text(2, help) + encode_text(3, unit) + data


def encode_gauge(points: bytes) -> bytes:
    """Encodes a Gauge."""
    return encode_nested(5, points)


def encode_sum(points: bytes, monotonic: bool) -> bytes:
    """Encodes a cumulative Sum."""
    return encode_nested(7, points + encode_sum_tail(monotonic))


def encode_sum_tail(monotonic: bool) -> bytes:
    """Encodes the fields after the points of a cumulative Sum."""
    return encode_unsigned(2, CUMULATIVE) + encode_unsigned(3, int(monotonic))


def encode_histogram(points: bytes) -> bytes:
    """Encodes a cumulative Histogram."""
    return encode_nested(9, points + encode_unsigned(2, CUMULATIVE))


def encode_packed_doubles(number: int, values: Sequence[float]) -> bytes:
    """Encodes a repeated double, packed."""
    return encode_nested(number, struct.pack(f"<{len(values)}d", *values))


def encode_packed_fixed64(number: int, values: Sequence[int]) -> bytes:
    """Encodes a repeated fixed64, packed."""
    return encode_nested(number, struct.pack(f"<{len(values)}Q", *values))


def encode_request(resource: bytes, scope: str, version: str, schema: str, metrics: Sequence[bytes]) -> bytes:
    """Encodes an ExportMetricsServiceRequest of one resource and one scope; `resource`: its encoded attributes."""
    about = encode_text(1, scope) + encode_text(2, version)
    inside = encode_nested(1, about) + b"".join(encode_nested(2, one) for one in metrics)
    return encode_nested(1, encode_nested(1, resource) + encode_nested(2, inside) + encode_text(3, schema))


def decode_rejected(answer: bytes) -> tuple[int, str]:
    """Returns (points refused, reason) of an ExportMetricsServiceResponse. Raises ValueError if it is none."""
    partial = ProtobufMessage(answer).message(1)
    return partial.signed(1), partial.text(2)
