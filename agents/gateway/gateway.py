"""The gateway: an HTTP server with its process, spool and uplink.

OTLP metrics on /v1/metrics, Prometheus remote write on /api/v1/write, health and metrics. 200 (204 for remote write)
only after the request is durable. 400 for what can never be read, 401 without a token, 413 above the size limit, 415
for another encoding, 429 if too much waits, 503 if nothing can be stored now, both with Retry-After.
"""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from agents.gateway.intake import DurableIntake, Overloaded, TooLarge
from agents.node.spool import disk
from agents.node.spool.spool import Spool
from agents.node.systemd import SystemdNotifier
from agents.node.uplink.uplink import open_uplink
from agents.protobuf import MalformedMessage, ProtobufMessage
from pipeline.api.tokens import Tokens, read_tokens
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.model.records import OTLP, Origin

MAX_REQUEST = 16 << 20
"""Largest request, compressed or not: the largest body of the wire format."""
IDLE_S = 60.0
"""How long a connection may be silent; chosen: clients send at least once a minute, and connect again otherwise."""
RETRY_S = 5
"""Retry-After of a refusal; chosen."""
_GZIP = 16 + zlib.MAX_WBITS  # zlib manual, inflateInit2: 16 more than the window's size is gzip alone
PROTOBUF = "application/x-protobuf"
V1, V2 = "prometheus.WriteRequest", "io.prometheus.write.v2.Request"
"""Messages of remote write 1.0 and 2.0."""


class RequestError(Exception):
    """A request that is refused with an HTTP status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class GatewayServer(http.server.ThreadingHTTPServer):
    """Accepts at most `connections` at a time; further ones get 503 at once.

    answers: number of answers by status.
    """

    daemon_threads, request_queue_size, allow_reuse_address = True, 128, True

    def __init__(
        self,
        address: tuple[str, int],
        intake: DurableIntake,
        origin: Origin,
        tokens: Tokens,
        connections: int,
        find_problem: Callable[[], str | None],
    ) -> None:
        self.intake, self.origin, self.tokens, self.find_problem = intake, origin, tokens, find_problem
        self.answers: Counter[int] = Counter()
        self._free = threading.BoundedSemaphore(connections)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, GatewayHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver`."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        self.answers[503] += 1
        request.settimeout(1.0)
        try:
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n")
        except OSError:
            self.answers[503] -= 1
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `socketserver`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are the clients' matter."""
        self.answers[0] += 1


class GatewayHandler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version, timeout, server_version, sys_version = "HTTP/1.1", IDLE_S, "fleetpulse-gateway", ""
    server: GatewayServer

    def do_POST(self) -> None:
        """A request with telemetry."""
        try:
            self._check_token()
            path = self.path.partition("?")[0]
            if path not in ("/v1/metrics", "/api/v1/write"):
                raise RequestError(HTTPStatus.NOT_FOUND, "expected POST /v1/metrics or /api/v1/write")
            body = self._read_body()
            form, written = check_request(body) if path == "/v1/metrics" else self._check_remote_write(body)
            self.server.intake.store(body, form, self.server.origin, time.time_ns() // 1000)
        except RequestError as error:
            return self._refuse(error.status, str(error))
        except TooLarge as error:
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error))
        except Overloaded as error:
            busy = HTTPStatus.TOO_MANY_REQUESTS if error.busy else HTTPStatus.SERVICE_UNAVAILABLE
            return self._refuse(busy, str(error), retry=True)
        if form == "otlp":
            return self._answer(HTTPStatus.OK, b"", PROTOBUF)
        return self._answer(HTTPStatus.NO_CONTENT, b"", "", more=written)

    def do_GET(self) -> None:
        """Health and metrics."""
        if self.path == "/healthz":
            self._answer(HTTPStatus.OK, b"ok\n", "text/plain")
        elif self.path == "/readyz":
            problem = self.server.find_problem()
            status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
            reasons = [] if problem is None else [problem]
            self._answer(status, json.dumps({"reasons": reasons}).encode(), "application/json")
        elif self.path == "/metrics":
            self._answer(HTTPStatus.OK, format_metrics(self.server).encode(), "text/plain; version=0.0.4")
        else:
            self._refuse(
                HTTPStatus.NOT_FOUND, "expected /healthz, /readyz, /metrics, or POST /v1/metrics or /api/v1/write"
            )

    def _check_remote_write(self, body: bytes) -> tuple[str, dict[str, str]]:
        """(format, headers of the answer). Raises RequestError."""
        kind = self.headers.get("Content-Type", "").replace(" ", "").partition(";proto=")[2] or V1
        if kind not in (V1, V2):
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"proto={kind!a}; expected {V1} or {V2}")
        return check_remote_write(body, kind == V2)

    def _check_token(self) -> None:
        tokens = self.server.tokens
        if tokens and tokens.find_user(self.headers.get("Authorization", "")) is None:
            raise RequestError(HTTPStatus.UNAUTHORIZED, "expected a bearer token of [gateway] token_file")

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

    def _refuse(self, status: HTTPStatus, why: str, retry: bool = False) -> None:
        """An error. What was not read of the body would be taken for the next request, so the connection ends."""
        self.close_connection = True
        self._answer(status, f"{why}\n".encode(), "text/plain", retry)

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


