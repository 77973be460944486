"""Readings -> one Batch: values in wire types; invalid values are missing.

A value that is NaN, outside its signal's valid range or does not fit its type becomes NaN in floats and the highest
value in unsigned integers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Device, Reading
from pipeline.model.names import MAX_NAME, clean_text, find_entity_fault
from pipeline.model.records import Batch, Block, Event, Origin
from pipeline.model.signals import CATALOGUE, Signal


@cache
def _limits(signal: Signal) -> tuple[np.dtype[Any], float | int, float, float, bool]:
    """Wire type, missing value, lowest and highest valid value of a signal, and whether every value is valid."""
    dtype = np.dtype(signal.type)
    low, high = signal.valid
    if dtype.kind == "f":
        return dtype, np.nan, low, high, math.isinf(low) and math.isinf(high)
    highest = int(np.iinfo(dtype).max)
    return dtype, highest, max(low, 0), min(high, highest - 1), low <= 0 and math.isinf(high)


def encode_column(signal: Signal, values: NDArray[Any]) -> NDArray[Any]:
    """`values` in the signal's wire type; missing is NaN or the highest unsigned value."""
    dtype, missing, low, high, any_valid = _limits(signal)
    if any_valid and (values.dtype == dtype or dtype.kind == values.dtype.kind == "f"):
        return values.astype(dtype, copy=False)
    good = (values >= low) & (values <= high)
    if values.dtype.kind == "f" and dtype.kind == "u":
        good &= values < float(missing)  # as a float the highest value of 64 bits is one more than it
    found = np.full(values.shape, missing, dtype)
    found[good] = values[good].astype(dtype)
    return found


def check_reading(reading: Reading, inventory: Mapping[str, Device] | None) -> None:
    """Raises ValueError or TypeError if a reading or inventory cannot be sent: a fault of its collector alone."""
    if len(set(reading.entities)) != len(reading.entities) or not all(":" in e for e in reading.entities):
        raise ValueError(f"{reading.device_class}: entities {reading.entities}: expected kind:name, each once")
    for name, values in reading.columns.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
            raise TypeError(f"{name}: {values!r}: expected an array of numbers")
        if values.shape != (len(reading.entities),):
            raise ValueError(f"{name}: values of shape {values.shape} for {len(reading.entities)} devices")
    "".join((*reading.entities, *(inventory or {}))).encode()  # fails on a name with bytes that are not text
    facts = [dict(event.data) for event in reading.events]
    json.dumps([*facts, *(dict(d.attributes) for d in (inventory or {}).values())], allow_nan=False)


def build_blocks(readings: Iterable[Reading]) -> tuple[Block, ...]:
    """One block per class with one row per entity, whichever collector read it; unread values are missing.

    Signals that are not in the catalogue are omitted. Of two readings of one signal and entity the later one is used.
    """
    by_class: dict[str, list[Reading]] = {}
    for reading in readings:
        if reading.entities:
            by_class.setdefault(reading.device_class, []).append(reading)
    found = (_build_block(device_class, together) for device_class, together in by_class.items())
    return tuple(block for block in found if block.columns)


def _build_block(device_class: str, readings: Sequence[Reading]) -> Block:
    entities = readings[0].entities
    if any(reading.entities != entities for reading in readings):
        entities = tuple({entity: None for reading in readings for entity in reading.entities})
    columns: dict[str, NDArray[Any]] = {}
    for reading in readings:
        for name, values in reading.columns.items():
            signal = CATALOGUE.get(name)
            if signal is not None and signal.device_class == device_class:
                _merge_column(columns, signal, encode_column(signal, values), reading.entities, entities)
    return Block(device_class, entities, columns)


def _merge_column(
    columns: dict[str, NDArray[Any]],
    signal: Signal,
    values: NDArray[Any],
    entities: tuple[str, ...],
    all_entities: tuple[str, ...],
) -> None:
    """Writes the values of some entities into the column of all; a missing value replaces nothing."""
    missing = _limits(signal)[1]
    if entities == all_entities and signal.name not in columns:
        columns[signal.name] = values.reshape(1, -1)
        return
    if signal.name not in columns:
        columns[signal.name] = np.full((1, len(all_entities)), missing, signal.type)
    row_of = {entity: row for row, entity in enumerate(all_entities)}
    rows = np.array([row_of[entity] for entity in entities])
    known = ~np.isnan(values) if values.dtype.kind == "f" else values != missing
    whole = columns[signal.name] = columns[signal.name].copy()
    whole[0, rows[known]] = values[known]


def build_batch(origin: Origin, time: int, readings: Iterable[Reading]) -> Batch | None:
    """The batch of one tick; None if nothing was read."""
    found = build_blocks(readings)
    return Batch(origin, np.array([time], np.int64), found) if found else None


def clean_event(event: Event) -> Event:
    """The event with text that the pipeline accepts: invalid characters become spaces, long text is cut."""
    return replace(event, data=_clean(dict(event.data)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key, MAX_NAME) if isinstance(key, str) else key: _clean(v) for key, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, (list, tuple)) else value


def build_inventory_event(time: int, node: str, devices: Mapping[str, Device]) -> Event:
    """The event that lists all entities, with parents and attributes; it always contains the node itself.

    Entities with names that the pipeline does not accept are omitted: one of them would invalidate the whole event.
    """
    named = {e: d for e, d in devices.items() if find_entity_fault((e, *d.parents)) is None}
    whole = {f"node:{node}": Device(), **named}
    entities = {e: {"parents": list(d.parents), "attributes": dict(d.attributes)} for e, d in whole.items()}
    return Event(time, f"node:{node}", "inventory", {"entities": entities})


def merge_inventories(inventories: Iterable[Mapping[str, Device]]) -> dict[str, Device]:
    """One inventory of many: attributes of the same entity are combined, the parents of the first one are used."""
    found: dict[str, Device] = {}
    for inventory in inventories:
        for entity, device in inventory.items():
            before = found.get(entity, Device())
            found[entity] = Device(before.parents or device.parents, {**before.attributes, **device.attributes})
    return found
