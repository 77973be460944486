"""Results that depend on the topology, computed once, and indexes over the topology.

`per_topology` caches the result of a method until a topology or the number of entities changes; `per_device_topology`
keeps it while jobs come and go. The indexes answer where devices are in a frame, and what is above and below them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from pipeline.model.rank_changes import RankChanges
from pipeline.model.records import Frame
from pipeline.model.topology import WORK, Topology, kind_of

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
    return _keep_result(method, devices_alone=False)


def per_device_topology(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Decorates as `per_topology` does a method that asks the topology about devices, not about the ranks below them.

    Its result is kept while jobs begin and end, which a busy site does every minute; not if an argument is a frame of
    ranks, jobs or stages, or names them.
    """
    return _keep_result(method, devices_alone=True)


def _keep_result(
    method: Callable[Concatenate[Owner, Arguments], Result], devices_alone: bool
) -> Callable[Concatenate[Owner, Arguments], Result]:
    @wraps(method)
    def cached(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        results: _Results | None = self.__dict__.get(_CACHE)
        if results is None:
            results = self.__dict__[_CACHE] = _Results()
        slot, key, topologies = _slot_and_key(method.__name__, (*args, *kwargs.values()), devices_alone)
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


def _slot_and_key(
    name: str, args: tuple[object, ...], devices_alone: bool
) -> tuple[tuple[object, ...], tuple[object, ...], list[Topology]]:
    slot: list[object] = [name]
    key: list[object] = []
    topologies: list[Topology] = []
    for arg in args:
        if isinstance(arg, Frame):
            slot.append(arg.device_class)
            devices_alone &= arg.device_class not in WORK
            topologies.append(arg.topology)
            key.append(len(arg.entities))
        elif isinstance(arg, Topology):
            topologies.append(arg)
        elif isinstance(arg, str):
            slot.append(arg)
        elif isinstance(arg, Sequence):
            devices_alone &= not len(arg) or kind_of(arg[0]) not in WORK
            key.append(len(arg))
        else:
            key.append(arg)
    for topology in topologies:
        key += (id(topology), topology.device_version if devices_alone else topology.version)
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

    @per_device_topology
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


_nodes: WeakKeyDictionary[Topology, dict[str, tuple[tuple[int, int], list[str]]]] = WeakKeyDictionary()


def find_nodes(frame: Frame) -> list[str]:
    """Returns the node of each entity of a frame of devices, "" without one; all detectors share it."""
    of_class, key = _nodes.setdefault(frame.topology, {}), (frame.topology.device_version, len(frame.entities))
    known = of_class.get(frame.device_class)
    if known is None or known[0] != key:
        found = [frame.topology.ancestor_of_kind(e, "node") or "" for e in frame.entities]
        known = of_class[frame.device_class] = key, found
    return known[1]


EVERYTHING = "site:all"
"""Entity of a finding whose subjects share no entity of the topology."""


def members_mask(named: Collection[str], frame: Frame) -> NDArray[np.bool_]:
    """Returns (N,) entities of a frame that are named, below a named entity, or carry ranks of a named job or stage."""
    wanted, topology, prefix = set(named), frame.topology, f"{frame.device_class}:"
    if wanted & {EVERYTHING, f"fleet:{frame.device_class}"}:
        return np.ones(len(frame.entities), bool)
    if frame.device_class != "rank":
        ranks = topology.descendants(*(e for e in wanted if kind_of(e) in ("job", "stage")))
        wanted |= {e for rank in ranks for e in topology.ancestors(rank) if e.startswith(prefix)}
    return below_mask(wanted, frame)


_positions: WeakKeyDictionary[Topology, dict[str, tuple[Sequence[str], dict[str, int]]]] = WeakKeyDictionary()


def find_positions(frame: Frame) -> Mapping[str, int]:
    """Returns the position of each entity of a frame; all detectors share it."""
    of_class, entities = _positions.setdefault(frame.topology, {}), frame.entities
    known = of_class.get(frame.device_class)
    if known is None or (known[0] is not entities and known[0] != entities):
        size = len(known[0]) if known is not None and known[0] == entities[: len(known[0])] else 0
        at = known[1] if known is not None and size else {}  # a class usually only grows
        at.update(zip(entities[size:], range(size, len(entities)), strict=True))
        known = of_class[frame.device_class] = entities, at
    return known[1]


class ChangedEntities:
    """What one reader has seen of a class: of ranks, which come and go, only those that changed are read again.

    A pickle or copy of it has seen no rank.
    """

    def __init__(self) -> None:
        self._size = 0
        self._ranks = RankChanges()

    def read(self, frame: Frame) -> tuple[bool, Sequence[int]]:
        """Returns whether everything may have changed, and the positions of the entities to read: changed or new."""
        before, self._size = self._size, len(frame.entities)
        changed = self._ranks.read(frame.topology) if frame.device_class in WORK else None
        if changed is None or self._size < before:
            return True, range(self._size)
        at = find_positions(frame) if changed else {}
        return False, [*sorted({i for e in changed if 0 <= (i := at.get(e, -1)) < before}), *range(before, self._size)]

    def forget(self) -> None:
        """Lets everything be read again."""
        self._ranks.forget()


def below_mask(named: Collection[str], frame: Frame) -> NDArray[np.bool_]:
    """Returns (N,) entities of a frame that are named, or below a named entity."""
    found, position = np.zeros(len(frame.entities), bool), find_positions(frame)
    at = (position.get(e, -1) for e in (*named, *frame.topology.descendants(*named)))
    found[[i for i in at if i >= 0]] = True
    return found


def pop_members_mask(waiting: list[str], frame: Frame) -> NDArray[np.bool_] | None:
    """Returns the `members_mask` of the names in `waiting` and empties it; None if it is empty.

    For feedback that arrives at an instant without a frame of the class that it concerns.
    """
    if not waiting:
        return None
    named = tuple(waiting)
    waiting.clear()
    return members_mask(named, frame)
