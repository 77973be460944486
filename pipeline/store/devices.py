"""Integer ids of devices: one small dense range per device class, so that frames are plain arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.store.append import insert


class Devices:
    """(class, site, entity) -> id within the class. Ids are given in order of appearance and never change.

    New devices wait in memory until `save` writes them in the transaction that stores their first rows; after a
    rollback they are written by the next one.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._ids: dict[tuple[str, str, str], int] = {}
        self._names: dict[str, list[str]] = defaultdict(list)
        self._arrays: dict[tuple[str, str, tuple[str, ...]], NDArray[np.int32]] = {}
        self._unsaved: list[tuple[str, int, str, str, str, bool]] = []
        self._simulated: dict[str, bool] = {}
        rows = connection.execute("SELECT class, id, site, entity, simulated FROM device ORDER BY class, id").fetchall()
        for device_class, number, site, entity, simulated in rows:
            self._ids[device_class, site, entity] = number
            self._names[device_class].append(entity)
            self._simulated[entity] = simulated

    def names(self, device_class: str) -> Sequence[str]:
        """Entities of a class by id."""
        return self._names[device_class]

    def is_simulated(self, entity: str) -> bool:
        """Whether the sender of that entity's telemetry said so; False for entities without telemetry."""
        return self._simulated.get(entity, False)

    def knows(self, entity: str) -> bool:
        """Whether telemetry of it ever came."""
        return entity in self._simulated

    def all_simulated(self) -> bool:
        """Whether there is telemetry, and all of it simulated."""
        return bool(self._simulated) and all(self._simulated.values())

    def ids(
        self, device_class: str, site: str, node: str, simulated: bool, entities: tuple[str, ...]
    ) -> NDArray[np.int32]:
        """(devices,) ids of `entities`, new ones given to strangers."""
        key = (device_class, site, entities)
        if key not in self._arrays:
            found = [self._id(device_class, site, node, simulated, entity) for entity in entities]
            self._arrays[key] = np.array(found, np.int32)
        return self._arrays[key]

    def _id(self, device_class: str, site: str, node: str, simulated: bool, entity: str) -> int:
        key = (device_class, site, entity)
        if key not in self._ids:
            self._ids[key] = len(self._names[device_class])
            self._names[device_class].append(entity)
            self._simulated[entity] = simulated
            self._unsaved.append((device_class, self._ids[key], site, entity, node, simulated))
        return self._ids[key]

    def save(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Writes new devices; `saved` forgets them once the transaction is durable."""
        if self._unsaved:
            names = ("class", "id", "site", "entity", "node", "simulated")
            insert(connection, "device", dict(zip(names, zip(*self._unsaved, strict=True), strict=True)))

    def saved(self) -> None:
        """The last `save` is durable."""
        self._unsaved = []
