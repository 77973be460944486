"""Unary gRPC calls over one HTTP/2 connection, by the sans-I/O library h2, loaded once a server took a call.

Chosen over grpcio, which takes several times the memory and starts threads of its own in what must stay light.

The answer to one call as it arrives: headers, one message in pieces, trailers with the status.

What a failed call is: gRPC's status codes with names, and the exception that carries one.

Where a service listens: `unix:PATH`, `/PATH` or `HOST:PORT`; beyond this machine only where that is allowed.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 0, 1, 2, 3, 4, 5
PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 7, 8, 12, 13, 14
NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""grpc/doc/statuscodes.md."""
OF_HTTP = {400: INTERNAL, 401: 16, 403: PERMISSION_DENIED, 404: UNIMPLEMENTED, 429: 14, 502: 14, 503: 14, 504: 14}
"""grpc/doc/http-grpc-status-mapping.md; any other is UNKNOWN."""
LONGEST_MESSAGE = 512
"""Most characters of a server's words that are passed on; chosen: they go into one line of talk."""


class CallFailed(Exception):  # noqa: N818 - reads as what happened
    """A call gave no answer. `code` is gRPC's, also where this end found the fault."""

    def __init__(self, target: str, method: str, code: int, message: str) -> None:
        self.code = code
        name = NAMES[code] if 0 <= code < len(NAMES) else "unknown code"
        self.reason = f"{name} ({code}): {printable(message) or 'no message'}"
        super().__init__(f"{target}: {method}: {self.reason}")


def printable(text: str) -> str:
    """A server's text without what cannot be written in a line."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_MESSAGE]).strip()


def unescaped(message: bytes) -> str:
    """grpc-message is percent-encoded (grpc/doc/PROTOCOL-HTTP2.md)."""
    from urllib.parse import unquote_to_bytes  # here, since most agents make no call that fails

    return unquote_to_bytes(message).decode("utf-8", "replace")


def code_of(value: bytes) -> int:
    """grpc-status as a number; what is none is UNKNOWN."""
    return int(value) if value.isdigit() and len(value) <= 4 else UNKNOWN


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


MEND = "wanted unix:PATH, /PATH or HOST:PORT, such as unix:/run/service.sock, localhost:8431 or [::1]:8431"


def opener(target: str, anywhere: bool = False) -> Callable[[float], socket.socket]:
    """What connects to the target within so many seconds; raises ValueError for what is no target.

    What is sent and told is not encrypted: hosts but this one must be allowed by `anywhere`.
    """
    path = target.removeprefix("unix:") if target.startswith("unix:") else target
    if target.startswith(("unix:", "/")):
        if not path:
            raise ValueError(f"{target!r}: {MEND}")
        return lambda timeout: _unix(path, timeout)
    host, _, port = target.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{target!r}: {MEND}")
    if not (anywhere or _here(host)):
        raise ValueError(f"{target!r}: not an address of this machine, and the call is not encrypted: wanted localhost")
    return lambda timeout: socket.create_connection((host, int(port)), timeout)


def _unix(path: str, timeout: float) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout)
        found.connect(path)
    except OSError:
        found.close()
        raise
    return found


def _here(host: str) -> bool:
    import ipaddress  # here, since most agents never ask

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
