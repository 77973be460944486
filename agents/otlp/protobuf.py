"""The few pieces of protobuf's wire format that OTLP's metrics need, and the messages around them.

Field numbers are those of opentelemetry/proto/metrics/v1/metrics.proto, common.proto and resource.proto (1.x, stable).
Written by hand because the generated classes cost a node 2 MiB and ten times the time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

VARINT, FIXED64, LENGTH = 0, 1, 2
"""Wire types (protobuf.dev, encoding)."""
CUMULATIVE = 2
"""AggregationTemporality: counters grow since their start."""


def varint(value: int) -> bytes:
    """An unsigned number, seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def nested(number: int, body: bytes) -> bytes:
    """A message, text or bytes as field `number`."""
    return tag(number, LENGTH) + varint(len(body)) + body


def text(number: int, value: str) -> bytes:
    return nested(number, value.encode("utf-8", "replace"))


def whole(number: int, value: int) -> bytes:
    return tag(number, VARINT) + varint(value)


def fixed(number: int, value: int) -> bytes:
    return tag(number, FIXED64) + struct.pack("<Q", value)


def double(number: int, value: float) -> bytes:
    return tag(number, FIXED64) + struct.pack("<d", value)


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
    for number, body in _fields(answer):
        if number == 1 and isinstance(body, bytes):
            found = dict(_fields(body))
            count, why = found.get(1, 0), found.get(2, b"")
            if isinstance(count, int) and isinstance(why, bytes):
                return count, why.decode("utf-8", "replace")
    return 0, ""


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """(number, value) of each field with a varint or a length; what else there is raises ValueError."""
    found: list[tuple[int, int | bytes]] = []
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        value, place = _read_varint(data, place)
        if key & 7 == VARINT:
            found.append((key >> 3, value))
        elif key & 7 == LENGTH and place + value <= len(data):
            found.append((key >> 3, data[place : place + value]))
            place += value
        else:
            raise ValueError("no protobuf message of the kind expected")
    return found


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data) and shift < 64:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("a number without end")
