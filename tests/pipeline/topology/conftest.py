"""One small site as each source describes it, in the formats that the real systems write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.topology.site import READERS
from pipeline.topology.source import Naming, SourceFile, SourceTopology

TOML = """version = 1
[node]
"n1" = ["rack:r1"]
"n2" = ["rack:r1"]
[rack]
"r1" = ["cdu:c1", "row:a"]
[attributes]
"node:n1" = { sku = "X1" }
[[link]]
a = "port:n1.mlx5_0"
b = "port:l1.4"
serial = "C7"
"""
CSV = "entity,parent,sku\nnode:n1,rack:r1,X1\nnode:n2,rack:r1,\nrack:r1,cdu:c1,\nrack:r1,row:a,\n"
CONF = """# the fabric
SwitchName=l1 Nodes=n1,n2 LinkSpeed=100
SwitchName=l2 \\
    Nodes=n[03-04],m7
switchname=s1 switches=l[1-2]
"""
BLOCKS = "BlockName=b1 Nodes=n1,n2\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n"
YAML = """---
- topology: tree
  cluster_default: true
  tree:
    switches:
      - switch: s1
        children: l[1-2]
      - switch: l1
        nodes: n1,n2
      - switch: l2
        nodes: n[3-4]
- topology: blocks
  block:
    block_sizes: [2, 4]
    blocks:
      - block: b1
        nodes: n1,n2
- topology: flat
  flat: true
"""
IBNET = """#
# Topology file: generated on Wed Aug  6 16:11:23 2025
#
# Initiated from node e09d730300156ff6 port e09d730300156ff6

vendid=0x2c9
devid=0xd2f2
sysimgguid=0x2c5eab0300b87b40
switchguid=0x2c5eab0300b87b40(2c5eab0300b87b40)
Switch\t65 "S-2c5eab0300b87b40"\t\t# "MF0;l1:MQM9701/U1" enhanced port 0 lid 73 lmc 0
[1]\t"H-e09d7303007a4bd8"[1](e09d7303007a4bd8) \t\t# "n1 mlx5_0" lid 647 4xNDR
[2]\t"H-e09d730300858d88"[1](e09d730300858d88) \t\t# "MT4129 ConnectX7   Mellanox Technologies" lid 515 4xNDR
[35]\t"S-2c5eab0300c26280"[32]\t\t# "MF0;s1:MQM9701/U1" lid 236 4xNDR
[65]\t"H-2c5eab0300b87b50"[1](2c5eab0300b87b50) \t\t# "Mellanox Technologies Aggregation Node" lid 193 4xNDR

switchguid=0x2c5eab0300c26280(2c5eab0300c26280)
Switch\t65 "S-2c5eab0300c26280"\t\t# "MF0;s1:MQM9701/U1" enhanced port 0 lid 236 lmc 0
[32]\t"S-2c5eab0300b87b40"[35]\t\t# "MF0;l1:MQM9701/U1" lid 73 4xNDR

caguid=0xe09d7303007a4bd8
Ca\t1 "H-e09d7303007a4bd8"\t\t# "n1 mlx5_0"
[1](e09d7303007a4bd8) \t"S-2c5eab0300b87b40"[1]\t\t# lid 647 lmc 0 "MF0;l1:MQM9701/U1" lid 73 4xNDR

caguid=0xe09d730300858d88
Ca\t1 "H-e09d730300858d88"\t\t# "MT4129 ConnectX7   Mellanox Technologies"
[1](e09d730300858d88) \t"S-2c5eab0300b87b40"[2]\t\t# lid 515 lmc 0 "MF0;l1:MQM9701/U1" lid 73 4xNDR

caguid=0x2c5eab0300b87b50
Ca\t1 "H-2c5eab0300b87b50"\t\t# "Mellanox Technologies Aggregation Node"
[1](2c5eab0300b87b50) \t"S-2c5eab0300b87b40"[65]\t\t# lid 193 lmc 0 "MF0;l1:MQM9701/U1" lid 73 4xNDR
"""


def dcim(table: str, number: int, name: str, **more: Any) -> dict[str, Any]:
    """A row as NetBox's REST API writes it."""
    url = f"https://netbox.example.org/api/dcim/{table}/{number}/"
    return {"id": number, "url": url, "display": name, "name": name, **more}


def part(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name, "slug": name, "display": name}


def cable(number: int, *ends: list[tuple[str, int, str, int, str]]) -> dict[str, Any]:
    """A cable of NetBox 4; each end: (type, own id, name, id of the device, its name)."""
    sides = [
        [
            {"object_type": kind, "object_id": own, "object": {"id": own, "name": name, "device": part(device, of)}}
            for kind, own, name, device, of in end
        ]
        for end in ends
    ]
    row = dcim("cables", number, f"#{number}", type="mmf-om4", label=f"C{number}", status={"value": "connected"})
    return {**row, "a_terminations": sides[0], "b_terminations": sides[1]}


def device(number: int, name: str, role: str, status: str = "active", **more: Any) -> dict[str, Any]:
    facts = {"serial": f"SN{number}", "device_type": {"model": "DGX H100"}, "rack": part(1, "r1"), "position": 10.0}
    return dcim("devices", number, name, role=part(1, role), status={"value": status}, **{**facts, **more})


