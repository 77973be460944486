"""Ports of the node, which network interface belongs to which RDMA port, and the hardware below a port.

One piece of hardware is one entity. The rule for every collector: the interface of an RDMA port has the name of the
RDMA port (`port:NODE.mlx5_0`, a second port `port:NODE.mlx5_0.2`), any other interface its own name. The infiniband
collector reports state, speed and traffic of RDMA ports; network and ethtool report the remaining signals of their
interfaces.
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

from agents.collectors.nic.sysfs import SysfsFile, list_names, read_sysfs_text

SOFTWARE_RDMA = ("rxe*", "siw*")
"""RDMA devices that the kernel creates on top of any interface (drivers/infiniband/sw): they have no hardware of their
own."""
MAX_PORTS = 256
"""Most ports of one node. Chosen: 16 times the largest host that is sold."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device. `folder` is its folder in sysfs."""

    device: str
    number: int
    folder: Path

    @property
    def name(self) -> str:
        """The part of the entity's name after the node."""
        return self.device if self.number == 1 else f"{self.device}.{self.number}"

    @property
    def hardware(self) -> Path:
        """The folder of the device below the RDMA device: the PCI function."""
        return self.folder.parents[1] / "device"

    @property
    def counts_traffic(self) -> bool:
        """Whether the port has its own traffic counters. Drivers other than mlx4 and mlx5 often have none."""
        return (self.folder / "counters" / "port_rcv_data").exists()


def is_selected(name: str, include: Iterable[str], exclude: Iterable[str], default: bool = True) -> bool:
    """Returns whether a name is selected by shell patterns. `include` takes precedence over `exclude`."""
    if any(fnmatch(name, pattern) for pattern in include):
        return True
    return default and not any(fnmatch(name, pattern) for pattern in exclude)


def is_virtual_function(hardware: Path) -> bool:
    """Returns whether a PCI device is a virtual function of another one (SR-IOV). It has no own port, and there
    may be hundreds.
    """
    return (hardware / "physfn").exists()


def rdma_ports(root: Path, include: Iterable[str] = (), exclude: Iterable[str] = SOFTWARE_RDMA) -> list[RdmaPort]:
    """Returns the ports below /sys/class/infiniband, sorted by name."""
    include, exclude = tuple(include), tuple(exclude)
    found = [
        RdmaPort(device, int(port), root / device / "ports" / port)
        for device in list_names(root)
        if is_selected(device, include, exclude, not is_virtual_function(root / device / "device"))
        for port in list_names(root / device / "ports")
        if port.isdigit()
    ]
    return sorted(found, key=lambda port: (port.device, port.number))[:MAX_PORTS]


def interface_of_port(port: RdmaPort, net: Path) -> str:
    """Returns the interface of a port: that of its first address, else the one of the same PCI function; empty if there
    is none.

    The first address of a bond's RDMA device names the bond, so that its members stay separate ports.
    """
    first = read_sysfs_text(port.folder / "gid_attrs" / "ndevs" / "0")
    if first and "/" not in first and (net / first).exists():
        return first
    for name in list_names(port.hardware / "net"):
        place = (
            read_sysfs_text(net / name / "dev_port")
            or read_sysfs_text(port.hardware / "net" / name / "dev_port")
            or "0"
        )
        if place == str(port.number - 1):
            return name
    return ""


def rdma_ports_by_interface(rdma: Path, net: Path, exclude: Iterable[str] = SOFTWARE_RDMA) -> Mapping[str, RdmaPort]:
    """Returns the RDMA port of each interface that belongs to one."""
    found: dict[str, RdmaPort] = {}
    for port in rdma_ports(rdma, (), exclude):
        if interface := interface_of_port(port, net):
            found.setdefault(interface, port)
    return found


def hardware_facts(hardware: Path) -> dict[str, object]:
    """Returns address, driver and NUMA node of the device below a port, from sysfs."""
    facts: dict[str, object] = {}
    real = os.path.realpath(hardware)
    if os.path.isdir(real):
        facts["pci_address" if ":" in os.path.basename(real) else "bus_address"] = os.path.basename(real)
    if (hardware / "driver").exists():
        facts["driver"] = os.path.basename(os.path.realpath(hardware / "driver"))
    numa = read_sysfs_text(hardware / "numa_node")
    if numa.isdigit():  # -1: not set by the firmware
        facts["numa_node"] = int(numa)
    return facts


HARDWARE_SIGNALS = ("nic.pcie_speed", "nic.pcie_speed_max", "nic.pcie_width", "nic.pcie_width_max", "nic.temperature")
HARDWARE_INTERVAL_S = 30.0
_LINK = ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
_NUMBER = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)")


def parse_link_value(text: str) -> float:
    """Returns `32.0 GT/s PCIe` as 32 and `16` as 16; NaN for `Unknown` and widths of 0 and 255, which mean the same."""
    found = _NUMBER.match(text)
    value = float(found[1]) if found else np.nan
    return np.nan if value in (0, 255) else value


class PortHardware:
    """PCIe link and temperature of the device at `folder` (the PCI function). Missing values are NaN."""

    def __init__(self, folder: Path) -> None:
        self._link = [SysfsFile(folder / name, keep=False) for name in _LINK]
        self._thermometer = _find_thermometer(folder)

    def read(self) -> tuple[float, ...]:
        """Returns one value per name in HARDWARE_SIGNALS."""
        heat = self._thermometer.number() if self._thermometer else None
        return (*(parse_link_value(file.text() or "") for file in self._link), np.nan if heat is None else heat / 1000)


def hardware_columns(devices: Iterable[PortHardware]) -> dict[str, NDArray[np.float64]]:
    """Returns the columns of all devices, without those that no device has."""
    values = np.array([device.read() for device in devices]).T
    return {name: column for name, column in zip(HARDWARE_SIGNALS, values, strict=True) if not np.isnan(column).all()}


def _find_thermometer(folder: Path) -> SysfsFile | None:
    """Returns the chip's own sensor: the one labelled as such (mlx5: asic), else the first; None if there is none."""
    files = [
        folder / "hwmon" / chip / name
        for chip in list_names(folder / "hwmon")
        for name in list_names(folder / "hwmon" / chip)
        if name.startswith("temp") and name.endswith("_input")
    ]
    labelled = [f for f in files if "asic" in read_sysfs_text(f.with_name(f.name.replace("_input", "_label"))).lower()]
    return SysfsFile((labelled or files)[0], keep=False) if files else None
