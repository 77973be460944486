"""What a port is for, told from where it sits: so that an idle or unplugged port does not alarm.

The rule, first match wins:
1. `[collector.X] roles` names it (by RDMA device, port or interface).
2. It carries the default route (itself, or below a bond or VLAN that does): management.
3. It sits behind the same PCIe switch as a GPU: compute.
4. It has no RDMA: unused if it was down when first seen, else management.
5. No port of this node shares a switch with a GPU (virtual machines, boards without switches), so that places tell
   nothing: InfiniBand is compute; Ethernet is unused if it was down when first seen, else storage where the node has
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
from agents.collectors.nic.sysfs import names_in, once
from pipeline.config.settings import constraint

Role = Literal["compute", "storage", "management", "unused"]
_KNOWN = get_args(Role)
ROLES = constraint(
    f"names of ports with one of {', '.join(_KNOWN)} each", lambda r: all(v in _KNOWN for v in r.values())
)
"""Metadata of the field `roles` of a collector's configuration."""
_GPU_VENDORS = ("0x10de", "0x1002")  # pci.ids: NVIDIA, AMD
_GPU_CLASSES = ("0x03", "0x12")  # PCI code and ID assignment specification: display, processing accelerator
_MAX_LAYERS = 4  # chosen: VLAN over bond over port is 2


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rule looks at. near_gpu: None where no port of the node is near one. up: when first seen."""

    rdma: bool = False
    ethernet: bool = True
    near_gpu: bool | None = None
    default_route: bool = False
    up: bool = True
    beside_infiniband: bool = False


def role(facts: Facts) -> Role:
    """Rules 2 to 6 of this page."""
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
    """Whether two devices' places in /sys/devices go through the same root port: then a switch joins them."""
    mine = _bridges(one)
    return bool(mine) and any(mine[:2] == theirs[:2] for theirs in map(_bridges, others) if theirs)


def _bridges(place: str) -> list[str]:
    """What lies above a device: root complex, root port, switch ports; empty where no port is between."""
    parts = place.partition("/pci")[2].split("/")
    return parts[:-1] if len(parts) > 2 else []


def gpu_places(sys: Path) -> list[str]:
    """The places of this node's GPUs in /sys/devices."""
    devices = sys / "bus" / "pci" / "devices"
    return [
        os.path.realpath(devices / name)
        for name in names_in(devices)
        if once(devices / name / "vendor") in _GPU_VENDORS and once(devices / name / "class").startswith(_GPU_CLASSES)
    ]


def near_gpu(places: Iterable[str], gpus: Iterable[str]) -> list[bool | None]:
    """For each port's place whether a GPU shares its switch; None for all where that is so for none."""
    gpus = list(gpus)
    found: list[bool | None] = [shares_switch(place, gpus) for place in places]
    return found if any(found) else [None] * len(found)


def default_routes(ipv4: str, ipv6: str) -> set[str]:
    """The interfaces that default routes leave by, from /proc/net/route and /proc/net/ipv6_route."""
    four = [line.split() for line in ipv4.splitlines()]
    six = [line.split() for line in ipv6.splitlines()]
    found = {f[0] for f in four if len(f) > 7 and f[1] == f[7] == "00000000"}
    found |= {s[9] for s in six if len(s) > 9 and s[0] == "0" * 32 and s[1] == "00"}
    return found - {"lo"}


def carrying(proc: Path, net: Path) -> set[str]:
    """The interfaces that carry a default route, with those that lie below them."""
    found = default_routes(_whole(proc / "net" / "route"), _whole(proc / "net" / "ipv6_route"))
    layer = found
    for _ in range(_MAX_LAYERS):
        layer = {n.removeprefix("lower_") for up in layer for n in names_in(net / up) if n.startswith("lower_")}
        found = found | layer
    return found


def _whole(path: Path) -> str:
    """A table of routes, which may be longer than a page; empty without that protocol in the kernel."""
    file = ProcFile(path)
    text = file.whole()
    file.close()
    return text or ""
