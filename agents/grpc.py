"""Unary gRPC calls over HTTP/2 without TLS, for services on this node, with the h2 library.

h2 is imported with the first call. Chosen over grpcio, which takes several times the memory and starts its own threads.
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
STATUS_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""grpc/doc/statuscodes.md."""
STATUS_OF_HTTP = {
    400: INTERNAL,
    401: 16,
    403: PERMISSION_DENIED,
    404: UNIMPLEMENTED,
    429: 14,
    502: 14,
    503: 14,
    504: 14,
}
"""grpc/doc/http-grpc-status-mapping.md; any other status is UNKNOWN."""
MAX_MESSAGE_CHARS = 512
"""Most characters of a server's message that are kept. Chosen: they go into one line of log."""


class CallFailed(Exception):  # noqa: N818 - reads better in `except CallFailed`
    """A call without an answer. `code` is gRPC's, also for errors found on this side."""

    def __init__(self, target: str, method: str, code: int, message: str) -> None:
        self.code = code
        name = STATUS_NAMES[code] if 0 <= code < len(STATUS_NAMES) else "unknown code"
        self.reason = f"{name} ({code}): {clean_message(message) or 'no message'}"
        super().__init__(f"{target}: {method}: {self.reason}")


def clean_message(text: str) -> str:
    """Returns a server's message without characters that cannot be printed on a line."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE_CHARS]).strip()


def decode_message(message: bytes) -> str:
    """Decodes grpc-message, which is percent-encoded (grpc/doc/PROTOCOL-HTTP2.md)."""
    from urllib.parse import unquote_to_bytes  # imported here: only failed calls need it

    return unquote_to_bytes(message).decode("utf-8", "replace")


def parse_status(value: bytes) -> int:
    """Returns grpc-status as a number; UNKNOWN if it is none."""
    return int(value) if value.isdigit() and len(value) <= 4 else UNKNOWN


_PREFIX_BYTES = 5
"""Bytes before a message: a compression flag, and its length (grpc/doc/PROTOCOL-HTTP2.md)."""
_STATUS_OF_RESET = {7: UNAVAILABLE, 8: CANCELLED, 11: RESOURCE_EXHAUSTED}
"""HTTP/2 error codes with a gRPC status of their own (same page); any other is INTERNAL."""


class CallResponse:
    """The answer to one call as it arrives: headers, one message in pieces, trailers with the status."""

    def __init__(self, target: str, method: str, stream: int, most: int) -> None:
        self._name = target, method
        self._stream, self._most = stream, most
        self._body = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self.ended = False

    def handle_event(self, event: Any, http: Any) -> None:
        """Takes an event of h2. Raises CallFailed as soon as the call cannot succeed any more."""
        kind = type(event).__name__
        if kind == "ConnectionTerminated" and (event.last_stream_id or 0) < self._stream:
            raise self._error(UNAVAILABLE, f"the server shuts down (HTTP/2 error {int(event.error_code)})")
        if getattr(event, "stream_id", None) != self._stream:
            return
        if kind in ("ResponseReceived", "TrailersReceived"):
            self._headers |= dict(event.headers)
            self._check_headers(kind == "ResponseReceived")
        elif kind == "DataReceived":
            http.acknowledge_received_data(event.flow_controlled_length, self._stream)
            self._add_data(event.data)
        elif kind == "StreamReset" and not self.ended:
            code = int(event.error_code)
            raise self._error(
                _STATUS_OF_RESET.get(code, INTERNAL), f"the server cancelled the call (HTTP/2 error {code})"
            )
        elif kind == "StreamEnded":
            self.ended = True

    def message(self) -> bytes:
        """Returns the whole message if the status is OK. Raises CallFailed."""
        status = self._headers.get(b"grpc-status")
        if status is None:
            raise self._error(INTERNAL, "the answer ended without a status: it is incomplete")
        if parse_status(status) != OK:
            raise self._error(parse_status(status), decode_message(self._headers.get(b"grpc-message", b"")))
        if len(self._body) < _PREFIX_BYTES or len(self._body) != self._expected_size():
            raise self._error(INTERNAL, f"{len(self._body)} bytes: expected one whole message")
        return bytes(self._body[_PREFIX_BYTES:])

    def _check_headers(self, first: bool) -> None:
        """Raises CallFailed if the answer is not gRPC; a gRPC status takes precedence."""
        status = self._headers.get(b":status", b"")
        if not first or b"grpc-status" in self._headers:
            return
        if status != b"200":
            code = STATUS_OF_HTTP.get(int(status) if status.isdigit() else 0, UNKNOWN)
            raise self._error(code, f"HTTP status {status.decode('ascii', 'replace')}")
        if not self._headers.get(b"content-type", b"").startswith(b"application/grpc"):
            raise self._error(UNKNOWN, f"content-type {self._headers.get(b'content-type', b'')!r}: not a gRPC server")

    def _add_data(self, data: bytes) -> None:
        """Adds data; keeps no byte beyond the one message that is allowed."""
        room = self._most + _PREFIX_BYTES - len(self._body)
        self._body += data[: max(room + 1, 0)]
        if len(self._body) < _PREFIX_BYTES:
            return
        if self._body[0]:
            raise self._error(INTERNAL, "a compressed answer, which was not requested")
        if self._expected_size() > self._most + _PREFIX_BYTES:
            text = f"an answer of {self._expected_size() - _PREFIX_BYTES} bytes: expected at most {self._most}"
            raise self._error(RESOURCE_EXHAUSTED, text)
        if len(self._body) > self._expected_size():
            raise self._error(INTERNAL, "the answer has more than one message")

    def _expected_size(self) -> int:
        return _PREFIX_BYTES + int.from_bytes(self._body[1:_PREFIX_BYTES], "big")

    def _error(self, code: int, message: str) -> CallFailed:
        return CallFailed(*self._name, code, message)


TARGET_HINT = "expected unix:PATH, /PATH or HOST:PORT, such as unix:/run/service.sock, localhost:8431 or [::1]:8431"


def make_connector(target: str, anywhere: bool = False) -> Callable[[float], socket.socket]:
    """Returns a function that connects to the target with a time-out. Raises ValueError for an invalid target.

    A target is `unix:PATH`, `/PATH` or `HOST:PORT`. The call is not encrypted: other hosts must be allowed by
    `anywhere`.
    """
    path = target.removeprefix("unix:") if target.startswith("unix:") else target
    if target.startswith(("unix:", "/")):
        if not path:
            raise ValueError(f"{target!r}: {TARGET_HINT}")
        return lambda timeout: _connect_unix(path, timeout)
    host, _, port = target.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{target!r}: {TARGET_HINT}")
    if not (anywhere or _is_loopback(host)):
        raise ValueError(f"{target!r}: another machine, and the call is not encrypted; expected localhost")
    return lambda timeout: socket.create_connection((host, int(port)), timeout)


def _connect_unix(path: str, timeout: float) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout)
        found.connect(path)
    except OSError:
        found.close()
        raise
    return found


def _is_loopback(host: str) -> bool:
    import ipaddress  # imported here: most agents make no calls

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Longest answer by default; gRPC's own default."""
MAX_REQUEST_BYTES = 32 * 1024
"""Longest request. Chosen: it fits the initial window of a server (RFC 9113, 6.9.2: 65,535 bytes)."""
READ_BYTES = 64 * 1024
_FRAME_TYPE_OFFSET, _SETTINGS_FRAME = 3, 4
"""Offset of a frame's type, and the type of SETTINGS (RFC 9113, 4.1 and 6.5)."""


