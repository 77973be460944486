"""The topology as the API needs it: a copy of its own, and which node an entity belongs to."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from pipeline.model.topology import Topology


class Places:
    """Hands out a copy of a topology that another thread goes on changing.

    A Topology remembers ancestors it has looked up, so two threads may not ask the same one. Its `parents` is replaced
    on every change and never written to, so that reading it needs no lock.
    """

    def __init__(self, source: Topology) -> None:
        self._source, self._lock = source, threading.Lock()
        self._parents: Mapping[str, tuple[str, ...]] | None = None
        self._copy = Topology()

    def topology(self) -> Topology:
        """As of now. Every caller gets the same copy until the source changes; looking up ancestors only adds to it."""
        with self._lock:
            parents = self._source.parents
            if parents is not self._parents:
                self._copy, self._parents = Topology.of_sound(parents), parents
            return self._copy


def node_of(topology: Topology, entity: str, senders: Mapping[str, str] = {}) -> str | None:
    """The node that the entity is, is on or runs on; by who sends it where no inventory tells. None: there is none."""
    node = topology.above_of_kind(entity, "node")
    return node if node is not None else senders.get(entity)


def above(topology: Topology, entity: str) -> tuple[str, ...]:
    """The entity and all its ancestors, nearest first."""
    return (entity, *topology.above(entity))
