"""The rank on each GPU, its job and stage, as the topology shows; the GPUs it is compared with.

A GPU is compared with those of its product in its stage; where one node is too large a part of that, in its whole job;
and where no job is known, in its rack. Clocks of different products differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import AncestorIndex, Peers
from detectors.base.state import State, memory, notes
from detectors.base.streams import Bools
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

Ints = NDArray[np.int32]
LEAST_PEERS = 8
"""GPUs below which a cohort proves nothing."""
MOST_OF_COHORT = 0.3
"""Share of a cohort that one node may be: if all of it changes, the median must still be that of the others."""
_REPORTS_FOR = 600 * SECOND
"""us after its last compute time during which a job counts as reporting them: longer than a checkpoint or evaluation;
chosen."""


def _no_ints() -> Ints:
    return np.empty(0, np.int32)


@dataclass
class GpuPlacement(State):
    """(N,) by GPU of the frame; -1 where there is none. Call `update_topology` once per instant.

    groups: cohort.   node, job: numbers into `nodes`, `jobs`.   job_known: whether a rank is on it.
    reported_at: when its job last reported a compute time.   names: of the cohorts.
    """

    reported_at: NDArray[np.int64] = memory(0, np.int64)
    _mates: dict[str, str] = notes()  # GPU -> name of its cohort
    groups: Ints = field(default_factory=_no_ints, init=False, repr=False)
    node: Ints = field(default_factory=_no_ints, init=False, repr=False)
    job: Ints = field(default_factory=_no_ints, init=False, repr=False)
    job_known: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)
    names: list[str] = field(default_factory=list, init=False, repr=False)
    nodes: list[str] = field(default_factory=list, init=False, repr=False)
    jobs: list[str] = field(default_factory=list, init=False, repr=False)
    _key: tuple[int, ...] = field(default=(), init=False, repr=False)
    _fleet: Peers = field(
        default_factory=lambda: Peers(("rack", "@sku"), ("@sku",), ("rack",), least=LEAST_PEERS),
        init=False,
        repr=False,
    )
    _ranks: AncestorIndex = field(default_factory=lambda: AncestorIndex("gpu"), init=False, repr=False)

    def update_topology(self, frame: Frame) -> Bools | None:
        """Follows topology and fleet; where they changed, returns (N,) GPUs with other peers than before."""
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key == self._key:
            return None
        self._key = key
        place = _ranks_by_gpu(frame.topology)
        stage, _ = _number_ancestors(frame, place, "stage")
        self.job, self.jobs = _number_ancestors(frame, place, "job")
        self.job_known = self.job >= 0
        node = [frame.topology.ancestor_of_kind(e, "node") or "" for e in frame.entities]
        self.nodes = list(dict.fromkeys(name for name in node if name))
        numbers = {name: i for i, name in enumerate(self.nodes)}
        self.node = np.array([numbers.get(name, -1) for name in node], np.int32)
        self._build_cohorts(frame, place, stage)
        return self._find_regrouped(frame.entities)

    def restore(self, state: Mapping[str, object]) -> None:
        """See `State.restore`; cohorts are built with the next frame."""
        super().restore(state)
        self._key = ()

    def _build_cohorts(self, frame: Frame, place: Mapping[str, Mapping[str, str]], stage: Ints) -> None:
        groups, names = np.full(len(frame.entities), -1, np.int32), list[str]()
        stage, job = _split_by_product(stage, frame), _split_by_product(self.job, frame)
        rungs = [
            (stage, "stage", MOST_OF_COHORT),
            (job, "job", MOST_OF_COHORT),
            (stage, "stage", 1.0),
            (job, "job", 1.0),
        ]
        for numbers, kind, most in rungs:
            for members in _members(numbers):
                waiting = members[groups[members] < 0]
                if len(members) >= LEAST_PEERS and len(waiting) and self._largest_node_share(members) <= most:
                    groups[waiting] = len(names)
                    names.append(place[frame.entities[members[0]]][kind])
        fleet = self._fleet.groups(frame)
        alone = (groups < 0) & ~self.job_known & (fleet >= 0)
        groups[alone] = fleet[alone] + len(names)
        named = {int(fleet[i]): self._fleet.cohort_name(frame, i) for i in np.flatnonzero(alone).tolist()}
        names += [named.get(g, "") for g in range(int(fleet.max(initial=-1)) + 1)]
        self.groups, self.names = groups, names

    def _largest_node_share(self, members: NDArray[np.int64]) -> float:
        nodes = self.node[members]
        nodes = nodes[nodes >= 0]
        return max(Counter(nodes.tolist()).values()) / len(members) if len(nodes) else 0.0

    def _find_regrouped(self, gpus: Sequence[str]) -> Bools:
        """Returns (N,) GPUs with another cohort than before."""
        now = {gpu: self.cohort_name(i) if self.job_known[i] else "" for i, gpu in enumerate(gpus)}
        before, self._mates = self._mates, now
        return np.array([before.get(gpu, mates) != mates for gpu, mates in now.items()], bool)

    def cohort_name(self, i: int) -> str:
        """Returns the name of the cohort that a GPU is compared with."""
        group = int(self.groups[i])
        return self.names[group] if group >= 0 else "own past"

    def record_reporting(self, gpus: Frame, ranks: Frame | None) -> None:
        """Records GPUs whose training job reports compute times."""
        self.grow(len(gpus.entities))
        if ranks is None or "rank.compute_time" not in ranks.values:
            return
        at = self._ranks.positions(ranks, gpus)
        reporting = at[(at >= 0) & np.isfinite(ranks["rank.compute_time"])]
        self.reported_at[reporting] = ranks.time

    def reports_compute_time(self, time: int) -> Bools:
        """Returns (N,) GPUs whose job reported compute times recently: the detector `straggler` judges those."""
        return np.asarray((self.reported_at > 0) & (time - self.reported_at <= _REPORTS_FOR))


def _ranks_by_gpu(topology: Topology) -> dict[str, dict[str, str]]:
    """Returns GPU -> ancestors by kind of the rank on it; of several ranks on one GPU the last named."""
    found: dict[str, dict[str, str]] = {}
    for entity in topology.parents:
        if kind_of(entity) == "rank":
            around: dict[str, str] = {}
            for above in topology.ancestors(entity):
                around.setdefault(kind_of(above), above)
            if "gpu" in around:
                found[around["gpu"]] = around
    return found


def _number_ancestors(frame: Frame, place: Mapping[str, Mapping[str, str]], kind: str) -> tuple[Ints, list[str]]:
    """Returns (N,) number of the ancestor of a kind of each GPU's rank, -1 none, and the names by number."""
    numbers: dict[str, int] = {}
    out = np.full(len(frame.entities), -1, np.int32)
    for i, gpu in enumerate(frame.entities):
        if (name := place.get(gpu, {}).get(kind)) is not None:
            out[i] = numbers.setdefault(name, len(numbers))
    return out, list(numbers)


def _split_by_product(numbers: Ints, frame: Frame) -> Ints:
    """Returns new numbers, in which different products have different ones."""
    known: dict[tuple[int, object], int] = {}
    attributes = frame.topology.attributes
    skus = (attributes.get(gpu, {}).get("sku") for gpu in frame.entities)
    pairs = list(zip(numbers.tolist(), skus, strict=True))
    return np.array([known.setdefault(pair, len(known)) if pair[0] >= 0 else -1 for pair in pairs], np.int32)


def _members(numbers: Ints) -> list[NDArray[np.int64]]:
    """Returns the GPUs of each number, without those of -1."""
    order = np.argsort(numbers, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
    return [part for part in parts if len(part) and numbers[part[0]] >= 0]
