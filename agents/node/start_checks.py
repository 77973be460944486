"""What an agent's start refuses, apart from what a single key must be: a reload refuses it too, and `config check`
what needs no look at files and ports.

A start that ends with exit code 2 is the last one of a unit (RestartPreventExitStatus=2), so a reload checks all of
this while the old agent still runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agents.collector import Collector
from agents.collectors.registry import configured_collectors
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.runtime.free_ports import check_free

LOOPBACK = "127.0.0.1"


def configure(config: Config) -> Sequence[Collector]:
    """Returns the collectors. Raises ConfigError for a wrong section of one."""
    return configured_collectors(config.collector, config.source, config.agent.collectors)


def check_settings(config: Config) -> None:
    """Raises ConfigError for settings with which an agent does not start."""
    if not config.agent.interval > 0:
        raise ConfigError(f"{config.source}: [agent] interval = {config.agent.interval}: expected more than 0 s")
    check_telemetry(config)


def check_telemetry(config: Config) -> None:
    """Raises ConfigError for settings of [opentelemetry] that contradict each other."""
    settings, where = config.opentelemetry, f"{config.source}: [opentelemetry]"
    if settings.kafka and config.pipeline.transport != "kafka":
        raise ConfigError(f'{where} kafka = true: requires [pipeline] transport = "kafka"')
    if settings.metrics == "all" and not settings.endpoint:
        raise ConfigError(f'{where} metrics = "all": requires an endpoint, such as "http://127.0.0.1:4318"')


def check_distinct_ports(config: Config) -> None:
    """Raises ConfigError if two servers of an agent have one port: the second would never listen.

    Not at a start: there the agent goes on, and logs that its receiver cannot listen.
    """
    found = _list_ports(config)
    if len(set(found.values())) < len(found):
        first, second = found
        raise ConfigError(f"{config.source}: {second} = {found[second]}: that is {first} too; expected another port")


def check_configuration(config: Config) -> None:
    """Raises ConfigError for what a start refuses without a look at files and ports, as `config check` does."""
    check_with_origin(config, configure)
    check_with_origin(config, check_settings)
    check_with_origin(config, check_distinct_ports)


def check_next_start(now: Config, fresh: Config) -> None:
    """Raises ConfigError if a start with `fresh` would end with exit code 2. Reads secrets.

    now: with which this process runs; its ports are free for its next start.
    """
    check_configuration(fresh)
    if fresh.pipeline.transport == "kafka":
        from agents.node.uplink.client import check_credentials

        check_credentials(fresh.kafka, "agent", [fresh.agent.node])
    if fresh.opentelemetry.endpoint or fresh.opentelemetry.prometheus_port:
        from agents.otlp.export import check_exports  # here: an agent without exports need not load them

        check_with_origin(fresh, check_exports)
    _check_ports(fresh, own=_list_ports(now).values())


def _list_ports(config: Config) -> dict[str, int]:
    """Returns key -> port of loopback on which an agent listens."""
    ports = {
        "[agent] otlp_port": config.agent.otlp_port,
        "[opentelemetry] prometheus_port": config.opentelemetry.prometheus_port,
    }
    return {key: port for key, port in ports.items() if port}


def _check_ports(config: Config, own: Collection[int]) -> None:
    """Raises ConfigError if another program has a port. own: ports of this process, which its next start has again."""
    for key, port in _list_ports(config).items():
        try:
            check_free(LOOPBACK, port, [(LOOPBACK, one) for one in own])
        except OSError as error:
            where = f"{config.source}: {key} = {port}"
            raise ConfigError(f"{where}: {error.strerror}; expected a port that is free on {LOOPBACK}") from error
