"""Decompresses snappy's block format, as Prometheus remote write uses it; every length is checked.

Our own, since a node's dependencies stay few and the format is small (google/snappy, format_description.txt): literals
and copies, each a slice here, so a request of 2,000 samples takes a few ms.
"""

from __future__ import annotations


class MalformedSnappy(ValueError):  # noqa: N818 - it describes the input, not an error of this program
    """The bytes are not a snappy block."""


def decompress(data: bytes, most: int) -> bytes:
    """The decompressed block. Raises MalformedSnappy, also if it would have more than `most` bytes."""
    size, at = _read_size(data)
    if size > most:
        raise MalformedSnappy(f"{size} bytes when decompressed, expected at most {most}")
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3:
            length, offset, at = _read_copy(data, tag, at)
            _copy(out, offset, length)
        else:
            length = (tag >> 2) + 1
            if length > 60:
                extra = length - 60
                length, at = int.from_bytes(_take(data, at, extra), "little") + 1, at + extra
            out += _take(data, at, length)
            at += length
        if len(out) > size:
            raise MalformedSnappy(f"more than the {size} bytes that it announces")
    if len(out) != size:
        raise MalformedSnappy(f"{len(out)} bytes when decompressed, expected {size}")
    return bytes(out)


def _read_size(data: bytes) -> tuple[int, int]:
    size = shift = 0
    for at, byte in enumerate(data[:5]):
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return size, at + 1
    raise MalformedSnappy("no length at its start")


def _read_copy(data: bytes, tag: int, at: int) -> tuple[int, int, int]:
    """(length, offset, position after it) of a copy with 1, 2 or 4 bytes of offset."""
    if tag & 3 == 1:
        return (tag >> 2 & 7) + 4, (tag >> 5) << 8 | _take(data, at, 1)[0], at + 1
    width = 2 if tag & 3 == 2 else 4
    return (tag >> 2) + 1, int.from_bytes(_take(data, at, width), "little"), at + width


def _take(data: bytes, at: int, length: int) -> bytes:
    found = data[at : at + length]
    if len(found) < length:
        raise MalformedSnappy(f"ends within an element at byte {at}")
    return found


def _copy(out: bytearray, offset: int, length: int) -> None:
    """Appends `length` bytes from `offset` bytes before the end; they may overlap."""
    if not 0 < offset <= len(out):
        raise MalformedSnappy(f"copy from {offset} bytes before the end of {len(out)}")
    start = len(out) - offset
    piece = bytes(out[start : start + length])
    out += (piece * (length // len(piece) + 1))[:length]
