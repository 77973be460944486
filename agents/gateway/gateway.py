"""The process `fleetpulse gateway`: server, intake, spool and uplink, until it is stopped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from agents.gateway.intake import DurableIntake
from agents.gateway.server import GatewayServer
from agents.node.spool import disk
from agents.node.spool.spool import Spool
from agents.node.uplink.uplink import open_uplink
from pipeline.api.tokens import read_tokens
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.model.records import OTLP, Origin

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
    """`fleetpulse gateway`: runs until `stop` is set."""
    server, close = start_gateway(config, _log)
    host, port = server.server_address[:2]
    _log(f"listening on http://{host!s}:{port}/v1/metrics, sends by {config.pipeline.transport}")
    stop.wait()
    close()
    _log("stopped")
    return 0


def _log(text: str) -> None:
    sys.stderr.write(f"gateway: {text}\n")
    sys.stderr.flush()
