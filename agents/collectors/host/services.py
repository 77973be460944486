"""Services that must run, as systemd has them, over D-Bus: state, restarts, and an event at each change of state.

The bus is a local socket of which every read and write has a time-out, so that no look can hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.columns import count_column
from agents.collectors.host.dbus import Bus, Refused
from pipeline.model.records import SECOND, Event, iso

_SYSTEMD, _ROOT = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
_MANAGER, _PROPERTIES = "org.freedesktop.systemd1.Manager", "org.freedesktop.DBus.Properties"
_ABSENT = "absent"
_STATES = ("inactive", "active", "reloading", "failed", "activating", "deactivating", "maintenance", _ABSENT)
_SUFFIXES = (".service", ".socket", ".target", ".timer", ".mount", ".path", ".slice", ".scope", ".swap", ".automount")
_LATEST = 253402300800 * SECOND  # the year 10000, beyond which no time can be written
MAX_UNITS = 64
"""Most units of one node; chosen: each costs two calls of systemd at every look."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit as systemd lists it. state: its ActiveState, or `absent`; path: its object on the bus."""

    state: str
    path: str


def listed(rows: object) -> dict[str, Unit]:
    """The answer of ListUnitsByNames, by full name: name, description, load state, active state, sub state, ..., path.

    Rows of another shape are left out.
    """
    found = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, tuple) and len(row) > 6 and all(isinstance(word, str) for word in row[:7]):
            found[row[0]] = Unit(_ABSENT if row[2] == "not-found" else row[3], row[6])
    return found


@dataclass
class Services(Collector):
    """service.*: one entity per unit of `units` that is installed, and per unit of `required` in any case.

    bus: the socket of the system bus. patience: seconds that systemd may take for one answer.
    """

    name: ClassVar[str] = "services"
    signals: ClassVar[tuple[str, ...]] = ("service.state", "service.restarts")
    events: ClassVar[tuple[str, ...]] = ("service",)
    interval: float = 15.0
    bus: str = "/run/dbus/system_bus_socket"
    units: tuple[str, ...] = (
        *("nvidia-fabricmanager", "nvidia-persistenced", "nvidia-imex", "nvidia-dcgm"),
        *("slurmd", "kubelet"),
    )
    required: tuple[str, ...] = ()
    patience: float = 1.0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _bus: Bus | None = field(default=None, init=False, repr=False)
    _known: dict[str, Unit] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node = node
        self._required = tuple(map(_full, self.required))
        self._names = list(dict.fromkeys((*self._required, *map(_full, self.units))))[:MAX_UNITS]
        try:
            self._bus = Bus(self.bus, self.patience)
        except (OSError, Refused) as failed:
            raise NoData(f"{self.bus}: {failed}; wanted the system bus of a host with systemd") from failed

    def read(self) -> tuple[Reading, ...]:
        if self._bus is None:
            raise NoData(f"{self.bus}: closed; wanted the system bus")
        try:
            units = self._look(self._bus)
            restarts = [_restarts(self._bus, name, unit) for name, unit in units.items()]
            events = tuple(self._event(self._bus, n, u) for n, u in units.items() if self._changed(n, u))
        except (OSError, Refused) as failed:
            raise NoData(f"{self.bus}: {failed}; wanted an answer of systemd") from failed
        self._known |= units
        if not units:
            raise NoData(f"none of these is installed: {', '.join(self._names)}")
        states = [_STATES.index(u.state) if u.state in _STATES else np.nan for u in units.values()]
        columns = {"service.state": np.array(states), "service.restarts": count_column(restarts)}
        return (Reading("service", tuple(map(self._entity, units)), columns, events),)

    def inventory(self) -> Mapping[str, Device]:
        units = {name: unit for name, unit in self._known.items() if self._wanted(name, unit)}
        facts = {name: {"unit": name, "required": name in self._required} for name in units}
        return {self._entity(name): Device((f"node:{self._node}",), facts[name]) for name in units}

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def _look(self, bus: Bus) -> dict[str, Unit]:
        """Units in the order of configuration; those that are neither installed nor required are left out."""
        (rows,) = bus.call(_SYSTEMD, _ROOT, _MANAGER, "ListUnitsByNames", self._names)
        found = listed(rows)
        self._known = {n: unit for n, unit in self._known.items() if n in found and self._wanted(n, found[n])}
        return {name: found[name] for name in self._names if name in found and self._wanted(name, found[name])}

    def _wanted(self, name: str, unit: Unit) -> bool:
        return unit.state != _ABSENT or name in self._required

    def _changed(self, name: str, unit: Unit) -> bool:
        return name in self._known and self._known[name].state != unit.state

    def _event(self, bus: Bus, name: str, unit: Unit) -> Event:
        since = None if unit.state == _ABSENT else _get(bus, unit.path, "Unit", "StateChangeTimestamp")
        began = iso(since) if isinstance(since, int) and 0 < since < _LATEST else None
        data = {"unit": name, "from": self._known[name].state, "to": unit.state, "since": began}
        return Event(self._now(), self._entity(name), "service", data)

    def _entity(self, name: str) -> str:
        return f"service:{self._node}.{name.removesuffix('.service')}"


def _restarts(bus: Bus, name: str, unit: Unit) -> int | None:
    """systemd's count; 0 again after `systemctl reset-failed` or a start by hand."""
    if unit.state == _ABSENT or not name.endswith(".service"):
        return None
    found = _get(bus, unit.path, "Service", "NRestarts")
    return found if isinstance(found, int) else None


def _get(bus: Bus, path: str, interface: str, name: str) -> object:
    """A property of a unit; None if this systemd does not have it (NRestarts came with 235)."""
    try:
        (found,) = bus.call(_SYSTEMD, path, _PROPERTIES, "Get", f"{_SYSTEMD}.{interface}", name)
    except Refused:
        return None
    return found


def _full(name: str) -> str:
    """Name of the unit; without a suffix it is a service, as in systemctl."""
    return name if name.endswith(_SUFFIXES) else f"{name}.service"
