"""RDMA ports (InfiniBand and RoCE) from /sys/class/infiniband: state, speed, counters, what they are and are for.

What an RDMA port is: the attributes by which bad batches, wrong firmware and mixed-up cables are found.

The character devices by which programs use an RDMA port: uverbs for data, umad and issm for management.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.nic import ports as hardware
from agents.collectors.nic import roles
from agents.collectors.nic.link_state import Edges
from agents.collectors.nic.ports import SOFTWARE, Hardware, RdmaPort, hardware_facts, interface_of, rdma_ports
from agents.collectors.nic.rdma_counters import COUNTERS, Ceilings, PortCounter
from agents.collectors.nic.roles import ROLES
from agents.collectors.nic.sysfs import Attribute, names_in, once
from pipeline.model.records import Event


def char_devices(sys_class: Path) -> Mapping[str, tuple[str, ...]]:
    """`mlx5_0` -> its uverbs, `mlx5_0.1` -> umad and issm of its port 1; from infiniband_verbs and infiniband_mad."""
    found: dict[str, tuple[str, ...]] = {}
    for folder in ("infiniband_verbs", "infiniband_mad"):
        for name in names_in(sys_class / folder):
            device = once(sys_class / folder / name / "ibdev")
            port = once(sys_class / folder / name / "port")
            if device:
                key = f"{device}.{port}" if port else device
                found[key] = (*found.get(key, ()), name)
    return found


def usable(devices: Mapping[str, tuple[str, ...]], device: str, port: int, ethernet: bool) -> bool:
    """Whether a port has what programs need: uverbs, and on InfiniBand umad and issm too (rdma_cap_ib_smi)."""
    verbs = any(name.startswith("uverbs") for name in devices.get(device, ()))
    managed = {name.rstrip("0123456789") for name in devices.get(f"{device}.{port}", ())}
    return verbs and (ethernet or {"umad", "issm"} <= managed)


_OF_DEVICE = ("fw_ver", "board_id", "hca_type", "node_guid", "sys_image_guid", "node_desc")
_OF_PORT = ("link_layer", "lid", "sm_lid")


def facts_of(port: RdmaPort, net: Path, devices: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    """The attributes of one port, without its role; what the driver does not tell is not among them."""
    device = port.folder.parents[1]
    found: dict[str, object] = {"device": port.device, "port": port.number}
    found |= {name: text for name in _OF_DEVICE if (text := once(device / name))}
    found |= {name: text for name in _OF_PORT if (text := once(port.folder / name))}
    gid = once(port.folder / "gids" / "0").split(":")
    if len(gid) == 8:  # the lower half of a port's first address is its GUID (IBTA specification 4.1.1)
        found["port_guid"] = ":".join(gid[4:])
    if interface := interface_of(port, net):
        found["interface"] = interface
    nodes = (*devices.get(port.device, ()), *devices.get(f"{port.device}.{port.number}", ()))
    if nodes:
        found["char_devices"] = sorted(nodes)
    return found | hardware_facts(port.hardware)


def port_facts(
    ports: Iterable[tuple[RdmaPort, bool, bool]], sys_class: Path, proc: Path, chosen: Mapping[str, str]
) -> list[dict[str, object]]:
    """The attributes of all ports of a node, each given with whether it is Ethernet and whether it was up at first."""
    ports, net = list(ports), sys_class / "net"
    devices, carrying = char_devices(sys_class), roles.carrying(proc, net)
    near = roles.near_gpu([os.path.realpath(p.hardware) for p, _, _ in ports], roles.gpu_places(sys_class.parent))
    mixed = not all(ethernet for _, ethernet, _ in ports)
    found = []
    for (port, ethernet, up), close in zip(ports, near, strict=True):
        facts = facts_of(port, net, devices)
        interface = str(facts.get("interface", ""))
        told = next((chosen[n] for n in (port.name, port.device, interface) if n in chosen), None)
        facts["role"] = told or roles.role(roles.Facts(True, ethernet, close, interface in carrying, up, mixed))
        found.append(facts)
    return found


_MISSING = np.iinfo(np.uint64).max
_ACTIVE, _LINK_UP = 4, 5  # IBTA specification 14.2.5.6: PortState, PortPhysicalState
_RATE = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?) Gb/sec(?: \((\d{1,2})X)?")
_SPEED_S = 5.0
RESCAN_S = 30.0
"""How often ports that came are looked for; chosen: as often as their devices. One that went is seen at once."""
_RHYTHMS = sorted({_SPEED_S, RESCAN_S, hardware.HARDWARE_EVERY_S, *(c.every for c in COUNTERS)})
STATE_REST_S = 60.0
"""How long a state that could not be read is left alone; chosen: a reset of the NIC's firmware takes 10 to 60 s."""
KEPT = 12
"""Ports whose files stay open between looks; chosen: 35 files each are below the usual limit of 1024."""
_STATE_SIGNALS = ("nic.state", "nic.logical_state", "nic.phys_state", "nic.speed", "nic.width", "nic.usable")


