"""RDMA ports (InfiniBand and RoCE) from /sys/class/infiniband: state, speed, counters, attributes and role."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.nic import ports as hardware
from agents.collectors.nic import roles
from agents.collectors.nic.link_state import LinkStateEvents
from agents.collectors.nic.ports import (
    SOFTWARE_RDMA,
    PortHardware,
    RdmaPort,
    hardware_facts,
    interface_of_port,
    rdma_ports,
)
from agents.collectors.nic.rdma_counters import RDMA_COUNTERS, CounterLimitWatch, PortCounter
from agents.collectors.nic.roles import ROLES_SETTING
from agents.collectors.nic.sysfs import SysfsFile, list_names, read_sysfs_text
from pipeline.model.records import Event


def char_devices(sys_class: Path) -> Mapping[str, tuple[str, ...]]:
    """Returns the character devices by which programs use RDMA ports: `mlx5_0` -> its uverbs, `mlx5_0.1` -> umad and
    issm of port 1.

    uverbs is for data, umad and issm are for management. From infiniband_verbs and infiniband_mad.
    """
    found: dict[str, tuple[str, ...]] = {}
    for folder in ("infiniband_verbs", "infiniband_mad"):
        for name in list_names(sys_class / folder):
            device = read_sysfs_text(sys_class / folder / name / "ibdev")
            port = read_sysfs_text(sys_class / folder / name / "port")
            if device:
                key = f"{device}.{port}" if port else device
                found[key] = (*found.get(key, ()), name)
    return found


def is_usable(devices: Mapping[str, tuple[str, ...]], device: str, port: int, ethernet: bool) -> bool:
    """Returns whether a port has what programs need: uverbs, and on InfiniBand also umad and issm (rdma_cap_ib_smi)."""
    verbs = any(name.startswith("uverbs") for name in devices.get(device, ()))
    managed = {name.rstrip("0123456789") for name in devices.get(f"{device}.{port}", ())}
    return verbs and (ethernet or {"umad", "issm"} <= managed)


_DEVICE_ATTRIBUTES = ("fw_ver", "board_id", "hca_type", "node_guid", "sys_image_guid", "node_desc")
_PORT_ATTRIBUTES = ("link_layer", "lid", "sm_lid")


def port_attributes(port: RdmaPort, net: Path, devices: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    """Returns the attributes of one port, without its role: firmware, board, addresses. What the driver does not
    provide is left out.
    """
    device = port.folder.parents[1]
    found: dict[str, object] = {"device": port.device, "port": port.number}
    found |= {name: text for name in _DEVICE_ATTRIBUTES if (text := read_sysfs_text(device / name))}
    found |= {name: text for name in _PORT_ATTRIBUTES if (text := read_sysfs_text(port.folder / name))}
    gid = read_sysfs_text(port.folder / "gids" / "0").split(":")
    if len(gid) == 8:  # the lower half of a port's first address is its GUID (IBTA specification 4.1.1)
        found["port_guid"] = ":".join(gid[4:])
    if interface := interface_of_port(port, net):
        found["interface"] = interface
    nodes = (*devices.get(port.device, ()), *devices.get(f"{port.device}.{port.number}", ()))
    if nodes:
        found["char_devices"] = sorted(nodes)
    return found | hardware_facts(port.hardware)


def all_port_attributes(
    ports: Iterable[tuple[RdmaPort, bool, bool]], sys_class: Path, proc: Path, chosen: Mapping[str, str]
) -> list[dict[str, object]]:
    """Returns the attributes of all ports of a node. Each is given with whether it is Ethernet and whether it was up at
    first.
    """
    ports, net = list(ports), sys_class / "net"
    devices, carrying = char_devices(sys_class), roles.default_route_interfaces(proc, net)
    near = roles.ports_near_gpus(
        [os.path.realpath(p.hardware) for p, _, _ in ports], roles.gpu_device_paths(sys_class.parent)
    )
    mixed = not all(ethernet for _, ethernet, _ in ports)
    found = []
    for (port, ethernet, up), close in zip(ports, near, strict=True):
        facts = port_attributes(port, net, devices)
        interface = str(facts.get("interface", ""))
        reported_values = next((chosen[n] for n in (port.name, port.device, interface) if n in chosen), None)
        facts["role"] = reported_values or roles.port_role(
            roles.PortTraits(True, ethernet, close, interface in carrying, up, mixed)
        )
        found.append(facts)
    return found


_MISSING = np.iinfo(np.uint64).max
_ACTIVE, _LINK_UP = 4, 5  # IBTA specification 14.2.5.6: PortState, PortPhysicalState
_RATE = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?) Gb/sec(?: \((\d{1,2})X)?")
_SPEED_S = 5.0
RESCAN_S = 30.0
"""Seconds between two searches for new ports. Chosen: the interval of their devices. A removed port is noticed
immediately."""
_RHYTHMS = sorted({_SPEED_S, RESCAN_S, hardware.HARDWARE_INTERVAL_S, *(c.interval for c in RDMA_COUNTERS)})
STATE_PAUSE_S = 60.0
"""Seconds without reads after a state could not be read. Chosen: a reset of the NIC firmware takes 10 to 60 s."""
MAX_OPEN_PORTS = 12
"""Ports whose files stay open between reads. Chosen: 35 files each stay below the usual limit of 1024."""
_STATE_SIGNALS = ("nic.state", "nic.logical_state", "nic.phys_state", "nic.speed", "nic.width", "nic.usable")


def parse_leading_number(text: str | None) -> float:
    """Returns `4: ACTIVE` as 4; NaN if the text does not start so."""
    head = (text or "").partition(":")[0].strip()
    return float(head) if head.isascii() and head.isdigit() and len(head) < 4 else np.nan


def parse_rate(text: str | None) -> tuple[float, float]:
    """Returns `400 Gb/sec (4X NDR)` as 400000 Mbit/s and 4 lanes; NaN for missing values."""
    found = _RATE.match(text or "")
    if found is None:
        return np.nan, np.nan
    return float(found[1]) * 1000, float(found[2]) if found[2] else np.nan


def _list_counter_files(port: RdmaPort) -> set[str]:
    return {f"{part}/{name}" for part in ("counters", "hw_counters") for name in list_names(port.folder / part)}


class _Port:
    """One port with its open files."""

    def __init__(self, port: RdmaPort, keep: bool) -> None:
        self.rdma_port = port
        self.state, self.phys_state, self.rate = (
            SysfsFile(port.folder / name, keep, STATE_PAUSE_S) for name in ("state", "phys_state", "rate")
        )
        self.counter_files = _list_counter_files(port)
        self.counters = {
            c.signal: SysfsFile(port.folder / c.file, keep and c.interval <= _SPEED_S)
            for c in RDMA_COUNTERS
            if c.file in self.counter_files
        }
        self.hardware = PortHardware(port.hardware)
        self.ethernet = read_sysfs_text(port.folder / "link_layer") == "Ethernet"
        self.up = parse_leading_number(read_sysfs_text(port.folder / "state")) == _ACTIVE

    def close(self) -> None:
        """Closes the files of the port."""
        for file in (self.state, self.phys_state, self.rate, *self.counters.values()):
            file.close()


@dataclass
class Infiniband(Collector):
    """nic.*: one entity per port of an RDMA device. `include` takes precedence over `exclude`, both are shell patterns
    of devices.

    roles: role by name of device, port or interface, where the rules (roles.py) are wrong.
    """

    name: ClassVar[str] = "infiniband"
    signals: ClassVar[tuple[str, ...]] = (
        *_STATE_SIGNALS,
        *(c.signal for c in RDMA_COUNTERS),
        *hardware.HARDWARE_SIGNALS,
    )
    events: ClassVar[tuple[str, ...]] = ("link_state", "counter_saturated", "counter_wrapped")
    root: Path = Path("/sys/class/infiniband")
    proc: Path = Path("/proc")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = SOFTWARE_RDMA
    roles: Mapping[str, str] = field(default_factory=dict, metadata=ROLES_SETTING)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _ports: dict[str, _Port] = field(default_factory=dict, init=False, repr=False)
    _active_counters: tuple[PortCounter, ...] = field(default=(), init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _schedule: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)
    _link_events: LinkStateEvents = field(default_factory=LinkStateEvents, init=False, repr=False)
    _limit_watch: CounterLimitWatch = field(default_factory=CounterLimitWatch, init=False, repr=False)

    def open(self, node: str) -> None:
        """Finds the RDMA ports. Raises NoData without an RDMA device."""
        self._node, self._schedule = node, SamplingSchedule(node, self._now)
        if not list_names(self.root):
            raise NoData(f"no RDMA device below {self.root}: no RDMA adapter, or no driver for it")
        self._update_ports(self._now())

    def read(self) -> tuple[Reading, ...]:
        """Returns state and counters of the ports that are due, and events of link changes."""
        time = self._now()
        gone = any(port.state.gone for port in self._ports.values())
        due = {every: every <= self.interval or self._schedule.due(every) for every in _RHYTHMS}
        events = self._update_ports(time) if due[RESCAN_S] or gone else []
        events += self._link_events.pending_removals(time, self._ports)
        if not self._ports and events:  # the last one was removed: that is reported first
            return (Reading("nic", (), {}, tuple(events)),)
        if not self._ports:
            raise NoData(f"no port of the devices below {self.root} is selected: excluded, or virtual functions")
        columns = self._state_columns(time, events)
        for counter in self._active_counters:
            if due[counter.interval]:
                columns[counter.signal] = self._counter_column(counter, time, events)
        columns |= self._speed_columns(columns["nic.phys_state"]) if due[_SPEED_S] else {}
        columns |= self._hardware_columns() if due[hardware.HARDWARE_INTERVAL_S] else {}
        return (Reading("nic", tuple(self._ports), columns, tuple(events)),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the ports with their attributes."""
        ports = [(port.rdma_port, port.ethernet, port.up) for port in self._ports.values()]
        facts = all_port_attributes(ports, self.root.parent, self.proc, self.roles)
        return {e: Device((f"node:{self._node}",), f) for e, f in zip(self._ports, facts, strict=True)}

    def close(self) -> None:
        """Closes the files of all ports."""
        for port in self._ports.values():
            port.close()
        self._ports = {}

    def _update_ports(self, time: int) -> list[Event]:
        """Opens new ports and closes removed ones. Returns the events of removed ports."""
        found = {f"port:{self._node}.{p.name}": p for p in rdma_ports(self.root, self.include, self.exclude)}
        events = [self._remove_port(e, time) for e, p in list(self._ports.items()) if e not in found or p.state.gone]
        ports: dict[str, _Port] = {}
        for entity, port in found.items():
            known = self._ports.get(entity)
            if known is not None and known.counter_files != _list_counter_files(
                port
            ):  # its driver was not ready, or changed
                known.close()
                known = None
            ports[entity] = known or _Port(port, keep=len(ports) < MAX_OPEN_PORTS)
        self._ports = ports
        self._active_counters = tuple(c for c in RDMA_COUNTERS if any(c.signal in p.counters for p in ports.values()))
        return [event for event in events if event is not None]

    def _remove_port(self, entity: str, time: int) -> Event | None:
        self._ports.pop(entity).close()
        self._limit_watch.drop_port(entity)
        return self._link_events.port_removed(time, entity)

    def _state_columns(self, time: int, events: list[Event]) -> dict[str, Any]:
        """Returns the states of all ports. Adds an event for each changed state."""
        logical = np.full(len(self._ports), np.nan)
        physical = np.full(len(self._ports), np.nan)
        for i, (entity, port) in enumerate(self._ports.items()):
            text = port.state.text()
            logical[i], physical[i] = parse_leading_number(text), parse_leading_number(port.phys_state.text())
            name = (text or "").partition(":")[2].strip().lower()
            if name and (event := self._link_events.update(time, entity, name, logical[i] == _ACTIVE)):
                events.append(event)
        up = np.where(np.isnan(logical), np.nan, logical == _ACTIVE)
        return {"nic.state": up, "nic.logical_state": logical, "nic.phys_state": physical}

    def _counter_column(self, counter: PortCounter, time: int, events: list[Event]) -> NDArray[np.uint64]:
        """Returns one counter of all ports, in the catalogue's unit."""
        column = np.full(len(self._ports), _MISSING, np.uint64)
        for i, (entity, port) in enumerate(self._ports.items()):
            file = port.counters.get(counter.signal)
            value = file.number() if file else None
            if value is None or not 0 <= value * counter.scale < _MISSING:
                continue
            column[i] = value * counter.scale
            if counter.bits < 64 and (event := self._limit_watch.check(time, entity, counter, value)):
                events.append(event)
        return column

    def _speed_columns(self, physical: NDArray[np.float64]) -> dict[str, Any]:
        """Returns speed and lanes of the links that are up.

        For links that are down the kernel reports only a default.
        """
        rates = np.array([parse_rate(port.rate.text()) for port in self._ports.values()])
        rates[physical != _LINK_UP] = np.nan
        return {"nic.speed": rates[:, 0], "nic.width": rates[:, 1]}

    def _hardware_columns(self) -> dict[str, Any]:
        """Returns whether programs can use the ports, and the signals of the hardware below them."""
        ports, devices = self._ports.values(), char_devices(self.root.parent)
        found = [is_usable(devices, p.rdma_port.device, p.rdma_port.number, p.ethernet) for p in ports]
        return {"nic.usable": np.array(found, np.uint8), **hardware.hardware_columns(port.hardware for port in ports)}
