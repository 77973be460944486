"""Slots of the running ranks: arrays by slot, while frames keep the columns of ended ranks permanently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.state import notes
from detectors.base.streams import Bools
from detectors.base.topology_index import ChangedEntities, find_positions, members_mask
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
    column: NDArray[np.int64] = field(default_factory=_no_columns, init=False, repr=False)
    gpu_column: NDArray[np.int64] = field(default_factory=_no_columns, init=False, repr=False)
    _gpus_known: int = field(default=-1, init=False, repr=False)
    _living: dict[str, int] = field(default_factory=dict, init=False, repr=False)  # rank -> its column
    _changed: ChangedEntities = field(default_factory=ChangedEntities, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def update_slots(self, frame: Frame, gates: Gates | None = None) -> list[int]:
        """Updates the slots from the topology; returns those with another rank, a rank on another GPU or, by `gates`,
        one whose device changed while it was gone."""
        if self.is_placed(frame):
            return []
        gone, come, fresh = self._follow_living(frame)
        back = {rank: self._left[rank] for rank in come if rank in self._left} if gates else {}
        again = self._assign_slots(gone, come, frame.time)
        changed = {rank: gates.last_change(rank, frame.topology) or 0 for rank in back} if gates else {}
        again += [self._slots[rank] for rank, at in changed.items() if at >= back[rank]]
        again += self._place_ranks(gone, come, frame, fresh)
        self.build_cohorts(np.zeros(len(self.names), np.int32), 2)
        self.groups[self.column < 0] = len(self.cohorts)  # a rank that is gone keeps what it learned among peers
        self.cohorts.append("gone")
        here = np.flatnonzero(self.column >= 0)
        now = np.array([*self.cohorts, "own past"], object)[self.groups[here]]  # the last one is that of -1
        moved = here[self.follow_mates([self.names[slot] for slot in here.tolist()], now)]
        return [*again, *moved.tolist()]

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the index is built with the next frame."""
        super().restore(state)
        self._changed.forget()

    def _follow_living(self, frame: Frame) -> tuple[list[str], list[str], bool]:
        """Returns the ranks that are gone since the last call, those that came or moved, and whether that is all."""
        everything, positions = self._changed.read(frame)
        ranks = {frame.entities[i]: i for i in positions}
        come = {rank: i for rank, i in ranks.items() if rank in frame.topology.parents}
        if everything:
            self._living = come
            return [rank for rank in self._slots if rank not in come], list(come), True
        gone = [rank for rank in ranks if rank not in come and self._living.pop(rank, None) is not None]
        self._living |= come
        return gone, list(come), False

    def _assign_slots(self, gone: Iterable[str], come: Sequence[str], time: int) -> list[int]:
        """Assigns slots to new ranks; frees those of ranks that ended long ago. Returns the new ones."""
        for rank in come:
            self._left.pop(rank, None)
        for rank in gone:
            self._left.setdefault(rank, time)
        for rank in [r for r, since in self._left.items() if time - since > _KEPT]:
            for known in (self._slots, self._gpus, self._mates, self._left):
                known.pop(rank, None)
        arrived = [rank for rank in come if rank not in self._slots]
        taken = set(self._slots.values())
        free = [slot for slot in range(len(taken) + len(arrived)) if slot not in taken][: len(arrived)]
        self._slots.update(zip(arrived, free, strict=True))
        return free

    def _place_ranks(self, gone: Iterable[str], come: Iterable[str], frame: Frame, fresh: bool) -> list[int]:
        """Updates column, name and ancestors of each slot; returns those of ranks on another GPU."""
        known = len(self.names)
        size = max(known, 1 + max(self._slots.values(), default=-1))  # state by slot never shrinks
        names, column = [*self.names, *[""] * (size - known)], np.full(size, -1, np.int64)
        if fresh:
            names = [""] * size
        else:
            column[:known] = self.column
        around: dict[int, Mapping[str, str]] = {}
        for rank in gone:
            if (slot := self._slots.get(rank)) is not None:
                names[slot], column[slot], around[slot] = "", -1, {}
        moved = []
        for rank in come:
            slot = self._slots[rank]
            names[slot], column[slot] = rank, self._living[rank]
            around[slot] = found = frame.topology.nearest_ancestors(rank)
            if (gpu := found.get("gpu")) is not None:
                if self._gpus.get(rank, gpu) != gpu:
                    moved.append(slot)
                self._gpus[rank] = gpu
        self.column, self._gpus_known, self.gpu_column = column, -1, np.full(size, -1, np.int64)
        self.place(names, around, _KINDS, fresh)
        return moved

    def read_ranks(self, frame: Frame, signal: str) -> NDArray[np.float64]:
        """Returns (S,) a signal of the ranks."""
        return np.append(frame[signal], np.nan)[self.column]

    def locate_gpus(self, gpus: Frame) -> None:
        """Finds the column of each rank's GPU in a frame of GPUs."""
        if self._gpus_known != (key := len(gpus.entities)):
            place = find_positions(gpus)
            where = np.array([*(place.get(e, -1) for e in self.entities["gpu"]), -1], np.int64)
            self._gpus_known, self.gpu_column = key, where[self.numbers["gpu"]]

    def of_gpus(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns (S,) the value of each rank's GPU, from values by GPU of the frame."""
        return np.append(values, np.nan)[self.gpu_column]

    def mask(self, named: Iterable[str], frame: Frame) -> Bools:
        """Returns (S,) ranks that are named, on a named device, or of a named job or stage. frame: of the ranks."""
        return np.append(members_mask(tuple(named), frame), False)[self.column]
