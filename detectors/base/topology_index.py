"""Indexes over the topology: members and ancestors of devices, positions in a frame, jobs of GPUs.

Each is rebuilt only when the topology or the number of entities changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Frame
from pipeline.model.topology import Topology, kind_of


class TopologyIndex:
    """What lies above the devices of a class, as positions and members; renewed when topology or fleet has changed."""

    def __init__(self) -> None:
        self._key: tuple[int, int, int] = (0, -1, 0)
        self._members: dict[str, list[int]] = {}
        self._places: dict[str, NDArray[np.intp]] = {}
        self._above: list[tuple[str, ...]] = []
        self._nodes: NDArray[np.intp] = np.empty(0, np.intp)
        self._known_nodes = -1

    def update(self, names: Sequence[str], topology: Topology) -> None:
        """Walks the topology, if it is another."""
        key = (id(topology), topology.version, len(names))
        if key == self._key:
            return
        self._key = key
        found = [topology.above(name) for name in names]
        if found == self._above:  # jobs that come and go change the topology, but not what lies above devices
            return
        self._above, self._members, self._places, self._known_nodes = found, {}, {}, -1
        for i, above in enumerate(self._above):
            for entity in above:
                self._members.setdefault(entity, []).append(i)

    def devices_below(self, entity: str) -> list[int]:
        """Positions of the devices below an entity."""
        return self._members.get(entity, [])

    def positions_below(self, entity: str) -> NDArray[np.intp]:
        """`members` as an array."""
        if entity not in self._places:
            self._places[entity] = np.array(self._members.get(entity, []), np.intp)
        return self._places[entity]

    def node_positions(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Per device the position of its node among `names`; -1 where none of them is above it."""
        if len(names) != self._known_nodes:
            at = {name: i for i, name in enumerate(names)}
            nearest = (next((e for e in above if kind_of(e) == "node"), "") for above in self._above)
            self._known_nodes, self._nodes = len(names), np.array([at.get(node, -1) for node in nearest], np.intp)
        return self._nodes

    def ancestors(self, position: int) -> tuple[str, ...]:
        """What lies above a device, nearest first."""
        return self._above[position]


class FramePositions:
    """Index of each entity of a frame of one class, renewed when the frame grew."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def value(self, frame: Frame | None, signal: str, entity: str) -> float:
        """A value of one entity; NaN where there is none."""
        if frame is None or signal not in frame.values:
            return float("nan")
        if len(self._of) != len(frame.entities):
            self._of = {e: i for i, e in enumerate(frame.entities)}
        place, column = self._of.get(entity, -1), frame.values[signal]
        return float(column[place]) if 0 <= place < len(column) else float("nan")


class JobIndex:
    """GPU -> the job of the rank on it, and node -> its GPUs; renewed when the topology changed."""

    def __init__(self) -> None:
        self._key: tuple[int, int] = (0, -1)
        self._of: dict[str, str] = {}
        self._in: dict[str, list[str]] = {}

    def job_on(self, gpu: str, topology: Topology) -> str | None:
        """The job on a GPU; None if none is known."""
        self._renew(topology)
        return self._of.get(gpu)

    def gpus_of(self, node: str, topology: Topology) -> frozenset[str]:
        """The GPUs of a server."""
        self._renew(topology)
        return frozenset(self._in.get(node, ()))

    def _renew(self, topology: Topology) -> None:
        key = (id(topology), topology.version)
        if key == self._key:
            return
        self._key, self._of, self._in = key, {}, {}
        for entity in topology.parents:
            kind = kind_of(entity)
            if kind == "rank":
                on, job = topology.above_of_kind(entity, "gpu"), topology.above_of_kind(entity, "job")
                if on and job:
                    self._of[on] = job
            elif kind == "gpu" and (node := topology.above_of_kind(entity, "node")):
                self._in.setdefault(node, []).append(entity)


EVERYTHING = "site:all"
"""What a finding names where what it is about shares nothing that the topology knows."""
_WORK = frozenset({"job", "stage"})
"""Kinds that run on devices: those are above their ranks, not below the kind itself."""


def members_mask(named: Collection[str], frame: Frame) -> NDArray[np.bool_]:
    """(N,) who of a frame is named, is below what is named, or carries the ranks of a job or stage that is."""
    wanted, above = frozenset(named), frame.topology.above
    if wanted & {EVERYTHING, f"fleet:{frame.device_class}"}:
        return np.ones(len(frame.entities), bool)
    ranks = [rank for e in wanted if kind_of(e) in _WORK for rank in frame.topology.below(e)]
    wanted |= {e for rank in ranks for e in above(rank) if kind_of(e) == frame.device_class}
    found = (e in wanted or not wanted.isdisjoint(above(e)) for e in frame.entities)
    return np.fromiter(found, bool, len(frame.entities))


def pop_members_mask(waiting: list[str], frame: Frame) -> NDArray[np.bool_] | None:
    """(N,) whom `waiting` names or stands for, which is emptied; None: nobody waits."""
    if not waiting:
        return None
    named = tuple(waiting)
    waiting.clear()
    return members_mask(named, frame)
