"""Slots of the running ranks: arrays by slot, while frames keep the columns of ended ranks permanently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.state import notes
from detectors.base.streams import Bools
from detectors.base.topology_index import members_mask
from detectors.straggler.gpu_placement import Placement
from pipeline.model.records import SECOND, Frame

_KEPT = 3600 * SECOND
"""us that a rank that ended keeps its slot: a job that comes back on the same GPUs keeps its baseline.
Chosen: the time for which ends of jobs are remembered."""
_KINDS = ("stage", "job", "gpu", "node")


def _no_columns() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass
class RankSlots(Placement):
    """Slots of ranks; call `update_slots` once per instant.

    column: of each in the frame, -1 for one that is gone.   gpu_column: of its GPU in the frame of GPUs, -1 none.
    """

    _slots: dict[str, int] = notes()
    _gpus: dict[str, str] = notes()  # rank -> the GPU on which it learned
    _left: dict[str, int] = notes()  # rank that is gone -> since when
    _mates: dict[str, str] = notes()  # rank -> name of its cohort
    column: NDArray[np.int64] = field(default_factory=_no_columns, init=False, repr=False)
    _key: tuple[int, ...] = field(default=(), init=False, repr=False)
    gpu_column: NDArray[np.int64] = field(default_factory=_no_columns, init=False, repr=False)
    _gpus_known: int = field(default=-1, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def update_slots(self, frame: Frame, gates: Gates | None = None) -> list[int]:
        """Updates the slots from the topology; returns those with another rank, a rank on another GPU or, by `gates`,
        one whose device changed while it was gone."""
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key == self._key:
            return []
        self._key = key
        living = {e: i for i, e in enumerate(frame.entities) if e in frame.topology.parents}
        back = {rank: since for rank, since in self._left.items() if rank in living} if gates else {}
        fresh = self._assign_slots(living, frame.time)
        changed = {rank: gates.last_change(rank, frame.topology) or 0 for rank in back} if gates else {}
        fresh += [self._slots[rank] for rank, at in changed.items() if at >= back[rank]]
        size = max(len(self.names), 1 + max(self._slots.values(), default=-1))  # state by slot never shrinks
        names, found = [""] * size, list[Mapping[str, str]]([{}]) * size
        self.column = np.full(size, -1, np.int64)
        for rank, i in living.items():
            slot = self._slots[rank]
            self.column[slot], names[slot] = i, rank
            found[slot] = around = frame.topology.nearest_ancestors(rank)
            if (gpu := around.get("gpu")) is not None:
                if self._gpus.get(rank, gpu) != gpu:
                    fresh.append(slot)
                self._gpus[rank] = gpu
        self._gpus_known, self.gpu_column = -1, np.full(size, -1, np.int64)
        self.place(names, found, _KINDS)
        self.build_cohorts(np.zeros(size, np.int32), 2)
        self.groups[self.column < 0] = len(self.cohorts)  # a rank that is gone keeps what it learned among peers
        self.cohorts.append("gone")
        now = {rank: self.cohort_name(self._slots[rank]) for rank in living}
        regrouped = [self._slots[rank] for rank, mates in now.items() if self._mates.get(rank, mates) != mates]
        self._mates.update(now)
        return fresh + regrouped

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the index is built with the next frame."""
        super().restore(state)
        self._key = ()

    def _assign_slots(self, living: Mapping[str, int], time: int) -> list[int]:
        """Assigns slots to new ranks; frees those of ranks that ended long ago. Returns the new ones."""
        for rank in self._slots:
            if rank in living:
                self._left.pop(rank, None)
            else:
                self._left.setdefault(rank, time)
        for rank in [r for r, since in self._left.items() if time - since > _KEPT]:
            for known in (self._slots, self._gpus, self._mates, self._left):
                known.pop(rank, None)
        arrived = [rank for rank in living if rank not in self._slots]
        taken = set(self._slots.values())
        free = [slot for slot in range(len(taken) + len(arrived)) if slot not in taken][: len(arrived)]
        self._slots.update(zip(arrived, free, strict=True))
        return free

    def read_ranks(self, frame: Frame, signal: str) -> NDArray[np.float64]:
        """Returns (S,) a signal of the ranks."""
        return np.append(frame[signal], np.nan)[self.column]

    def locate_gpus(self, gpus: Frame) -> None:
        """Finds the column of each rank's GPU in a frame of GPUs."""
        if self._gpus_known != (key := len(gpus.entities)):
            place = {e: i for i, e in enumerate(gpus.entities)}
            where = np.array([*(place.get(e, -1) for e in self.entities["gpu"]), -1], np.int64)
            self._gpus_known, self.gpu_column = key, where[self.numbers["gpu"]]

    def of_gpus(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns (S,) the value of each rank's GPU, from values by GPU of the frame."""
        return np.append(values, np.nan)[self.gpu_column]

    def mask(self, named: Iterable[str], frame: Frame) -> Bools:
        """Returns (S,) ranks that are named, on a named device, or of a named job or stage. frame: of the ranks."""
        return np.append(members_mask(tuple(named), frame), False)[self.column]
