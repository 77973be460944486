"""Which ports there are, and which network interface is which RDMA port: one piece of hardware, one entity.

The rule, for every collector: the interface of an RDMA port bears the name of the RDMA port (`port:NODE.mlx5_0`, a
second port `port:NODE.mlx5_0.2`), any other interface its own. The infiniband collector tells state, speed and traffic
of RDMA ports; network and ethtool tell of their interfaces what it does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from agents.sources.nics.attribute import names_in, once

SOFTWARE = ("rxe*", "siw*")
"""RDMA devices that the kernel makes over any interface (drivers/infiniband/sw): no hardware of their own."""
MAX_PORTS = 256
"""Most ports of one node that are read; chosen: 16 times the largest host that is sold."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device; `folder` is its part of sysfs."""

    device: str
    number: int
    folder: Path

    @property
    def name(self) -> str:
        """What stands behind the node in the entity's name."""
        return self.device if self.number == 1 else f"{self.device}.{self.number}"

    @property
    def hardware(self) -> Path:
        """The folder of the device that the RDMA device sits on: the PCI function."""
        return self.folder.parents[1] / "device"

    @property
    def counts_traffic(self) -> bool:
        """Whether the port has counters of its own; drivers other than mlx4 and mlx5 have often none."""
        return (self.folder / "counters" / "port_rcv_data").exists()


def wanted(name: str, include: Iterable[str], exclude: Iterable[str], otherwise: bool = True) -> bool:
    """Whether a name is chosen by shell patterns; `include` wins over `exclude`."""
    if any(fnmatch(name, pattern) for pattern in include):
        return True
    return otherwise and not any(fnmatch(name, pattern) for pattern in exclude)


def is_virtual_function(hardware: Path) -> bool:
    """Whether a PCI device is a share of another one (SR-IOV): no port of its own, and there may be hundreds."""
    return (hardware / "physfn").exists()


def rdma_ports(root: Path, include: Iterable[str] = (), exclude: Iterable[str] = SOFTWARE) -> list[RdmaPort]:
    """The ports below /sys/class/infiniband, in order of name."""
    include, exclude = tuple(include), tuple(exclude)
    found = [
        RdmaPort(device, int(port), root / device / "ports" / port)
        for device in names_in(root)
        if wanted(device, include, exclude, not is_virtual_function(root / device / "device"))
        for port in names_in(root / device / "ports")
        if port.isdigit()
    ]
    return sorted(found, key=lambda port: (port.device, port.number))[:MAX_PORTS]


def interface_of(port: RdmaPort, net: Path) -> str:
    """The interface of a port: that of its first address, else the one of the same PCI function; empty if none.

    The first address of a bond's RDMA device names the bond, so that its members stay ports of their own.
    """
    first = once(port.folder / "gid_attrs" / "ndevs" / "0")
    if first and "/" not in first and (net / first).exists():
        return first
    for name in names_in(port.hardware / "net"):
        place = once(net / name / "dev_port") or once(port.hardware / "net" / name / "dev_port") or "0"
        if place == str(port.number - 1):
            return name
    return ""


def owners(rdma: Path, net: Path, exclude: Iterable[str] = SOFTWARE) -> Mapping[str, RdmaPort]:
    """interface -> the RDMA port that it belongs to."""
    found: dict[str, RdmaPort] = {}
    for port in rdma_ports(rdma, (), exclude):
        if interface := interface_of(port, net):
            found.setdefault(interface, port)
    return found


def hardware_facts(hardware: Path) -> dict[str, object]:
    """What sysfs says of the device below a port: its address, driver and memory node."""
    facts: dict[str, object] = {}
    real = os.path.realpath(hardware)
    if os.path.isdir(real):
        facts["pci_address" if ":" in os.path.basename(real) else "bus_address"] = os.path.basename(real)
    if (hardware / "driver").exists():
        facts["driver"] = os.path.basename(os.path.realpath(hardware / "driver"))
    numa = once(hardware / "numa_node")
    if numa.isdigit():  # -1: the firmware does not say
        facts["numa_node"] = int(numa)
    return facts