def leading_number(text: str | None) -> float:
    """`4: ACTIVE` -> 4; NaN if that is not how the text begins."""
    head = (text or "").partition(":")[0].strip()
    return float(head) if head.isascii() and head.isdigit() and len(head) < 4 else np.nan


def rate_and_width(text: str | None) -> tuple[float, float]:
    """`400 Gb/sec (4X NDR)` -> 400000 Mbit/s and 4 lanes; NaN for what is not there."""
    found = _RATE.match(text or "")
    if found is None:
        return np.nan, np.nan
    return float(found[1]) * 1000, float(found[2]) if found[2] else np.nan


def _counter_files(port: RdmaPort) -> set[str]:
    return {f"{part}/{name}" for part in ("counters", "hw_counters") for name in names_in(port.folder / part)}


class _Port:
    """One port with its files."""

    def __init__(self, port: RdmaPort, keep: bool) -> None:
        self.at = port
        self.state, self.phys_state, self.rate = (
            Attribute(port.folder / name, keep, STATE_REST_S) for name in ("state", "phys_state", "rate")
        )
        self.there = _counter_files(port)
        self.counters = {
            c.signal: Attribute(port.folder / c.file, keep and c.every <= _SPEED_S)
            for c in COUNTERS
            if c.file in self.there
        }
        self.hardware = Hardware(port.hardware)
        self.ethernet = once(port.folder / "link_layer") == "Ethernet"
        self.up = leading_number(once(port.folder / "state")) == _ACTIVE

    def close(self) -> None:
        for file in (self.state, self.phys_state, self.rate, *self.counters.values()):
            file.close()


