"""The HTTP server of a gateway: OTLP metrics on /v1/metrics, Prometheus remote write on /api/v1/write, health, metrics.

200 (204 for remote write) only after the request is durable. 400 for what can never be read, 401 without a token, 413
above the size limit, 415 for another encoding, 429 if too much waits, 503 if nothing can be stored now, both with
Retry-After.
"""

from __future__ import annotations

import http.server
import json
import socket
import ssl
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from agents.gateway.receiver import (
    MAX_REQUEST,
    OTLP_FORMAT,
    V1_FORMAT,
    V2_FORMAT,
    Receiver,
    RequestError,
    check_otlp,
    check_remote_write,
)

IDLE_S = 60.0
"""How long a connection may be silent; chosen: clients send at least once a minute, and connect again otherwise."""
HANDSHAKE_S = 10.0
"""Longest TLS handshake; chosen."""
RETRY_S = 5
"""Retry-After of a refusal; chosen."""
_GZIP = 16 + zlib.MAX_WBITS  # zlib manual, inflateInit2: 16 more than the window's size is gzip alone
PROTOBUF = "application/x-protobuf"
OTLP_PATH, WRITE_PATH = "/v1/metrics", "/api/v1/write"
WRITE_FORMATS = {
    "": V1_FORMAT,
    "prometheus.WriteRequest": V1_FORMAT,
    "io.prometheus.write.v2.Request": V2_FORMAT,
}
"""Message of remote write, as its Content-Type names it -> format of the request."""


