"""OTLP over gRPC: the method Export of OpenTelemetry's MetricsService, with the checks of the HTTP server.

grpcio is loaded only where `[gateway] grpc_port` is set. Requests stay bytes: no generated classes.
"""

from __future__ import annotations

import importlib
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from agents.gateway.receiver import MAX_REQUEST, OTLP_FORMAT, Receiver, RequestError, check_otlp
from pipeline.model.errors import ConfigError

EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
THREADS = 16
"""Requests in progress, each of which waits for the disk. Chosen: with MAX_REQUEST at most 256 MiB; others wait."""
STREAMS = 64
"""Requests that one connection may have in progress or waiting. Chosen."""
IDLE_MS = 60_000
"""How long a connection without requests is kept; chosen, as HTTP."""
CODES = {
    HTTPStatus.BAD_REQUEST: "INVALID_ARGUMENT",
    HTTPStatus.UNAUTHORIZED: "UNAUTHENTICATED",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RESOURCE_EXHAUSTED",
    HTTPStatus.TOO_MANY_REQUESTS: "UNAVAILABLE",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
}
"""Status of a refusal -> gRPC status. OTLP clients retry UNAVAILABLE, but not RESOURCE_EXHAUSTED without a RetryInfo
(OTLP specification, failures)."""


class GrpcServer:
    """A gRPC server in front of a Receiver; its threads start immediately. Raises ConfigError.

    certificate: (private key, certificate chain) in PEM; None for no TLS.  port: the one that it listens on.
    """

    def __init__(self, host: str, port: int, receiver: Receiver, certificate: tuple[bytes, bytes] | None) -> None:
        try:
            grpc: Any = importlib.import_module("grpc")
        except ImportError as error:
            raise ConfigError(f"[gateway] grpc_port = {port}: {error}; pip install 'fleetpulse[grpc]'") from error
        options = {
            "grpc.max_receive_message_length": MAX_REQUEST,  # before and after decompression
            "grpc.max_concurrent_streams": STREAMS,
            "grpc.max_connection_idle_ms": IDLE_MS,
            "grpc.so_reuseport": 0,  # a second gateway on this port must fail, not share it
        }
        self._server = grpc.server(ThreadPoolExecutor(THREADS, "gateway-grpc"), options=list(options.items()))
        self._server.add_generic_rpc_handlers((_make_handler(grpc, receiver),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([certificate]))
        except RuntimeError as error:
            raise ConfigError(f"[gateway] host = {host!r}, grpc_port = {port}: {error}") from error
        self._server.start()

    def stop(self, seconds: float) -> None:
        """Accepts nothing more; requests in progress have `seconds` to end."""
        self._server.stop(seconds).wait()


def _make_handler(grpc: Any, receiver: Receiver) -> Any:
    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        """Finds what answers a call, before its message is read."""

        def service(self, details: Any) -> Any:
            """See `grpc.GenericRpcHandler`."""
            if details.method != EXPORT:
                return None
            metadata = dict(details.invocation_metadata)
            try:
                user = receiver.check_token(str(metadata.get("authorization", "")))
            except RequestError as error:
                refusal = error
                # a handler of streams refuses without reading a message
                return grpc.stream_unary_rpc_method_handler(lambda _, context: refuse(context, refusal, ""))
            return grpc.unary_unary_rpc_method_handler(lambda body, context: export(body, context, user))

    def export(body: bytes, context: Any, user: str) -> bytes:
        try:
            check_otlp(body)
            receiver.store(body, OTLP_FORMAT, "grpc")
        except RequestError as error:
            refuse(context, error, user)
        return b""  # an ExportMetricsServiceResponse without a partial success

    def refuse(context: Any, error: RequestError, user: str) -> None:
        address = parse_peer(context.peer())
        receiver.record_refusal(f"{user} ({address})" if user else address, error.status, str(error))
        context.abort(grpc.StatusCode[CODES[error.status]], str(error))

    return Handler()


def parse_peer(peer: str) -> str:
    """The address of gRPC's name of a client: `ipv4:10.0.0.7:53412` -> `10.0.0.7`."""
    address = urllib.parse.unquote(peer.partition(":")[2])
    return address.rpartition(":")[0].strip("[]") or peer
