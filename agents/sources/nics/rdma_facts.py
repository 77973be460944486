"""What an RDMA port is: the attributes by which bad batches, wrong firmware and mixed-up cables are found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from agents.sources.nics import roles
from agents.sources.nics.attribute import once
from agents.sources.nics.devices import char_devices
from agents.sources.nics.ports import RdmaPort, hardware_facts, interface_of

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
