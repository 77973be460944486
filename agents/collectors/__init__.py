"""The collectors. A new one is one file beside this and one line in COLLECTORS; `[collector.NAME]` configures it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from agents.collector import Collector
from agents.collectors.clock import Clock
from agents.collectors.edac import Edac
from agents.collectors.ethtool import EthtoolStatistics
from agents.collectors.filesystems import Filesystems
from agents.collectors.host import Host
from agents.collectors.hwmon import Hwmon
from agents.collectors.infiniband import Infiniband
from agents.collectors.ipmi import Ipmi
from agents.collectors.kernel_log import KernelLog
from agents.collectors.network import Network
from agents.collectors.nvme import Nvme
from agents.collectors.nvml import Nvml
from agents.collectors.pci import Pci
from agents.collectors.powercap import Powercap
from agents.collectors.processors import Processors
from agents.collectors.services import Services
from agents.collectors.tasks import Tasks
from agents.collectors.versions import Versions
from agents.collectors.xid import XidEvents
from pipeline.errors import ConfigError
from pipeline.settings import build

COLLECTORS: tuple[type[Collector], ...] = (
    Host,
    Network,
    Infiniband,
    EthtoolStatistics,
    Nvml,
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
)


def configured(tables: Mapping[str, Mapping[str, Any]], source: str = "configuration") -> tuple[Collector, ...]:
    """Every collector with its table of the configuration. Raises ConfigError on names and keys that nobody has."""
    known = {collector.name: collector for collector in COLLECTORS}
    for name in tables:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            mend = f"did you mean [collector.{close[0]}]?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: [collector.{name}]: no such collector; {mend}")
    return tuple(
        build(collector, tables.get(name, {}), source, f"collector.{name}") for name, collector in known.items()
    )
