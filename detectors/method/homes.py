"""Below what devices lie, and what lies above them: looked up once for all until topology or fleet change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.topology import Topology, kind_of


class Homes:
    """What lies above the devices of a class, as positions and members; renewed when topology or fleet has changed."""

    def __init__(self) -> None:
        self._key: tuple[int, int, int] = (0, -1, 0)
        self._members: dict[str, list[int]] = {}
        self._places: dict[str, NDArray[np.intp]] = {}
        self._above: list[tuple[str, ...]] = []
        self._nodes: NDArray[np.intp] = np.empty(0, np.intp)
        self._known_nodes = -1

    def renew(self, names: Sequence[str], topology: Topology) -> None:
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

    def members(self, entity: str) -> list[int]:
        """Positions of the devices below an entity."""
        return self._members.get(entity, [])

    def places(self, entity: str) -> NDArray[np.intp]:
        """`members` as an array."""
        if entity not in self._places:
            self._places[entity] = np.array(self._members.get(entity, []), np.intp)
        return self._places[entity]

    def nodes(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Per device the position of its node among `names`; -1 where none of them is above it."""
        if len(names) != self._known_nodes:
            at = {name: i for i, name in enumerate(names)}
            nearest = (next((e for e in above if kind_of(e) == "node"), "") for above in self._above)
            self._known_nodes, self._nodes = len(names), np.array([at.get(node, -1) for node in nearest], np.intp)
        return self._nodes

    def above(self, position: int) -> tuple[str, ...]:
        """What lies above a device, nearest first."""
        return self._above[position]
