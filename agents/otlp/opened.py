"""Makes what [opentelemetry] asks for; the only place that knows all the parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata

from agents.otlp.export import Export, about
from agents.otlp.outbox import Outbox
from agents.telemetry import Telemetry
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.records import Origin


def opened(config: Config, origin: Origin, say: Callable[[str, str], object]) -> Telemetry:
    """The parts that are configured, each loaded only then. Raises ConfigError."""
    settings, outboxes, version = config.opentelemetry, dict[str, Outbox](), _version()
    if settings.endpoint:
        from agents.otlp.http import Post

        post = Post(settings, config.source)
        outboxes["http"] = Outbox("otlp-http", post, functools.partial(say, "otlp"))
    if settings.kafka:
        from agents.otlp.broker import Broker

        broker = Broker(config.kafka, origin.node)
        outboxes["kafka"] = Outbox("otlp-kafka", broker, functools.partial(say, "otlp kafka"), broker.close)
    ways = [outboxes["kafka"].put] if settings.kafka else []
    ways += [outboxes["http"].put] if settings.metrics == "all" else []
    export = Export(origin, version, settings.interval, ways) if ways else None
    metrics = None
    if settings.endpoint or settings.prometheus_port:
        try:
            from agents.otlp.own import Metrics
        except ImportError as error:
            raise ConfigError(
                f"{config.source}: [opentelemetry]: {error}; wanted opentelemetry-sdk: pip install 'fleetpulse[agent]'"
            ) from error
        send = outboxes["http"].put if settings.endpoint else None
        metrics = Metrics(about(origin, version), version, settings.interval, send, settings.prometheus_port)
    return Telemetry(export, metrics, outboxes)


def _version() -> str:
    try:
        return metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:  # run from its folder
        return "0"
