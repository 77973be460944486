"""Slots of the running ranks: their stage, job, GPU and node, and the ranks they are compared with.

Jobs come and go, and frames keep the columns of their ranks permanently; work per tick goes over the slots alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.state import State, notes
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import TopologyIndex
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

Ints = NDArray[np.int32]
LEAST_PEERS = 8
"""Minimum ranks of a cohort; smaller ones prove nothing."""
MOST_OF_COHORT = 0.3
"""Share of a cohort that one node may be: if all of it is slow, the median must still be that of the others."""
_KEPT = 3600 * SECOND
"""us that a rank that ended keeps its slot: a job that comes back on the same GPUs keeps its baseline.
Chosen: the time for which ends of jobs are remembered."""
_ABSURD = 1e30  # no time, logarithm or counter is as large, and single precision ends soon above
_KINDS = ("stage", "job", "gpu", "node")


class StageMedians:
    """Medians by stage, over arrays by slot. only: (S,) compared with all of its stage and no others."""

    def __init__(self, stage: Ints, only: Bools, count: int) -> None:
        self._stage, self._only = stage, only
        self._order = np.argsort(stage, kind="stable").astype(np.int32)[np.count_nonzero(stage < 0) :]
        self._first = np.append(0, np.cumsum(np.bincount(stage[stage >= 0]))).astype(np.int64)
        rest = np.unique(stage[~only & (stage >= 0)])
        parts = [self._order[self._first[s] : self._first[s + 1]] for s in rest.tolist()]
        self._others = np.concatenate([np.empty(0, np.int32), *parts]), np.cumsum([0, *map(len, parts)])
        row = np.append(np.full(count, -1), -1)
        row[rest] = np.arange(len(rest))
        self._row = row[stage]

    def compute(self, values: Floats) -> Floats:
        """Returns (S,) median of each one's stage; NaN without one."""
        return self._grouped(values, self._order, self._first, self._stage)

    def complete(self, values: Floats, cohort_median: Floats) -> Floats:
        """Returns the same, with `cohort_median` where the cohort is the stage."""
        if self._only.all():
            return cohort_median
        return np.where(self._only, cohort_median, self._grouped(values, *self._others, self._row))

    def _grouped(self, values: Floats, order: Ints, first: NDArray[np.int64], row: NDArray[Any]) -> Floats:
        count, size = len(first) - 1, len(values)
        median, spread = np.empty(count, np.float32), np.empty(count, np.float32)
        outputs = np.empty(size + 1, np.float32), median, spread, np.empty(count, np.int32)
        singles = np.where(np.abs(values) < _ABSURD, values, np.nan).astype(np.float32)
        kernel.cohorts(singles, np.zeros(size, np.float32), order, first, *outputs)
        return np.asarray(np.append(median, np.nan)[row], np.float64)