NETBOX: dict[str, Any] = {
    "devices": {
        "count": 5,
        "next": None,
        "results": [
            device(1, "n1", "gpu-server"),
            device(2, "n2", "gpu-server", "decommissioning"),
            device(3, "l1", "leaf-switch"),
            device(4, "p1", "rack-pdu"),
            device(5, "kvm", "console"),
        ],
    },
    "racks": [dcim("racks", 1, "r1", location=part(1, "hall-2"), site=part(1, "fra1"), serial="R77")],
    "locations": [dcim("locations", 1, "hall-2", site=part(1, "fra1"), parent=None)],
    "power-feeds": [dcim("power-feeds", 7, "A", power_panel=part(1, "panel-1"), rack=part(1, "r1"))],
    "cables": [
        cable(1, [("dcim.interface", 11, "eth0", 1, "n1")], [("dcim.interface", 31, "Ethernet4", 3, "l1")]),
        cable(2, [("dcim.powerport", 12, "PSU1", 1, "n1")], [("dcim.poweroutlet", 41, "1", 4, "p1")]),
        cable(3, [("dcim.interface", 13, "eth1", 1, "n1")], []),
        cable(4, [("dcim.powerport", 42, "in", 4, "p1")], [("dcim.powerfeed", 7, "A", 0, "")]),
    ],
    "sites": [dcim("sites", 1, "fra1")],
    "interfaces": [dcim("interfaces", 1, "eth0")],
}


def kube_node(name: str, **labels: str) -> dict[str, Any]:
    return {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}}


def topograph(accelerator: str, block: str, spine: str) -> dict[str, str]:
    names = {"accelerator": accelerator, "block": block, "spine": spine}
    return {f"network.topology.nvidia.com/{label}": value for label, value in names.items()}


KUBE: dict[str, Any] = {
    "kind": "List",
    "items": [
        kube_node("n1.example.org", **topograph("d1", "b1", "s1"), **{"topology.kubernetes.io/zone": "z1"}),
        kube_node("n2", **topograph("d1", "b1", "s1"), **{"nvidia.com/gpu.clique": "00ab-1.3", "site/row": "a"}),
        kube_node("n3", **topograph("d2", "b1", "s1")),
    ],
}
LLDP: dict[str, Any] = {
    "n1": {
        "lldp": {
            "interface": [
                {
                    "eth0": {
                        "via": "LLDP",
                        "chassis": {"l1": {"id": {"type": "mac", "value": "52:54:00:00:00:01"}}},
                        "port": {"id": {"type": "ifname", "value": "Ethernet4"}, "descr": "to n1"},
                    }
                }
            ]
        }
    }
}


@dataclass(frozen=True)
class Example:
    """A format with a good file, some lines that it must give, and lines that are left out."""

    format: str
    text: str
    lines: Mapping[str, tuple[str, ...]]
    naming: Naming = field(default_factory=Naming)


EXAMPLES = (
    Example(
        "toml",
        TOML,
        {"node:n1": ("rack:r1",), "rack:r1": ("cdu:c1", "row:a"), "port:n1.mlx5_0": ("node:n1", "node:l1")[:1]},
    ),
    Example("csv", CSV, {"node:n1": ("rack:r1",), "rack:r1": ("cdu:c1", "row:a")}),
    Example("slurm", CONF, {"node:n1": ("leaf:l1",), "node:n04": ("leaf:l2",), "leaf:l1": ("spine:s1",)}),
    Example("slurm", BLOCKS, {"node:n1": ("rack:b1",)}, Naming({"block": "rack"})),
    Example("slurm_yaml", YAML, {"node:n1": ("leaf:l1", "block:b1"), "node:n4": ("leaf:l2",)}),
    Example(
        "kubernetes",
        json.dumps(KUBE),
        {
            "node:n1": ("accelerator:d1", "block:b1", "spine:s1", "zone:z1"),
            "node:n2": ("row:a", "clique:00ab-1.3", "accelerator:d1", "block:b1", "spine:s1"),
            "accelerator:d1": ("block:b1",),
            "block:b1": ("spine:s1",),
        },
        Naming(labels={"site/row": "row"}, short_names=True),
    ),
    Example(
        "netbox",
        json.dumps(NETBOX),
        {
            "node:n1": ("rack:r1", "pdu:p1"),
            "rack:r1": ("location:hall-2", "site:fra1", "feed:panel-1.A", "pdu:p1"),
            "location:hall-2": ("site:fra1",),
            "feed:panel-1.A": ("panel:panel-1",),
            "pdu:p1": ("feed:panel-1.A",),
            "port:n1.eth0": ("node:n1", "leaf:l1"),
            "port:l1.Ethernet4": ("leaf:l1",),
        },
    ),
    Example(
        "ibnetdiscover",
        IBNET,
        {"port:n1.mlx5_0": ("node:n1", "leaf:l1"), "port:l1.1": ("leaf:l1",), "leaf:l1": ("spine:s1",)},
    ),
    Example("lldp", json.dumps(LLDP), {"port:n1.eth0": ("node:n1", "leaf:l1"), "port:l1.Ethernet4": ("leaf:l1",)}),
)


def read(format_: str, text: str, naming: Naming | None = None, path: str = "site.file") -> SourceTopology:
    """Reads one text as a file of a source."""
    return READERS[format_]([SourceFile(path, text)], naming or Naming())
