"""What the agent tells of itself and its telemetry to OpenTelemetry or Prometheus, where [opentelemetry] wants it.

Off by default, and then nothing of it is loaded. The agent calls `take`, `describe` and `observe`; none of them waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agents.snapshot import Look, Snapshot
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.records import Origin

if TYPE_CHECKING:
    from agents.otlp.opened import Telemetry

__all__ = ["Look", "Snapshot", "open_telemetry"]


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
