"""Makes what [opentelemetry] asks for; the only place that knows all the parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from agents.collector import Device
from agents.node.snapshot import Snapshot
from agents.otlp.export import Export, about
from agents.otlp.outbox import Outbox
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.model.records import Batch, Origin

if TYPE_CHECKING:
    from agents.otlp.own import Metrics


class Telemetry:
    """Holds what is configured. Made by `open_telemetry`."""

    def __init__(self, export: Export | None, metrics: Metrics | None, outboxes: Mapping[str, Outbox]) -> None:
        self._export, self.metrics, self._outboxes = export, metrics, outboxes

    def take(self, batch: Batch) -> None:
        """The telemetry of one tick."""
        if self._export is not None:
            self._export.take(batch)

    def describe(self, devices: Mapping[str, Device]) -> None:
        """All entities there are, when that changed."""
        if self._export is not None:
            self._export.describe(devices)

    def observe(self, snapshot: Snapshot) -> None:
        """The agent itself, once per tick."""
        if self.metrics is not None:
            self.metrics.observe(snapshot, {name: (box.sent, box.dropped) for name, box in self._outboxes.items()})

    def close(self, seconds: float) -> None:
        """Ends within about `seconds`; what is not sent by then is lost, but for what the spool holds."""
        if self._export is not None:
            self._export.flush()
        if self.metrics is not None:
            self.metrics.close()
        for outbox in self._outboxes.values():
            outbox.close(seconds)


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
            from agents.otlp import own
        except ImportError as error:
            raise ConfigError(
                f"{config.source}: [opentelemetry]: {error}; wanted opentelemetry-sdk: pip install 'fleetpulse[agent]'"
            ) from error
        send = outboxes["http"].put if settings.endpoint else None
        metrics = own.Metrics(about(origin, version), version, settings.interval, send, settings.prometheus_port)
    return Telemetry(export, metrics, outboxes)


def _version() -> str:
    try:
        return metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:  # run from its folder
        return "0"
