"""What sits on each GPU as far as the topology tells: whose rank, of which job; who its peers are; who is hooked.

A GPU is compared with those of its product in its stage; where a node is too large a part of that, in its whole job;
and where no job is known, in its rack. Products differ in their clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import AncestorIndex, Peers
from detectors.base.streams import Bools
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

Ints = NDArray[np.int32]
LEAST_PEERS = 8
"""GPUs below which a cohort says nothing about scale."""
MOST_OF_COHORT = 0.3
"""Share of a cohort that one node may be: if all of it changes, the median must still be that of the others."""
_REPORTS_FOR = 600 * SECOND
"""How long a job that told compute times counts as one that tells them: longer than a checkpoint or evaluation takes;
chosen."""


class GpuPlacement:
    """Arrays by GPU of the frame; -1 where there is nothing. Feed `update` once per instant.

    groups: cohort.   node, job: numbers into `nodes`, `jobs`.   placed: its job is known.
    """

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._mates: dict[str, str] = {}  # GPU -> with whom it was compared
        self.reported_at = np.empty(0, np.int64)
        self.groups = self.node = self.job = np.empty(0, np.int32)
        self.job_known = np.empty(0, bool)
        self.names: list[str] = []
        self.nodes: list[str] = []
        self.jobs: list[str] = []
        self._fleet = Peers(("rack", "@sku"), ("@sku",), ("rack",), least=LEAST_PEERS)
        self._ranks = AncestorIndex("gpu")

    def update_topology(self, frame: Frame) -> Bools | None:
        """Follows topology and fleet; where they changed, (N,) who has other peers than before."""
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
        told = {int(fleet[i]): self._fleet.cohort_name(frame, i) for i in np.flatnonzero(alone).tolist()}
        names += [told.get(g, "") for g in range(int(fleet.max(initial=-1)) + 1)]
        self.groups, self.names = groups, names

    def _largest_node_share(self, members: NDArray[np.int64]) -> float:
        nodes = self.node[members]
        nodes = nodes[nodes >= 0]
        return max(Counter(nodes.tolist()).values()) / len(members) if len(nodes) else 0.0

    def _find_regrouped(self, gpus: Sequence[str]) -> Bools:
        """(N,) who has other peers than before."""
        now = {gpu: self.cohort_name(i) if self.job_known[i] else "" for i, gpu in enumerate(gpus)}
        before, self._mates = self._mates, now
        return np.array([before.get(gpu, mates) != mates for gpu, mates in now.items()], bool)

    def cohort_name(self, i: int) -> str:
        """In words: with whom a GPU is compared."""
        group = int(self.groups[i])
        return self.names[group] if group >= 0 else "own past"

    def record_reporting(self, gpus: Frame, ranks: Frame | None) -> None:
        """Takes note of GPUs whose training job itself tells compute times."""
        if (more := len(gpus.entities) - len(self.reported_at)) > 0:
            self.reported_at = np.append(self.reported_at, np.zeros(more, np.int64))
        if ranks is None or "rank.compute_time" not in ranks.values:
            return
        at = self._ranks.positions(ranks, gpus)
        told = at[(at >= 0) & np.isfinite(ranks["rank.compute_time"])]
        self.reported_at[told] = ranks.time

    def reports_compute_time(self, time: int) -> Bools:
        """(N,) whose job told compute times of late: the detector `straggler` judges those."""
        return np.asarray((self.reported_at > 0) & (time - self.reported_at <= _REPORTS_FOR))

    def snapshot(self) -> dict[str, Any]:
        return {"heard": self.reported_at.copy(), "mates": dict(self._mates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.reported_at, self._mates = state["heard"], dict(state["mates"])
        self._key = ()


def _ranks_by_gpu(topology: Topology) -> dict[str, dict[str, str]]:
    """GPU -> stage and job of the rank on it; of several ranks on one GPU the last named."""
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
    """(N,) number of what a GPU's rank is part of, -1 none, and the names by number."""
    numbers: dict[str, int] = {}
    out = np.full(len(frame.entities), -1, np.int32)
    for i, gpu in enumerate(frame.entities):
        if (name := place.get(gpu, {}).get(kind)) is not None:
            out[i] = numbers.setdefault(name, len(numbers))
    return out, list(numbers)


def _split_by_product(numbers: Ints, frame: Frame) -> Ints:
    """The same numbers where products are told apart, too."""
    known: dict[tuple[int, object], int] = {}
    attributes = frame.topology.attributes
    skus = (attributes.get(gpu, {}).get("sku") for gpu in frame.entities)
    pairs = list(zip(numbers.tolist(), skus, strict=True))
    return np.array([known.setdefault(pair, len(known)) if pair[0] >= 0 else -1 for pair in pairs], np.int32)


def _members(numbers: Ints) -> list[NDArray[np.int64]]:
    """GPUs by number, those of -1 left out."""
    order = np.argsort(numbers, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
    return [part for part in parts if len(part) and numbers[part[0]] >= 0]