@dataclass
class Infiniband(Collector):
    """nic.*: one entity per port of an RDMA device; `include` wins over `exclude`, both are shell patterns of devices.

    roles: what a port is for, by name of device, port or interface, where the rule (roles.py) is wrong.
    """

    name: ClassVar[str] = "infiniband"
    signals: ClassVar[tuple[str, ...]] = (*_STATE_SIGNALS, *(c.signal for c in COUNTERS), *hardware.HARDWARE_SIGNALS)
    events: ClassVar[tuple[str, ...]] = ("link_state", "counter_saturated", "counter_wrapped")
    root: Path = Path("/sys/class/infiniband")
    proc: Path = Path("/proc")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = SOFTWARE
    roles: Mapping[str, str] = field(default_factory=dict, metadata=ROLES)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _ports: dict[str, _Port] = field(default_factory=dict, init=False, repr=False)
    _active: tuple[PortCounter, ...] = field(default=(), init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)
    _edges: Edges = field(default_factory=Edges, init=False, repr=False)
    _ceilings: Ceilings = field(default_factory=Ceilings, init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._rhythm = node, Rhythm(node, self._now)
        if not names_in(self.root):
            raise NoData(f"no RDMA device below {self.root}: no RDMA adapter, or no driver for it")
        self._scan(self._now())

    def read(self) -> tuple[Reading, ...]:
        time = self._now()
        gone = any(port.state.gone for port in self._ports.values())
        due = {every: every <= self.interval or self._rhythm.due(every) for every in _RHYTHMS}
        events = self._scan(time) if due[RESCAN_S] or gone else []
        events += self._edges.late(time, self._ports)
        if not self._ports and events:  # the last one went: that is told first
            return (Reading("nic", (), {}, tuple(events)),)
        if not self._ports:
            raise NoData(f"no port of the devices below {self.root} is wanted: excluded, or virtual functions")
        columns = self._states(time, events)
        for counter in self._active:
            if due[counter.every]:
                columns[counter.signal] = self._count(counter, time, events)
        columns |= self._speeds(columns["nic.phys_state"]) if due[_SPEED_S] else {}
        columns |= self._hardware() if due[hardware.HARDWARE_EVERY_S] else {}
        return (Reading("nic", tuple(self._ports), columns, tuple(events)),)

    def inventory(self) -> Mapping[str, Device]:
        ports = [(port.at, port.ethernet, port.up) for port in self._ports.values()]
        facts = port_facts(ports, self.root.parent, self.proc, self.roles)
        return {e: Device((f"node:{self._node}",), f) for e, f in zip(self._ports, facts, strict=True)}

    def close(self) -> None:
        for port in self._ports.values():
            port.close()
        self._ports = {}

    def _scan(self, time: int) -> list[Event]:
        """Opens ports that came and closes those that went; the events of the latter."""
        found = {f"port:{self._node}.{p.name}": p for p in rdma_ports(self.root, self.include, self.exclude)}
        events = [self._let_go(e, time) for e, p in list(self._ports.items()) if e not in found or p.state.gone]
        ports: dict[str, _Port] = {}
        for entity, port in found.items():
            known = self._ports.get(entity)
            if known is not None and known.there != _counter_files(port):  # its driver was not ready, or is another
                known.close()
                known = None
            ports[entity] = known or _Port(port, keep=len(ports) < KEPT)
        self._ports = ports
        self._active = tuple(c for c in COUNTERS if any(c.signal in p.counters for p in ports.values()))
        return [event for event in events if event is not None]

    def _let_go(self, entity: str, time: int) -> Event | None:
        self._ports.pop(entity).close()
        self._ceilings.forget(entity)
        return self._edges.gone(time, entity)

    def _states(self, time: int, events: list[Event]) -> dict[str, Any]:
        """State of every port, told as an event where it changed."""
        logical = np.full(len(self._ports), np.nan)
        physical = np.full(len(self._ports), np.nan)
        for i, (entity, port) in enumerate(self._ports.items()):
            text = port.state.text()
            logical[i], physical[i] = leading_number(text), leading_number(port.phys_state.text())
            name = (text or "").partition(":")[2].strip().lower()
            if name and (event := self._edges.look(time, entity, name, logical[i] == _ACTIVE)):
                events.append(event)
        up = np.where(np.isnan(logical), np.nan, logical == _ACTIVE)
        return {"nic.state": up, "nic.logical_state": logical, "nic.phys_state": physical}

    def _count(self, counter: PortCounter, time: int, events: list[Event]) -> NDArray[np.uint64]:
        """One counter of all ports, in the catalogue's unit."""
        column = np.full(len(self._ports), _MISSING, np.uint64)
        for i, (entity, port) in enumerate(self._ports.items()):
            file = port.counters.get(counter.signal)
            value = file.number() if file else None
            if value is None or not 0 <= value * counter.scale < _MISSING:
                continue
            column[i] = value * counter.scale
            if counter.bits < 64 and (event := self._ceilings.look(time, entity, counter, value)):
                events.append(event)
        return column

    def _speeds(self, physical: NDArray[np.float64]) -> dict[str, Any]:
        """Speed and lanes of the links that are up: what the kernel says of one that is down is only a default."""
        rates = np.array([rate_and_width(port.rate.text()) for port in self._ports.values()])
        rates[physical != _LINK_UP] = np.nan
        return {"nic.speed": rates[:, 0], "nic.width": rates[:, 1]}

    def _hardware(self) -> dict[str, Any]:
        """Whether programs can use the ports, and what is below them."""
        ports, devices = self._ports.values(), char_devices(self.root.parent)
        found = [usable(devices, p.at.device, p.at.number, p.ethernet) for p in ports]
        return {"nic.usable": np.array(found, np.uint8), **hardware.hardware_columns(port.hardware for port in ports)}
