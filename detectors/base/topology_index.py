"""Results that depend on the topology, computed once, and indexes over the topology.

`per_topology` caches the result of a method until a topology or the number of entities changes. The indexes answer
where devices are in a frame, what is above and below them, and which jobs run on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Frame
from pipeline.model.topology import Topology, kind_of

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def per_topology(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Decorates a method whose result depends only on topology and entities: it is computed when one of them changes.

    Arguments are frames, topologies, sequences of entities, texts and other values. Compared are the identity and
    version of each topology, the number of entities of each frame and sequence (entities of a class keep their order
    and only grow), and other arguments by value. The newest result is kept for each device class and text among the
    arguments; until it changes, the same object is returned. It is in no snapshot, pickle or copy of its object.
    """

    @wraps(method)
    def cached(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        results: _Results | None = self.__dict__.get(_CACHE)
        if results is None:
            results = self.__dict__[_CACHE] = _Results()
        slot, key, topologies = _slot_and_key(method.__name__, (*args, *kwargs.values()))
        known = results.get(slot)
        if known is None or known[0] != key:
            # the topology is held, so that its id belongs to no other one as long as it is in the key
            known = results[slot] = key, topologies, method(self, *args, **kwargs)
        result: Result = known[2]
        return result

    return cached


_CACHE = "_topology_results"


class _Results(dict[tuple[object, ...], tuple[tuple[object, ...], list[Topology], Any]]):
    """Cached results of one object; a copy and a pickle of it are empty."""

    def __reduce__(self) -> tuple[type[_Results], tuple[()]]:
        return _Results, ()


def _slot_and_key(name: str, args: tuple[object, ...]) -> tuple[tuple[object, ...], tuple[object, ...], list[Topology]]:
    slot: list[object] = [name]
    key: list[object] = []
    topologies: list[Topology] = []
    for arg in args:
        if isinstance(arg, Frame):
            slot.append(arg.device_class)
            key += (id(arg.topology), arg.topology.version, len(arg.entities))
            topologies.append(arg.topology)
        elif isinstance(arg, Topology):
            key += (id(arg), arg.version)
            topologies.append(arg)
        elif isinstance(arg, str):
            slot.append(arg)
        else:
            key.append(len(arg) if isinstance(arg, Sequence) else arg)
    return tuple(slot), tuple(key), topologies


class TopologyIndex:
    """Ancestors of the devices of a class, and the devices below each entity, by position among the devices."""

    def __init__(self) -> None:
        self._newest: list[tuple[str, ...]] = []
        self._above: list[tuple[str, ...]] = []
        self._members: dict[str, list[int]] = {}
        self._positions: dict[str, NDArray[np.intp]] = {}
        self._nodes: NDArray[np.intp] = np.empty(0, np.intp)
        self._known_nodes = -1

    def update(self, names: Sequence[str], topology: Topology) -> None:
        """Rebuilds the index if devices or topology have changed."""
        found = self._ancestors(names, topology)
        if found is self._newest:
            return
        self._newest = found
        if found == self._above:  # jobs that start and end change the topology, but not the ancestors of devices
            return
        self._above, self._members, self._positions, self._known_nodes = found, {}, {}, -1
        for i, above in enumerate(found):
            for entity in above:
                self._members.setdefault(entity, []).append(i)

    @per_topology
    def _ancestors(self, names: Sequence[str], topology: Topology) -> list[tuple[str, ...]]:
        return [topology.ancestors(name) for name in names]

    def devices_below(self, entity: str) -> list[int]:
        """Returns the positions of the devices below an entity."""
        return self._members.get(entity, [])

    def positions_below(self, entity: str) -> NDArray[np.intp]:
        """Returns `devices_below` as an array; the same one until the index is rebuilt."""
        if entity not in self._positions:
            self._positions[entity] = np.array(self._members.get(entity, []), np.intp)
        return self._positions[entity]

    def node_positions(self, nodes: Sequence[str]) -> NDArray[np.intp]:
        """Returns for each device the position of its node in `nodes`; -1 where none of them is above it."""
        if len(nodes) != self._known_nodes:
            at = {name: i for i, name in enumerate(nodes)}
            nearest = (next((e for e in above if kind_of(e) == "node"), "") for above in self._above)
            self._known_nodes, self._nodes = len(nodes), np.array([at.get(node, -1) for node in nearest], np.intp)
        return self._nodes

    def ancestors(self, position: int) -> tuple[str, ...]:
        """Returns all that is above a device, nearest first."""
        return self._above[position]


class FramePositions:
    """Positions of entities in the frames of one class; rebuilt when the frame has grown."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def value(self, frame: Frame | None, signal: str, entity: str) -> float:
        """Returns the value of one entity; NaN where there is none."""
        if frame is None or signal not in frame.values:
            return float("nan")
        if len(self._at) != len(frame.entities):
            self._at = {e: i for i, e in enumerate(frame.entities)}
        at, column = self._at.get(entity, -1), frame.values[signal]
        return float(column[at]) if 0 <= at < len(column) else float("nan")


class JobIndex:
    """The job of the rank on each GPU, and the GPUs of each node."""

    def job_on(self, gpu: str, topology: Topology) -> str | None:
        """Returns the job on a GPU; None if none is known."""
        return self._jobs_and_gpus(topology)[0].get(gpu)

    def gpus_of(self, node: str, topology: Topology) -> frozenset[str]:
        """Returns the GPUs of a node."""
        return frozenset(self._jobs_and_gpus(topology)[1].get(node, ()))

    @per_topology
    def _jobs_and_gpus(self, topology: Topology) -> tuple[Mapping[str, str], Mapping[str, list[str]]]:
        jobs: dict[str, str] = {}
        gpus: dict[str, list[str]] = {}
        for entity in topology.parents:
            kind = kind_of(entity)
            if kind == "rank":
                gpu, job = topology.ancestor_of_kind(entity, "gpu"), topology.ancestor_of_kind(entity, "job")
                if gpu and job:
                    jobs[gpu] = job
            elif kind == "gpu" and (node := topology.ancestor_of_kind(entity, "node")):
                gpus.setdefault(node, []).append(entity)
        return jobs, gpus


EVERYTHING = "site:all"
"""Entity of a finding whose subjects share no entity of the topology."""
_WORK = frozenset({"job", "stage"})
"""Kinds that run on devices. The topology has their ranks below devices, not the job itself."""


def members_mask(named: Collection[str], frame: Frame) -> NDArray[np.bool_]:
    """Returns (N,) entities of a frame that are named, below a named entity, or carry ranks of a named job or stage."""
    wanted, above = frozenset(named), frame.topology.ancestors
    if wanted & {EVERYTHING, f"fleet:{frame.device_class}"}:
        return np.ones(len(frame.entities), bool)
    ranks = [rank for e in wanted if kind_of(e) in _WORK for rank in frame.topology.descendants(e)]
    wanted |= {e for rank in ranks for e in above(rank) if kind_of(e) == frame.device_class}
    found = (e in wanted or not wanted.isdisjoint(above(e)) for e in frame.entities)
    return np.fromiter(found, bool, len(frame.entities))


def pop_members_mask(waiting: list[str], frame: Frame) -> NDArray[np.bool_] | None:
    """Returns the `members_mask` of the names in `waiting` and empties it; None if it is empty.

    For feedback that arrives at an instant without a frame of the class that it concerns.
    """
    if not waiting:
        return None
    named = tuple(waiting)
    waiting.clear()
    return members_mask(named, frame)
