"""Cohorts: which entities are compared with each other, as group numbers that change only with topology or fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from detectors.base.topology_index import ChangedEntities, find_positions, per_device_topology
from pipeline.model.records import Frame
from pipeline.model.topology import Topology

Key = tuple[int, ...]
_SPARE = 1024  # names of ended jobs that are kept before they are dropped together; chosen
OWN = frozenset(
    (
        *("serial", "uuid", "guid", "name", "description", "asset_tag", "location"),
        *("bmc", "path", "address", "lid", "firmware"),
    )
)
"""Attributes that identify one device; devices that differ only in these are comparable."""


def comparable_attributes(attributes: Mapping[str, object]) -> str:
    """Returns the attributes that devices must share to be comparable, as text."""
    return str(sorted((key, value) for key, value in attributes.items() if key not in OWN))


class Cohorts:
    """Numbers the entities of a frame by their nearest ancestor of the first of `kinds` that they have."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    @per_device_topology
    def groups(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) group of each entity, -1 without such an ancestor; the same array until topology or fleet
        change."""
        return self._number(frame)

    def _number(self, frame: Frame) -> NDArray[np.int32]:
        groups = np.full(len(frame.entities), -1, np.int32)
        for kind in self.kinds:
            found = frame.topology.group_numbers(frame.entities, kind)
            fresh = (groups < 0) & (found >= 0)
            groups[fresh] = found[fresh] + groups.max(initial=-1) + 1
        return groups


class SpanningCohorts(Cohorts):
    """Numbers the entities of a frame by their nearest ancestor of the first of `kinds` that spans `least` nodes.

    All entities without one form the unit `fleet:CLASS`: else entities of a fleet without a topology file, or of racks
    of two nodes, could not be judged together.

    names: unit of each group.   rest: group of the entities without an ancestor, -1 where all have one.
    """

    def __init__(self, *kinds: str, least: int) -> None:
        super().__init__(*kinds)
        self.least = least
        self.names: list[str] = []
        self.rest = -1

    def _number(self, frame: Frame) -> NDArray[np.int32]:
        entities, topology = frame.entities, frame.topology
        groups, nodes = np.full(len(entities), -1, np.int32), topology.group_numbers(entities, "node")
        self.names, self.rest = [], -1
        for kind in self.kinds:
            found = np.where(groups < 0, topology.group_numbers(entities, kind), -1)
            for number in np.unique(found[found >= 0]).tolist():
                mine = found == number
                if len(np.unique(nodes[mine & (nodes >= 0)])) >= self.least:
                    groups[mine] = len(self.names)
                    self.names.append(topology.ancestor_of_kind(entities[int(mine.argmax())], kind) or "")
        if (groups < 0).any():
            self.rest = len(self.names)
            groups[groups < 0] = self.rest
            self.names.append(f"fleet:{frame.device_class}")
        return groups


class Peers:
    """Cohorts by a ladder of criteria: the first rung on which an entity has enough peers.

    rungs: each a tuple of kinds of ancestor (`stage`, `rack`) and of attributes (`@sku`), of an entity or its nearest
           ancestor with it; all must be equal. An entity that lacks one is not on that rung.
    least: members of a cohort, the entity itself included; with fewer the next rung counts.
    An entity on no rung has the group -1: it can be compared with its own past alone.
    """

    def __init__(self, *rungs: tuple[str, ...], least: int = 8) -> None:
        self.rungs, self.least = rungs, least
        self._terms: dict[str, _Terms] = {}  # device class -> of its entities

    def groups(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) cohort of each entity; the same array until topology or fleet change."""
        return self._numbered(frame)[0]

    def kinds(self, frame: Frame) -> tuple[NDArray[np.int32], list[str]]:
        """Returns `groups`, and the names of the cohorts."""
        return self._numbered(frame)

    def cohort_name(self, frame: Frame, i: int) -> str:
        """Returns the cohort of an entity in words."""
        group = int(self.groups(frame)[i])
        return self._numbered(frame)[1][group] if group >= 0 else "own past"

    @per_device_topology
    def _numbered(self, frame: Frame) -> tuple[NDArray[np.int32], list[str]]:
        terms = self._terms.setdefault(frame.device_class, _Terms(self.rungs))
        groups, names = np.full(len(frame.entities), -1, np.int32), list[str]()
        for keys, numbers in terms.read(frame):
            mine = np.flatnonzero((groups < 0) & (numbers >= 0))
            count = np.bincount(numbers[mine], minlength=len(keys))
            first = np.full(len(keys), len(numbers))
            first[numbers[mine[::-1]]] = mine[::-1]
            found = np.flatnonzero((count >= self.least) & (count > 0))
            found = found[np.argsort(first[found])]  # in order of their first members
            group = np.full(len(keys), -1, np.int32)
            group[found] = np.arange(len(names), len(names) + len(found))
            groups[mine] = group[numbers[mine]]
            names += [", ".join(map(str, keys[i])) for i in found.tolist()]
        return groups, names


