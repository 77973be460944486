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
}
"""Kinds of parts of nodes alone -> node and part in a name, such as `gpu:NODE.3`, `gpu:NODE.amd0`, `nvlink:NODE.3.0`.
Source: the collectors of these kinds. Names of disks have dots (`etherd!e1.0`): several leave the node open."""


def find_node_by_name(entity: str, topology: Topology) -> str | None:
    """Returns the node in the name of a device that the topology does not have; None if it names none for sure.

    A node that the name begins with is not enough: `gpu:n0.lab.0` is not on n0, and a mute of n0 must not mute
    it while no inventory of n0.lab has arrived. Ports, sensors and power supplies may be of switches and facilities.
    """
    kind, _, name = entity.partition(":")
    if kind not in _NAMES or entity in topology.parents:
        return None
    fits = _NAMES[kind].fullmatch(name)
    if fits is None:
        return None
    node = f"node:{fits[1]}"
    sure = "." not in fits[1] or node in topology.parents or topology.descendants(node)
    return node if sure else None


def list_place(entity: str, topology: Topology) -> tuple[str, ...]:
    """Returns an entity and all that it is a part of, nearest first."""
    node = find_node_by_name(entity, topology)
    return (entity, *topology.ancestors(entity)) if node is None else (entity, node, *topology.ancestors(node))


def find_ancestor(entity: str, kind: str, topology: Topology) -> str | None:
    """Returns the nearest of `list_place` of a kind; None if there is none."""
    if entity in topology.parents:
        return topology.ancestor_of_kind(entity, kind)
    return next((one for one in list_place(entity, topology) if kind_of(one) == kind), None)
