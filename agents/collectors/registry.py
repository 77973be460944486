"""The list of collectors, and their construction from the configuration.

A new collector is one module below this folder and one line in COLLECTORS. `[collector.NAME]` configures it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agents.collector import Collector, collector_settings
from agents.collectors.accelerators.amd import Amd
from agents.collectors.accelerators.gaudi import Gaudi
from agents.collectors.accelerators.neuron import Neuron
from agents.collectors.accelerators.tpu import Tpu
from agents.collectors.bmc.ipmi import Ipmi
from agents.collectors.bmc.redfish import Redfish
from agents.collectors.canary.canary import Canary
from agents.collectors.exporters.prometheus import Prometheus
from agents.collectors.fabric.fabric import Fabric
from agents.collectors.gpu.nvml import Nvml
from agents.collectors.gpu.pci import Pci
from agents.collectors.gpu.xid import XidEvents
from agents.collectors.host.clock import Clock
from agents.collectors.host.edac import Edac
from agents.collectors.host.host import Host
from agents.collectors.host.hwmon import Hwmon
from agents.collectors.host.kernel_log import KernelLog
from agents.collectors.host.processors import Powercap, Processors
from agents.collectors.host.services import Services
from agents.collectors.host.storage import Filesystems, Nvme
from agents.collectors.host.tasks import Tasks
from agents.collectors.host.versions import Versions
from agents.collectors.jobs.jobs import Jobs
from agents.collectors.nic.ethtool import EthtoolStatistics
from agents.collectors.nic.infiniband import Infiniband
from agents.collectors.nic.lldp import Lldp
from agents.collectors.nic.network import Network
from agents.collectors.training.training import Training
from pipeline.config.settings import build_section, check_value, describe_key
from pipeline.model.errors import ConfigError

COLLECTORS: tuple[type[Collector], ...] = (
    Host,
    Network,
    Infiniband,
    EthtoolStatistics,
    Fabric,
    Lldp,  # after the collectors that report the port itself
    Nvml,
    Amd,
    Neuron,
    Tpu,
    Gaudi,
    Clock,
    Edac,
    Filesystems,
    Nvme,
    Pci,
    Processors,
    Services,
    Tasks,
    Versions,
    KernelLog,
    XidEvents,
    Hwmon,
    Powercap,
    Ipmi,
    Redfish,
    Prometheus,
    Canary,
    Jobs,
    Training,  # after the collectors that know a rank's GPU: the parents reported first are kept
)

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
