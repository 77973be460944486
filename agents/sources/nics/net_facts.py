"""What a network interface is: its address, the driver that its peers share, what it is for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from agents.sources.nics import roles
from agents.sources.nics.attribute import once
from agents.sources.nics.ports import hardware_facts


def facts_of(interface: str, net: Path) -> dict[str, object]:
    """The attributes of one interface, without its role."""
    folder = net / interface
    facts: dict[str, object] = {"interface": interface}
    if address := once(folder / "address"):
        facts["address"] = address
    if (folder / "wireless").exists():
        facts["wireless"] = True
    return facts | hardware_facts(folder / "device")


def interface_facts(
    ports: Iterable[tuple[str, bool]], rdma: set[str], net: Path, proc: Path, chosen: Mapping[str, str]
) -> list[dict[str, object]]:
    """The attributes of interfaces, each given with whether it was up at first. `rdma`: whose role others tell."""
    ports, carrying = list(ports), roles.carrying(proc, net)
    places = [os.path.realpath(net / name / "device") for name, _ in ports]
    near = roles.near_gpu(places, roles.gpu_places(net.parent.parent))
    found = []
    for (name, up), close in zip(ports, near, strict=True):
        facts = facts_of(name, net)
        if name not in rdma:
            at = roles.Facts(rdma=False, near_gpu=close, default_route=name in carrying, up=up)
            facts["role"] = chosen.get(name) or roles.role(at)
        found.append(facts)
    return found