class GrpcChannel:
    """One connection for one or more calls, which have `deadline` seconds in total; a context manager."""

    def __init__(self, target: str, deadline: float, anywhere: bool = False) -> None:
        self._target, self._connect = target, make_connector(target, anywhere)
        self._deadline = time.monotonic() + deadline
        self._socket: socket.socket | None = None
        self._http: Any = None
        self._first_bytes = b""

    def __enter__(self) -> GrpcChannel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def call_unary(self, method: str, request: bytes = b"", most: int = MAX_ANSWER_BYTES) -> bytes:
        """Returns the message that answers `request`. Raises CallFailed and closes the connection.

        method: /PACKAGE.SERVICE/METHOD. most: bytes of the longest answer.
        """
        if len(request) > MAX_REQUEST_BYTES:
            raise ValueError(f"{method}: a request of {len(request)} bytes: expected at most {MAX_REQUEST_BYTES}")
        try:
            return self._exchange(method, request, most)
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
        """Closes the connection; the next call opens another one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._http = None

    def _exchange(self, method: str, request: bytes, most: int) -> bytes:
        self._connect_once()
        h2 = importlib.import_module("h2.exceptions")
        try:
            stream = self._send(method, request)
            answer = CallResponse(self._target, method, stream, most)
            while not answer.ended:
                data = self._receive()
                if not data:
                    raise CallFailed(self._target, method, UNAVAILABLE, "the server closed the connection")
                self._check_first_frame(data)
                for event in self._http.receive_data(data):
                    answer.handle_event(event, self._http)
                self._flush()
            return answer.message()
        except h2.H2Error as error:
            text = f"not gRPC over HTTP/2: {type(error).__name__} {error}"
            raise CallFailed(self._target, method, INTERNAL, text) from error

    def _connect_once(self) -> None:
        """Connects unless there is a connection."""
        if self._socket is not None:
            return
        self._socket, self._first_bytes = self._connect(self._seconds_left()), b""
        connection, settings = (importlib.import_module(f"h2.{name}") for name in ("connection", "config"))
        self._http = connection.H2Connection(settings.H2Configuration(client_side=True, header_encoding=None))
        self._http.initiate_connection()
        self._http.update_settings({importlib.import_module("h2.settings").SettingCodes.ENABLE_PUSH: 0})

    def _send(self, method: str, request: bytes) -> int:
        """Sends a whole request: headers, and the message with its length; returns the stream."""
        stream: int = self._http.get_next_available_stream_id()
        host = "localhost" if self._target.startswith(("unix:", "/")) else self._target
        headers = (
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", host)),
            *(("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "fleetpulse")),
            ("grpc-accept-encoding", "identity"),
            ("grpc-timeout", f"{max(1, round(self._seconds_left() * 1000))}m"),
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
        self._socket.settimeout(self._seconds_left())
        return self._socket.recv(READ_BYTES)

    def _check_first_frame(self, data: bytes) -> None:
        """Raises an error immediately if the server does not begin with SETTINGS (RFC 9113, 3.4)."""
        self._first_bytes += data[: max(0, _FRAME_TYPE_OFFSET + 1 - len(self._first_bytes))]
        if len(self._first_bytes) > _FRAME_TYPE_OFFSET and self._first_bytes[_FRAME_TYPE_OFFSET] != _SETTINGS_FRAME:
            raise importlib.import_module("h2.exceptions").ProtocolError(f"the server began with {data[:16]!r}")

    def _flush(self) -> None:
        assert self._socket is not None
        data = self._http.data_to_send()
        if data:
            self._socket.settimeout(self._seconds_left())
            self._socket.sendall(data)

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def call_once(
    target: str, method: str, request: bytes = b"", deadline: float = 5.0, most: int = MAX_ANSWER_BYTES
) -> bytes:
    """Makes one call over its own connection."""
    with GrpcChannel(target, deadline) as channel:
        return channel.call_unary(method, request, most)