class _Terms:
    """The values of the terms of each rung of the entities of a class. Of ranks, those that changed are read."""

    def __init__(self, rungs: tuple[tuple[str, ...], ...]) -> None:
        self._rungs = rungs
        self._keys: list[dict[tuple[object, ...], int]] = []  # by rung: values -> their number
        self._numbers = np.empty((len(rungs), 0), np.int32)
        self._changed = ChangedEntities()

    def __reduce__(self) -> tuple[type[_Terms], tuple[tuple[tuple[str, ...], ...]]]:
        return _Terms, (self._rungs,)

    def read(self, frame: Frame) -> list[tuple[list[tuple[object, ...]], NDArray[np.int32]]]:
        """Returns for each rung the known values, and the (N,) number among them of each entity; -1: one is missing."""
        everything, positions = self._changed.read(frame)
        if everything:
            self._keys, self._numbers = [{} for _ in self._rungs], np.empty((len(self._rungs), 0), np.int32)
        more = len(frame.entities) - self._numbers.shape[1]
        self._numbers = np.pad(self._numbers, ((0, 0), (0, more)), constant_values=-1)
        for i in positions:
            for rung, (terms, keys) in enumerate(zip(self._rungs, self._keys, strict=True)):
                key = _find_values(frame.topology, frame.entities[i], terms)
                self._numbers[rung, i] = -1 if key is None else keys.setdefault(key, len(keys))
        return [(list(keys), numbers) for keys, numbers in zip(self._keys, self._numbers, strict=True)]


def _find_values(topology: Topology, entity: str, rung: tuple[str, ...]) -> tuple[object, ...] | None:
    """Returns the values of the terms of a rung; None if one is missing."""
    found: list[object] = []
    for term in rung:
        value = _attribute(topology, entity, term[1:]) if term[0] == "@" else topology.ancestor_of_kind(entity, term)
        if value is None:
            return None
        found.append(value)
    return tuple(found)


def _attribute(topology: Topology, entity: str, name: str) -> object | None:
    """Returns an attribute of an entity, else of the nearest ancestor that has it."""
    known = (topology.attributes.get(e, {}).get(name) for e in (entity, *topology.ancestors(entity)))
    return next((value for value in known if value is not None), None)


class AncestorIndex:
    """Where the ancestor of one kind of each entity is in the frame of another class. Of ranks, those that changed are
    looked up."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._found = np.empty(0, np.int32)
        self._known: tuple[str, str, int] = "", "", 0
        self._changed = ChangedEntities()

    @per_device_topology
    def positions(self, frame: Frame, other: Frame) -> NDArray[np.int32]:
        """Returns (N,) position in `other`; -1 where there is none."""
        key, size = (frame.device_class, other.device_class, len(other.entities)), len(frame.entities)
        everything, positions = self._changed.read(frame)
        found, at = np.full(size, -1, np.int32), find_positions(other)
        if everything or key != self._known:
            positions, self._known = range(size), key
        else:
            found[: len(self._found)] = self._found
        for i in positions:
            above = frame.topology.ancestor_of_kind(frame.entities[i], self.kind)
            found[i] = at.get(above, -1) if above else -1
        self._found = found
        return found


class Ancestors:
    """The nearest ancestors of one kind, by position: numbered again as jobs come and go."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._at = np.empty(0, np.int32)

    def update(self, size: int, changed: Iterable[tuple[int, str | None]]) -> None:
        """Sets the ancestors at some of `size` positions; a new one has none."""
        at, names = np.full(size, -1, np.int32), self._names
        at[: len(self._at)] = self._at[:size]
        for i, name in changed:
            at[i] = -1 if name is None else names.setdefault(name, len(names))
        self._at = at

    def number(self) -> tuple[NDArray[np.int32], list[str]]:
        """Returns (N,) number of each position's ancestor by first appearance, -1 without, and the names by number."""
        there = np.flatnonzero(self._at >= 0)
        first = np.full(len(self._names), len(self._at))
        first[self._at[there[::-1]]] = there[::-1]
        used = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(self._at))]
        names = list(self._names)
        listed = [names[i] for i in used.tolist()]
        number = np.full(len(names) + 1, -1, np.int32)
        number[used] = np.arange(len(used))
        if len(names) > 2 * len(listed) + _SPARE:  # jobs come and go
            self._names, self._at = {name: i for i, name in enumerate(listed)}, number[self._at]
            return self._at.copy(), listed
        return number[self._at], listed
