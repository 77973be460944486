"""Parents and children of entities: a directed graph without circles, of bounded depth, changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from pipeline.errors import UsageError

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
