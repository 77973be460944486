"""Where the living ranks are: a slot for each, its stage, job, GPU and node, and with whom it can be compared.

Jobs come and go and frames keep the columns of their ranks for ever; work per tick goes over the slots alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.streams import Floats
from detectors.base.topology_index import TopologyIndex
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

Ints = NDArray[np.int32]
LEAST_PEERS = 8
"""Ranks below which a cohort says nothing about scale."""
MOST_OF_COHORT = 0.3
"""Share of a cohort of which one node may be: if it goes slow as a whole, the median must still be the others'."""
_KEPT = 3600 * SECOND
"""How long a rank that ended keeps its slot: a job that comes back on the same GPUs goes on from what was learnt.
Chosen: the time for which ends of jobs are remembered."""
_ABSURD = 1e30  # no time, logarithm or counter is as large, and single precision ends soon above: such a value is none
_KINDS = ("stage", "job", "gpu", "node")


class RankSlots:
    """Slots of ranks; arrays are by slot, -1 where there is nothing. Feed `update` once per instant."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._gpus: dict[str, str] = {}  # rank -> the GPU on which it learnt
        self._left: dict[str, int] = {}  # rank that is gone -> since when
        self._mates: dict[str, str] = {}  # rank -> with whom it was compared
        self._key: tuple[int, ...] = ()
        self._ancestors: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
        self.column = np.empty(0, np.int64)
        self.ranks: list[str] = []
        self.numbers: dict[str, Ints] = {kind: np.empty(0, np.int32) for kind in _KINDS}
        self.entities: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        self._number_of: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
        self.groups = np.empty(0, np.int32)
        self.cross_stage = np.empty(0, bool)  # compared with ranks of other stages too
        self.any_cross_stage = False  # whether any is
        self.stage_only = np.empty(0, bool)  # compared with all of its stage, and with nobody else
        self.cohorts: list[str] = []
        self._order, self._first = np.empty(0, np.int32), np.zeros(1, np.int64)  # slots stage by stage
        self._gpu_at: tuple[int, NDArray[np.int64]] = (-1, self.column)
        self._last_gpu: dict[str, str] = {}  # rank that is gone -> the GPU on which it was
        self._node_index, self._gpu_index = (
            TopologyIndex(),
            TopologyIndex(),
        )  # of the nodes, and of the GPUs of ranks that are gone

    def __len__(self) -> int:
        return len(self.ranks)

    def update_slots(self, frame: Frame) -> list[int]:
        """Follows the topology; the slots that hold another rank, or a rank on another GPU, than before."""
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

    def _find_regrouped(self, living: Iterable[str]) -> list[int]:
        """Slots of ranks that are compared with others than before: another stage, or the job in place of the stage."""
        now = {rank: self.cohort_name(self._slots[rank]) for rank in living}
        changed = [self._slots[rank] for rank, mates in now.items() if self._mates.get(rank, mates) != mates]
        self._mates.update(now)
        return changed

    def _assign_slots(self, living: Mapping[str, int], time: int) -> list[int]:
        """Slots for the living; those of ranks that are long gone are free again. Returns the new ones."""
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
        """Nearest of each kind; looked up anew only for a rank whose parents are others than before."""
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
        self._gpu_at = (-1, self.column)
        self.groups, self.cohorts = self._build_cohorts()
        stage = self.numbers["stage"]
        self._order = np.argsort(stage, kind="stable").astype(np.int32)[np.count_nonzero(stage < 0) :]
        self._first = np.append(0, np.cumsum(np.bincount(stage[stage >= 0]))).astype(np.int64)
        pooled = np.array([*(name in numbers["job"] for name in self.cohorts), False], bool)
        self.cross_stage = pooled[self.groups] & (self.numbers["stage"] >= 0)
        self.any_cross_stage = bool(self.cross_stage.any())
        of_cohort = np.array([*(numbers["stage"].get(name, -2) for name in self.cohorts), -2])
        self.stage_only = (of_cohort[self.groups] == stage) & (self.groups >= 0)
        rest = np.unique(stage[~self.stage_only & (stage >= 0)])
        parts = [self._order[self._first[s] : self._first[s + 1]] for s in rest.tolist()]
        self._other_stages = np.concatenate([np.empty(0, np.int32), *parts]), np.cumsum([0, *map(len, parts)])
        row = np.append(np.full(len(self.entities["stage"]), -1), -1)
        row[rest] = np.arange(len(rest))
        self._row = row[stage]

    def _build_cohorts(self) -> tuple[Ints, list[str]]:
        """With whom each is compared: its stage, or where a node is too large a part of that, the whole job.

        What a rank of another stage usually takes longer by is its own offset, which the kernel learns; so a change
        can be told from all of the job where the stage is too small.
        """
        groups, names = np.full(len(self), -1, np.int32), list[str]()
        rungs = [(kind, LEAST_PEERS, MOST_OF_COHORT) for kind in ("stage", "job")] + [
            (kind, LEAST_PEERS, 1.0) for kind in ("stage", "job")
        ]
        for kind, least, most in (*rungs, ("stage", 2, 1.0), ("job", 2, 1.0)):
            for number, members in _members(self.numbers[kind]):
                waiting = members[groups[members] < 0]
                if len(members) >= least and len(waiting) and self._largest_node_share(members) <= most:
                    groups[waiting] = len(names)
                    names.append(self.entities[kind][number])
        groups[self.column < 0] = len(names)  # who is gone for a while keeps what it learnt among peers
        return groups, [*names, "nobody"]

    def _largest_node_share(self, members: NDArray[np.int64]) -> float:
        """Share of the largest node; of unknown nodes nothing is known."""
        nodes = self.numbers["node"][members]
        nodes = nodes[nodes >= 0]
        return max(Counter(nodes.tolist()).values()) / len(members) if len(nodes) else 0.0

    def ancestor(self, kind: str, slot: int) -> str | None:
        """The stage, job, GPU or node of a slot."""
        number = int(self.numbers[kind][slot])
        return self.entities[kind][number] if number >= 0 else None

    def cohort_name(self, slot: int) -> str:
        """In words: with whom it is compared."""
        group = int(self.groups[slot])
        return self.cohorts[group] if group >= 0 else "own past"

    def stage_medians(self, values: Floats) -> Floats:
        """(S,) median of each one's stage; NaN without one."""
        return self._grouped_medians(values, self._order, self._first, self.numbers["stage"])

    def fill_stage_medians(self, values: Floats, median: Floats) -> Floats:
        """The same, where `median` is known of those with whom each is compared."""
        if self.stage_only.all():
            return median
        return np.where(self.stage_only, median, self._grouped_medians(values, *self._other_stages, self._row))

    def _grouped_medians(self, values: Floats, order: Ints, first: NDArray[np.int64], row: NDArray[Any]) -> Floats:
        count, size = len(first) - 1, len(values)
        median, spread = np.empty(count, np.float32), np.empty(count, np.float32)
        told = np.empty(size + 1, np.float32), median, spread, np.empty(count, np.int32)
        singles = np.where(np.abs(values) < _ABSURD, values, np.nan).astype(np.float32)
        kernel.cohorts(singles, np.zeros(size, np.float32), order, first, *told)
        return np.asarray(np.append(median, np.nan)[row], np.float64)

    def read_ranks(self, frame: Frame, signal: str) -> NDArray[np.float64]:
        """(S,) a signal of the ranks."""
        return np.append(frame[signal], np.nan)[self.column]

    def read_gpus(self, gpus: Frame, signal: str) -> NDArray[np.float64]:
        """(S,) a signal of the ranks' GPUs."""
        if self._gpu_at[0] != (key := len(gpus.entities)):
            place = {e: i for i, e in enumerate(gpus.entities)}
            where = np.array([*(place.get(e, -1) for e in self.entities["gpu"]), -1], np.int64)
            self._gpu_at = key, where[self.numbers["gpu"]]
        return np.append(gpus[signal], np.nan)[self._gpu_at[1]]

    def slots_on(self, entity: str, topology: Topology) -> list[int]:
        """Slots of the ranks that are, or were last, on or in an entity."""
        kind = kind_of(entity)
        if kind == "rank":
            return self.slots_of([entity])
        if kind in _KINDS:
            mine = [self._number_of[kind][entity]] if entity in self._number_of[kind] else []
        else:
            kind = "node"
            self._node_index.update(self.entities["node"], topology)
            mine = self._node_index.devices_below(entity)
        slots = np.flatnonzero(np.isin(self.numbers[kind], mine)).tolist() if mine else []
        if kind in ("stage", "job"):
            return slots
        ranks, gpus = list(self._last_gpu), list(self._last_gpu.values())
        self._gpu_index.update(gpus, topology)
        there = {*self._gpu_index.devices_below(entity), *(i for i, gpu in enumerate(gpus) if gpu == entity)}
        return [*slots, *self.slots_of(ranks[i] for i in sorted(there))]

    def slots_of(self, ranks: Iterable[str]) -> list[int]:
        """Slots of ranks that have one."""
        return [self._slots[rank] for rank in ranks if rank in self._slots]

    def slot_of(self, rank: str) -> int | None:
        """Slot of a rank, if it has one."""
        return self._slots.get(rank)

    def snapshot(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in ("_slots", "_gpus", "_left", "_mates")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, known in state.items():
            setattr(self, name, dict(known))
        self._key = ()


def _members(numbers: Ints) -> list[tuple[int, NDArray[np.int64]]]:
    """Slots by number, those of -1 left out."""
    order = np.argsort(numbers, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
    return [(int(numbers[part[0]]), part) for part in parts if len(part) and numbers[part[0]] >= 0]
