"""Entities `kind:name` and their parents, nearest first: what each is part of, runs on or is supplied by.

A fault of a parent reaches its children. Children of one parent are peers at the level of that parent's kind.
The graph has no circles, a bounded depth, and is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import UsageError

MAX_DEPTH = 16
"""Most parents over one another (chosen: nvlink, gpu, node, chassis, rack, row, hall, building, site are nine)."""
_SHOWN = 8  # names of a circle that a message shows
Parents = Mapping[str, tuple[str, ...]]


class Lineage:
    """Parents of entities, nearest first, and the children of each; an entity and its parents need no other line.

    Memory: one entry for each entity with parents, and one for each pair of child and parent.
    """

    def __init__(self, parents: Mapping[str, tuple[str, ...]] = {}) -> None:
        self.parents: dict[str, tuple[str, ...]] = {}
        self._children: dict[str, dict[str, None]] = {}
        self.put(parents)

    def check(self, lines: Parents) -> None:
        """Raises UsageError if `lines`, in place of what is known of their entities, make a circle or are too deep.

        Costs one visit of each line, of what is above it and of what is below it.
        """
        up = _Paths(lambda entity: lines.get(entity) or (() if entity in lines else self.parents.get(entity, ())))
        for entity in lines:
            up.longest(entity)
        down = _Paths(self._children_with(lines))
        for entity in lines:
            if (depth := up.longest(entity) + down.longest(entity)) > MAX_DEPTH:
                raise UsageError(f"topology: {depth} levels of parents through {entity}, at most {MAX_DEPTH}")

    def put_sound(self, lines: Parents) -> dict[str, str]:
        """Puts what passes `check`, in order of the lines; entity -> why for the others, which change nothing."""
        try:
            self.check(lines)
        except UsageError:
            return {entity: fault for entity, above in lines.items() if (fault := self._put_one(entity, above))}
        self.put(lines)
        return {}

    def _put_one(self, entity: str, parents: tuple[str, ...]) -> str | None:
        line = {entity: parents}
        try:
            self.check(line)
        except UsageError as error:
            return str(error)
        self.put(line)
        return None

    def put(self, lines: Parents) -> None:
        """Adds or replaces lines, which `check` has passed."""
        for entity, parents in lines.items():
            self._unlink(entity)
            self.parents[entity] = parents
            for parent in parents:
                self._children.setdefault(parent, {})[entity] = None

    def drop(self, entities: Iterable[str]) -> None:
        """Takes out lines; the entities stay as parents of others."""
        for entity in entities:
            self._unlink(entity)
            self.parents.pop(entity, None)

    def below(self, *entities: str) -> tuple[str, ...]:
        """All descendants of any of `entities`, nearest first (breadth first), each once."""
        found: dict[str, None] = {}
        level = [*entities]
        while level:
            fresh = [child for e in level for child in self._children.get(e, ())]
            level = [e for e in dict.fromkeys(fresh) if e not in found]
            found.update(dict.fromkeys(level))
        return tuple(found)

    def _children_with(self, lines: Parents) -> Callable[[str], Iterable[str]]:
        """What gives the children of an entity once `lines` are put."""
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


class _Paths:
    """Lengths of the longest paths that begin at an entity; each entity is visited once."""

    def __init__(self, following: Callable[[str], Iterable[str]]) -> None:
        self._following = following
        self._length: dict[str, int] = {}

    def longest(self, start: str) -> int:
        """Edges of the longest path. Raises UsageError on a circle."""
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
            path[entity] = iter(self._following(entity))


def _circle(path: list[str], again: str) -> str:
    round_ = [*path[path.index(again) :], again]
    shown = round_ if len(round_) <= _SHOWN else [*round_[: _SHOWN - 2], "...", again]
    return f"topology: parents form a circle: {' -> '.join(shown)}; wanted a graph without circles"


def kind_of(entity: str) -> str:
    """What stands before the first colon of an entity: `gpu` of `gpu:n042.3`."""
    return entity.split(":", 1)[0]


class Topology:
    """A typed directed acyclic graph of entities.

    parents:    entity -> its parents, nearest first; a parent needs no line of its own. At most MAX_DEPTH levels.
    attributes: entity -> facts that make entities comparable (SKU, speed, role).
    `version` counts changes, so that others know when to renew what they derived.
    """

    def __init__(
        self, parents: Mapping[str, Sequence[str]] = {}, attributes: Mapping[str, Mapping[str, object]] = {}
    ) -> None:
        self._lineage = Lineage()
        self.attributes: dict[str, dict[str, object]] = {}
        self.version = 0
        self.fixed = frozenset[str](), frozenset[str]()  # whose parents, and whose attributes, no inventory replaces
        # by parents: the many sensors, links and services of a node are alike in them
        self._above: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._nearest: dict[tuple[tuple[str, ...], str], str | None] = {}
        self._named: set[str] = set()  # who is in any line of _above: a change of others leaves the lines as they are
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.merge(parents, attributes)

    @classmethod
    def of_sound(
        cls, parents: Mapping[str, tuple[str, ...]], attributes: Mapping[str, Mapping[str, object]] = {}
    ) -> Topology:
        """A topology of parents that are known to be sound, such as those of another one: it spares the check."""
        made = cls({}, attributes)
        made._lineage = Lineage(parents)
        made.version += 1
        return made

    @property
    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """Entity -> its parents; replaced on every change and never written to, so that any thread may read it."""
        return self._lineage.parents

    def merge(self, parents: Mapping[str, Sequence[str]], attributes: Mapping[str, Mapping[str, object]] = {}) -> bool:
        """Adds or replaces lines; True if anything changed.

        Raises UsageError, and changes nothing, on a circle or on more than MAX_DEPTH levels of parents.
        """
        new = {e: self._shared(tuple(p)) for e, p in parents.items() if self.parents.get(e) != tuple(p)}
        facts = {e: dict(a) for e, a in attributes.items() if self.attributes.get(e) != dict(a)}
        if not new and not facts:
            return False
        self._lineage.check(new)
        self._lineage.parents = dict(self.parents)  # others may be reading it
        self._lineage.put(new)
        self.version += 1
        self._changed(new.keys())
        self.attributes.update(facts)
        return True

    def forget(self, entities: Iterable[str]) -> None:
        """Takes out lines of entities that are no more; whoever has them as a parent keeps the name."""
        entities = list(entities)
        gone = self.parents.keys() & entities
        self._lineage.parents, attributes = dict(self.parents), self.attributes.copy()  # others may be reading those
        self._lineage.drop(gone)
        for entity in entities:
            attributes.pop(entity, None)
        self.attributes, self.version = attributes, self.version + 1
        self._changed(gone)

    def _changed(self, entities: Set[str]) -> None:
        """Forgets what was looked up through entities whose parents are others now."""
        if not self._named.isdisjoint(entities):
            self._above = {parents: line for parents, line in self._above.items() if entities.isdisjoint(line)}
            self._nearest, self._named = {}, set().union(*self._above.values())
        if max(len(self._known), len(self._above)) > 2 * len(self.parents):  # jobs come and go, and others move
            self._known = {line: line for line in self.parents.values()}
            self._above, self._nearest, self._named = {}, {}, set()

    def _shared(self, parents: tuple[str, ...]) -> tuple[str, ...]:
        return self._known.setdefault(parents, parents)

    def above(self, entity: str) -> tuple[str, ...]:
        """All ancestors, nearest first (breadth first), each once."""
        parents = self.parents.get(entity, ())
        if parents not in self._above:
            found: dict[str, None] = {}
            level = list(parents)
            while level:
                fresh = [e for e in dict.fromkeys(level) if e not in found]
                found.update(dict.fromkeys(fresh))
                level = [p for e in fresh for p in self.parents.get(e, ())]
            self._named.update(found)
            self._above[parents] = tuple(found)
        return self._above[parents]

    def above_of_kind(self, entity: str, kind: str) -> str | None:
        """Nearest ancestor of that kind, or the entity itself if it is one; None if there is none."""
        if kind_of(entity) == kind:
            return entity
        key = self.parents.get(entity, ()), kind
        if key not in self._nearest:
            self._nearest[key] = next((e for e in self.above(entity) if kind_of(e) == kind), None)
        return self._nearest[key]

    def below(self, *entities: str) -> tuple[str, ...]:
        """All entities that have one of `entities` among their ancestors, nearest first, each once."""
        return self._lineage.below(*entities)

    def groups(self, entities: Sequence[str], kind: str) -> NDArray[np.int32]:
        """(N,) number of each entity's ancestor of `kind`; -1 where it has none. Numbers follow first appearance."""
        numbers: dict[str, int] = {}
        out = np.full(len(entities), -1, np.int32)
        for i, entity in enumerate(entities):
            parent = self.above_of_kind(entity, kind)
            if parent is not None:
                out[i] = numbers.setdefault(parent, len(numbers))
        return out
