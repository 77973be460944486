"""Role of a port, derived from its place in the machine, so that an idle or unplugged port raises no alarm.

The first matching rule decides:
1. `[collector.X] roles` names it (by RDMA device, port or interface).
2. It carries the default route (itself, or below a bond or VLAN that does): management.
3. It is behind the same PCIe switch as a GPU: compute.
4. It has no RDMA: unused if it was down when first seen, else management.
5. No port of this node shares a switch with a GPU (virtual machines, boards without switches), so positions prove
   nothing: InfiniBand is compute; Ethernet is unused if it was down when first seen, else storage if the node has
   InfiniBand ports too, else compute.
6. Any other RDMA port: unused if it was down when first seen, else storage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from agents.collectors.kernel_files import ProcFile
from agents.collectors.nic.sysfs import list_names, read_sysfs_text
from pipeline.config.settings import constraint

PortRole = Literal["compute", "storage", "management", "unused"]
_ROLE_NAMES = get_args(PortRole)
ROLES_SETTING = constraint(
    f"names of ports, each with one of {', '.join(_ROLE_NAMES)}", lambda r: all(v in _ROLE_NAMES for v in r.values())
)
"""Metadata of the field `roles` of a collector's configuration."""
_GPU_VENDORS = ("0x10de", "0x1002")  # pci.ids: NVIDIA, AMD
_GPU_CLASSES = ("0x03", "0x12")  # PCI code and ID assignment specification: display, processing accelerator
_MAX_LAYERS = 4  # chosen: VLAN over bond over port is 2


@dataclass(frozen=True, slots=True)
class PortTraits:
    """Input of the rules. near_gpu: None if no port of the node is near a GPU. up: when first seen."""

    rdma: bool = False
    ethernet: bool = True
    near_gpu: bool | None = None
    default_route: bool = False
    up: bool = True
    beside_infiniband: bool = False


def port_role(facts: PortTraits) -> PortRole:
    """Returns the role by rules 2 to 6."""
    if facts.default_route:
        return "management"
    if facts.near_gpu:
        return "compute"
    if not facts.rdma:
        return "management" if facts.up else "unused"
    if facts.near_gpu is None and not facts.ethernet:
        return "compute"
    if not facts.up:
        return "unused"
    return "compute" if facts.near_gpu is None and not facts.beside_infiniband else "storage"


def shares_switch(one: str, others: Iterable[str]) -> bool:
    """Returns whether two devices have the same root port in their /sys/devices paths: then a switch connects them."""
    mine = _bridges_above(one)
    return bool(mine) and any(mine[:2] == theirs[:2] for theirs in map(_bridges_above, others) if theirs)


def _bridges_above(place: str) -> list[str]:
    """Returns the parents of a device: root complex, root port, switch ports; empty if there is no port in between."""
    parts = place.partition("/pci")[2].split("/")
    return parts[:-1] if len(parts) > 2 else []


def gpu_device_paths(sys: Path) -> list[str]:
    """Returns the /sys/devices paths of this node's GPUs."""
    devices = sys / "bus" / "pci" / "devices"
    return [
        os.path.realpath(devices / name)
        for name in list_names(devices)
        if read_sysfs_text(devices / name / "vendor") in _GPU_VENDORS
        and read_sysfs_text(devices / name / "class").startswith(_GPU_CLASSES)
    ]


def ports_near_gpus(places: Iterable[str], gpus: Iterable[str]) -> list[bool | None]:
    """Returns for each port's path whether a GPU shares its switch; None for all if none does."""
    gpus = list(gpus)
    found: list[bool | None] = [shares_switch(place, gpus) for place in places]
    return found if any(found) else [None] * len(found)


def parse_default_routes(ipv4: str, ipv6: str) -> set[str]:
    """Returns the interfaces of default routes, from /proc/net/route and /proc/net/ipv6_route."""
    four = [line.split() for line in ipv4.splitlines()]
    six = [line.split() for line in ipv6.splitlines()]
    found = {f[0] for f in four if len(f) > 7 and f[1] == f[7] == "00000000"}
    found |= {s[9] for s in six if len(s) > 9 and s[0] == "0" * 32 and s[1] == "00"}
    return found - {"lo"}


def default_route_interfaces(proc: Path, net: Path) -> set[str]:
    """Returns the interfaces that carry a default route, including those below them."""
    found = parse_default_routes(
        _read_route_table(proc / "net" / "route"), _read_route_table(proc / "net" / "ipv6_route")
    )
    layer = found
    for _ in range(_MAX_LAYERS):
        layer = {n.removeprefix("lower_") for up in layer for n in list_names(net / up) if n.startswith("lower_")}
        found = found | layer
    return found


def _read_route_table(path: Path) -> str:
    """Returns a table of routes, which may be longer than a page; empty if the kernel lacks the protocol."""
    file = ProcFile(path)
    text = file.full_text()
    file.close()
    return text or ""
