"""Which ports there are, and which network interface is which RDMA port: one piece of hardware, one entity.

The rule, for every collector: the interface of an RDMA port bears the name of the RDMA port (`port:NODE.mlx5_0`, a
second port `port:NODE.mlx5_0.2`), any other interface its own. The infiniband collector tells state, speed and traffic
of RDMA ports; network and ethtool tell of their interfaces what it does not.

The PCIe link and the temperature of the device below a port, from sysfs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agents.collectors.nic.sysfs import Attribute, names_in, once

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


HARDWARE_SIGNALS = ("nic.pcie_speed", "nic.pcie_speed_max", "nic.pcie_width", "nic.pcie_width_max", "nic.temperature")
HARDWARE_EVERY_S = 30.0
_LINK = ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
_NUMBER = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)")


def link_value(text: str) -> float:
    """`32.0 GT/s PCIe` -> 32, `16` -> 16; NaN for `Unknown` and a width of 0 or 255, which say the same."""
    found = _NUMBER.match(text)
    value = float(found[1]) if found else np.nan
    return np.nan if value in (0, 255) else value


class Hardware:
    """Reads the device at `folder` (the PCI function). What it does not tell is NaN."""

    def __init__(self, folder: Path) -> None:
        self._link = [Attribute(folder / name, keep=False) for name in _LINK]
        self._heat = _thermometer(folder)

    def read(self) -> tuple[float, ...]:
        """One value per name of SIGNALS."""
        heat = self._heat.number() if self._heat else None
        return (*(link_value(file.text() or "") for file in self._link), np.nan if heat is None else heat / 1000)


def hardware_columns(devices: Iterable[Hardware]) -> dict[str, NDArray[np.float64]]:
    """What is read of all devices; no column for what none of them tells."""
    values = np.array([device.read() for device in devices]).T
    return {name: column for name, column in zip(HARDWARE_SIGNALS, values, strict=True) if not np.isnan(column).all()}


def _thermometer(folder: Path) -> Attribute | None:
    """The chip's own sensor: the one labelled so (mlx5: asic), else the first."""
    files = [
        folder / "hwmon" / chip / name
        for chip in names_in(folder / "hwmon")
        for name in names_in(folder / "hwmon" / chip)
        if name.startswith("temp") and name.endswith("_input")
    ]
    labelled = [f for f in files if "asic" in once(f.with_name(f.name.replace("_input", "_label"))).lower()]
    return Attribute((labelled or files)[0], keep=False) if files else None
