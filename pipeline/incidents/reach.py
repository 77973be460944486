"""What an incident reaches: the GPUs, nodes, ranks and jobs on and below its cause and members.

The cause is at fault; what else it reaches only suffers: `split_nodes`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.incidents.jobs import Places
from pipeline.model.links import PEER
from pipeline.model.places import find_ancestor
from pipeline.model.topology import WORK, Topology, kind_of

SPREADS = frozenset({"rack", "cdu", "loop", "pdu", "leaf", "spine", "switch", "rail", "row", "pod", "fabric", "site"})
"""Kinds of causes that reach everything below them."""
_BESIDE = frozenset({"psu", "disk", "dimm", "filesystem", "service", "nic", "cpu", "chassis"})
"""Parts of a node that its GPUs may suffer from: its jobs are listed if they are measured as slower, not by guess."""


@dataclass(frozen=True, slots=True)
class Reach:
    """gpus, nodes, ranks: reached directly.   jobs: job -> its reached ranks.   beside: jobs on the node of a part.
    hosts: nodes of the GPUs."""

    gpus: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    ranks: frozenset[str] = frozenset()
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()


def find_reach(cause: str, members: Iterable[str], topology: Topology, places: Places) -> Reach:
    """Returns what a cause and its members reach.

    A port reaches the GPU that communicates over it: by position if a node has as many ports as GPUs, else all.
    """
    roots = list(dict.fromkeys((cause, *members)))
    work = [e for e in roots if kind_of(e) in WORK]
    reached, gpus = _spread([e for e in roots if kind_of(e) not in WORK], topology)
    nodes = {e for e in reached if kind_of(e) == "node"}
    hosts = frozenset(node for gpu in gpus if (node := find_ancestor(gpu, "node", topology)))
    nodes |= hosts.union(node for e in reached if (node := find_ancestor(e, "node", topology)))
    ranks = {rank for on in (*gpus, *(n for n in nodes if n in reached)) for rank in places.on.get(on, ())}
    ranks |= {rank for e in work for rank in _ranks_of(e, topology, places)}
    gpus |= {gpu for rank in ranks if rank in places.of for gpu in places.of[rank].gpus}
    nodes |= {place.node for rank in ranks if (place := places.of.get(rank)) and place.node}
    beside = {n for e in reached if kind_of(e) in _BESIDE and (n := topology.ancestor_of_kind(e, "node"))}
    jobs, others = _by_job(ranks, places), _jobs_on(beside, places)
    return Reach(frozenset(gpus), frozenset(nodes), frozenset(ranks), jobs, others, hosts)


def find_carriers(entity: str, topology: Topology) -> frozenset[str]:
    """Returns the GPUs and nodes whose ranks an entity reaches by itself, a port also those at the other end of its
    cable; none for work."""
    if kind_of(entity) in WORK:
        return frozenset()
    far = topology.attributes.get(entity, {}).get(PEER)
    reached, gpus = _spread((entity, far) if isinstance(far, str) else (entity,), topology)
    return frozenset((*gpus, *(e for e in reached if kind_of(e) == "node")))


def _spread(devices: Iterable[str], topology: Topology) -> tuple[dict[str, None], set[str]]:
    """Returns the devices with all below them that suffers with them, and the GPUs that are, or depend on, one."""
    reached = dict.fromkeys(devices)
    spread = [e for e in reached if kind_of(e) in SPREADS or kind_of(e) in ("node", "gpu")]
    reached |= dict.fromkeys(topology.descendants(*spread))
    gpus = {e for e in reached if kind_of(e) == "gpu"}
    for port in [e for e in reached if kind_of(e) == "port"]:
        gpus.update(find_port_gpus(port, topology))
    gpus |= {gpu for e in reached if kind_of(e) == "nvlink" and (gpu := topology.ancestor_of_kind(e, "gpu"))}
    return reached, gpus


def _ranks_of(entity: str, topology: Topology, places: Places) -> Iterable[str]:
    if kind_of(entity) == "rank":
        return (entity,)
    return places.ranks.get(entity) or (e for e in topology.descendants(entity) if kind_of(e) == "rank")


def _by_job(ranks: Iterable[str], places: Places) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for rank in sorted(ranks, key=natural_order):
        if (job := places.job_of.get(rank)) is not None:
            found.setdefault(job, []).append(rank)
    return {job: tuple(mine) for job, mine in found.items()}


def _jobs_on(nodes: Iterable[str], places: Places) -> frozenset[str]:
    ranks = (rank for node in nodes for rank in places.on.get(node, ()))
    return frozenset(job for rank in ranks if (job := places.job_of.get(rank)))


def find_port_gpus(port: str, topology: Topology) -> tuple[str, ...]:
    """Returns the GPUs of a node that communicate over one of its ports; none for a port of a switch."""
    node = topology.ancestor_of_kind(port, "node")
    if node is None:
        return ()
    below = sorted(topology.descendants(node), key=natural_order)
    gpus = [e for e in below if kind_of(e) == "gpu"]
    ports = [e for e in below if kind_of(e) == "port"]
    if len(ports) == len(gpus) and port in ports:
        return (gpus[ports.index(port)],)
    return tuple(gpus)


def natural_order(name: str) -> tuple[object, ...]:
    """Sorts numbers in names by value: mlx5_9 before mlx5_10."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))


class NodesBelow:
    """Finds the nodes below an entity, or with a part below it (a port of a leaf switch). Indexed once."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._index: dict[str, set[str]] | None = None

    def __call__(self, entity: str) -> set[str]:
        """Returns the names of the nodes."""
        if self._index is None:
            self._index = defaultdict(set)
            for child in self._topology.parents:
                node = self._topology.ancestor_of_kind(child, "node")
                for parent in self._topology.ancestors(child) if node else ():
                    self._index[parent].add(str(node))
        return self._index.get(entity, set())


def split_nodes(
    cause: str,
    members: Iterable[str],
    topology: Topology,
    nodes_below: Callable[[str], set[str]],
    senders: Mapping[str, str] = {},
) -> tuple[set[str], set[str]]:
    """Returns (nodes at fault, nodes that only suffer). senders: entity -> its node, of entities in no inventory; else
    the name of a device says it.

    At fault is the node that the cause is, or is a part of. Of a shared cause, such as a coolant loop, a leaf switch or
    a job, no node is at fault: all below it and all with findings suffer. If the cause is on no node and not shared,
    nothing is known to be elsewhere, and its members are at fault.
    """

    def find_nodes(entities: Iterable[str]) -> set[str]:
        """Returns the nodes that entities are or run on: by inventory, else their senders."""
        found = (
            topology.ancestor_of_kind(e, "node") or senders.get(e) or find_ancestor(e, "node", topology)
            for e in entities
        )
        return {node for node in found if node is not None}

    suffering, kind = find_nodes(members), kind_of(cause)
    if kind in SPREADS:
        return set(), suffering | (nodes_below(cause) if kind != "site" else set())
    if kind in ("job", "stage"):
        return set(), suffering
    at_fault = find_nodes([cause]) or suffering
    return at_fault, suffering - at_fault
