"""The collectors. A new one is one file beside this and one line in COLLECTORS; `[collector.NAME]` configures it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agents.collector import Collector, settings
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
from agents.collectors.host.filesystems import Filesystems
from agents.collectors.host.host import Host
from agents.collectors.host.hwmon import Hwmon
from agents.collectors.host.kernel_log import KernelLog
from agents.collectors.host.nvme import Nvme
from agents.collectors.host.powercap import Powercap
from agents.collectors.host.processors import Processors
from agents.collectors.host.services import Services
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
    Lldp,  # after whoever tells of the port itself
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
    Training,  # after whoever knows a rank's GPU: the first one's parents hold
)

Rule = tuple[str, Callable[[Any], bool]]
MOST_DEADLINE_S = 25
"""Longest deadline: a collector that hangs is reported within 30 s of its look, a look at the workers included."""
PARTS = ("patience", "timeout", "budget")
"""Settings that say how long a part of a look may take: together less than `deadline`, else each look is given up."""
_PART: Rule = "seconds, above 0 and below `deadline`", lambda value: 0 < value < MOST_DEADLINE_S
_RULES: Mapping[str, Rule] = {
    "interval": ("seconds, above 0 and at most 3600", lambda value: 0 < value <= 3600),
    "deadline": (f"seconds, above 0 and at most {MOST_DEADLINE_S}", lambda value: 0 < value <= MOST_DEADLINE_S),
    **dict.fromkeys(PARTS, _PART),
}
_NUMBER: Rule = "a number, not negative", lambda value: 0 <= value < math.inf


def configured(
    tables: Mapping[str, Mapping[str, Any]], source: str = "configuration", only: Collection[str] = ()
) -> tuple[Collector, ...]:
    """Every collector that has something to do, with its table of the configuration; of those `only`, if any is named.

    Raises ConfigError on names and keys that nobody has, and on values that cannot work.
    """
    known = {collector.name: collector for collector in COLLECTORS}
    for name in tables:
        _check_name(name, known, f"{source}: [collector.{name}]", "[collector.{}]")
    for name in only:
        _check_name(name, known, f"{source}: [agent] collectors has {name!r}", "{!r}")
    made = (_made(collector, tables.get(name, {}), source) for name, collector in known.items())
    return tuple(c for c in made if c.wanted() and (not only or c.name in only))


def _check_name(name: str, known: Collection[str], where: str, form: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        mend = f"did you mean {form.format(close[0])}?" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"{where}: no such collector; {mend}")


def _made(kind: type[Collector], table: Mapping[str, Any], source: str) -> Collector:
    """One collector; what is true of the settings of all, new ones included, is seen to here."""
    section = f"collector.{kind.name}"
    made = build_section(kind, table, source, section)
    found = settings(made)
    parts = [key for key in PARTS if key in found]
    for key, value in found.items():
        if type(value) in (int, float):
            text, holds = _RULES.get(key, _NUMBER)
            check_value(describe_key(source, section, key), value, text, holds)
    if parts and sum(found[key] for key in parts) >= made.deadline:
        key = next((key for key in parts if key in table), parts[0])
        text = f"{' and '.join(parts)} {'together ' if len(parts) > 1 else ''}below `deadline` ({made.deadline:g} s)"
        check_value(describe_key(source, section, key), found[key], text, lambda _: False)
    return made
