"""The job and the rank on each GPU, and the GPUs of each node. What jobs change is renewed, not all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from detectors.base.topology_index import find_nodes
from pipeline.model.rank_changes import RankChanges
from pipeline.model.records import Frame
from pipeline.model.topology import Topology


class JobIndex:
    """Answers which job runs where. All indexes share what they find in a topology."""

    _found: ClassVar[WeakKeyDictionary[Topology, tuple[int, _Jobs]]] = WeakKeyDictionary()

    def jobs_by_gpu(self, topology: Topology) -> Mapping[str, str]:
        """Returns GPU -> job on it, where one is known."""
        return self._jobs(topology).on

    def jobs_by_node(self, topology: Topology) -> Mapping[str, str]:
        """Returns node -> the job of all its ranks, where there is one."""
        return self._jobs(topology).of_node

    def ranks_by_gpu(self, topology: Topology) -> Mapping[str, Mapping[str, str]]:
        """Returns GPU -> ancestors by kind of the rank on it; of several ranks on one GPU the last named."""
        return self._jobs(topology).around

    def job_on(self, gpu: str, topology: Topology) -> str | None:
        """Returns the job on a GPU; None if none is known."""
        return self._jobs(topology).on.get(gpu)

    def job_of_node(self, node: str, topology: Topology) -> str | None:
        """Returns the job of all ranks of a node; None if it has none, or several."""
        return self._jobs(topology).of_node.get(node)

    def gpus_of(self, node: str, topology: Topology) -> frozenset[str]:
        """Returns the GPUs of a node."""
        return self._jobs(topology).gpus.get(node, frozenset())

    def places(self, gpus: Frame, nics: Frame | None) -> JobPlaces:
        """Returns where jobs are in frames of GPUs and ports."""
        jobs, size = self._jobs(gpus.topology), (len(gpus.entities), len(nics.entities) if nics else 0)
        if size not in jobs.places:
            jobs.places[size] = _find_places(jobs, gpus, nics)
        return jobs.places[size]

    def _jobs(self, topology: Topology) -> _Jobs:
        known = self._found.get(topology)
        if known is None or known[0] != topology.version:
            known = self._found[topology] = topology.version, _renew(known[1] if known else None, topology)
        return known[1]


class JobPlaces(NamedTuple):
    """Jobs in frames. nodes: job -> its nodes.

    of_gpu, of_port: (N,) number of the job of each GPU, and of each port of a node with one job; -1 none.
    """

    nodes: Mapping[str, tuple[str, ...]]
    of_gpu: NDArray[np.int64]
    of_port: NDArray[np.int64]


@dataclass(slots=True)
class _Jobs:
    """What the index knows of one topology.

    gpus: node -> its GPUs.   node_of: GPU -> its node.   ranks: GPU -> ancestors by kind of each rank on it.
    around, on: of the last of them, and its job.   of_node: node -> the only job on it.   places: by sizes of frames.
    """

    gpus: Mapping[str, frozenset[str]]
    node_of: Mapping[str, str]
    ranks: dict[str, dict[str, Mapping[str, str]]] = field(default_factory=dict)
    around: dict[str, Mapping[str, str]] = field(default_factory=dict)
    on: dict[str, str] = field(default_factory=dict)
    of_node: dict[str, str] = field(default_factory=dict)
    places: dict[tuple[int, int], JobPlaces] = field(default_factory=dict)
    changes: RankChanges = field(default_factory=RankChanges)
    _gpu_of: dict[str, str] = field(default_factory=dict)  # rank -> the GPU that it is on

    def place(self, ranks: Iterable[str], topology: Topology) -> None:
        """Follows ranks that were added, removed or moved."""
        touched: dict[str, None] = {}
        for rank in ranks:
            if (before := self._gpu_of.pop(rank, None)) is not None:
                del self.ranks[before][rank]
                touched[before] = None
            around = topology.nearest_ancestors(rank) if rank in topology.parents else {}
            if (gpu := around.get("gpu")) is not None:
                self._gpu_of[rank] = gpu
                self.ranks.setdefault(gpu, {})[rank] = around
                touched[gpu] = None
        self._order_shared(touched, topology)
        for gpu in touched:
            self._name_last(gpu)
        for node in dict.fromkeys(node for gpu in touched if (node := self.node_of.get(gpu))):
            self._name_only_job(node)

    def _order_shared(self, gpus: Iterable[str], topology: Topology) -> None:
        """Sorts the ranks of GPUs with several as the topology names them."""
        shared = [gpu for gpu in gpus if len(self.ranks[gpu]) > 1]
        if shared:
            mine = {rank for gpu in shared for rank in self.ranks[gpu]}
            order = {rank: i for i, rank in enumerate(e for e in topology.parents if e in mine)}
            for gpu in shared:
                self.ranks[gpu] = dict(sorted(self.ranks[gpu].items(), key=lambda line: order[line[0]]))

    def _name_last(self, gpu: str) -> None:
        here = self.ranks[gpu]
        if not here:
            del self.ranks[gpu], self.around[gpu]
            self.on.pop(gpu, None)
            return
        self.around[gpu] = next(reversed(here.values()))
        jobs = [job for around in here.values() if (job := around.get("job"))]
        if jobs:
            self.on[gpu] = jobs[-1]
        else:
            self.on.pop(gpu, None)

    def _name_only_job(self, node: str) -> None:
        ranks = (around for gpu in self.gpus[node] for around in self.ranks.get(gpu, {}).values())
        jobs = {job for around in ranks if (job := around.get("job"))}
        if len(jobs) == 1:
            self.of_node[node] = jobs.pop()
        else:
            self.of_node.pop(node, None)


def _renew(known: _Jobs | None, topology: Topology) -> _Jobs:
    """Returns the jobs of a topology now; of changed jobs only what they changed is read."""
    changed = known.changes.read(topology) if known is not None else None
    if known is not None and changed is not None:
        known.places.clear()
        known.place((e for e in changed if e.startswith("rank:")), topology)
        return known
    made = _Jobs(*_find_gpus(topology))
    made.changes.read(topology)
    made.place((e for e in topology.parents if e.startswith("rank:")), topology)
    return made


def _find_gpus(topology: Topology) -> tuple[Mapping[str, frozenset[str]], Mapping[str, str]]:
    """Returns node -> its GPUs, and GPU -> its node."""
    found = ((e, topology.ancestor_of_kind(e, "node")) for e in topology.parents if e.startswith("gpu:"))
    node_of = {gpu: node for gpu, node in found if node}
    gpus: dict[str, set[str]] = {}
    for gpu, node in node_of.items():
        gpus.setdefault(node, set()).add(gpu)
    return {node: frozenset(mine) for node, mine in gpus.items()}, node_of


def _find_places(jobs: _Jobs, gpus: Frame, nics: Frame | None) -> JobPlaces:
    on = [*map(jobs.on.get, gpus.entities)]
    nodes: dict[str, dict[str, None]] = {}
    for node, job in zip(find_nodes(gpus), on, strict=True):
        if job:
            nodes.setdefault(job, {})[node] = None
    number = {job: i for i, job in enumerate(nodes)}
    of_port = map(jobs.of_node.get, find_nodes(nics) if nics else ())
    of = [np.array([-1 if job is None else number.get(job, -1) for job in each], np.int64) for each in (on, of_port)]
    return JobPlaces({job: tuple(found) for job, found in nodes.items()}, of[0], of[1])
