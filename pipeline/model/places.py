"""Where an entity is: by the topology, else by the name of a device that no inventory has named yet."""

from __future__ import annotations

from pipeline.model.topology import Topology, kind_of

_PARTS = frozenset({"gpu", "nvlink", "neuroncore", "cpu", "dimm", "disk"})
"""Kinds of parts of nodes alone, which are named `NODE.PART`."""
_MIXED = frozenset({"port", "nic", "sensor", "psu"})
"""Kinds of parts of nodes, but also of switches and facilities: their node is known by another source, or none."""


def find_node_by_name(entity: str, topology: Topology) -> str | None:
    """Returns the node in the name of a device that the topology does not have; None if it names none for sure.

    A node of the topology is the longest that the name begins with. Without one, only a name with one dot is clear:
    `gpu:a.b.0` may be on the node a or a.b, and what is muted for one must not mute the other.
    """
    kind, _, name = entity.partition(":")
    if kind not in _PARTS | _MIXED or entity in topology.parents:
        return None
    end = name.rfind(".")
    while end > 0:
        node = f"node:{name[:end]}"
        if node in topology.parents or topology.descendants(node):
            return node
        end = name.rfind(".", 0, end)
    owner, _, part = name.partition(".")
    return f"node:{owner}" if kind in _PARTS and owner and part and "." not in part else None


def list_place(entity: str, topology: Topology) -> tuple[str, ...]:
    """Returns an entity and all that it is a part of, nearest first."""
    node = find_node_by_name(entity, topology)
    return (entity, *topology.ancestors(entity)) if node is None else (entity, node, *topology.ancestors(node))


def find_ancestor(entity: str, kind: str, topology: Topology) -> str | None:
    """Returns the nearest of `list_place` of a kind; None if there is none."""
    if entity in topology.parents:
        return topology.ancestor_of_kind(entity, kind)
    return next((one for one in list_place(entity, topology) if kind_of(one) == kind), None)