def check_request(body: bytes) -> tuple[str, dict[str, str]]:
    """Raises RequestError unless the body has resources and scopes; the pipeline checks what is in them."""
    try:
        for resource in ProtobufMessage(body).messages(1):
            resource.messages(2)
    except MalformedMessage as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"not an OTLP metrics request: {error}") from error
    return "otlp", {}


def check_remote_write(body: bytes, second: bool) -> tuple[str, dict[str, str]]:
    """(format, headers with what was written, which version 2.0 requires). Raises RequestError."""
    samples = histograms = 0
    try:
        for series in ProtobufMessage(body).messages(5 if second else 1):
            samples += series.count(2)
            histograms += series.count(3 if second else 4)
    except MalformedMessage as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"not a remote write request: {error}") from error
    if not second:
        return "prometheus1", {}
    counts = {"Samples": samples, "Histograms": histograms, "Exemplars": 0}
    return "prometheus2", {f"X-Prometheus-Remote-Write-{what}-Written": str(n) for what, n in counts.items()}


def format_metrics(server: GatewayServer) -> str:
    """The gateway's own metrics, as Prometheus text."""
    intake = server.intake
    lines = [
        "# TYPE fleetpulse_gateway_requests_total counter",
        *(f'fleetpulse_gateway_requests_total{{status="{s}"}} {n}' for s, n in sorted(server.answers.items())),
        "# TYPE fleetpulse_gateway_stored_total counter",
        f"fleetpulse_gateway_stored_total {intake.stored}",
        "# TYPE fleetpulse_gateway_repeated_total counter",
        f"fleetpulse_gateway_repeated_total {intake.repeated}",
        "# TYPE fleetpulse_gateway_refused_total counter",
        f"fleetpulse_gateway_refused_total {intake.refused}",
    ]
    return "\n".join(lines) + "\n"


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


# --- the process ----------------------------------------------------------------------------------------------------

BEAT_S = 1.0
"""Time between two messages to a watchdog of the service manager; chosen, as of the agent."""
CLOSE_S = 2.0
"""How long the end waits for acknowledgements of Kafka; what is left is in the spool."""


def start_gateway(config: Config, log: Callable[[str], object]) -> tuple[GatewayServer, Callable[[], None]]:
    """A running gateway, and the function that stops it. Raises ConfigError, SpoolError."""
    settings, node = config.gateway, config.gateway.node
    tokens = read_tokens(settings, "gateway")
    spool = Spool(
        config.spool.directory,
        node,
        OTLP,
        max_bytes=config.spool.max_bytes,
        segment_bytes=config.spool.segment_bytes,
        free_bytes=config.spool.free_bytes,
    )
    uplink = open_uplink(config, config.pipeline.transport, [node], log, "agent")
    intake = DurableIntake(spool, uplink.wake if uplink else lambda: None)
    origin = Origin(config.site.name, node, disk.read_boot_id())
    try:
        address = settings.host, settings.port
        server = GatewayServer(address, intake, origin, tokens, settings.connections, intake.find_problem)
    except OSError as error:
        intake.close()
        where = f"{config.source}: [gateway] host = {settings.host!r}, port = {settings.port}"
        raise ConfigError(f"{where}: {error.strerror}") from error
    if uplink:
        uplink.start()
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="gateway-http", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        intake.close()
        if uplink:
            uplink.stop()
            uplink.close(CLOSE_S)

    return server, stop


def run(config: Config, stop: threading.Event) -> int:
    """`fleetpulse gateway`: runs until `stop` is set. The service manager hears when it listens and when it ends."""
    manager = SystemdNotifier()
    server, close = start_gateway(config, _log)
    host, port = server.server_address[:2]
    _log(f"listening on http://{host!s}:{port}/v1/metrics, sends by {config.pipeline.transport}")
    manager.notify_ready(BEAT_S)
    while not stop.wait(BEAT_S):
        manager.notify_alive()
    manager.notify_stopping()
    close()
    manager.close()
    _log("stopped")
    return 0


def _log(text: str) -> None:
    sys.stderr.write(f"gateway: {text}\n")
    sys.stderr.flush()
