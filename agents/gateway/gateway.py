"""The gateway's process: an HTTP and perhaps a gRPC server, one spool, one uplink; and the part of it in an agent.

An agent with `[agent] otlp_port` receives what programs on its node send over HTTP, into a spool beside its own two.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable

from agents.gateway.grpc_server import GrpcServer
from agents.gateway.http_server import OTLP_PATH, WRITE_PATH, GatewayServer
from agents.gateway.intake import DurableIntake
from agents.gateway.receiver import Receiver
from agents.node.spool import disk
from agents.node.spool.spool import Spool
from agents.node.uplink.uplink import open_uplink
from pipeline.api.tokens import Tokens, read_tokens
from pipeline.config.sections import Config, Gateway
from pipeline.http import certificates
from pipeline.model.errors import ConfigError, SpoolError
from pipeline.model.records import OTLP, Origin
from pipeline.model.regular_files import read_regular
from pipeline.runtime.log_line import write_log_line
from pipeline.runtime.systemd import SystemdNotifier

BEAT_S = 1.0
"""Time between two messages to a watchdog of the service manager; chosen, as of the agent."""
CLOSE_S = 2.0
"""How long the end waits for acknowledgements of Kafka; the rest is in the spool."""


class RunningGateway:
    """A gateway that listens. Raises ConfigError, SpoolError.

    port, grpc_port: those that it listens on; grpc_port is 0 without [gateway] grpc.
    """

    def __init__(self, config: Config, log: Callable[[str], object]) -> None:
        settings, node = config.gateway, config.gateway.node
        tokens, certificate = read_tokens(settings, "gateway"), read_certificate(settings)
        self._uplink = open_uplink(config, config.pipeline.transport, [node], log, "agent")
        self._intake = DurableIntake(open_spool(config, node), self._uplink.wake if self._uplink else lambda: None)
        self.receiver = Receiver(self._intake, Origin(config.site.name, node, disk.read_boot_id()), tokens)
        self._grpc: GrpcServer | None = None
        try:
            self._grpc = self._open_grpc(settings, certificate)
            self.http = open_http(settings.host, settings.port, self.receiver, settings)
        except ConfigError as error:
            self._close_grpc()
            self._intake.close()
            raise ConfigError(f"{config.source}: {error}") from error
        self.port, self.grpc_port = int(self.http.server_address[1]), self._grpc.port if self._grpc else 0
        if self._uplink:
            self._uplink.start()
        serve_in_thread(self.http, "gateway-http")

    def close(self) -> None:
        """Stops listening; everything that was accepted is durable."""
        self.http.shutdown()
        self.http.server_close()
        self._close_grpc()
        self._intake.close()
        if self._uplink:
            self._uplink.stop()
            self._uplink.close(CLOSE_S)

    def _open_grpc(self, settings: Gateway, certificate: tuple[bytes, bytes] | None) -> GrpcServer | None:
        if not settings.grpc:
            return None
        return GrpcServer(settings.host, settings.grpc_port, self.receiver, certificate)

    def _close_grpc(self) -> None:
        if self._grpc:
            self._grpc.stop(CLOSE_S)


def open_spool(config: Config, node: str) -> Spool:
    """The spool of a node's requests. Raises SpoolError."""
    settings = config.spool
    return Spool(
        settings.directory,
        node,
        OTLP,
        max_bytes=settings.max_bytes,
        segment_bytes=settings.segment_bytes,
        free_bytes=settings.free_bytes,
    )


def open_http(
    host: str, port: int, receiver: Receiver, settings: Gateway, paths: tuple[str, ...] = (OTLP_PATH, WRITE_PATH)
) -> GatewayServer:
    """An HTTP server that listens; `serve_in_thread` starts it. Raises ConfigError."""
    tls = None
    if settings.certificate_file is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            certificates.load_own(tls, settings.certificate_file, settings.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"[gateway] certificate_file, key_file: {error}") from error
    try:
        return GatewayServer((host, port), receiver, settings.connections, receiver.intake.find_problem, tls, paths)
    except OSError as error:
        raise ConfigError(f"[gateway] host = {host!r}, port = {port}: {error.strerror}") from error


