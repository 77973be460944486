"""Entities `kind:name` and their parents, nearest first: what each is part of, runs on or is supplied by.

A fault of a parent reaches its children. Children of one parent are peers at the level of that parent's kind.
The graph has no circles, a bounded depth, and is changed in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import UsageError

MAX_DEPTH = 16
"""Maximum number of levels (chosen; nvlink, gpu, node, chassis, rack, row, hall, building, site are nine)."""
_LINE_VISITS, _VISITS = 60, 300_000
"""Entities that `set_valid` visits: for each line, and in all, where lines do not pass. Chosen: to find one line in a
million takes 40 for each, and 300,000 take 1 to 10 s."""
_UNCHECKED = "topology: not checked, as too many lines before make circles or too many levels; expected few"
_SHOWN = 8  # names of a circle shown in a message
_KEPT_CHANGES = 64  # more than a busy site has from one frame to the next; chosen
_LARGE_CHANGE = 4  # a change of more than one in so many entities costs a reader as much as to read all; chosen
Parents = Mapping[str, tuple[str, ...]]


class ParentGraph:
    """Parents of entities, nearest first, and the children of each. A parent needs no entry itself.

    Memory: one entry for each entity with parents, and one for each pair of child and parent.
    """

    def __init__(self, parents: Mapping[str, tuple[str, ...]] = {}) -> None:
        self.parents: dict[str, tuple[str, ...]] = {}
        self._children: dict[str, dict[str, None]] = {}
        self._visits = 0  # of entities by checks
        self.set_parents(parents)

    def check_parents(self, lines: Parents) -> None:
        """Raises UsageError if `lines` would make a circle or exceed MAX_DEPTH when they replace the present entries.

        Visits each line, its ancestors and its descendants once.
        """
        up = _LongestPaths(
            lambda entity: lines.get(entity) or (() if entity in lines else self.parents.get(entity, ()))
        )
        down = _LongestPaths(self._children_with(lines))
        try:
            for entity in lines:
                up.longest_from(entity)
            for entity in lines:
                if (depth := up.longest_from(entity) + down.longest_from(entity)) > MAX_DEPTH:
                    raise UsageError(f"topology: {depth} levels of parents through {entity}, at most {MAX_DEPTH}")
        finally:
            self._visits += up.visits + down.visits

    def set_valid(self, lines: Parents) -> dict[str, str]:
        """Sets the lines that pass `check_parents`, in order; returns entity -> reason for those that do not.

        Halves what does not pass, as a check of each line alone takes time with the square of their number. After
        _LINE_VISITS and _VISITS, what has not passed is refused.
        """
        refused: dict[str, str] = {}
        end = self._visits + _LINE_VISITS * len(lines) + _VISITS
        waiting = [list(lines.items())]
        while waiting:
            part = waiting.pop()
            if self._visits > end:
                refused |= {entity: _UNCHECKED for entity, _ in part}
                continue
            try:
                self.check_parents(dict(part))
            except UsageError as error:
                if len(part) == 1:
                    refused[part[0][0]] = str(error)
                else:
                    middle = len(part) // 2
                    waiting += [part[middle:], part[:middle]]  # the first half is next
            else:
                self.set_parents(dict(part))
        return refused

    def set_parents(self, lines: Parents) -> None:
        """Adds or replaces lines; they must have passed `check_parents`."""
        for entity, parents in lines.items():
            self._unlink(entity)
            self.parents[entity] = parents
            for parent in parents:
                self._children.setdefault(parent, {})[entity] = None

    def remove(self, entities: Iterable[str]) -> None:
        """Removes the entries of entities; they may remain parents of others."""
        for entity in entities:
            self._unlink(entity)
            self.parents.pop(entity, None)

    def descendants(self, *entities: str) -> tuple[str, ...]:
        """All descendants of any of `entities`, nearest first (breadth first), each once."""
        found: dict[str, None] = {}
        level = [*entities]
        while level:
            fresh = [child for e in level for child in self._children.get(e, ())]
            level = [e for e in dict.fromkeys(fresh) if e not in found]
            found.update(dict.fromkeys(level))
        return tuple(found)

    def _children_with(self, lines: Parents) -> Callable[[str], Iterable[str]]:
        """A function that returns the children of an entity as they will be with `lines` set."""
        new: dict[str, list[str]] = {}
        for entity, parents in lines.items():
            for parent in parents:
                new.setdefault(parent, []).append(entity)
        return lambda entity: (
            *(child for child in self._children.get(entity, ()) if child not in lines),
            *new.get(entity, ()),
        )

    def _unlink(self, entity: str) -> None:
        for parent in self.parents.get(entity, ()):
            children = self._children.get(parent, {})
            children.pop(entity, None)
            if not children:
                self._children.pop(parent, None)


class _LongestPaths:
    """Length of the longest path from an entity; visits each entity once."""

    def __init__(self, following: Callable[[str], Iterable[str]]) -> None:
        self._following = following
        self._length: dict[str, int] = {}
        self.visits = 0

    def longest_from(self, start: str) -> int:
        """Number of edges of the longest path from `start`. Raises UsageError on a circle."""
        path: dict[str, Iterator[str]] = {}
        self._enter(start, path)
        while path:
            entity, left = next(reversed(path.items()))
            following = next((e for e in left if e in path or e not in self._length), None)
            if following is None:
                del path[entity]
                self._length[entity] = max((self._length[e] + 1 for e in self._following(entity)), default=0)
            elif following in path:
                raise UsageError(_circle([*path], following))
            else:
                self._enter(following, path)
        return self._length[start]

    def _enter(self, entity: str, path: dict[str, Iterator[str]]) -> None:
        if entity not in self._length:
            self.visits += 1
            path[entity] = iter(self._following(entity))


def _circle(path: list[str], again: str) -> str:
    round_ = [*path[path.index(again) :], again]
    shown = round_ if len(round_) <= _SHOWN else [*round_[: _SHOWN - 2], "...", again]
    return f"topology: parents form a circle: {' -> '.join(shown)}; expected no circles"


def kind_of(entity: str) -> str:
    """The kind of an entity, before the first colon: `gpu` of `gpu:n042.3`."""
    return entity.partition(":")[0]


def overlay_parents(site: tuple[str, ...], reported: Iterable[str]) -> tuple[str, ...]:
    """Parents of an entity: those of the site, and of an inventory those of kinds that the site does not name."""
    kinds = {kind_of(parent) for parent in site}
    return (*site, *(parent for parent in reported if kind_of(parent) not in kinds))


WORK = frozenset({"job", "stage", "rank"})
"""Kinds of what runs on devices: it comes and goes while the devices stay, and is above no device."""


class Topology:
    """A typed directed acyclic graph of entities.

    parents:    entity -> its parents, nearest first; a parent needs no entry itself. At most MAX_DEPTH levels.
    attributes: entity -> properties that make entities comparable (SKU, speed, role).
    `version` counts changes, so that derived data can be renewed; `device_version` counts those of anything but WORK.
    """

    def __init__(
        self, parents: Mapping[str, Sequence[str]] = {}, attributes: Mapping[str, Mapping[str, object]] = {}
    ) -> None:
        self._graph = ParentGraph()
        self.attributes: dict[str, dict[str, object]] = {}
        self.version = self.device_version = 0
        # parents and attributes from files of the site, which no inventory replaces
        self.site: tuple[Parents, Mapping[str, Mapping[str, object]]] = {}, {}
        # keyed by parents, which the many sensors, links and services of a node share
        self._ancestors: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._nearest: dict[tuple[str, ...], dict[str, str]] = {}  # parents -> kind -> nearest ancestor
        self._cached_ancestors: set[str] = (
            set()
        )  # entities in any cached line; a change of others does not affect the cache
        self._lines_of_work: dict[str, set[tuple[str, ...]]] = {}  # stage or job -> keys of cached lines with it
        self._tuples: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._changes: deque[tuple[str, ...]] = deque(maxlen=_KEPT_CHANGES)  # entities of each, the newest last
        self.merge(parents, attributes)

    @classmethod
    def from_checked(
        cls, parents: Mapping[str, tuple[str, ...]], attributes: Mapping[str, Mapping[str, object]] = {}
    ) -> Topology:
        """A topology of parents that are known to be valid, such as those of another topology; they are not checked."""
        made = cls({}, attributes)
        made._graph = ParentGraph(parents)
        made._count_change(tuple(parents))
        return made

    @property
    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """Entity -> its parents. Replaced on every change and never modified, so any thread may read it."""
        return self._graph.parents

    def merge(self, parents: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, object]] = {}) -> bool:
        """Adds or replaces entries; returns whether anything changed.

        Raises UsageError, and changes nothing, on a circle or on more than MAX_DEPTH levels of parents.
        """
        new = {e: self._share_tuple(tuple(p)) for e, p in parents.items() if self.parents.get(e) != tuple(p)}
        facts = {e: dict(a) for e, a in attributes.items() if self.attributes.get(e) != dict(a)}
        if not new and not facts:
            return False
        self._graph.check_parents(new)
        self._graph.parents = dict(self.parents)  # other threads may be reading it
        self._graph.set_parents(new)
        self._count_change((*new, *(e for e in facts if e not in new)))
        self._drop_cached(new.keys())
        self.attributes.update(facts)
        return True

    def remove_entities(self, entities: Iterable[str]) -> None:
        """Removes entities that no longer exist; they may remain parents of others."""
        entities = tuple(entities)
        gone = self.parents.keys() & entities
        # copies: other threads may be reading the present ones
        self._graph.parents, attributes = dict(self.parents), self.attributes.copy()
        self._graph.remove(gone)
        for entity in entities:
            attributes.pop(entity, None)
        self.attributes = attributes
        self._count_change(entities)
        self._drop_cached(gone)

    def _count_change(self, entities: tuple[str, ...]) -> None:
        self.version += 1
        self.device_version += any(kind_of(entity) not in WORK for entity in entities)
        if len(entities) * _LARGE_CHANGE > len(self.parents):
            self._changes.clear()
        else:
            self._changes.append(entities)

    def changed_since(self, version: int) -> tuple[str, ...] | None:
        """Returns the entities that were added, changed or removed after a version, each once; None where that is no
        longer known: too many changes ago, or a large one since. For the thread that changes the topology."""
        missing = self.version - version
        if missing > len(self._changes):
            return None
        newest = islice(self._changes, len(self._changes) - missing, None)
        return tuple(dict.fromkeys(entity for change in newest for entity in change))

    def _drop_cached(self, entities: Set[str]) -> None:
        """Drops cached lookups through entities whose parents changed; through work, which changes often, by index."""
        for work in entities:
            for parents in self._lines_of_work.pop(work, ()):
                self._ancestors.pop(parents, None)
                self._nearest.pop(parents, None)
        if any(kind_of(e) not in WORK for e in entities) and not self._cached_ancestors.isdisjoint(entities):
            self._ancestors = {parents: line for parents, line in self._ancestors.items() if entities.isdisjoint(line)}
            self._nearest = {parents: known for parents, known in self._nearest.items() if parents in self._ancestors}
            self._cached_ancestors = set().union(*self._ancestors.values())
        if max(len(self._tuples), len(self._ancestors)) > 2 * len(self.parents):  # jobs come and go, and entities move
            self._tuples = {line: line for line in self.parents.values()}
            self._ancestors, self._nearest, self._cached_ancestors, self._lines_of_work = {}, {}, set(), {}

    def _share_tuple(self, parents: tuple[str, ...]) -> tuple[str, ...]:
        return self._tuples.setdefault(parents, parents)

    def ancestors(self, entity: str) -> tuple[str, ...]:
        """All ancestors of an entity, nearest first (breadth first), each once."""
        parents = self.parents.get(entity, ())
        if parents not in self._ancestors:
            found: dict[str, None] = {}
            level = list(parents)
            while level:
                fresh = [e for e in dict.fromkeys(level) if e not in found]
                found.update(dict.fromkeys(fresh))
                level = [p for e in fresh for p in self.parents.get(e, ())]
            self._cached_ancestors.update(found)
            self._ancestors[parents] = tuple(found)
            for work in found:
                if kind_of(work) in WORK:
                    self._lines_of_work.setdefault(work, set()).add(parents)
        return self._ancestors[parents]

    def ancestor_of_kind(self, entity: str, kind: str) -> str | None:
        """Nearest ancestor of a kind, or the entity itself if it is of that kind; None if there is none."""
        return entity if kind_of(entity) == kind else self.nearest_ancestors(entity).get(kind)

    def nearest_ancestors(self, entity: str) -> Mapping[str, str]:
        """Kind -> nearest ancestor of that kind. Shared by all with the same parents: not to be modified."""
        parents = self._graph.parents.get(entity, ())
        nearest = self._nearest.get(parents)
        if nearest is None:
            nearest = self._nearest[parents] = {kind_of(e): e for e in reversed(self.ancestors(entity))}
        return nearest

    def descendants(self, *entities: str) -> tuple[str, ...]:
        """All descendants of `entities`, nearest first, each once."""
        return self._graph.descendants(*entities)

    def group_numbers(self, entities: Sequence[str], kind: str) -> NDArray[np.int32]:
        """(N,) group number of each entity by its ancestor of `kind`; -1 = none. Numbered by first appearance."""
        numbers: dict[str, int] = {}
        out = np.full(len(entities), -1, np.int32)
        for i, entity in enumerate(entities):
            parent = self.ancestor_of_kind(entity, kind)
            if parent is not None:
                out[i] = numbers.setdefault(parent, len(numbers))
        return out
