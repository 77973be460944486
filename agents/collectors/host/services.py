"""Services that must run, from systemd over D-Bus: state, restarts, and an event at each change of state.

The bus is a local socket with a timeout for every read and write, so no read can hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.columns import count_column
from agents.collectors.host.dbus import DBusConnection, DBusError
from pipeline.model.records import SECOND, Event, iso

_SYSTEMD, _ROOT = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
_MANAGER, _PROPERTIES = "org.freedesktop.systemd1.Manager", "org.freedesktop.DBus.Properties"
_ABSENT = "absent"
_STATES = ("inactive", "active", "reloading", "failed", "activating", "deactivating", "maintenance", _ABSENT)
_SUFFIXES = (".service", ".socket", ".target", ".timer", ".mount", ".path", ".slice", ".scope", ".swap", ".automount")
_MAX_TIME = 253402300800 * SECOND  # the year 10000, the end of times that can be written
MAX_UNITS = 64
"""Most units of one node. Chosen: each costs two calls of systemd at every read."""


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """One unit as systemd lists it. state: its ActiveState, or `absent`; path: its object on the bus."""

    state: str
    path: str


def parse_unit_list(rows: object) -> dict[str, SystemdUnit]:
    """Parses the result of ListUnitsByNames, by full name: name, description, load state, active state, sub state, ...,
    path.

    Rows in another format are skipped.
    """
    found = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, tuple) and len(row) > 6 and all(isinstance(word, str) for word in row[:7]):
            found[row[0]] = SystemdUnit(_ABSENT if row[2] == "not-found" else row[3], row[6])
    return found


@dataclass
class Services(Collector):
    """service.*: one entity per installed unit of `units`, and per unit of `required` in any case.

    bus: socket of the system bus. patience: seconds that systemd may take for one response.
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
    _bus: DBusConnection | None = field(default=None, init=False, repr=False)
    _last_units: dict[str, SystemdUnit] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node = node
        self._required = tuple(map(_full_unit_name, self.required))
        self._names = list(dict.fromkeys((*self._required, *map(_full_unit_name, self.units))))[:MAX_UNITS]
        try:
            self._bus = DBusConnection(self.bus, self.patience)
        except (OSError, DBusError) as failed:
            raise NoData(f"{self.bus}: {failed}; expected the system bus of a host with systemd") from failed

    def read(self) -> tuple[Reading, ...]:
        if self._bus is None:
            raise NoData(f"{self.bus}: closed; expected an open system bus")
        try:
            units = self._list_units(self._bus)
            restarts = [_read_restarts(self._bus, name, unit) for name, unit in units.items()]
            events = tuple(self._state_event(self._bus, n, u) for n, u in units.items() if self._has_changed(n, u))
        except (OSError, DBusError) as failed:
            raise NoData(f"{self.bus}: {failed}; expected a response of systemd") from failed
        self._last_units |= units
        if not units:
            raise NoData(f"none of these is installed: {', '.join(self._names)}")
        states = [_STATES.index(u.state) if u.state in _STATES else np.nan for u in units.values()]
        columns = {"service.state": np.array(states), "service.restarts": count_column(restarts)}
        return (Reading("service", tuple(map(self._service_entity, units)), columns, events),)

    def inventory(self) -> Mapping[str, Device]:
        units = {name: unit for name, unit in self._last_units.items() if self._is_reported(name, unit)}
        facts = {name: {"unit": name, "required": name in self._required} for name in units}
        return {self._service_entity(name): Device((f"node:{self._node}",), facts[name]) for name in units}

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def _list_units(self, bus: DBusConnection) -> dict[str, SystemdUnit]:
        """Returns units in the order of configuration, without those that are neither installed nor required."""
        (rows,) = bus.call(_SYSTEMD, _ROOT, _MANAGER, "ListUnitsByNames", self._names)
        found = parse_unit_list(rows)
        self._last_units = {
            n: unit for n, unit in self._last_units.items() if n in found and self._is_reported(n, found[n])
        }
        return {name: found[name] for name in self._names if name in found and self._is_reported(name, found[name])}

    def _is_reported(self, name: str, unit: SystemdUnit) -> bool:
        return unit.state != _ABSENT or name in self._required

    def _has_changed(self, name: str, unit: SystemdUnit) -> bool:
        return name in self._last_units and self._last_units[name].state != unit.state

    def _state_event(self, bus: DBusConnection, name: str, unit: SystemdUnit) -> Event:
        since = None if unit.state == _ABSENT else _read_property(bus, unit.path, "Unit", "StateChangeTimestamp")
        began = iso(since) if isinstance(since, int) and 0 < since < _MAX_TIME else None
        data = {"unit": name, "from": self._last_units[name].state, "to": unit.state, "since": began}
        return Event(self._now(), self._service_entity(name), "service", data)

    def _service_entity(self, name: str) -> str:
        return f"service:{self._node}.{name.removesuffix('.service')}"


def _read_restarts(bus: DBusConnection, name: str, unit: SystemdUnit) -> int | None:
    """Returns systemd's count. It is 0 again after `systemctl reset-failed` or a manual start."""
    if unit.state == _ABSENT or not name.endswith(".service"):
        return None
    found = _read_property(bus, unit.path, "Service", "NRestarts")
    return found if isinstance(found, int) else None


def _read_property(bus: DBusConnection, path: str, interface: str, name: str) -> object:
    """Returns a property of a unit; None if this systemd does not have it (NRestarts came with 235)."""
    try:
        (found,) = bus.call(_SYSTEMD, path, _PROPERTIES, "Get", f"{_SYSTEMD}.{interface}", name)
    except DBusError:
        return None
    return found


def _full_unit_name(name: str) -> str:
    """Returns the full name of the unit. Without a suffix it is a service, as in systemctl."""
    return name if name.endswith(_SUFFIXES) else f"{name}.service"