class GatewayServer(http.server.ThreadingHTTPServer):
    """Accepts at most `connections` at a time; further ones get 503 immediately, or with TLS are closed.

    answers: number of answers by status.
    """

    daemon_threads, request_queue_size, allow_reuse_address = True, 128, True

    def __init__(
        self,
        address: tuple[str, int],
        receiver: Receiver,
        connections: int,
        find_problem: Callable[[], str | None],
        tls: ssl.SSLContext | None = None,
        paths: tuple[str, ...] = (OTLP_PATH, WRITE_PATH),
    ) -> None:
        self.receiver, self.find_problem, self.paths = receiver, find_problem, paths
        self.answers: Counter[int] = Counter()
        self._tls = tls
        self._free = threading.BoundedSemaphore(connections)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, GatewayHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver`."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        self.answers[503] += 1
        why = "too many connections: raise [gateway] connections"
        self.receiver.record_refusal(str(client_address[0]), HTTPStatus.SERVICE_UNAVAILABLE, why)
        request.settimeout(1.0)
        try:
            if self._tls is None:
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n")
        except OSError:
            self.answers[503] -= 1
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `socketserver`. The handshake is in the connection's own thread, so that it delays no other."""
        try:
            if self._tls is not None:
                request.settimeout(HANDSHAKE_S)
                request = self._tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:
            self.handle_error(request, client_address)
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are the clients' matter."""
        self.answers[0] += 1


class GatewayHandler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version, timeout, server_version, sys_version = "HTTP/1.1", IDLE_S, "fleetpulse-gateway", ""
    server: GatewayServer
    user = ""

    def do_POST(self) -> None:
        """A request with telemetry."""
        receiver, written = self.server.receiver, dict[str, str]()
        try:
            self.user = receiver.check_token(self.headers.get("Authorization", ""))
            path = self.path.partition("?")[0]
            if path not in self.server.paths:
                raise RequestError(HTTPStatus.NOT_FOUND, f"expected POST {' or '.join(self.server.paths)}")
            form = OTLP_FORMAT if path == OTLP_PATH else self._find_write_format()
            body = self._read_body()
            if form == OTLP_FORMAT:
                check_otlp(body)
            else:
                written = check_remote_write(body, form)
            receiver.store(body, form, "http")
        except RequestError as error:
            return self._refuse(error)
        if form == OTLP_FORMAT:
            return self._answer(HTTPStatus.OK, b"", PROTOBUF)
        return self._answer(HTTPStatus.NO_CONTENT, b"", "", more=written)

    def do_GET(self) -> None:
        """Health, metrics and refused senders."""
        if self.path == "/healthz":
            self._answer(HTTPStatus.OK, b"ok\n", "text/plain")
        elif self.path == "/readyz":
            problem = self.server.find_problem()
            status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
            reasons = [] if problem is None else [problem]
            self._answer(status, json.dumps({"reasons": reasons}).encode(), "application/json")
        elif self.path == "/metrics":
            self._answer(HTTPStatus.OK, format_metrics(self.server).encode(), "text/plain; version=0.0.4")
        elif self.path == "/senders":
            self._list_senders()
        else:
            wanted = "/healthz, /readyz, /metrics, /senders, or POST " + " or ".join(self.server.paths)
            self._refuse(RequestError(HTTPStatus.NOT_FOUND, f"expected {wanted}"))

    def _list_senders(self) -> None:
        try:
            self.user = self.server.receiver.check_token(self.headers.get("Authorization", ""))
        except RequestError as error:
            return self._refuse(error)
        found = {"refused": self.server.receiver.list_refused()}
        return self._answer(HTTPStatus.OK, json.dumps(found).encode(), "application/json")

    def _find_write_format(self) -> str:
        """The format of a remote write request. Raises RequestError."""
        kind = self.headers.get("Content-Type", "").replace(" ", "").partition(";proto=")[2]
        if kind not in WRITE_FORMATS:
            wanted = " or ".join(filter(None, WRITE_FORMATS))
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"proto={kind!a}; expected {wanted}")
        return WRITE_FORMATS[kind]

    def _read_body(self) -> bytes:
        """The decompressed body. Raises RequestError."""
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != PROTOBUF:
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {kind!a}; expected {PROTOBUF}")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 12:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if int(length) > MAX_REQUEST:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_REQUEST} bytes are accepted")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the connection closed before the end of the body")
        return decompress_body(body, self.headers.get("Content-Encoding", "").strip().lower())

    def _refuse(self, error: RequestError) -> None:
        """An error. The unread rest of the body would be taken for the next request, so the connection ends."""
        sender = f"{self.user} ({self.client_address[0]})" if self.user else str(self.client_address[0])
        self.server.receiver.record_refusal(sender, error.status, str(error))
        self.close_connection = True
        self._answer(error.status, f"{error}\n".encode(), "text/plain", retry=error.may_retry)

    def _answer(
        self, status: HTTPStatus, body: bytes, kind: str, retry: bool = False, more: Mapping[str, str] = {}
    ) -> None:
        self.server.answers[int(status)] += 1
        self.send_response(status)
        for name, text in more.items():
            self.send_header(name, text)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        if retry:
            self.send_header("Retry-After", str(RETRY_S))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """One line per request would fill the log; /metrics counts them."""


def decompress_body(body: bytes, encoding: str) -> bytes:
    """The body without its Content-Encoding. Raises RequestError."""
    if encoding in ("", "identity"):
        return body
    if encoding == "snappy":
        try:
            return decompress_snappy(body, MAX_REQUEST)
        except MalformedSnappy as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not snappy: {error}") from error
    if encoding not in ("gzip", "x-gzip"):
        wanted = "expected none, gzip or snappy"
        raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding!a}; {wanted}")
    unpacker = zlib.decompressobj(_GZIP)
    try:
        found = unpacker.decompress(body, MAX_REQUEST + 1)
    except zlib.error as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not gzip: {error}") from error
    if len(found) > MAX_REQUEST:
        why = f"at most {MAX_REQUEST} bytes are accepted after decompression"
        raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(HTTPStatus.BAD_REQUEST, "the body is not one whole gzip member")
    return found


def format_metrics(server: GatewayServer) -> str:
    """The metrics of the gateway, as Prometheus text."""
    lines = [
        "# HELP fleetpulse_gateway_requests_total Answers of the HTTP server, by status; 0: broken connections.",
        "# TYPE fleetpulse_gateway_requests_total counter",
        *(f'fleetpulse_gateway_requests_total{{status="{s}"}} {n}' for s, n in sorted(server.answers.items())),
    ]
    return "\n".join(lines) + "\n" + server.receiver.format_metrics()


# --- snappy ---------------------------------------------------------------------------------------------------------

# Our own, since a node's dependencies stay few and the block format is small (google/snappy, format_description.txt).


class MalformedSnappy(ValueError):  # noqa: N818 - it describes the input, not an error of this program
    """The bytes are not a snappy block."""


def decompress_snappy(data: bytes, most: int) -> bytes:
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
