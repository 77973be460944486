"""As much of D-Bus as a caller of methods needs: messages to and from bytes, and one connection with time-outs.

Layout and names: D-Bus Specification 0.43, "Message Protocol" and "Authentication Protocol".
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_CALL, _RETURN, _ERROR = 1, 2, 3
_PATH, _INTERFACE, _MEMBER, _ERROR_NAME, _REPLY_SERIAL, _DESTINATION, _SIGNATURE = 1, 2, 3, 4, 5, 6, 8
_FIXED = 16  # bytes of a message before its header fields, with the length of these
_DEEPEST = 32  # nesting of values; the specification allows 32 arrays and 32 structs
MAX_MESSAGE = 1 << 20
"""Most bytes of one message; chosen: what systemd tells of a dozen units is 4 KB, and the bus itself allows 128 MiB."""
_NUMBERS = {"y": "B", "b": "I", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d"}


class Refused(Exception):  # noqa: N818 - the called side's answer, not a fault of the connection
    """The method was answered with an error; the message is its name."""


def message(serial: int, destination: str, path: str, interface: str, member: str, arguments: Sequence[Any]) -> bytes:
    """A method call whose arguments are texts and lists of texts."""
    body, signature = bytearray(), ""
    for argument in arguments:
        listed = not isinstance(argument, str)
        signature += "as" if listed else "s"
        _put_list(body, argument) if listed else _put_text(body, argument)
    fields = bytearray()
    told = ((_PATH, "o", path), (_DESTINATION, "s", destination), (_INTERFACE, "s", interface), (_MEMBER, "s", member))
    for code, kind, text in told:
        _pad(fields, 8)
        fields += bytes((code, 1)) + kind.encode() + b"\0"
        _put_text(fields, text)
    if signature:
        _pad(fields, 8)
        fields += bytes((_SIGNATURE, 1)) + b"g\0" + bytes((len(signature),)) + signature.encode() + b"\0"
    head = bytearray(struct.pack("<cBBBIII", b"l", _CALL, 0, 1, len(body), serial, len(fields))) + fields
    _pad(head, 8)
    return bytes(head + body)


def length(fixed: bytes) -> int:
    """Bytes of the whole message of which these are the first 16. Raises ValueError on what is none."""
    order = {b"l": "<", b"B": ">"}.get(fixed[:1])
    if order is None or len(fixed) < _FIXED or fixed[3] != 1:
        raise ValueError(f"{fixed[:_FIXED].hex()}: wanted the head of a D-Bus message")
    body, _, fields = struct.unpack_from(f"{order}III", fixed, 4)
    whole = _FIXED + (fields + 7) // 8 * 8 + body
    if whole > MAX_MESSAGE:
        raise ValueError(f"D-Bus message of {whole} bytes; wanted at most {MAX_MESSAGE}")
    return int(whole)


def answer(whole: bytes) -> tuple[int | None, list[Any]]:
    """(serial of the call that this answers, its values). Raises Refused on an error, ValueError on no message."""
    if len(whole) < _FIXED or length(whole[:_FIXED]) != len(whole):
        raise ValueError(f"{len(whole)} bytes; wanted a whole D-Bus message")
    try:
        reader = _Reader(whole, "<" if whole[:1] == b"l" else ">", 12)
        fields = dict(reader.value("a(yv)"))
        reader.align(8)
        serial, kind = fields.get(_REPLY_SERIAL), whole[1]
        if kind == _ERROR:
            raise Refused(str(fields.get(_ERROR_NAME, "error without a name")))
        if kind != _RETURN:
            return None, []
        return serial, reader.values(str(fields.get(_SIGNATURE, "")))
    except (struct.error, IndexError, TypeError) as broken:
        raise ValueError(f"broken D-Bus message: {broken}") from broken


class _Reader:
    """Takes values off a message one by one. Raises ValueError, IndexError or struct.error on broken ones."""

    def __init__(self, data: bytes, order: str, at: int) -> None:
        self._data, self._order, self._at = data, order, at

    def align(self, to: int) -> None:
        self._at += -self._at % to

    def values(self, signature: str, depth: int = 0) -> list[Any]:
        found = []
        while signature:
            end = _end(signature)
            found.append(self.value(signature[:end], depth))
            signature = signature[end:]
        return found

    def value(self, kind: str, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("values nested too deep")
        if kind[0] in _NUMBERS:
            return self._number(_NUMBERS[kind[0]])
        if kind[0] in "so":
            return self._text(self._number("I"))
        if kind[0] == "g":
            return self._text(self._number("B"))
        if kind[0] == "v":
            return self.values(self._text(self._number("B")), depth + 1)[0]
        if kind[0] == "a":
            return self._list(kind[1:], depth + 1)
        if kind[0] in "({":
            self.align(8)
            return tuple(self.values(kind[1:-1], depth + 1))
        raise ValueError(f"unknown type {kind!r}")

    def _number(self, code: str) -> Any:
        self.align(struct.calcsize(code))
        (number,) = struct.unpack_from(self._order + code, self._data, self._at)
        self._at += struct.calcsize(code)
        return number

    def _text(self, size: int) -> str:
        if self._at + size >= len(self._data):
            raise ValueError("text beyond the message")
        text = self._data[self._at : self._at + size].decode("utf-8", "replace")
        self._at += size + 1
        return text

    def _list(self, kind: str, depth: int) -> list[Any]:
        end = self._number("I")
        self.align(8 if kind[0] in "({" else 1)
        end += self._at
        if end > len(self._data):
            raise ValueError("list beyond the message")
        found = []
        while self._at < end:
            before = self._at
            found.append(self.value(kind, depth))
            if self._at == before:  # an empty struct would go on for ever
                raise ValueError("value without bytes")
        return found


class Bus:
    """A connection to the bus at a Unix socket; no call waits longer than `patience` seconds. Raises OSError."""

    def __init__(self, path: str, patience: float) -> None:
        self._patience, self._serial = patience, 0
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._link.settimeout(patience)
            self._link.connect(path)
            self._admit()
            self.call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello")
        except BaseException:
            self.close()
            raise

    def call(self, destination: str, path: str, interface: str, member: str, *arguments: Any) -> list[Any]:
        """Calls a method and gives what it returns. Raises Refused, or OSError if the bus fails or takes too long."""
        self._serial += 1
        until = time.monotonic() + self._patience
        self._link.settimeout(self._patience)
        self._link.sendall(message(self._serial, destination, path, interface, member, arguments))
        while True:
            fixed = self._take(_FIXED, until)
            try:
                serial, values = answer(fixed + self._take(length(fixed) - _FIXED, until))
            except ValueError as broken:
                raise ConnectionError(str(broken)) from broken
            if serial == self._serial:
                return values

    def close(self) -> None:
        self._link.close()

    def _admit(self) -> None:
        """EXTERNAL: the kernel tells the bus who we are."""
        self._link.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        told, until = b"", time.monotonic() + self._patience
        while not told.endswith(b"\r\n") and len(told) < 512:
            told += self._take(1, until)
        if not told.startswith(b"OK "):
            raise PermissionError(f"the bus refuses user {os.getuid()}: {told[:80]!r}")
        self._link.sendall(b"BEGIN\r\n")

    def _take(self, size: int, until: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._link.settimeout(left)
            if not (piece := self._link.recv(size - len(found))):
                raise ConnectionResetError("the bus closed the connection")
            found += piece
        return bytes(found)


def _end(signature: str) -> int:
    """Characters of the first complete type of a signature. Raises IndexError if there is none."""
    if signature[0] == "a":
        return 1 + _end(signature[1:])
    if signature[0] not in "({":
        return 1
    depth, at = 0, 0
    while True:
        depth += (signature[at] in "({") - (signature[at] in ")}")
        at += 1
        if not depth:
            return at


def _pad(data: bytearray, to: int) -> None:
    data += bytes(-len(data) % to)


def _put_text(data: bytearray, text: str) -> None:
    _pad(data, 4)
    raw = text.encode()
    data += struct.pack("<I", len(raw)) + raw + b"\0"


def _put_list(data: bytearray, texts: Sequence[str]) -> None:
    _pad(data, 4)
    inner = bytearray()
    for text in texts:
        _put_text(inner, text)
    data += struct.pack("<I", len(inner)) + inner
