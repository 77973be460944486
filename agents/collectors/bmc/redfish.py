"""What Redfish tells of power, coolant, leaks and the BMCs themselves: one thread per BMC, within its budget.

Power and coolant are one collector, since one BMC has one budget: exactly one request is under way to each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.bmc.redfish_settings import Bmc
from agents.collectors.columns import signal_column
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event
from pipeline.model.signals import signals_of_class

if TYPE_CHECKING:
    from agents.collectors.bmc.redfish_poller import Watch

_CLASSES = ("power", "psu", "battery", "coolant", "leak", "bmc")
_SENSORS = tuple(f"sensor.{n}" for n in ("temperature", "voltage", "current", "power", "fan_speed", "ratio", "alarm"))
_BMC_S = 10.0
"""How often each BMC's own state is told, besides at its change."""
_CLOSE_S = 2.0
"""Longest wait at the end for sessions to be given back, over all BMCs."""
MAX_BMCS = 64
"""Most BMCs of one agent; chosen: a row of racks has a coolant unit or two, and a dozen shelves and PDUs per rack."""
Values = dict[str, dict[str, dict[str, float]]]


@dataclass
class Redfish(Collector):
    """power.*, psu.*, battery.*, coolant.*, leak.*, bmc.*, and sensor.* where wanted, of the BMCs in `bmcs`.

    Each is read by threads of its own; a look takes what came since the last one and never waits. A cdu bears the flow
    of its secondary connectors together, and the mean of their temperatures and pressures.
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
    bmcs: tuple[Bmc, ...] = ()
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _watches: list[Any] = field(default_factory=list, init=False, repr=False)
    _reachable: dict[str, bool | None] = field(default_factory=dict, init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)

    def __post_init__(self) -> None:
        names = Counter(bmc.name for bmc in self.bmcs)
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            found = f"name = {', '.join(map(repr, twice))} stands more than once"
            raise ConfigError(f"[[collector.redfish.bmcs]]: {found}; wanted another name for each BMC")
        if len(self.bmcs) > MAX_BMCS:
            raise ConfigError(f"[[collector.redfish.bmcs]]: {len(self.bmcs)} BMCs; wanted at most {MAX_BMCS} per agent")

    def wanted(self) -> bool:
        return bool(self.bmcs)

    def open(self, node: str) -> None:
        if not self.bmcs:
            raise NoData("no BMC is configured; wanted [[collector.redfish.bmcs]] with name and url of each")
        from agents.collectors.bmc.redfish_poller import Watch

        self.close()
        self._rhythm, self._reachable = Rhythm(node, self._now), {}
        self._watches = [Watch(bmc, self._now, self._monotonic) for bmc in self.bmcs]
        for watch in self._watches:
            watch.start()

    def read(self) -> tuple[Reading, ...]:
        if not self._watches:
            raise NoData("it is closed; wanted it opened first")
        values: Values = {}
        events: list[Event] = []
        told = self._rhythm.due(_BMC_S)
        for watch in self._watches:
            watch.mind()
            came, happened = watch.mail.take()
            events += happened
            for entity, (device_class, signals) in came.items():
                values.setdefault(device_class, {})[entity] = signals
            if told or watch.reachable is not self._reachable.get(watch.bmc.name):
                self._reachable[watch.bmc.name] = watch.reachable
                values.setdefault("bmc", {})[f"bmc:{watch.bmc.name}"] = _state(watch)
        found = [_reading(device_class, rows) for device_class, rows in values.items()]
        if events:
            found.append(Reading("bmc", (), {}, tuple(events)))
        return tuple(found)

    def inventory(self) -> Mapping[str, Device]:
        found: dict[str, Device] = {}
        for watch in self._watches:
            told = {"url": watch.bmc.url, "failure": watch.reason or watch.faults.newest}
            found[f"bmc:{watch.bmc.name}"] = Device(watch.bmc.parents, told)
            found |= watch.devices()
        return found

    def renewed(self) -> bool:
        changed = [watch for watch in self._watches if watch.changed]
        for watch in changed:
            watch.changed = False
        return bool(changed)

    def close(self) -> None:
        """Stops all threads at once and waits a little, so that sessions are given back."""
        for watch in self._watches:
            watch.stop()
        until = self._monotonic() + _CLOSE_S
        for watch in self._watches:
            watch.join(max(0.0, until - self._monotonic()))
        self._watches = []


def _state(watch: Watch) -> dict[str, float]:
    """What is known of the BMC itself; of one that was never heard, how long it has been waited for."""
    found: dict[str, Any] = {
        "bmc.reachable": watch.reachable,
        "bmc.latency": watch.latency,
        "bmc.pending": watch.pending(),
        "bmc.requests": watch.session.requests,
        "bmc.failures": watch.failures,
    }
    return {signal: float(value) for signal, value in found.items() if value is not None}


def _reading(device_class: str, rows: Mapping[str, Mapping[str, float]]) -> Reading:
    """A reading with a column for each signal that came of any entity."""
    signals = dict.fromkeys(signal for row in rows.values() for signal in row)
    return Reading(
        device_class,
        tuple(rows),
        {signal: signal_column(signal, [row.get(signal) for row in rows.values()]) for signal in signals},
    )
