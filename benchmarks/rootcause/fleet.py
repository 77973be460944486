"""A fleet for the Desk: containment, supply, network, jobs and software versions, without telemetry.

Chosen, as the simulator's layout (agents/sim/layout.py): 8 nodes a rack, 2 racks a PDU, 4 racks a coolant loop, 8
racks a row, 8 GPUs and ports a node, port r on rail r, one leaf for each rail of a pod of 32 nodes. Names contain the
rack, as in most sites, so that a Desk without topology can group by name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pipeline.model.topology import Topology

GPUS, RACK, POD = 8, 8, 32
OLD, NEW = "570.133.20", "575.57.08"
"""Two driver versions: a roll-out reaches racks in random order."""


@dataclass
class Fleet:
    """parents, attributes: of the topology. below: cause -> nodes below it. ranks: job -> its ranks (rank, node)."""

    nodes: list[str] = field(default_factory=list)
    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, object]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)
    ports: dict[str, list[str]] = field(default_factory=dict)
    ranks: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def topology(self) -> Topology:
        """Returns everything that is known of it."""
        return Topology(self.parents, self.attributes)

    def pick(self, kind: str, dice: random.Random) -> str:
        """Returns a cause of a kind."""
        return dice.choice(sorted(e for e in (*self.below, *self.ports, *self.ranks) if e.startswith(f"{kind}:")))


def make_fleet(nodes: int, seed: int) -> Fleet:
    """Returns a fleet of so many nodes; the seed places jobs and versions."""
    dice, fleet = random.Random(seed), Fleet()
    upgraded = {r for r in range(-(-nodes // RACK)) if dice.random() < 0.35}
    for n in range(nodes):
        r = n // RACK
        name = f"r{r:03d}-n{n % RACK}"
        node, rack = f"node:{name}", f"rack:r{r:03d}"
        fleet.nodes.append(node)
        fleet.parents[node] = (rack,)
        fleet.parents[rack] = (f"cdu:c{r // 4}", f"pdu:p{r // 2}", f"row:w{r // 8}")
        version = NEW if r in upgraded else OLD
        fleet.attributes[node] = {"nvidia_driver": version}
        for over in (rack, *fleet.parents[rack], f"version:nvidia_driver={version}"):
            fleet.below.setdefault(over, []).append(node)
        for i in range(GPUS):
            port, leaf = f"port:{name}.mlx5_{i}", f"leaf:l{n // POD}-{i}"
            fleet.parents[f"gpu:{name}.{i}"] = (node,)
            fleet.parents[port] = (node, leaf, f"rail:{i}")
            for network in (leaf, f"rail:{i}"):
                fleet.ports.setdefault(network, []).append(port)
    _place_jobs(fleet, dice)
    return fleet


def _place_jobs(fleet: Fleet, dice: random.Random) -> None:
    """Places jobs on nearly all nodes: one on two fifths of them, the others smaller, on random nodes."""
    free, number = dice.sample(fleet.nodes, int(0.9 * len(fleet.nodes))), 80
    while len(free) > 1:
        size = 2 * len(fleet.nodes) // 5 if number == 80 else dice.choice((2, 4, 8, 16, 32))
        mine, free, number = free[:size], free[size:], number + 1
        job = f"job:{number}"
        for n, node in enumerate(mine):
            for i in range(GPUS):
                rank = f"rank:{number}.{n * GPUS + i}"
                stage = f"stage:{number}.{n * 4 // len(mine)}"
                fleet.parents[rank] = (stage, job, f"gpu:{node[5:]}.{i}")
                fleet.ranks.setdefault(job, []).append((rank, node))
