"""What the agent tells of itself and its telemetry to OpenTelemetry or Prometheus, where [opentelemetry] wants it.

Off by default, and then nothing of it is loaded. The agent calls `take`, `describe` and `observe`; none of them waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agents.collector import Device
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.records import Batch, Origin

if TYPE_CHECKING:
    from agents.otlp.export import Export
    from agents.otlp.outbox import Outbox
    from agents.otlp.own import Metrics


@dataclass(frozen=True, slots=True)
class Look:
    """One delivery of a collector at this tick: its state (ok, no data, fault, hung) and how long it took in s."""

    collector: str
    result: str
    took: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The agent after one tick. Counts are since the start; what is not known is None, and has no point.

    looks: what collectors brought at this tick.  restarts: by collector.  gaps, unsent: messages.
    lag: seconds since the oldest message was made that Kafka has not acknowledged; 0 if there is none.
    """

    time: int
    looks: tuple[Look, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)
    spool_bytes: float | None = None
    dropped: float | None = None
    gaps: int | None = None
    unsent: int | None = None
    lag: float | None = None
    late_ticks: int | None = None
    cpu_time: float | None = None
    memory: int | None = None


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


def open_telemetry(config: Config, origin: Origin, say: Callable[[str, str], object]) -> Telemetry | None:
    """What [opentelemetry] asks for, None if that is nothing. `say` gets subject and text. Raises ConfigError."""
    settings, where = config.opentelemetry, f"{config.source}: [opentelemetry]"
    if settings.kafka and config.pipeline.transport != "kafka":
        raise ConfigError(f'{where} kafka = true: there are brokers only with [pipeline] transport = "kafka"')
    if settings.metrics == "all" and not settings.endpoint:
        raise ConfigError(f'{where} metrics = "all": wants an endpoint, such as "http://127.0.0.1:4318"')
    if not (settings.endpoint or settings.kafka or settings.prometheus_port):
        return None
    from agents.otlp.opened import opened

    return opened(config, origin, say)
