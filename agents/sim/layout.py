"""Who is who in a simulated fleet: names, parents and which node ships what. Every name carries `sim-`.

Chosen, as a liquid-cooled training hall is built: 8 nodes per rack, 2 racks per PDU, 4 racks per coolant loop; one
port per GPU; rail r joins port r of all nodes, one leaf switch serves one rail of a pod of 32 nodes. Seven eighths of
the nodes train: one job below 8 busy nodes, else two (three fifths and the rest); the last eighth idles. A job has 4
pipeline stages of consecutive ranks. Names and relations are the same for every seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NODES_PER_RACK, RACKS_PER_PDU, RACKS_PER_LOOP, NODES_PER_POD, STAGES = 8, 2, 4, 32, 4
FACILITY = "sim-facility"
"""The shipper of what no node can see: PDUs and coolant loops."""
_SKU = {"node": "SIM-HGX-8", "gpu": "SIM-H100-SXM", "port": "SIM-CX7-400G", "cdu": "SIM-CDU-500", "pdu": "SIM-PDU-200"}

Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Job:
    """A training job on consecutive nodes; `ranks` and `gpus` are slices of the fleet's rank and GPU order."""

    name: str
    nodes: slice
    gpus: slice
    ranks: slice
    stages: int


@dataclass(frozen=True, slots=True)
class Shipper:
    """One node's agent: the devices it reports, as slices of the fleet's order per device class."""

    node: str
    parts: Mapping[str, slice]