def serve_in_thread(server: GatewayServer, name: str) -> None:
    """Starts to serve."""
    threading.Thread(target=server.serve_forever, args=(0.1,), name=name, daemon=True).start()


def read_certificate(settings: Gateway) -> tuple[bytes, bytes] | None:
    """(private key, certificate chain) of [gateway]; None if it has none. Raises ConfigError."""
    if settings.certificate_file is None:
        if settings.key_file is not None:
            raise ConfigError("[gateway] key_file: expected certificate_file too")
        return None
    try:
        chain = read_regular(settings.certificate_file)
        return (chain if settings.key_file is None else read_regular(settings.key_file)), chain
    except OSError as error:
        raise ConfigError(f"[gateway] certificate_file, key_file: {error}") from error


def run(config: Config, stop: threading.Event) -> int:
    """`fleetpulse gateway`: runs until `stop` is set. systemd is notified when it listens and ends."""
    manager = SystemdNotifier()
    gateway, scheme = RunningGateway(config, _log), "https" if config.gateway.certificate_file else "http"
    _log(f"listening on {scheme}://{config.gateway.host}:{gateway.port}, sends by {config.pipeline.transport}")
    if gateway.grpc_port:
        _log(f"OTLP over gRPC on {config.gateway.host}:{gateway.grpc_port}")
    manager.notify_ready(BEAT_S)
    while not stop.wait(BEAT_S):
        manager.notify_alive()
    manager.notify_stopping()
    gateway.close()
    manager.close()
    _log("stopped")
    return 0


def _log(text: str) -> None:
    write_log_line(f"gateway: {text}")


# --- within an agent ------------------------------------------------------------------------------------------------

LOCAL = "127.0.0.1"
"""An agent receives only from its own node."""
LOCAL_CONNECTIONS = 32
"""Connections of an agent's receiver. Chosen: a program per GPU and some more."""
TRY_AGAIN_S = 10.0
"""Time between two tries to listen; chosen: the port may be another program's for a while."""


class LocalReceiver:
    """Receives OTLP over HTTP from programs on the agent's node. All that waits for a disk runs in separate threads.

    Every request counts as telemetry of this node, whatever its resource says; so no token is needed.
    """

    def __init__(
        self, config: Config, origin: Origin, on_durable: Callable[[], object], log: Callable[[str, str], object]
    ) -> None:
        self._config, self._origin, self._on_durable, self._log = config, origin, on_durable, log
        self._stop = threading.Event()
        self._intake: DurableIntake | None = None
        self.http: GatewayServer | None = None
        self._thread = threading.Thread(target=self._open, name="otlp-receiver", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Stops listening, and waits at most `seconds` for the disk."""
        self._stop.set()
        self._thread.join(seconds)
        if self.http:
            self.http.shutdown()
            self.http.server_close()
        if self._intake:
            self._intake.close(seconds)

    def _open(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
                return
            except (ConfigError, SpoolError, OSError) as error:
                self._log("otlp", f"{error}; next try in {TRY_AGAIN_S:g} s")
            self._stop.wait(TRY_AGAIN_S)

    def _listen(self) -> None:
        """Opens the spool once, then the port. Raises ConfigError, SpoolError."""
        if self._intake is None:
            self._intake = DurableIntake(open_spool(self._config, self._origin.node), self._on_durable)
        receiver, port = (
            Receiver(self._intake, self._origin, Tokens({}, None, lambda: 0), local=True),
            self._config.agent.otlp_port,
        )
        settings = Gateway(node=self._origin.node, connections=LOCAL_CONNECTIONS)
        try:
            self.http = open_http(LOCAL, port, receiver, settings, (OTLP_PATH,))
        except ConfigError as error:
            raise ConfigError(f"[agent] otlp_port = {port}: {error.__cause__ or error}") from error
        self._log("otlp", f"listening on http://{LOCAL}:{port}{OTLP_PATH}")
        serve_in_thread(self.http, "otlp-http")
