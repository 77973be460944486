"""Redfish data of power, coolant, leaks and the BMCs themselves: one thread per BMC, with a limited request rate.

Power and coolant are one collector, since each BMC has one limit: exactly one request at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.collectors.columns import signal_column
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event
from pipeline.model.signals import signals_of_class

if TYPE_CHECKING:
    from agents.collectors.bmc.redfish_poller import BmcPoller

_CLASSES = ("power", "psu", "battery", "coolant", "leak", "bmc")
_SENSORS = tuple(f"sensor.{n}" for n in ("temperature", "voltage", "current", "power", "fan_speed", "ratio", "alarm"))
_BMC_S = 10.0
"""Seconds between two reports of each BMC's own state, besides its changes."""
_CLOSE_S = 2.0
"""Longest wait at the end for logouts, over all BMCs."""
MAX_BMCS = 64
"""Most BMCs of one agent. Chosen: a row of racks has one or two coolant units, and a dozen shelves and PDUs per
rack."""
ValuesByClass = dict[str, dict[str, dict[str, float]]]


@dataclass
class Redfish(Collector):
    """power.*, psu.*, battery.*, coolant.*, leak.*, bmc.*, and sensor.* if configured, of the BMCs in `bmcs`.

    Each BMC is read by its own threads; a read takes what arrived since the last one and never waits. A cdu has the
    total flow of its secondary connectors, and the mean of their temperatures and pressures.
    """

    name: ClassVar[str] = "redfish"
    signals: ClassVar[tuple[str, ...]] = (
        *(s.name for c in _CLASSES for s in signals_of_class(c) if not s.name.endswith(".generation")),
        *_SENSORS,
    )
    events: ClassVar[tuple[str, ...]] = ("redfish", "bmc_lost", "bmc_back")
    lane: ClassVar[str] = "redfish"
    remote: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    settling: ClassVar[float] = 5.0
    interval: float = 1.0
    bmcs: tuple[BmcSettings, ...] = ()
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _pollers: list[Any] = field(default_factory=list, init=False, repr=False)
    _reachable: dict[str, bool | None] = field(default_factory=dict, init=False, repr=False)
    _schedule: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)

    def __post_init__(self) -> None:
        names = Counter(bmc.name for bmc in self.bmcs)
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            found = f"name = {', '.join(map(repr, twice))} is used more than once"
            raise ConfigError(f"[[collector.redfish.bmcs]]: {found}; expected a unique name for each BMC")
        if len(self.bmcs) > MAX_BMCS:
            raise ConfigError(
                f"[[collector.redfish.bmcs]]: {len(self.bmcs)} BMCs; expected at most {MAX_BMCS} per agent"
            )

    def has_work(self) -> bool:
        """Returns whether a BMC is configured."""
        return bool(self.bmcs)

    def open(self, node: str) -> None:
        """Starts one poller per BMC. Raises NoData if none is configured."""
        if not self.bmcs:
            raise NoData("no BMC is configured; expected [[collector.redfish.bmcs]] with name and url of each")
        from agents.collectors.bmc.redfish_poller import BmcPoller

        self.close()
        self._schedule, self._reachable = SamplingSchedule(node, self._now), {}
        self._pollers = [BmcPoller(bmc, self._now, self._monotonic) for bmc in self.bmcs]
        for poller in self._pollers:
            poller.start()

    def read(self) -> tuple[Reading, ...]:
        """Returns what the pollers read since the last call, and the state of the BMCs; does not wait."""
        if not self._pollers:
            raise NoData("closed; call open first")
        values: ValuesByClass = {}
        events: list[Event] = []
        report_bmcs = self._schedule.due(_BMC_S)
        for poller in self._pollers:
            poller.check()
            values_by_entity, new_events = poller.results.take_all()
            events += new_events
            for entity, (device_class, signals) in values_by_entity.items():
                values.setdefault(device_class, {})[entity] = signals
            if report_bmcs or poller.reachable is not self._reachable.get(poller.bmc.name):
                self._reachable[poller.bmc.name] = poller.reachable
                values.setdefault("bmc", {})[f"bmc:{poller.bmc.name}"] = _bmc_signals(poller)
        found = [_make_reading(device_class, rows) for device_class, rows in values.items()]
        if events:
            found.append(Reading("bmc", (), {}, tuple(events)))
        return tuple(found)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the BMCs and the devices that they report."""
        found: dict[str, Device] = {}
        for poller in self._pollers:
            attributes = {"url": poller.bmc.url, "failure": poller.last_failure or poller.faults.last}
            found[f"bmc:{poller.bmc.name}"] = Device(poller.bmc.parents, attributes)
            found |= poller.devices()
        return found

    def inventory_changed(self) -> bool:
        """Returns whether the devices of a BMC changed since the last call."""
        changed = [poller for poller in self._pollers if poller.changed]
        for poller in changed:
            poller.changed = False
        return bool(changed)

    def close(self) -> None:
        """Stops all threads together and waits briefly for their logouts."""
        for poller in self._pollers:
            poller.stop()
        deadline = self._monotonic() + _CLOSE_S
        for poller in self._pollers:
            poller.join(max(0.0, deadline - self._monotonic()))
        self._pollers = []


def _bmc_signals(poller: BmcPoller) -> dict[str, float]:
    """Returns the signals of the BMC itself. Before its first response, only how long it has been pending."""
    found: dict[str, Any] = {
        "bmc.reachable": poller.reachable,
        "bmc.latency": poller.latency,
        "bmc.pending": poller.pending_seconds(),
        "bmc.requests": poller.session.requests,
        "bmc.failures": poller.failures,
    }
    return {signal: float(value) for signal, value in found.items() if value is not None}


def _make_reading(device_class: str, rows: Mapping[str, Mapping[str, float]]) -> Reading:
    """Returns a reading with a column for each signal that any entity has."""
    signals = dict.fromkeys(signal for row in rows.values() for signal in row)
    return Reading(
        device_class,
        tuple(rows),
        {signal: signal_column(signal, [row.get(signal) for row in rows.values()]) for signal in signals},
    )
