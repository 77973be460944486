"""Entities of a simulated fleet: names, parents, and the node that reports each. Every name starts with `sim-`.

Chosen, as a liquid-cooled training hall is built: 8 nodes per rack, 2 racks per PDU, 4 racks per coolant loop; one
port per GPU; rail r joins port r of all nodes, one leaf switch serves one rail of a pod of 32 nodes. Seven eighths of
the nodes train, the last eighth is spare. Names and relations are the same for every seed. Jobs and their ranks
change over time: agents/sim/schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.world import DEFAULT, World

NODES_PER_RACK, RACKS_PER_PDU, RACKS_PER_LOOP, NODES_PER_POD = 8, 2, 4, 32
PSUS = 6  # of a node of 8 GPUs, 4 of which are enough; as in HGX servers
FACILITY = "sim-facility"
"""Sender of devices that no node can read: PDUs, coolant loops and leak ropes."""
_SKU = {"node": "SIM-HGX-8", "port": "SIM-CX7-400G", "cdu": "SIM-CDU-500", "pdu": "SIM-PDU-200"}

Index = NDArray[np.intp]


class Layout:
    """Names and relations of `nodes` x `gpus_per_node`; arrays are in fleet order (GPU = port = node * gpus + i)."""

    def __init__(self, nodes: int, gpus_per_node: int, world: World = DEFAULT) -> None:
        self.nodes, self.gpus_per_node, self.world = nodes, gpus_per_node, world
        self.gpus = nodes * gpus_per_node
        width = max(3, len(str(nodes)))
        self.node_names = tuple(f"sim-n{n + 1:0{width}d}" for n in range(nodes))
        self._number(nodes)
        self.entities: Mapping[str, tuple[str, ...]] = self._entities(gpus_per_node)
        """Device class -> names of its devices, for all but ranks."""
        self.senders: Mapping[str, Index] = self._senders(nodes)
        """Device class -> (devices,) number of the sender that reports each."""
        self.targets: Mapping[str, tuple[str, ...]] = {
            **self.entities,
            "rack": tuple(f"rack:sim-r{r + 1}" for r in range(self.racks)),
            "leaf": tuple(f"leaf:sim-l{leaf + 1}" for leaf in range(self._leaves)),
            "instrument": (
                *self.entities["gpu"],
                *(self.entities["coolant"] if world.reads("coolant.flow") else ()),
                *(self.entities["sensor"][::2] if world.reads("sensor.temperature") else ()),
            ),
        }
        """Kind of target of a fault -> names of all such devices."""
        self.sender_names = (*self.node_names, FACILITY)
        self.parents = dict(self._parents())

    def _number(self, nodes: int) -> None:
        """Assigns devices to racks, PDUs, loops and leaves."""
        self.node_of_gpu: Index = np.arange(self.gpus) // self.gpus_per_node
        self.rack_of_node: Index = np.arange(nodes) // NODES_PER_RACK
        self.racks = int(self.rack_of_node[-1]) + 1
        self.pdu_of_rack: Index = np.arange(self.racks) // RACKS_PER_PDU
        self.loop_of_rack: Index = np.arange(self.racks) // RACKS_PER_LOOP
        self.rack_of_gpu: Index = self.rack_of_node[self.node_of_gpu]
        self.pdu_of_gpu: Index = self.pdu_of_rack[self.rack_of_gpu]
        self.loop_of_gpu: Index = self.loop_of_rack[self.rack_of_gpu]
        rail = np.arange(self.gpus) % self.gpus_per_node
        self.leaf_of_port: Index = self.node_of_gpu // NODES_PER_POD * self.gpus_per_node + rail
        self._leaves = -(-nodes // NODES_PER_POD) * self.gpus_per_node
        if not self.world.fabric.rails:
            self.leaf_of_port, self._leaves = self.rack_of_gpu, self.racks
        self.ports_of_node = self.world.fabric.ports or self.gpus_per_node
        self.port_used: NDArray[np.bool_] = rail < self.ports_of_node
        """(ports,) whether a port is in use; the others are down on purpose."""

    def _entities(self, width: int) -> dict[str, tuple[str, ...]]:
        names, loops = self.node_names, self.world.cooling.has_loop
        return {
            "gpu": tuple(f"gpu:{n}.{i}" for n in names for i in range(width)),
            "nvlink": tuple(f"nvlink:{n}.{i}.0" for n in names for i in range(width)),
            "nic": tuple(f"port:{n}.mlx5_{i}" for n in names for i in range(width)),
            "node": tuple(f"node:{n}" for n in names),
            "sensor": tuple(f"sensor:{n}.{what}" for n in names for what in ("inlet", "fan")),
            "psu": tuple(f"psu:{n}.{i}" for n in names for i in range(PSUS)),
            **({"disk": tuple(f"disk:{n}.nvme0n1" for n in names)} if self.world.is_drawn else {}),
            "power": tuple(f"pdu:sim-p{p + 1}" for p in range(int(self.pdu_of_rack[-1]) + 1)),
            "coolant": tuple(f"cdu:sim-c{c + 1}" for c in range(int(self.loop_of_rack[-1]) + 1) if loops),
            "leak": tuple(f"leak_detector:sim-r{r + 1}" for r in range(self.racks) if loops),
        }

    def _senders(self, nodes: int) -> dict[str, Index]:
        own = ("gpu", "nvlink", "nic", "node", "sensor", "psu", *(("disk",) if self.world.is_drawn else ()))
        each = {c: len(self.entities[c]) // nodes for c in own}
        found: dict[str, Index] = {c: np.arange(nodes * count) // count for c, count in each.items()}
        return found | {c: np.full(len(self.entities[c]), nodes) for c in ("power", "coolant", "leak")}

    def sender_of(self, entity: str) -> int:
        """Returns the number of the sender that reports `entity`."""
        return self._sender_of[entity]

    @property
    def busy_nodes(self) -> int:
        """Number of the nodes that have jobs: the first ones."""
        return max(1, self.nodes - int(self.nodes * self.world.work.idle))

    def busy_count(self, what: str) -> int:
        """Returns how many of the first devices of a kind have work: those of nodes that are not spare."""
        nodes = self.busy_nodes
        per = {"gpu": self.gpus_per_node, "nvlink": self.gpus_per_node, "nic": self.gpus_per_node, "node": 1}
        return nodes * per[what] if what in per else len(self.targets[what])

    def nodes_below(self, what: str, device: int) -> Index:
        """Returns the nodes that depend on a device: gpu, nvlink, nic, psu, node, rack, power (PDU), coolant (loop),
        leaf or instrument."""
        rack = self.rack_of_node
        found: dict[str, Callable[[], Any]] = {
            "gpu": lambda: self.node_of_gpu[device : device + 1],
            "nic": lambda: self.node_of_gpu[device : device + 1],
            "nvlink": lambda: self.node_of_gpu[device : device + 1],
            "psu": lambda: np.array([device // PSUS]),
            "instrument": lambda: self.nodes_below(*self.instrument(device)),
            "sensor": lambda: np.array([device // 2]),
            "node": lambda: np.array([device]),
            "rack": lambda: np.flatnonzero(rack == device),
            "power": lambda: np.flatnonzero(self.pdu_of_rack[rack] == device),
            "coolant": lambda: np.flatnonzero(self.loop_of_rack[rack] == device),
            "leaf": lambda: self.node_of_gpu[self.leaf_of_port == device],
        }
        return np.asarray(found[what](), np.intp)

    def instrument(self, number: int) -> tuple[str, int]:
        """Returns class and number of a target `instrument`: a GPU, a coolant loop or the air inlet of a node."""
        loops = len(self.entities["coolant"]) if self.world.reads("coolant.flow") else 0
        if number < self.gpus:
            return "gpu", number
        rest = number - self.gpus
        return ("coolant", rest) if rest < loops else ("sensor", 2 * (rest - loops))

    def row_of(self, rack: int) -> Index:
        """Returns the racks of a rack's row: those on one coolant loop."""
        return np.flatnonzero(self.loop_of_rack == self.loop_of_rack[rack])

    def gpus_of(self, nodes: Index) -> Index:
        """Returns the GPUs (and ports) of some nodes."""
        width = self.gpus_per_node
        return np.asarray((np.asarray(nodes)[:, None] * width + np.arange(width)).ravel(), np.intp)

    def attributes(self, entity: str) -> dict[str, object]:
        """Returns attributes by which entities are compared; empty if there are none."""
        kind = entity.split(":", 1)[0]
        sku = f"SIM-{self.world.part.name}" if kind == "gpu" else _SKU.get(kind)
        return {"sku": sku, "simulated": True} if sku else {}

    def inventory(self) -> list[dict[str, dict[str, object]]]:
        """Returns per sender its entities with parents and attributes: the content of inventory events."""
        known: list[dict[str, dict[str, object]]] = [{} for _ in self.sender_names]
        for entity, parents in self.parents.items():
            line: dict[str, object] = {"parents": list(parents), "attributes": self.attributes(entity)}
            known[self._sender_of[entity]][entity] = line
        return known

    def _parents(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Returns every entity with its parents, nearest first; also records its sender."""
        self._sender_of: dict[str, int] = {}
        for n, name in enumerate(self.node_names):
            own = self._of_node(n, name)
            self._sender_of |= dict.fromkeys(own, n)
            yield from own.items()
        racks: dict[str, tuple[str, ...]] = {
            rack: (
                self.entities["power"][self.pdu_of_rack[r]],
                *self.entities["coolant"][self.loop_of_rack[r] : self.loop_of_rack[r] + 1],
            )
            for r, rack in enumerate(self.targets["rack"])
        }
        leaks = {rope: (self.targets["rack"][r],) for r, rope in enumerate(self.entities["leak"])}
        facility = racks | leaks | dict.fromkeys((*self.entities["power"], *self.entities["coolant"]), ())
        self._sender_of |= dict.fromkeys((f"node:{FACILITY}", *facility), self.nodes)
        self._sender_of |= dict.fromkeys(self.targets["leaf"], self.nodes)
        yield from facility.items()

    def _of_node(self, n: int, name: str) -> dict[str, tuple[str, ...]]:
        """Returns a node and its parts."""
        node, width = f"node:{name}", self.gpus_per_node
        own: dict[str, tuple[str, ...]] = {node: (self.targets["rack"][self.rack_of_node[n]],)}
        for i in range(width):
            leaf = self.targets["leaf"][self.leaf_of_port[n * width + i]]
            own[f"gpu:{name}.{i}"] = (node,)
            own[f"nvlink:{name}.{i}.0"] = (f"gpu:{name}.{i}", node)
            own[f"port:{name}.mlx5_{i}"] = (node, leaf, f"rail:sim-{i}")
        own |= {f"disk:{name}.nvme0n1": (node,)} if self.world.is_drawn else {}
        own |= {f"sensor:{name}.{what}": (node,) for what in ("inlet", "fan")}
        return own | {f"psu:{name}.{i}": (node,) for i in range(PSUS)}
