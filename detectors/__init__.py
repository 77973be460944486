"""Detectors turn frames into findings. A new one: one file and a line in DETECTORS (see detectors/base/detector.py)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from detectors.anomaly.anomaly import Anomaly
from detectors.base.detector import Detector
from detectors.heat.coolant import Coolant
from detectors.heat.coolant_edge import CoolantEdge
from detectors.heat.coolant_leak import CoolantLeak
from detectors.heat.thermal import Thermal
from detectors.heat.thermal_edge import ThermalEdge
from detectors.heat.thermal_inlet import ThermalInlet
from detectors.host.host_health import HostHealth
from detectors.link.link import Link
from detectors.link.link_congestion import LinkCongestion
from detectors.link.link_nvlink import LinkNvlink
from detectors.link.link_optic import LinkOptic
from detectors.link.link_pcie import LinkPcie
from detectors.link.link_stall import LinkStall
from detectors.memory.memory import Memory
from detectors.power.power import Power
from detectors.sdc.sdc import SdcVote
from detectors.sdc.sdc_gradient import SdcGradient
from detectors.sdc.sdc_replica import SdcReplica
from detectors.straggler.straggler import Straggler
from detectors.straggler.straggler_inferred import StragglerInferred
from detectors.straggler.straggler_job import StragglerJob
from detectors.telemetry.telemetry import Telemetry
from detectors.telemetry.telemetry_blind import TelemetryBlind
from detectors.telemetry.telemetry_clock import TelemetryClock
from detectors.telemetry.telemetry_sensor import TelemetrySensor
from detectors.telemetry.telemetry_site import TelemetrySite
from detectors.xid.xid import Xid
from pipeline.config.settings import build_section
from pipeline.model.errors import ConfigError, UsageError

DETECTORS: tuple[type[Detector], ...] = (
    *(Straggler, StragglerInferred, StragglerJob),
    *(Link, LinkStall, LinkOptic, LinkCongestion, LinkNvlink, LinkPcie),
    *(SdcVote, SdcReplica, SdcGradient),
    *(Xid, Memory, HostHealth, Power),
    *(Coolant, CoolantEdge, CoolantLeak, Thermal, ThermalInlet, ThermalEdge),
    *(Telemetry, TelemetrySensor, TelemetryClock, TelemetryBlind, TelemetrySite),
    Anomaly,
)
"""In the order of docs/detectors.md; the order does not change findings."""

REMOVED: Mapping[str, str] = {
    "power_draw": "power depends on the instructions, too, which no signal shows",
}
"""Detectors of earlier versions, and why they were removed: their tables in a configuration are refused with that."""


def configured(tables: Mapping[str, Mapping[str, Any]] = {}, source: str = "defaults") -> list[Detector]:
    """Returns one of each, configured by its table [detector.NAME].

    Raises ConfigError on an unknown or removed name and on an unknown key.
    """
    known = {cls.name: cls for cls in DETECTORS}
    for name in tables:
        if name in REMOVED:
            raise ConfigError(f"{source}: [detector.{name}]: removed, because {REMOVED[name]}; delete this table")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: [detector.{name}]: no such detector; {hint}")
    return [build_section(cls, tables.get(name, {}), source, f"detector.{name}") for name, cls in known.items()]


def listing(tables: Mapping[str, Mapping[str, Any]] = {}, source: str = "defaults") -> list[dict[str, Any]]:
    """Returns one row of plain data per detector, as configured."""
    return [detector.describe() for detector in configured(tables, source)]


def explain(name: str, rows: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Returns the row of one detector, from `rows` or the defaults. Raises UsageError on an unknown name."""
    known = {row["name"]: row for row in rows or listing()}
    if name in known:
        return known[name]
    if name in REMOVED:
        raise UsageError(f"detectors: '{name}' was removed, because {REMOVED[name]}")
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(known)}"
    raise UsageError(f"detectors: no detector '{name}'; {hint}")
