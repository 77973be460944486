"""Ranks that ended: those that their node's inventory names no longer, with the stages and jobs that nobody is left in.

A rank bears the attribute `node` of who tells of it (agents/collectors/jobs.py); others, such as simulated ones, stay.
Without this a GPU would belong to every job that ever ran on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.records import Event
from pipeline.topology import Topology, kind_of

ATTRIBUTE = "node"
WORK = frozenset({"stage", "job"})
"""What ranks are a part of, and what ends with the last of them."""


class EndedRanks:
    """Takes ended ranks out of a topology. Memory: a few names for each rank that is there."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks: dict[str, set[str]] = {}
        self._over: dict[str, tuple[str, ...]] = {}
        self._members: dict[str, set[str]] = {}
        self._note(entity for entity in topology.attributes if kind_of(entity) == "rank")

    def follow(self, inventories: Sequence[Event]) -> tuple[str, ...]:
        """Reads inventories that the topology has taken; returns what left it."""
        ended: list[str] = []
        emptied: list[str] = []
        works: dict[str, None] = {}
        for event in inventories:
            told = event.data.get("entities")
            if not isinstance(told, dict):
                continue
            node = event.entity.partition(":")[2]
            absent = self._ranks.get(node, set()) - told.keys()
            # one that another node tells of by now has moved
            ended += (e for e in absent if self._topology.attributes.get(e, {}).get(ATTRIBUTE) == node)
            for rank in absent - self._topology.parents.keys():  # somebody else took it out
                self._place(rank, ())
            self._ranks[node] = self._ranks.get(node, set()) - absent
            emptied += self._note(entity for entity in told if kind_of(entity) == "rank")
            works |= {entity: None for entity in told if kind_of(entity) in WORK}
        emptied += self._deserted(works)
        emptied += (over for rank in ended for over in self._place(rank, ()))
        ended += dict.fromkeys(over for over in emptied if over not in self._members)
        if not ended:
            return ()
        self._topology.forget(ended)
        return tuple(ended)

    def _note(self, ranks: Iterable[str]) -> list[str]:
        """Takes ranks in; returns the stages and jobs that nobody is left in because a rank is in another one now."""
        emptied: list[str] = []
        for rank in ranks:
            node = self._topology.attributes.get(rank, {}).get(ATTRIBUTE)
            if isinstance(node, str):
                self._ranks.setdefault(node, set()).add(rank)
                emptied += self._place(rank, tuple(e for e in self._topology.above(rank) if kind_of(e) in WORK))
        return emptied

    def _deserted(self, works: Iterable[str]) -> list[str]:
        """Stages and jobs in which nobody is: who reports steps may name any stage, and it would stay for ever."""
        found = [entity for entity in works if entity not in self._members]
        if not found:
            return []
        ranks = (entity for entity in self._topology.parents if kind_of(entity) == "rank")
        over = {above for rank in ranks for above in self._topology.above(rank)}
        return [entity for entity in found if entity not in over]

    def _place(self, rank: str, over: tuple[str, ...]) -> list[str]:
        """Puts a rank below its stage and job, or below none; returns those that nobody is left in."""
        before = self._over.pop(rank, ())
        for entity in before:
            self._members.get(entity, set()).discard(rank)
        if over:
            self._over[rank] = over
        for entity in over:
            self._members.setdefault(entity, set()).add(rank)
        empty = [entity for entity in before if not self._members.get(entity)]
        for entity in empty:
            self._members.pop(entity, None)
        return empty
