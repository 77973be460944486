"""Integer ids of devices: a small dense range per device class, so that frames are plain arrays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.store.append import insert_columns

EXCLUDED = -1
"""Used instead of an id: the rows of this device are not stored."""
_MAX_CACHED = 16_000_000
"""Maximum cached ids, 64 MB; chosen: 12,500 nodes of 300 devices at three intervals are 11 million."""


class Devices:
    """(class, site, entity) -> id within the class. Ids are assigned in order of appearance and never change.

    In frames a device has a slot: its position among the existing ids. Ids and slots are equal until devices are
    dropped (pipeline/store/retention.py). New devices wait in memory until `save` writes them in the transaction that
    stores their first rows; after a rollback the next one writes them.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._simulated: dict[str, bool] = {}
        self._unsaved: list[tuple[str, int, str, str, str, bool]] = []
        self.load(connection)

    def load(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Loads all devices from the store, and drops everything else."""
        self._ids: dict[tuple[str, str, str], int] = {}
        self._names: dict[str, list[str]] = defaultdict(list)
        self._origins: dict[str, list[tuple[str, str, bool]]] = defaultdict(list)
        self._arrays: dict[tuple[str, str, tuple[str, ...]], NDArray[np.int32]] = {}
        self._cached = 0  # ids in _arrays
        self._next: Counter[str] = Counter()
        self._slots: dict[str, NDArray[np.int32]] = {}  # by id; absent if ids and slots are equal
        self._unsaved.clear()
        self._simulated.clear()
        self._sites: dict[str, str] = {}
        query = "SELECT class, id, site, entity, node, simulated FROM device ORDER BY class, id"
        rows = connection.execute(query).fetchall()
        for device_class, number, site, entity, node, simulated in rows:
            self._sites[node] = site
            self._ids[device_class, site, entity] = number
            self._origins[device_class].append((site, node, simulated))
            self._names[device_class].append(entity)
            self._simulated[entity] = simulated
            self._next[device_class] = number + 1
        for device_class, after in self._next.items():
            if after != len(self._names[device_class]):
                ids = [number for c, number, *_ in rows if c == device_class]
                self._slots[device_class] = np.full(after, -1, np.int32)
                self._slots[device_class][ids] = np.arange(len(ids))

    def find_slots(self, device_class: str, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Slots of devices by id; -1 for dropped devices."""
        known = self._slots.get(device_class)
        if known is None:
            return ids
        late = np.int32(len(known) - np.count_nonzero(known >= 0))
        return np.where(ids < len(known), known[np.minimum(ids, len(known) - 1)], ids - late)

    def names(self, device_class: str) -> Sequence[str]:
        """Entities of a class by slot."""
        return self._names[device_class]

    def origins(self, device_class: str) -> Sequence[tuple[str, str, bool]]:
        """(site, node, simulated) of the devices of a class by slot; at least as many as `names`."""
        return self._origins[device_class]

    def is_simulated(self, entity: str) -> bool:
        """Whether the telemetry of an entity is marked as simulated; False without telemetry."""
        return self._simulated.get(entity, False)

    def site_of(self, node: str) -> str | None:
        """The site of a node, from its newest telemetry; after a start, from its newest device; None without either."""
        return self._sites.get(node)

    def has_device(self, entity: str) -> bool:
        """Whether the entity ever had telemetry."""
        return entity in self._simulated

    def are_all_simulated(self) -> bool:
        """Whether there is telemetry, and all of it is simulated."""
        return bool(self._simulated) and all(self._simulated.values())

    def assign_ids(
        self,
        device_class: str,
        site: str,
        node: str,
        simulated: bool,
        entities: tuple[str, ...],
        excluded: Collection[str] = (),
    ) -> NDArray[np.int32]:
        """(devices,) ids of `entities`; assigns new ids; EXCLUDED for excluded entities."""
        key = (device_class, site, entities)
        self._sites[node] = site
        if excluded or key not in self._arrays:
            found = [
                EXCLUDED if e in excluded else self._assign_id(device_class, site, node, simulated, e) for e in entities
            ]
            if excluded:
                return np.array(found, np.int32)
            if self._cached > _MAX_CACHED:
                self._arrays.clear()
                self._cached = 0
            self._arrays[key] = np.array(found, np.int32)
            self._cached += len(found)
        return self._arrays[key]

    def _assign_id(self, device_class: str, site: str, node: str, simulated: bool, entity: str) -> int:
        key = (device_class, site, entity)
        if key not in self._ids:
            self._ids[key] = self._next[device_class]
            self._next[device_class] += 1
            self._origins[device_class].append((site, node, simulated))
            self._names[device_class].append(entity)
            self._simulated[entity] = simulated
            self._unsaved.append((device_class, self._ids[key], site, entity, node, simulated))
        return self._ids[key]

    def save(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Writes new devices; call `mark_saved` when the transaction is durable."""
        if self._unsaved:
            names = ("class", "id", "site", "entity", "node", "simulated")
            insert_columns(connection, "device", dict(zip(names, zip(*self._unsaved, strict=True), strict=True)))

    def mark_saved(self) -> None:
        """Records that the last `save` is durable."""
        self._unsaved = []
