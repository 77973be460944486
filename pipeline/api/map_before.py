"""Which nodes sent data at a time in the past, and which are new since then, from the store: for the change of the
counts of the fleet map."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.api.fleet import SILENT
from pipeline.api.fleet_groups import FleetIndex
from pipeline.api.fleet_map import NodePlaces
from pipeline.model.records import SECOND
from pipeline.model.signals import CLASSES
from pipeline.store import history_files, schema
from pipeline.store.devices import Devices
from pipeline.store.history_files import STEPS

LOOK_BACK = 24 * 3600 * SECOND
"""How long before a time rows are looked for that show that a node existed (us). Chosen: [store] hot_hours; a node that
was silent for longer counts as new when it returns."""


def find_reporting(
    cursor: duckdb.DuckDBPyConnection, devices: Devices, places: NodePlaces, index: FleetIndex, moment: int
) -> NDArray[np.bool_]:
    """Returns (nodes,) whether any device of a node has a row in the SILENT before `moment` (UTC us, whole minutes).

    Classes with few devices are read first, and no further one once all nodes have a row.
    """
    seen = np.zeros(len(index.nodes), bool)
    for device_class in sorted(CLASSES, key=lambda name: len(devices.names(name))):
        place = places.find(devices, device_class, index)
        if not (_nodes_of(np.arange(len(place)), place, len(seen)) & ~seen).any():
            continue
        for slots in _read_slots(cursor, devices, device_class, moment - SILENT, moment, STEPS[0]):
            seen |= _nodes_of(slots, place, len(seen))
    return seen


def find_new(
    cursor: duckdb.DuckDBPyConnection,
    devices: Devices,
    places: NodePlaces,
    index: FleetIndex,
    reporting: NDArray[np.bool_],
    moment: int,
) -> NDArray[np.bool_]:
    """Returns (nodes,) whether a node sent data, but none in the LOOK_BACK before `moment`: it did not exist then.

    reporting: what `find_reporting` returned. Of each other node one class is read: its agent, which sends rows of
    itself, or without one the class with the fewest devices.
    """
    new, unsure = np.zeros(len(index.nodes), bool), ~reporting
    for device_class in sorted(CLASSES, key=lambda name: (name != "agent", len(devices.names(name)))):
        place = places.find(devices, device_class, index)
        wanted = _nodes_of(np.arange(len(place)), place, len(unsure)) & unsure
        if not wanted.any():
            continue
        unsure &= ~wanted
        for slots in _read_slots(cursor, devices, device_class, moment - LOOK_BACK, moment, STEPS[1]):
            wanted &= ~_nodes_of(slots, place, len(wanted))
        new |= wanted
    return new


def _nodes_of(slots: NDArray[np.intp], place: NDArray[np.intp], count: int) -> NDArray[np.bool_]:
    """Returns (count,) which nodes have the devices in these slots. place: the node of each slot, -1 without one."""
    found = np.zeros(count, bool)
    nodes = place[slots[(slots >= 0) & (slots < len(place))]]
    found[nodes[nodes >= 0]] = True
    return found


def _read_slots(
    cursor: duckdb.DuckDBPyConnection, devices: Devices, device_class: str, start: int, end: int, step: int
) -> Iterator[NDArray[np.intp]]:
    """Yields the slots of the devices of a class with a row in [start, end): recent rows, then rollups of `step` s."""
    where = f"time >= make_timestamptz({start}) AND time < make_timestamptz({end})"
    for table in schema.read_layout(cursor, device_class):
        found = cursor.execute(f'SELECT DISTINCT device FROM "{table}" WHERE {where}').fetchnumpy()["device"]
        yield devices.find_slots(device_class, np.asarray(found, np.int32)).astype(np.intp)
    files = history_files.list_files(cursor, device_class, step, start, end)
    folder = history_files.folder_of(cursor) if files else None
    if folder is None:
        return
    rows = history_files.select_files(folder, files, {"time": "TIMESTAMPTZ", "entity": "VARCHAR"})
    names = {entity: slot for slot, entity in enumerate(list(devices.names(device_class)))}
    sealed = cursor.execute(f"SELECT DISTINCT entity FROM ({rows}) WHERE {where}").fetchall()
    yield np.array([names.get(entity, -1) for (entity,) in sealed], np.intp)
