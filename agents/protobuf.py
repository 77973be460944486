"""Protobuf's wire format: writes fields, and reads a message whose schema the caller knows (protobuf.dev, encoding).

The generated classes would cost a node 2 MiB and more and a dependency that must fit everybody else's.
"""

from __future__ import annotations

import struct

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types."""
MOST_FIELDS = 200_000
"""Most fields of one message; chosen: a message of 4 MiB of empty fields would otherwise take 200 MiB."""
_WHOLE_64 = 2**64 - 1


class Malformed(ValueError):  # noqa: N818 - says what the bytes are
    """These bytes are no protobuf message."""


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


class Message:
    """A message, asked by field number. What the schema of the caller does not have is passed over.

    A field of another wire type than asked for counts as absent, and of several the last holds, as protobuf has it.
    Messages within are opened when they are asked for, so depth costs nothing.
    """

    def __init__(self, data: bytes) -> None:
        """Raises Malformed for what is torn, has groups or numbers without end."""
        self._fields: dict[tuple[int, int], list[int | bytes]] = {}
        place = count = 0
        while place < len(data):
            key, place = read_varint(data, place)
            value, place = _value(data, key & 7, place)
            count += 1
            if key >> 3 == 0 or count > MOST_FIELDS:
                raise Malformed(f"field {count} has the number 0" if key >> 3 == 0 else f"above {MOST_FIELDS} fields")
            self._fields.setdefault((key >> 3, key & 7), []).append(value)

    def has(self, number: int) -> bool:
        """Whether the field was sent, in whatever wire type."""
        return any(known == number for known, _ in self._fields)

    def whole(self, number: int, default: int = 0) -> int:
        """uint32, uint64, bool, enum."""
        found = self._last(number, VARINT)
        return found if isinstance(found, int) else default

    def signed(self, number: int, default: int = 0) -> int:
        """int32, int64: a negative number is written in 64 bits."""
        found = self.whole(number, default)
        return found - 2**64 if found >= 2**63 else found

    def double(self, number: int, default: float = 0.0) -> float:
        found = self._last(number, FIXED64)
        return float(struct.unpack("<d", struct.pack("<Q", found))[0]) if isinstance(found, int) else default

    def fixed(self, number: int, default: int = 0) -> int:
        """fixed64."""
        found = self._last(number, FIXED64)
        return found if isinstance(found, int) else default

    def text(self, number: int, default: str = "") -> str:
        found = self._last(number, LENGTH)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else default

    def texts(self, number: int) -> list[str]:
        return [body.decode("utf-8", "replace") for body in self._bodies(number)]

    def wholes(self, number: int) -> list[int]:
        """A repeated number, packed or not."""
        found = [value for value in self._fields.get((number, VARINT), []) if isinstance(value, int)]
        for body in self._bodies(number):
            place = 0
            while place < len(body):
                value, place = read_varint(body, place)
                found.append(value)
        return found

    def message(self, number: int) -> Message:
        """The message within; empty where it was not sent."""
        bodies = self._bodies(number)
        return Message(bodies[-1] if bodies else b"")

    def messages(self, number: int) -> list[Message]:
        return [Message(body) for body in self._bodies(number)]

    def _last(self, number: int, kind: int) -> int | bytes | None:
        found = self._fields.get((number, kind))
        return found[-1] if found else None

    def _bodies(self, number: int) -> list[bytes]:
        return [body for body in self._fields.get((number, LENGTH), []) if isinstance(body, bytes)]


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """(number, place behind it); ten bytes at most, of which 64 bits count."""
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value & _WHOLE_64, place
    raise Malformed(f"a number without end at byte {place}")


def _value(data: bytes, kind: int, place: int) -> tuple[int | bytes, int]:
    if kind == VARINT:
        return read_varint(data, place)
    if kind == LENGTH:
        size, place = read_varint(data, place)
        body = data[place : place + size] if place + size <= len(data) else None
    elif kind in (FIXED64, FIXED32):
        size = 8 if kind == FIXED64 else 4
        body = data[place : place + size] if place + size <= len(data) else None
    else:
        raise Malformed(f"wire type {kind} at byte {place}: wanted 0, 1, 2 or 5")
    if body is None:
        raise Malformed(f"{size} bytes wanted at byte {place} of {len(data)}: the message is torn")
    return (body if kind == LENGTH else int.from_bytes(body, "little")), place + size
