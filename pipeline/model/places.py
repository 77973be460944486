"""Where an entity is: by the topology, else by the name of a device that no inventory has named yet."""

from __future__ import annotations

import re

from pipeline.model.topology import Topology, kind_of

_NAMES = {
    "gpu": re.compile(r"(.+)\.[a-z]*[0-9]+"),
    "cpu": re.compile(r"(.+)\.[0-9]+"),
    "nvlink": re.compile(r"(.+)\.[0-9]+\.[0-9]+"),
    "neuroncore": re.compile(r"(.+)\.[a-z]*[0-9]+\.[0-9]+"),
    "dimm": re.compile(r"(.+)\.mc[0-9]+\.(?:dimm|rank)[0-9]+"),
    "disk": re.compile(r"([^.]+)\.[^.]+"),
    "port": re.compile(
        r"(.+)\.(?:(?:mlx[45]|hfi1|efa|hns|ionic|erdma|mana)_(?:bond_)?|bnxt_re|irdma|qedr)[0-9]+(?:\.[0-9]+)?"
    ),
    "sensor": re.compile(r"(.+?)\.ipmi\..+"),
}
"""Kinds of parts of nodes -> node and part in a name, such as `gpu:NODE.3`, `gpu:NODE.amd0`, `nvlink:NODE.3.0`. Source:
the collectors of these kinds. Names of disks have dots (`etherd!e1.0`): several leave the node open. Of ports only
those of RDMA devices, which switches do not have (names as of Linux's drivers; `port:NODE.mlx5_0.2` is the second port
of a device), and of sensors only those that an agent reads from its own BMC: others may be of switches, facilities."""
_PARTS = frozenset({"gpu", "port", "nvlink", "psu", "sensor", "disk", "dimm", "cpu", "nic"})
"""Kinds of what is mostly in nodes."""


def find_node_by_name(entity: str, topology: Topology) -> str | None:
    """Returns the node in the name of a device that the topology does not have; None if it names none for sure.

    A node that the name begins with is not enough: `gpu:n0.lab.0` is not on n0, and a mute of n0 must not mute
    it while no inventory of n0.lab has arrived. Other ports, sensors and power supplies, and NICs, have no node.
    """
    node = None if entity in topology.parents else _read_node(entity)
    if node is None:
        return None
    return node if "." not in node or node in topology.parents or topology.descendants(node) else None


def guess_node_by_name(entity: str, topology: Topology) -> str | None:
    """Returns the most likely node of a device that the topology does not have, by its name: enough to compare what
    began together, not to mute anything. None if its kind is not in nodes."""
    if entity in topology.parents or kind_of(entity) not in _PARTS:
        return None
    if (node := _read_node(entity)) is not None:
        return node
    owner = entity.partition(":")[2].rpartition(".")[0].partition(".")[0]
    return f"node:{owner}" if owner else None


def _read_node(entity: str) -> str | None:
    """Returns the node in a name of the forms of _NAMES, whether it exists or not."""
    kind, _, name = entity.partition(":")
    fits = _NAMES[kind].fullmatch(name) if kind in _NAMES else None
    return None if fits is None else f"node:{fits[1]}"


def list_place(entity: str, topology: Topology) -> tuple[str, ...]:
    """Returns an entity and all that it is a part of, nearest first."""
    node = find_node_by_name(entity, topology)
    return (entity, *topology.ancestors(entity)) if node is None else (entity, node, *topology.ancestors(node))


def find_ancestor(entity: str, kind: str, topology: Topology) -> str | None:
    """Returns the nearest of `list_place` of a kind; None if there is none."""
    if entity in topology.parents:
        return topology.ancestor_of_kind(entity, kind)
    return next((one for one in list_place(entity, topology) if kind_of(one) == kind), None)
