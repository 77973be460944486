"""Network ports from /sys/class/net: state, speed, traffic and error counters, attributes and role."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.kernel_files import ProcFile
from agents.collectors.nic import ports as hardware
from agents.collectors.nic import roles
from agents.collectors.nic.link_state import LinkStateEvents
from agents.collectors.nic.ports import (
    SOFTWARE_RDMA,
    PortHardware,
    RdmaPort,
    hardware_facts,
    is_selected,
    is_virtual_function,
    rdma_ports_by_interface,
)
from agents.collectors.nic.roles import ROLES_SETTING
from agents.collectors.nic.sysfs import list_names, read_sysfs_text
from pipeline.model.records import Event


def interface_attributes(interface: str, net: Path) -> dict[str, object]:
    """Returns the attributes of one interface, without its role."""
    folder = net / interface
    facts: dict[str, object] = {"interface": interface}
    if address := read_sysfs_text(folder / "address"):
        facts["address"] = address
    if (folder / "wireless").exists():
        facts["wireless"] = True
    return facts | hardware_facts(folder / "device")


def all_interface_attributes(
    ports: Iterable[tuple[str, bool]], rdma: set[str], net: Path, proc: Path, chosen: Mapping[str, str]
) -> list[dict[str, object]]:
    """Returns the attributes of interfaces, each given with whether it was up at first. `rdma`: names whose role
    infiniband reports.
    """
    ports, carrying = list(ports), roles.default_route_interfaces(proc, net)
    places = [os.path.realpath(net / name / "device") for name, _ in ports]
    near = roles.ports_near_gpus(places, roles.gpu_device_paths(net.parent.parent))
    found = []
    for (name, up), close in zip(ports, near, strict=True):
        facts = interface_attributes(name, net)
        if name not in rdma:
            at = roles.PortTraits(rdma=False, near_gpu=close, default_route=name in carrying, up=up)
            facts["role"] = chosen.get(name) or roles.port_role(at)
        found.append(facts)
    return found


_ERRORS_S, _RESCAN_S = 5.0, 30.0
_TRAFFIC = {
    "nic.rx_bytes": ("statistics/rx_bytes", 1.0),
    "nic.tx_bytes": ("statistics/tx_bytes", 1.0),
    "nic.rx_packets": ("statistics/rx_packets", _ERRORS_S),
    "nic.tx_packets": ("statistics/tx_packets", _ERRORS_S),
}
_COUNTERS = {
    **_TRAFFIC,
    "nic.rx_errors": ("statistics/rx_errors", _ERRORS_S),
    "nic.tx_errors": ("statistics/tx_errors", _ERRORS_S),
    "nic.rx_dropped": ("statistics/rx_dropped", _ERRORS_S),
    "nic.tx_dropped": ("statistics/tx_dropped", _ERRORS_S),
    "nic.crc_errors": ("statistics/rx_crc_errors", _ERRORS_S),
    "nic.carrier_changes": ("carrier_changes", 1.0),
    "nic.carrier_downs": ("carrier_down_count", 1.0),
    "nic.rx_missed": ("statistics/rx_missed_errors", _ERRORS_S),
    "nic.rx_length_errors": ("statistics/rx_length_errors", _ERRORS_S),
    "nic.rx_frame_errors": ("statistics/rx_frame_errors", _ERRORS_S),
    "nic.tx_carrier_errors": ("statistics/tx_carrier_errors", _ERRORS_S),
}
_RHYTHMS = sorted({1.0, _ERRORS_S, _RESCAN_S, hardware.HARDWARE_INTERVAL_S})
_MISSING = np.iinfo(np.uint64).max


class _Port:
    """One interface with its open files. rdma: the RDMA port it belongs to, which reports state, speed and hardware."""

    def __init__(self, folder: Path, rdma: RdmaPort | None) -> None:
        self.name, self.rdma = folder.name, rdma
        reported_values = _TRAFFIC if rdma is not None and rdma.counts_traffic else {}
        self.counters = {s: ProcFile(folder / path) for s, (path, _) in _COUNTERS.items() if s not in reported_values}
        self.state = {name: ProcFile(folder / name) for name in ("operstate", "carrier", "speed")}
        self.hardware = PortHardware(folder / "device")
        self.up = _operational_state(self) == 1

    def close(self) -> None:
        """Closes the files of the port."""
        for file in (*self.counters.values(), *self.state.values()):
            file.close()


@dataclass
class Network(Collector):
    """nic.*: one port per interface that is hardware, or carries traffic and matches none of `exclude`.

    `include` takes precedence over `exclude`; both are shell patterns of interface names. The interface of an RDMA port
    has that port's name and adds what the RDMA port does not report. `rdma_exclude` is `exclude` of infiniband.
    """

    name: ClassVar[str] = "network"
    signals: ClassVar[tuple[str, ...]] = ("nic.state", "nic.speed", *_COUNTERS, *hardware.HARDWARE_SIGNALS)
    events: ClassVar[tuple[str, ...]] = ("link_state",)
    root: Path = Path("/sys/class/net")
    proc: Path = Path("/proc")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = (
        "lo",
        *("veth*", "docker*", "br-*", "virbr*", "cni*", "flannel*", "cali*", "cilium*", "lxc*", "kube-*"),
        *("tap*", "tun*", "vnet*", "dummy*", "ifb*", "vxlan*", "podman*"),
    )
    rdma_exclude: tuple[str, ...] = SOFTWARE_RDMA
    roles: Mapping[str, str] = field(default_factory=dict, metadata=ROLES_SETTING)
    _ports: dict[str, _Port] = field(default_factory=dict, init=False, repr=False)
    _listed: set[str] = field(default_factory=set, init=False, repr=False)
    _rdma_ports: Mapping[str, RdmaPort] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _schedule: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)
    _link_events: LinkStateEvents = field(default_factory=LinkStateEvents, init=False, repr=False)

    def open(self, node: str) -> None:
        """Checks that there are network interfaces. Raises NoData if not."""
        self._node, self._schedule = node, SamplingSchedule(node, self._now)
        if not self.root.is_dir():
            raise NoData(f"no network interfaces below {self.root}")

    def read(self) -> tuple[Reading, ...]:
        """Returns state and counters of the interfaces that are due, and events of link changes."""
        due = {every: every <= self.interval or self._schedule.due(every) for every in _RHYTHMS}
        events = self._update_interfaces(set(list_names(self.root)), due[_RESCAN_S])
        if not self._ports and events:  # the last one was removed: that is reported first
            return (Reading("nic", (), {}, tuple(events)),)
        if not self._ports:
            raise NoData(f"no network interface below {self.root} is hardware or carries traffic")
        kinds: dict[tuple[str, ...], list[_Port]] = {}
        for port in self._ports.values():
            kinds.setdefault((str(port.rdma is None), *port.counters), []).append(port)
        readings = tuple(self._read_group(ports, due, events) for ports in kinds.values())
        return (*readings[:-1], replace(readings[-1], events=tuple(events)))

    def inventory(self) -> Mapping[str, Device]:
        """Returns the ports with their attributes."""
        ports = [(port.name, port.up) for port in self._ports.values()]
        rdma = {port.name for port in self._ports.values() if port.rdma is not None}
        facts = all_interface_attributes(ports, rdma, self.root, self.proc, self.roles)
        return {
            self._port_entity(n): Device((f"node:{self._node}",), f) for (n, _), f in zip(ports, facts, strict=True)
        }

    def close(self) -> None:
        """Closes the files of all ports."""
        for port in self._ports.values():
            port.close()
        self._ports = {}

    def _port_entity(self, interface: str) -> str:
        rdma = self._ports[interface].rdma
        return f"port:{self._node}.{rdma.name if rdma else interface}"

    def _read_group(self, ports: list[_Port], due: Mapping[float, bool], events: list[Event]) -> Reading:
        """Reads the ports of one kind, all of which have the same signals."""
        columns: dict[str, Any] = {}
        if ports[0].rdma is None:
            columns |= self._state_columns(ports, due, events)
        for signal in ports[0].counters:
            if due[_COUNTERS[signal][1]]:
                found = [port.counters[signal].number() for port in ports]
                columns[signal] = np.array([_MISSING if f is None or f < 0 else f for f in found], np.uint64)
        return Reading("nic", tuple(self._port_entity(port.name) for port in ports), columns)

    def _state_columns(self, ports: list[_Port], due: Mapping[float, bool], events: list[Event]) -> dict[str, Any]:
        """Returns the states, and if due speed and hardware. Adds an event for each changed state."""
        states, time = [_operational_state(port) for port in ports], self._now()
        for port, state in zip(ports, states, strict=True):
            name = "" if np.isnan(state) else "up" if state else "down"
            if event := self._link_events.update(time, self._port_entity(port.name), name, state == 1):
                events.append(event)
        columns: dict[str, Any] = {"nic.state": np.array(states)}
        if due[_ERRORS_S]:
            columns["nic.speed"] = np.array([_or_nan(port.state["speed"].number()) for port in ports])
        if due[hardware.HARDWARE_INTERVAL_S]:
            columns |= hardware.hardware_columns(port.hardware for port in ports)
        return columns

    def _update_interfaces(self, names: set[str], rescan: bool) -> list[Event]:
        """Opens new interfaces and closes removed ones. A selected interface stays until it is removed.

        Interfaces that were not selected are checked again only every 30 s: a host of containers has hundreds.
        """
        new = names if rescan else names - self._listed
        if new:
            self._rdma_ports = rdma_ports_by_interface(self.root.parent / "infiniband", self.root, self.rdma_exclude)
        events: list[Event | None] = []
        for name, port in list(self._ports.items()):
            if name not in names:
                events.append(self._link_events.port_removed(self._now(), self._port_entity(name)))
            elif port.rdma == self._rdma_ports.get(name) and port.state["operstate"].text() is not None:
                continue
            self._ports.pop(name).close()
            new = new | {name} & names
        for name in sorted(new - self._ports.keys()):
            if self._is_selected(name):
                self._ports[name] = _Port(self.root / name, self._rdma_ports.get(name))
        self._ports, self._listed = dict(sorted(self._ports.items())), names
        events += self._link_events.pending_removals(self._now(), map(self._port_entity, self._ports))
        return [event for event in events if event is not None]

    def _is_selected(self, name: str) -> bool:
        device = self.root / name / "device"
        if is_selected(name, self.include, ("*",)):
            return True
        if not is_selected(name, (), self.exclude) or is_virtual_function(device):
            return False
        return device.exists() or read_sysfs_text(self.root / name / "carrier") == "1"


def _operational_state(port: _Port) -> float:
    """Returns 1 for up, 0 for down. Drivers that never set operstate report `unknown`; then the carrier decides."""
    text = (port.state["operstate"].text() or "").strip()
    if text == "unknown":
        return _or_nan(port.state["carrier"].number())
    return float(text == "up") if text else np.nan


def _or_nan(found: int | None) -> float:
    return np.nan if found is None else found
