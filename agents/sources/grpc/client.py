"""Unary gRPC calls over one HTTP/2 connection, by the sans-I/O library h2, loaded once a server took a call.

Chosen over grpcio, which takes several times the memory and starts threads of its own in what must stay light.
"""

from __future__ import annotations

import importlib
import socket
import time
from types import TracebackType
from typing import Any

from agents.sources.grpc.answer import Answer
from agents.sources.grpc.status import DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE, CallFailed
from agents.sources.grpc.target import opener

MOST_BYTES = 4 * 1024 * 1024
"""Longest answer unless told; gRPC's own default."""
LONGEST_REQUEST = 32 * 1024
"""Longest request; chosen: it fits into the window that a server opens with (RFC 9113, 6.9.2: 65,535 bytes)."""
READ_AT_ONCE = 64 * 1024
_KIND, _SETTINGS = 3, 4
"""Place of a frame's type, and the type of SETTINGS (RFC 9113, 4.1 and 6.5)."""


class Channel:
    """One connection for one or more calls, which together have `deadline` seconds; use it as a context."""

    def __init__(self, target: str, deadline: float, anywhere: bool = False) -> None:
        self._target, self._connect = target, opener(target, anywhere)
        self._until = time.monotonic() + deadline
        self._socket: socket.socket | None = None
        self._http: Any = None
        self._first = b""

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def unary(self, method: str, request: bytes = b"", most: int = MOST_BYTES) -> bytes:
        """The message that answers `request`. Raises CallFailed; after that the connection is made anew.

        method: /PACKAGE.SERVICE/METHOD. most: bytes of the longest answer.
        """
        if len(request) > LONGEST_REQUEST:
            raise ValueError(f"{method}: a request of {len(request)} bytes: wanted at most {LONGEST_REQUEST}")
        try:
            return self._called(method, request, most)
        except CallFailed:
            self.close()
            raise
        except ModuleNotFoundError as error:
            self.close()
            text = f"{error}: install the agent with its dependencies (fleetpulse[agent])"
            raise CallFailed(self._target, method, INTERNAL, text) from None
        except TimeoutError:
            self.close()
            raise CallFailed(self._target, method, DEADLINE_EXCEEDED, "no answer in time") from None
        except OSError as error:
            self.close()
            raise CallFailed(self._target, method, UNAVAILABLE, error.strerror or str(error)) from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._http = None

    def _called(self, method: str, request: bytes, most: int) -> bytes:
        self._open()
        h2 = importlib.import_module("h2.exceptions")
        try:
            stream = self._send(method, request)
            answer = Answer(self._target, method, stream, most)
            while not answer.ended:
                data = self._receive()
                if not data:
                    raise CallFailed(self._target, method, UNAVAILABLE, "the server closed the connection")
                self._check(data)
                for event in self._http.receive_data(data):
                    answer.take(event, self._http)
                self._flush()
            return answer.message()
        except h2.H2Error as error:
            text = f"no HTTP/2 of gRPC: {type(error).__name__} {error}"
            raise CallFailed(self._target, method, INTERNAL, text) from error

    def _open(self) -> None:
        """Connects where there is no connection."""
        if self._socket is not None:
            return
        self._socket, self._first = self._connect(self._left()), b""
        connection, settings = (importlib.import_module(f"h2.{name}") for name in ("connection", "config"))
        self._http = connection.H2Connection(settings.H2Configuration(client_side=True, header_encoding=None))
        self._http.initiate_connection()
        self._http.update_settings({importlib.import_module("h2.settings").SettingCodes.ENABLE_PUSH: 0})

    def _send(self, method: str, request: bytes) -> int:
        """Sends a request whole: headers and the message behind its length."""
        stream: int = self._http.get_next_available_stream_id()
        host = "localhost" if self._target.startswith(("unix:", "/")) else self._target
        headers = (
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", host)),
            *(("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "fleetpulse")),
            ("grpc-accept-encoding", "identity"),
            ("grpc-timeout", f"{max(1, round(self._left() * 1000))}m"),
        )
        self._http.send_headers(stream, headers)
        body = b"\0" + len(request).to_bytes(4, "big") + request
        size = self._http.max_outbound_frame_size
        for start in range(0, len(body), size):
            self._http.send_data(stream, body[start : start + size])
        self._http.end_stream(stream)
        self._flush()
        return stream

    def _receive(self) -> bytes:
        assert self._socket is not None
        self._socket.settimeout(self._left())
        return self._socket.recv(READ_AT_ONCE)

    def _check(self, data: bytes) -> None:
        """A server's first frame is SETTINGS (RFC 9113, 3.4): what is none is told at once, not at the deadline."""
        self._first += data[: max(0, _KIND + 1 - len(self._first))]
        if len(self._first) > _KIND and self._first[_KIND] != _SETTINGS:
            raise importlib.import_module("h2.exceptions").ProtocolError(f"the server began with {data[:16]!r}")

    def _flush(self) -> None:
        assert self._socket is not None
        data = self._http.data_to_send()
        if data:
            self._socket.settimeout(self._left())
            self._socket.sendall(data)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def call(target: str, method: str, request: bytes = b"", deadline: float = 5.0, most: int = MOST_BYTES) -> bytes:
    """One call over a connection of its own."""
    with Channel(target, deadline) as channel:
        return channel.unary(method, request, most)
