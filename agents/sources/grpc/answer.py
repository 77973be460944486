"""The answer to one call as it arrives: headers, one message in pieces, trailers with the status."""

from __future__ import annotations

from typing import Any

from agents.sources.grpc.status import (
    CANCELLED,
    INTERNAL,
    OF_HTTP,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNKNOWN,
    CallFailed,
    code_of,
    unescaped,
)

_PREFIX = 5
"""Bytes before a message: whether it is compressed, and its length (grpc/doc/PROTOCOL-HTTP2.md)."""
_RESET = {7: UNAVAILABLE, 8: CANCELLED, 11: RESOURCE_EXHAUSTED}
"""HTTP/2 error codes with a gRPC status of their own (same page); any other is INTERNAL."""


class Answer:
    """Takes the events of h2 that belong to one stream."""

    def __init__(self, target: str, method: str, stream: int, most: int) -> None:
        self._name = target, method
        self._stream, self._most = stream, most
        self._body = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self.ended = False

    def take(self, event: Any, http: Any) -> None:
        """Raises CallFailed as soon as the call cannot succeed any more."""
        kind = type(event).__name__
        if kind == "ConnectionTerminated" and (event.last_stream_id or 0) < self._stream:
            raise self._failed(UNAVAILABLE, f"the server goes away (HTTP/2 error {int(event.error_code)})")
        if getattr(event, "stream_id", None) != self._stream:
            return
        if kind in ("ResponseReceived", "TrailersReceived"):
            self._headers |= dict(event.headers)
            self._check(kind == "ResponseReceived")
        elif kind == "DataReceived":
            http.acknowledge_received_data(event.flow_controlled_length, self._stream)
            self._add(event.data)
        elif kind == "StreamReset" and not self.ended:
            code = int(event.error_code)
            raise self._failed(_RESET.get(code, INTERNAL), f"the server broke the call off (HTTP/2 error {code})")
        elif kind == "StreamEnded":
            self.ended = True

    def message(self) -> bytes:
        """The whole message, where the status is OK."""
        status = self._headers.get(b"grpc-status")
        if status is None:
            raise self._failed(INTERNAL, "the answer ended without a status: it is torn")
        if code_of(status) != OK:
            raise self._failed(code_of(status), unescaped(self._headers.get(b"grpc-message", b"")))
        if len(self._body) < _PREFIX or len(self._body) != self._expected():
            raise self._failed(INTERNAL, f"{len(self._body)} bytes: wanted one whole message")
        return bytes(self._body[_PREFIX:])

    def _check(self, first: bool) -> None:
        """Whether what comes is gRPC at all; a status that is there says more."""
        status = self._headers.get(b":status", b"")
        if not first or b"grpc-status" in self._headers:
            return
        if status != b"200":
            code = OF_HTTP.get(int(status) if status.isdigit() else 0, UNKNOWN)
            raise self._failed(code, f"HTTP status {status.decode('ascii', 'replace')}")
        if not self._headers.get(b"content-type", b"").startswith(b"application/grpc"):
            raise self._failed(UNKNOWN, f"content-type {self._headers.get(b'content-type', b'')!r}: no gRPC server")

    def _add(self, data: bytes) -> None:
        """Keeps no byte beyond the one message that is allowed."""
        room = self._most + _PREFIX - len(self._body)
        self._body += data[: max(room + 1, 0)]
        if len(self._body) < _PREFIX:
            return
        if self._body[0]:
            raise self._failed(INTERNAL, "a compressed answer, which was not asked for")
        if self._expected() > self._most + _PREFIX:
            text = f"an answer of {self._expected() - _PREFIX} bytes: wanted at most {self._most}"
            raise self._failed(RESOURCE_EXHAUSTED, text)
        if len(self._body) > self._expected():
            raise self._failed(INTERNAL, "more than one message answers the call")

    def _expected(self) -> int:
        return _PREFIX + int.from_bytes(self._body[1:_PREFIX], "big")

    def _failed(self, code: int, message: str) -> CallFailed:
        return CallFailed(*self._name, code, message)