class Layout:
    """Names and relations of `nodes` x `gpus_per_node`; arrays are in fleet order (GPU = port = node * gpus + i)."""

    def __init__(self, nodes: int, gpus_per_node: int) -> None:
        self.nodes, self.gpus_per_node = nodes, gpus_per_node
        self.gpus = nodes * gpus_per_node
        width = max(3, len(str(nodes)))
        self.node_names = tuple(f"sim-n{n + 1:0{width}d}" for n in range(nodes))
        self.node_of_gpu: Index = np.arange(self.gpus) // gpus_per_node
        self.rack_of_node: Index = np.arange(nodes) // NODES_PER_RACK
        racks = int(self.rack_of_node[-1]) + 1
        self.pdu_of_rack: Index = np.arange(racks) // RACKS_PER_PDU
        self.loop_of_rack: Index = np.arange(racks) // RACKS_PER_LOOP
        self.rack_of_gpu: Index = self.rack_of_node[self.node_of_gpu]
        self.pdu_of_gpu: Index = self.pdu_of_rack[self.rack_of_gpu]
        self.loop_of_gpu: Index = self.loop_of_rack[self.rack_of_gpu]
        self.jobs = tuple(_jobs(nodes, gpus_per_node))
        self.ranks = self.jobs[-1].ranks.stop
        self.job_of_gpu: Index = np.full(self.gpus, -1)
        self.stage_of_rank: Index = np.zeros(self.ranks, np.intp)
        for number, job in enumerate(self.jobs):
            self.job_of_gpu[job.gpus] = number
            self.stage_of_rank[job.ranks] = number * STAGES + _stages(job)
        self.entities: Mapping[str, tuple[str, ...]] = {
            "gpu": tuple(f"gpu:{n}.{i}" for n in self.node_names for i in range(gpus_per_node)),
            "nic": tuple(f"port:{n}.mlx5_{i}" for n in self.node_names for i in range(gpus_per_node)),
            "node": tuple(f"node:{n}" for n in self.node_names),
            "rank": tuple(f"rank:{j.name}.{i}" for j in self.jobs for i in range(j.ranks.stop - j.ranks.start)),
            "power": tuple(f"pdu:sim-p{p + 1}" for p in range(int(self.pdu_of_rack[-1]) + 1)),
            "coolant": tuple(f"cdu:sim-c{c + 1}" for c in range(int(self.loop_of_rack[-1]) + 1)),
        }
        self.shippers = tuple(self._shippers())
        self.parents = dict(self._parents())

    def shipper_of(self, entity: str) -> int:
        """Number of the shipper that reports `entity`; jobs and the like are reported by the first node they touch."""
        return self._home[entity]

    def attributes(self, entity: str) -> dict[str, object]:
        """Facts that make entities comparable; empty where there are none."""
        sku = _SKU.get(entity.split(":", 1)[0])
        return {"sku": sku, "simulated": True} if sku else {}

    def inventory(self) -> Iterator[tuple[str, dict[str, object]]]:
        """(entity of the shipper, its entities with parents and attributes): the data of inventory events."""
        known: list[dict[str, object]] = [{} for _ in self.shippers]
        for entity, parents in self.parents.items():
            line = {"parents": list(parents), "attributes": self.attributes(entity)}
            known[self._home[entity]][entity] = line
        for shipper, entities in zip(self.shippers, known, strict=True):
            yield f"node:{shipper.node}", entities

    def _shippers(self) -> Iterator[Shipper]:
        width = self.gpus_per_node
        for n, name in enumerate(self.node_names):
            parts = {"gpu": slice(n * width, (n + 1) * width), "nic": slice(n * width, (n + 1) * width)}
            parts["node"] = slice(n, n + 1)
            if (n + 1) * width <= self.ranks:  # ranks are the GPUs of the busy nodes, which come first
                parts["rank"] = slice(n * width, (n + 1) * width)
            yield Shipper(name, parts)
        facility = {c: slice(0, len(self.entities[c])) for c in ("power", "coolant")}
        yield Shipper(FACILITY, facility)

    def _parents(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every entity with its parents, nearest first; fills in who reports it."""
        self._home: dict[str, int] = {}
        for n, name in enumerate(self.node_names):
            rack = self.rack_of_node[n]
            own: dict[str, tuple[str, ...]] = {f"node:{name}": (f"rack:sim-r{rack + 1}",)}
            for i in range(self.gpus_per_node):
                leaf = (n // NODES_PER_POD) * self.gpus_per_node + i
                own[f"gpu:{name}.{i}"] = (f"node:{name}",)
                own[f"port:{name}.mlx5_{i}"] = (f"node:{name}", f"leaf:sim-l{leaf + 1}", f"rail:sim-{i}")
            own |= self._ranks_of(n)
            self._home |= dict.fromkeys(own, n)
            yield from own.items()
        racks = {
            f"rack:sim-r{r + 1}": (f"pdu:sim-p{self.pdu_of_rack[r] + 1}", f"cdu:sim-c{self.loop_of_rack[r] + 1}")
            for r in range(len(self.pdu_of_rack))
        }
        facility = racks | dict.fromkeys((*self.entities["power"], *self.entities["coolant"]), ())
        self._home |= dict.fromkeys((f"node:{FACILITY}", *facility), self.nodes)
        yield from facility.items()

    def _ranks_of(self, node: int) -> dict[str, tuple[str, ...]]:
        """Ranks on one node, and the stages and the job that begin there."""
        found: dict[str, tuple[str, ...]] = {}
        for gpu in range(node * self.gpus_per_node, min((node + 1) * self.gpus_per_node, self.ranks)):
            job = self.jobs[self.job_of_gpu[gpu]]
            stage = f"stage:{job.name}.{self.stage_of_rank[gpu] % STAGES}"
            if gpu == job.ranks.start:
                found[f"job:{job.name}"] = ()
            if gpu == job.ranks.start or self.stage_of_rank[gpu] != self.stage_of_rank[gpu - 1]:
                found[stage] = (f"job:{job.name}",)
            found[self.entities["rank"][gpu]] = (stage, f"job:{job.name}", self.entities["gpu"][gpu])
        return found


def _jobs(nodes: int, gpus: int) -> Iterator[Job]:
    busy = max(1, nodes - nodes // 8)
    first = busy if busy < 8 else round(busy * 0.6)
    bounds = [(0, first)] + ([(first, busy)] if first < busy else [])
    for number, (a, b) in enumerate(bounds):
        ranks = slice(a * gpus, b * gpus)  # busy nodes come first, so a GPU's number is its rank's number
        yield Job(f"sim-{81 + number}", slice(a, b), ranks, ranks, min(STAGES, (b - a) * gpus))


def _stages(job: Job) -> Index:
    """(ranks,) pipeline stage of each rank of a job."""
    ranks = job.ranks.stop - job.ranks.start
    return np.asarray(np.arange(ranks) * job.stages // ranks, np.intp)
