"""When the counters of each device last started from zero, so that a reset is not taken for growth.

A counter that decreases was reset, together with all others of its device: by a reloaded driver, by a person, or by a
new device in its place. (A decrease from the top of 32 bits to the bottom is a wrap, not a reset.) The generation is
the UTC second in which the agent first saw the present counters. It survives restarts of the agent within one boot.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from agents.node.spool.disk import FileWriter, ImmediateFileWriter
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE

_MISSING = np.iinfo(np.uint64).max
_WRAP = 1 << 32
Key = tuple[str, tuple[str, ...]]
Names = tuple[str, ...]
_MAX_LAYOUTS, _MAX_DEVICES = 512, 32_768
"""Remembered layouts (signals x devices) of one class, and devices; chosen: a node has at most hundreds of devices of a
class, and reads of a few layouts; the agent of a fabric has 16,384 ports (agents/collectors/fabric). Beyond that
(interfaces of containers) a reset may be missed."""
_SAVE_US = 60 * SECOND
"""Interval of saving the newest counters for a restart of the agent, so that a reset in between is found. Chosen: at
most 60 kB a minute; after a kill -9 a counter that exceeds its value of a minute ago hides its reset."""
_MAX_SECOND = 0xFFFF_FFFE
"""Highest second that the signal can hold; the value above it means missing."""


class CounterGenerations:
    """Follows the counters of one node. `path`, written by `files`, keeps the state within the boot `boot`."""

    def __init__(self, path: Path, boot: bytes, files: FileWriter | None = None) -> None:
        self._path, self._boot, self._files = path, boot.hex(), files or ImmediateFileWriter()
        self._since, self._last = _load_state(path, self._boot) if self._files.disk_responds else ({}, {})
        self._saved, self._saved_at = dict(self._since), 0

    def update(self, time: int, readings: Iterable[Reading]) -> tuple[list[Reading], list[Event]]:
        """Readings with the generation of every device that has counters, and an event for each that was reset."""
        keys: dict[Key, None] = {}
        events: list[Event] = []
        for reading in readings:
            if names := _counter_signals(tuple(reading.columns), reading.device_class):
                key = reading.device_class, reading.entities
                keys[key] = None
                events += self._find_resets(time, key, names, reading)
        if len(self._since) > _MAX_DEVICES:
            seen = {entity for _, entities in keys for entity in entities}
            self._since = {entity: since for entity, since in self._since.items() if entity in seen}
        # a time before the last one: the clock was in the future and set back
        if self._since != self._saved or not 0 <= time - self._saved_at < _SAVE_US:
            self._saved_at = time
            self.save()
        return [self._generation_reading(key) for key in keys], events

    def _find_resets(self, time: int, key: Key, names: Names, reading: Reading) -> list[Event]:
        device_class, entities = key
        last = self._last.setdefault(device_class, _LastCounters())
        values = np.array([_to_uint64(reading.columns[name]) for name in names])
        reset: dict[str, list[str]] = {}
        for row, column in last.find_decreases(names, entities, values):
            reset.setdefault(entities[column], []).append(names[row])
        for entity in entities:
            if entity not in self._since or entity in reset:
                self._since[entity] = time // SECOND
        return [Event(time, entity, "counter_reset", {"signals": signals}) for entity, signals in reset.items()]

    def _generation_reading(self, key: Key) -> Reading:
        device_class, entities = key
        since = np.array([self._since[entity] for entity in entities], np.uint32)
        return Reading(device_class, entities, {f"{device_class}.generation": since})

    def save(self) -> None:
        """Saves the state; if the disk refuses it, a restart begins new generations, which costs one interval."""
        self._saved = dict(self._since)
        last = {device_class: found.to_json() for device_class, found in self._last.items()}
        text = json.dumps({"boot": self._boot, "since": self._since, "last": last})
        self._files.write_later(self._path, lambda: _replace_file(self._path, text))


class _LastCounters:
    """The newest known counters of one class: a row per signal, a column per device, over readings of any layout."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._values = np.empty((0, 0), np.uint64)
        self._locations: dict[tuple[Names, Names], tuple[NDArray[np.intp], ...]] = {}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> _LastCounters:
        """Decodes to_json. Raises ValueError, TypeError, KeyError or OverflowError on anything else."""
        made = cls()
        made._rows = {str(name): row for row, name in enumerate(found["signals"])}
        made._columns = {str(entity): column for column, entity in enumerate(found["entities"])}
        values = [[_MISSING if value is None else int(value) for value in row] for row in found["values"]]
        made._values = np.array(values, np.uint64).reshape(len(made._rows), len(made._columns))
        return made

    def to_json(self) -> dict[str, Any]:
        """The counters as JSON; a missing value is None."""
        values = [[None if value == _MISSING else value for value in row] for row in self._values.tolist()]
        return {"signals": list(self._rows), "entities": list(self._columns), "values": values}

    def find_decreases(self, names: Names, entities: Names, now: NDArray[np.uint64]) -> NDArray[np.intp]:
        """(k, 2) signal and device of each counter that decreased; a missing value is ignored.

        A counter that was near the top of 32 bits and is near the bottom has wrapped.
        """
        location = self._locate(names, entities)
        before = self._values[location]
        lower = (now < before) & (before != _MISSING)
        self._values[location] = np.where(now == _MISSING, before, now)
        if lower.any():
            lower &= ~((before >= 0.9 * _WRAP) & (before < _WRAP) & (now < 0.1 * _WRAP))
        return np.argwhere(lower)

    def _locate(self, names: Names, entities: Names) -> tuple[NDArray[np.intp], ...]:
        """The index of these signals and devices in the values, which grow for new ones."""
        if (names, entities) not in self._locations:
            if len(self._locations) >= _MAX_LAYOUTS or len(self._columns) + len(entities) > _MAX_DEVICES:
                self.__init__()  # type: ignore[misc] # devices come and go: all are forgotten
            rows = [self._rows.setdefault(name, len(self._rows)) for name in names]
            columns = [self._columns.setdefault(entity, len(self._columns)) for entity in entities]
            larger = np.full((len(self._rows), len(self._columns)), _MISSING, np.uint64)
            larger[: self._values.shape[0], : self._values.shape[1]] = self._values
            self._values = larger
            self._locations[names, entities] = np.ix_(rows, columns)
        return self._locations[names, entities]


@lru_cache(1024)
def _counter_signals(names: Names, device_class: str) -> Names:
    """The counters among these signals, except those that restart by design. A collector has few sets of columns."""
    found = (CATALOGUE.get(name) for name in names)
    return tuple(
        s.name
        for s in found
        if s is not None and s.kind == "counter" and s.device_class == device_class and not s.wraps
    )


def _to_uint64(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Counts as unsigned integers; invalid values are missing."""
    if values.dtype == np.uint64:
        return values
    known = (values >= 0) & (values < _MISSING)
    return np.where(known, np.where(known, values, 0).astype(np.uint64), _MISSING).astype(np.uint64)


def _replace_file(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        new = path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, path)


def _load_state(path: Path, boot: str) -> tuple[dict[str, int], dict[str, _LastCounters]]:
    """The state that an agent of the same boot saved; empty if it cannot be read or is invalid."""
    try:
        found = json.loads(path.read_text())
        since = {str(entity): int(second) for entity, second in found["since"].items()}
        last = {str(device_class): _LastCounters.from_json(table) for device_class, table in found["last"].items()}
        sane = all(0 <= second <= _MAX_SECOND for second in since.values())
        return (since, last) if sane and found["boot"] == boot else ({}, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}, {}
