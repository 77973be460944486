"""Columns of many ports, given in slices that each fit one message."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Table = tuple[tuple[str, ...], dict[str, NDArray[Any]]]
"""Entities and columns of them."""
SLICE = 1536
"""Most ports of one slice; chosen: two slices of the longest names (59 bytes) are 180 KB of the 256 KB that the layout
of a message may have (pipeline/wire.py), and the node's own devices need some."""


class Share:
    """The newest table; each look takes a slice, going round, so that no port waits for ever behind those before it."""

    def __init__(self) -> None:
        self._entities: tuple[str, ...] = ()
        self._columns: dict[str, NDArray[Any]] = {}
        self._at = self._left = 0

    def put(self, entities: tuple[str, ...], columns: dict[str, NDArray[Any]]) -> None:
        """Takes a table in place of what was not given yet."""
        self._entities, self._columns = entities, columns
        self._left = -(-len(entities) // SLICE)
        self._at = self._at if self._at * SLICE < len(entities) else 0

    def take(self) -> tuple[Table, ...]:
        """The next slice, if one is left."""
        if not self._left:
            return ()
        part = slice(self._at * SLICE, (self._at + 1) * SLICE)
        self._left -= 1
        self._at = self._at + 1 if part.stop < len(self._entities) else 0
        return ((self._entities[part], {name: values[part] for name, values in self._columns.items()}),)
