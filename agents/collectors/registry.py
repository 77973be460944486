"""The list of collectors, and their construction from the configuration.

A new collector is one module below this folder and one line in _CLASSES. `[collector.NAME]` configures it.
"""

from __future__ import annotations

import difflib
import math
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agents.collector import Collector, collector_settings
from pipeline.config.settings import build_section, check_value, describe_key
from pipeline.model.errors import ConfigError

_CLASSES = (
    "host.host:Host",
    "nic.network:Network",
    "nic.infiniband:Infiniband",
    "nic.ethtool:EthtoolStatistics",
    "fabric.fabric:Fabric",
    "nic.lldp:Lldp",  # after the collectors that report the port itself
    "gpu.nvml:Nvml",
    "accelerators.amd:Amd",
    "accelerators.neuron:Neuron",
    "accelerators.tpu:Tpu",
    "accelerators.gaudi:Gaudi",
    "host.clock:Clock",
    "host.processors:Edac",
    "host.storage:Filesystems",
    "host.storage:Nvme",
    "gpu.pci:Pci",
    "host.processors:Processors",
    "host.services:Services",
    "host.host:Tasks",
    "host.versions:Versions",
    "host.kernel_log:KernelLog",
    "gpu.xid:XidEvents",
    "host.hwmon:Hwmon",
    "host.processors:Powercap",
    "bmc.ipmi:Ipmi",
    "bmc.redfish:Redfish",
    "exporters.prometheus:Prometheus",
    "canary.canary:Canary",
    "jobs.jobs:Jobs",
    "training.training:Training",  # after the collectors that know a rank's GPU: the parents reported first are kept
)
"""Module and class of each collector below agents/collectors, in the order in which they are read."""
COLLECTORS: tuple[type[Collector], ...] = tuple(pkgutil.resolve_name(f"agents.collectors.{name}") for name in _CLASSES)

SettingRule = tuple[str, Callable[[Any], bool]]
MAX_DEADLINE_S = 25
"""Longest deadline. A collector that hangs is reported within 30 s of its read, including the check of the workers."""
TIME_LIMIT_KEYS = ("patience", "timeout", "budget")
"""Settings that limit the duration of parts of a read. Their sum must be below `deadline`, otherwise every read would
time out."""
_TIME_LIMIT_RULE: SettingRule = "seconds, above 0 and below `deadline`", lambda value: 0 < value < MAX_DEADLINE_S
_RULES: Mapping[str, SettingRule] = {
    "interval": ("seconds, above 0 and at most 3600", lambda value: 0 < value <= 3600),
    "deadline": (f"seconds, above 0 and at most {MAX_DEADLINE_S}", lambda value: 0 < value <= MAX_DEADLINE_S),
    **dict.fromkeys(TIME_LIMIT_KEYS, _TIME_LIMIT_RULE),
}
_NUMBER_RULE: SettingRule = "a number, not negative", lambda value: 0 <= value < math.inf


def configured_collectors(
    tables: Mapping[str, Mapping[str, Any]], source: str = "configuration", only: Collection[str] = ()
) -> tuple[Collector, ...]:
    """Returns every collector that has something to do, built from its table of the configuration.

    only: names of collectors; if given, the others are left out. Raises ConfigError for unknown names and keys and for
    values that cannot work.
    """
    known = {collector.name: collector for collector in COLLECTORS}
    for name in tables:
        _check_name(name, known, f"{source}: [collector.{name}]", "[collector.{}]")
    for name in only:
        _check_name(name, known, f"{source}: [agent] collectors has {name!r}", "{!r}")
    made = (_build_collector(collector, tables.get(name, {}), source) for name, collector in known.items())
    return tuple(c for c in made if c.has_work() and (not only or c.name in only))


def _check_name(name: str, known: Collection[str], where: str, template: str) -> None:
    if name not in known:
        similar = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {template.format(similar[0])}?" if similar else f"known: {', '.join(known)}"
        raise ConfigError(f"{where}: no such collector; {hint}")


def _build_collector(kind: type[Collector], table: Mapping[str, Any], source: str) -> Collector:
    """Builds one collector and checks the settings that all collectors have in common."""
    section = f"collector.{kind.name}"
    made = build_section(kind, table, source, section)
    values = collector_settings(made)
    time_limits = [key for key in TIME_LIMIT_KEYS if key in values]
    for key, value in values.items():
        if type(value) in (int, float):
            text, holds = _RULES.get(key, _NUMBER_RULE)
            check_value(describe_key(source, section, key), value, text, holds)
    if time_limits and sum(values[key] for key in time_limits) >= made.deadline:
        key = next((key for key in time_limits if key in table), time_limits[0])
        together = "together " if len(time_limits) > 1 else ""
        text = f"{' and '.join(time_limits)} {together}below `deadline` ({made.deadline:g} s)"
        check_value(describe_key(source, section, key), values[key], text, lambda _: False)
    return made
