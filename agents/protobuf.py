"""Protobuf's wire format: writes fields, and reads a message whose schema the caller knows (protobuf.dev, encoding).

Generated classes would cost a node 2 MiB and more, and a dependency that must fit every installation's.
"""

from __future__ import annotations

import struct

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types."""
MAX_FIELDS = 200_000
"""Most fields of one message. Chosen: a message of 4 MiB of empty fields would otherwise take 200 MiB."""
_UINT64_MASK = 2**64 - 1


class MalformedMessage(ValueError):  # noqa: N818 - it describes the input, not an error of this program
    """The bytes are not a protobuf message."""


def encode_varint(value: int) -> bytes:
    """Encodes an unsigned number: seven bits per byte, lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_tag(number: int, kind: int) -> bytes:
    """Encodes a field's number and wire type."""
    return encode_varint(number << 3 | kind)


def encode_nested(number: int, body: bytes) -> bytes:
    """Encodes a message, text or bytes as field `number`."""
    return encode_tag(number, LENGTH) + encode_varint(len(body)) + body


def encode_text(number: int, value: str) -> bytes:
    """Encodes a string field."""
    return encode_nested(number, value.encode("utf-8", "replace"))


def encode_unsigned(number: int, value: int) -> bytes:
    """Encodes a uint32, uint64, bool or enum field."""
    return encode_tag(number, VARINT) + encode_varint(value)


def encode_fixed64(number: int, value: int) -> bytes:
    """Encodes a fixed64 field."""
    return encode_tag(number, FIXED64) + struct.pack("<Q", value)


def encode_double(number: int, value: float) -> bytes:
    """Encodes a double field."""
    return encode_tag(number, FIXED64) + struct.pack("<d", value)


class ProtobufMessage:
    """A message, read by field number. Fields that the caller's schema lacks are ignored.

    A field of another wire type counts as absent, and of several the last one counts, as protobuf defines. Nested
    messages are parsed when they are read, so that depth costs nothing.
    """

    def __init__(self, data: bytes) -> None:
        """Raises MalformedMessage for incomplete messages, groups and endless numbers."""
        self._fields: dict[tuple[int, int], list[int | bytes]] = {}
        place = count = 0
        while place < len(data):
            key, place = decode_varint(data, place)
            value, place = _read_value(data, key & 7, place)
            count += 1
            if key >> 3 == 0 or count > MAX_FIELDS:
                raise MalformedMessage(
                    f"field {count} has the number 0" if key >> 3 == 0 else f"above {MAX_FIELDS} fields"
                )
            self._fields.setdefault((key >> 3, key & 7), []).append(value)

    def has(self, number: int) -> bool:
        """Whether the field is present, in any wire type."""
        return any(known == number for known, _ in self._fields)

    def count(self, number: int) -> int:
        """How many messages, texts or byte fields there are of that number."""
        return len(self._bodies(number))

    def unsigned(self, number: int, default: int = 0) -> int:
        """Returns a uint32, uint64, bool or enum."""
        found = self._last(number, VARINT)
        return found if isinstance(found, int) else default

    def signed(self, number: int, default: int = 0) -> int:
        """Returns an int32 or int64: a negative number has 64 bits."""
        found = self.unsigned(number, default)
        return found - 2**64 if found >= 2**63 else found

    def double(self, number: int, default: float = 0.0) -> float:
        """Returns a double."""
        found = self._last(number, FIXED64)
        return float(struct.unpack("<d", struct.pack("<Q", found))[0]) if isinstance(found, int) else default

    def fixed64(self, number: int, default: int = 0) -> int:
        """Returns a fixed64."""
        found = self._last(number, FIXED64)
        return found if isinstance(found, int) else default

    def text(self, number: int, default: str = "") -> str:
        """Returns a string."""
        found = self._last(number, LENGTH)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else default

    def texts(self, number: int) -> list[str]:
        """Returns a repeated string."""
        return [body.decode("utf-8", "replace") for body in self._bodies(number)]

    def unsigned_list(self, number: int) -> list[int]:
        """Returns a repeated number, packed or not."""
        found = [value for value in self._fields.get((number, VARINT), []) if isinstance(value, int)]
        for body in self._bodies(number):
            place = 0
            while place < len(body):
                value, place = decode_varint(body, place)
                found.append(value)
        return found

    def message(self, number: int) -> ProtobufMessage:
        """Returns the nested message; an empty one if absent."""
        bodies = self._bodies(number)
        return ProtobufMessage(bodies[-1] if bodies else b"")

    def messages(self, number: int) -> list[ProtobufMessage]:
        """Returns a repeated nested message."""
        return [ProtobufMessage(body) for body in self._bodies(number)]

    def _last(self, number: int, kind: int) -> int | bytes | None:
        found = self._fields.get((number, kind))
        return found[-1] if found else None

    def _bodies(self, number: int) -> list[bytes]:
        return [body for body in self._fields.get((number, LENGTH), []) if isinstance(body, bytes)]


def decode_varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns (number, position after it); at most ten bytes, of which 64 bits count."""
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value & _UINT64_MASK, place
    raise MalformedMessage(f"an endless number at byte {place}")


def _read_value(data: bytes, kind: int, place: int) -> tuple[int | bytes, int]:
    if kind == VARINT:
        return decode_varint(data, place)
    if kind == LENGTH:
        size, place = decode_varint(data, place)
        body = data[place : place + size] if place + size <= len(data) else None
    elif kind in (FIXED64, FIXED32):
        size = 8 if kind == FIXED64 else 4
        body = data[place : place + size] if place + size <= len(data) else None
    else:
        raise MalformedMessage(f"wire type {kind} at byte {place}: expected 0, 1, 2 or 5")
    if body is None:
        raise MalformedMessage(f"expected {size} bytes at byte {place} of {len(data)}: the message is incomplete")
    return (body if kind == LENGTH else int.from_bytes(body, "little")), place + size