@dataclass
class RankSlots(State):
    """Slots of ranks; arrays are by slot, -1 where there is none. Call `update_slots` once per instant.

    column:  in the frame.   ranks: names.   numbers: kind -> number of the rank's stage, job, GPU or node.
    entities: kind -> names by number.   groups: cohort.   cohorts: names of the cohorts.
    cross_stage: compared with ranks of other stages too.   stage_only: compared with all of its stage and no others.
    """

    _slots: dict[str, int] = notes()
    _gpus: dict[str, str] = notes()  # rank -> the GPU on which it learned
    _left: dict[str, int] = notes()  # rank that is gone -> since when
    _mates: dict[str, str] = notes()  # rank -> name of its cohort
    column: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)
    ranks: list[str] = field(default_factory=list, init=False, repr=False)
    numbers: dict[str, Ints] = field(
        default_factory=lambda: {kind: np.empty(0, np.int32) for kind in _KINDS}, init=False, repr=False
    )
    entities: dict[str, list[str]] = field(
        default_factory=lambda: {kind: [] for kind in _KINDS}, init=False, repr=False
    )
    groups: Ints = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)
    cohorts: list[str] = field(default_factory=list, init=False, repr=False)
    cross_stage: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)
    any_cross_stage: bool = field(default=False, init=False, repr=False)
    stage_only: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)

    def __post_init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._ancestors: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
        self._number_of: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
        self._medians = StageMedians(self.numbers["stage"], self.stage_only, 0)
        self._gpu_column: tuple[int, NDArray[np.int64]] = (-1, self.column)
        self._last_gpu: dict[str, str] = {}  # rank that is gone -> the GPU on which it was
        self._node_index, self._gpu_index = TopologyIndex(), TopologyIndex()  # of nodes; of GPUs in _last_gpu

    def __len__(self) -> int:
        return len(self.ranks)

    def update_slots(self, frame: Frame) -> list[int]:
        """Updates the slots from the topology; returns those with another rank, or a rank on another GPU."""
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key == self._key:
            return []
        self._key = key
        parents = frame.topology.parents
        living = {e: i for i, e in enumerate(frame.entities) if e in parents}
        fresh = self._assign_slots(living, frame.time)
        place = {e: self._find_ancestors(e, frame.topology) for e in living}
        for rank, around in place.items():
            if (gpu := around.get("gpu")) is not None:
                if self._gpus.get(rank, gpu) != gpu:
                    fresh.append(self._slots[rank])
                self._gpus[rank] = gpu
        self._last_gpu = {rank: gpu for rank in self._left if (gpu := self._gpus.get(rank))}
        self._build_index(living, place)
        return fresh + self._find_regrouped(living)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the index is built with the next frame."""
        super().restore(state)
        self._key = ()

    def _find_regrouped(self, living: Iterable[str]) -> list[int]:
        """Returns slots of ranks with another cohort than before: another stage, or the job in place of the stage."""
        now = {rank: self.cohort_name(self._slots[rank]) for rank in living}
        changed = [self._slots[rank] for rank, mates in now.items() if self._mates.get(rank, mates) != mates]
        self._mates.update(now)
        return changed

    def _assign_slots(self, living: Mapping[str, int], time: int) -> list[int]:
        """Assigns slots to new ranks; frees those of ranks that ended long ago. Returns the new ones."""
        for rank in self._slots:
            if rank in living:
                self._left.pop(rank, None)
            else:
                self._left.setdefault(rank, time)
        for rank in [r for r, since in self._left.items() if time - since > _KEPT]:
            for known in (self._slots, self._gpus, self._ancestors, self._mates, self._left):
                known.pop(rank, None)
        arrived = [rank for rank in living if rank not in self._slots]
        taken = set(self._slots.values())
        free = [slot for slot in range(len(taken) + len(arrived)) if slot not in taken]
        fresh = free[: len(arrived)]
        self._slots.update(zip(arrived, fresh, strict=True))
        return fresh

    def _find_ancestors(self, rank: str, topology: Topology) -> dict[str, str]:
        """Returns the nearest ancestor of each kind; computed again only for a rank with other parents than before."""
        parents = topology.parents[rank]
        known = self._ancestors.get(rank)
        if known is None or known[0] != parents:
            around: dict[str, str] = {}
            for above in topology.ancestors(rank):
                around.setdefault(kind_of(above), above)
            self._ancestors[rank] = known = parents, around
        return known[1]

    def _build_index(self, living: Mapping[str, int], place: Mapping[str, dict[str, str]]) -> None:
        size = max(len(self.ranks), 1 + max(self._slots.values(), default=-1))  # state by slot never shrinks
        self.column, self.ranks = np.full(size, -1, np.int64), [""] * size
        self.numbers = {kind: np.full(size, -1, np.int32) for kind in _KINDS}
        numbers: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
        for rank, i in living.items():
            slot = self._slots[rank]
            self.column[slot], self.ranks[slot] = i, rank
            for kind in _KINDS:
                if (entity := place[rank].get(kind)) is not None:
                    self.numbers[kind][slot] = numbers[kind].setdefault(entity, len(numbers[kind]))
        self.entities, self._number_of = {kind: list(found) for kind, found in numbers.items()}, numbers
        self._gpu_column = (-1, self.column)
        self.groups, self.cohorts = self._build_cohorts()
        stage = self.numbers["stage"]
        pooled = np.array([*(name in numbers["job"] for name in self.cohorts), False], bool)
        self.cross_stage = pooled[self.groups] & (stage >= 0)
        self.any_cross_stage = bool(self.cross_stage.any())
        of_cohort = np.array([*(numbers["stage"].get(name, -2) for name in self.cohorts), -2])
        self.stage_only = (of_cohort[self.groups] == stage) & (self.groups >= 0)
        self._medians = StageMedians(stage, self.stage_only, len(self.entities["stage"]))

    def _build_cohorts(self) -> tuple[Ints, list[str]]:
        """Returns the cohort of each: its stage, or the whole job where a node is too large a part of the stage.

        The usual difference of a rank of another stage is its own offset, which the kernel learns; so a change shows
        against all of the job where the stage is too small.
        """
        groups, names = np.full(len(self), -1, np.int32), list[str]()
        large = [(kind, LEAST_PEERS, most) for most in (MOST_OF_COHORT, 1.0) for kind in ("stage", "job")]
        for kind, least, most in (*large, ("stage", 2, 1.0), ("job", 2, 1.0)):
            for number, members in _members(self.numbers[kind]):
                waiting = members[groups[members] < 0]
                if len(members) >= least and len(waiting) and self._largest_node_share(members) <= most:
                    groups[waiting] = len(names)
                    names.append(self.entities[kind][number])
        groups[self.column < 0] = len(names)  # a rank that is gone for a while keeps what it learned among peers
        return groups, [*names, "nobody"]

    def _largest_node_share(self, members: NDArray[np.int64]) -> float:
        """Returns the share of the largest node; 0 if the nodes are unknown."""
        nodes = self.numbers["node"][members]
        nodes = nodes[nodes >= 0]
        return max(Counter(nodes.tolist()).values()) / len(members) if len(nodes) else 0.0

    def ancestor(self, kind: str, slot: int) -> str | None:
        """Returns the stage, job, GPU or node of a slot."""
        number = int(self.numbers[kind][slot])
        return self.entities[kind][number] if number >= 0 else None

    def cohort_name(self, slot: int) -> str:
        """Returns the name of the cohort that a rank is compared with."""
        group = int(self.groups[slot])
        return self.cohorts[group] if group >= 0 else "own past"

    def stage_medians(self, values: Floats) -> Floats:
        """Returns (S,) median of each one's stage; NaN without one."""
        return self._medians.compute(values)

    def fill_stage_medians(self, values: Floats, cohort_median: Floats) -> Floats:
        """Returns the same, with `cohort_median` where the cohort is the stage."""
        return self._medians.complete(values, cohort_median)

    def read_ranks(self, frame: Frame, signal: str) -> NDArray[np.float64]:
        """Returns (S,) a signal of the ranks."""
        return np.append(frame[signal], np.nan)[self.column]

    def read_gpus(self, gpus: Frame, signal: str) -> NDArray[np.float64]:
        """Returns (S,) a signal of the ranks' GPUs."""
        if self._gpu_column[0] != (key := len(gpus.entities)):
            place = {e: i for i, e in enumerate(gpus.entities)}
            where = np.array([*(place.get(e, -1) for e in self.entities["gpu"]), -1], np.int64)
            self._gpu_column = key, where[self.numbers["gpu"]]
        return np.append(gpus[signal], np.nan)[self._gpu_column[1]]

    def slots_on(self, entity: str, topology: Topology) -> list[int]:
        """Returns slots of the ranks that are, or were last, on or in an entity."""
        kind = kind_of(entity)
        if kind == "rank":
            return self.slots_of([entity])
        if kind in _KINDS:
            wanted = [self._number_of[kind][entity]] if entity in self._number_of[kind] else []
        else:
            kind = "node"
            self._node_index.update(self.entities["node"], topology)
            wanted = self._node_index.devices_below(entity)
        slots = np.flatnonzero(np.isin(self.numbers[kind], wanted)).tolist() if wanted else []
        if kind in ("stage", "job"):
            return slots
        ranks, gpus = list(self._last_gpu), list(self._last_gpu.values())
        self._gpu_index.update(gpus, topology)
        gone = {*self._gpu_index.devices_below(entity), *(i for i, gpu in enumerate(gpus) if gpu == entity)}
        return [*slots, *self.slots_of(ranks[i] for i in sorted(gone))]

    def slots_of(self, ranks: Iterable[str]) -> list[int]:
        """Returns slots of the ranks that have one."""
        return [self._slots[rank] for rank in ranks if rank in self._slots]

    def slot_of(self, rank: str) -> int | None:
        """Returns the slot of a rank, if it has one."""
        return self._slots.get(rank)


def _members(numbers: Ints) -> list[tuple[int, NDArray[np.int64]]]:
    """Returns the slots of each number, without those of -1."""
    order = np.argsort(numbers, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
    return [(int(numbers[part[0]]), part) for part in parts if len(part) and numbers[part[0]] >= 0]
