"""Ancestors of entities at a time: the topology, with ranks where the starts of jobs placed them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property

from pipeline.model.links import PEER
from pipeline.model.records import Event
from pipeline.model.topology import Topology, kind_of


class Placement:
    """Topology over time: hardware is static, ranks move with their jobs.

    events: only job_start counts (`data.ranks`: rank -> stage and gpu). When its job ends a rank stays in its last
    place, since an alert may come a little later. Ranks without an event are where the topology has them.
    """

    def __init__(self, topology: Topology, events: Iterable[Event] = ()) -> None:
        self.topology = topology
        self._placed: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        for event in sorted((e for e in events if e.kind == "job_start"), key=lambda e: e.time):
            ranks = event.data.get("ranks")
            for rank, place in ranks.items() if isinstance(ranks, Mapping) else ():
                self._placed.setdefault(rank, []).append((event.time, _parents(event.entity, place)))

    def __contains__(self, entity: str) -> bool:
        """Returns whether the topology or the start of a job names it."""
        return entity in self._named

    @cached_property
    def _named(self) -> set[str]:
        moved = (parents for moves in self._placed.values() for _, parents in moves)
        above = {parent for parents in (*self.topology.parents.values(), *moved) for parent in parents}
        return above.union(self.topology.parents, self.topology.attributes, self._placed)

    def ancestors(self, entity: str, time: int) -> tuple[str, ...]:
        """Returns all that it was part of, ran on or was fed by."""
        if entity not in self._placed:
            return self.topology.ancestors(entity)
        parents = self.parents(entity, time)
        return tuple(dict.fromkeys((*parents, *(e for p in parents for e in self.topology.ancestors(p)))))

    def parents(self, entity: str, time: int) -> tuple[str, ...]:
        """Returns the nearest of those."""
        placed = self._placed.get(entity)
        if not placed:
            return self.topology.parents.get(entity, ())
        return placed[max(0, bisect_right(placed, time, key=lambda line: line[0]) - 1)][1]

    def is_same(self, entity: str, root: str, time: int) -> bool:
        """Returns whether it is the root itself, the rank that ran on it, or the other end of that link."""
        if entity == root:
            return True
        if kind_of(entity) == "rank":
            return root in self.parents(entity, time) and kind_of(root) == "gpu"
        return kind_of(root) == "port" and self.topology.attributes.get(root, {}).get(PEER) == entity

    def is_connected(self, entity: str, root: str, time: int) -> bool:
        """Returns whether one is the other, above it or below it."""
        return (
            self.is_same(entity, root, time)
            or entity in self.ancestors(root, time)
            or root in self.ancestors(entity, time)
        )


def _parents(job: str, place: object) -> tuple[str, ...]:
    """Returns stage, job and GPU of a rank, as far as they are given."""
    given = place if isinstance(place, Mapping) else {}
    named = (given.get("stage"), job, given.get("gpu"))
    return tuple(name for name in named if isinstance(name, str))
