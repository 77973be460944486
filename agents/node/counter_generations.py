"""When the counters of each device began their present life, so that nobody takes a reset for growth.

A counter that goes back was reset, with all others of its device: by a driver that was loaded anew, by a person, by a
new device in its place. (One that falls from the top of 32 bits to the bottom has only wrapped.) The generation is the
UTC second in which the agent first saw the present life. It is kept over restarts of the agent within one boot.
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
from agents.node.spool.disk import AtOnce, SmallFiles
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE

_MISSING = np.iinfo(np.uint64).max
_WRAP = 1 << 32
Key = tuple[str, tuple[str, ...]]
Names = tuple[str, ...]
_LOOKS, _DEVICES = 512, 32_768
"""Sets of columns and devices of one class, and devices, that are remembered; chosen: a node has at most hundreds of
devices of a class, and looks of a few sets; a fabric's agent has 16,384 ports (agents/collectors/fabric/topology.py).
Beyond that (interfaces of containers) a reset may go unseen."""
_SAVE_US = 60 * SECOND
"""How often the newest counters are kept for a restart of the agent, so that a reset meanwhile is seen. Chosen: 60 kB a
minute at most; after a kill -9 a counter that outgrew its value of a minute ago hides its reset."""
_LATEST = 0xFFFF_FFFE
"""Greatest second that the signal can say; the one above means missing."""


class Generations:
    """Follows the counters of one node. `path`, written by `files`, keeps what was found within the boot `boot`."""

    def __init__(self, path: Path, boot: bytes, files: SmallFiles | None = None) -> None:
        self._path, self._boot, self._files = path, boot.hex(), files or AtOnce()
        self._since, self._last = _kept(path, self._boot) if self._files.answers else ({}, {})
        self._saved, self._saved_at = dict(self._since), 0

    def follow(self, time: int, readings: Iterable[Reading]) -> tuple[list[Reading], list[Event]]:
        """Readings with the generation of every device that counts, and an event for each that was reset."""
        keys: dict[Key, None] = {}
        events: list[Event] = []
        for reading in readings:
            if names := _counting(tuple(reading.columns), reading.device_class):
                key = reading.device_class, reading.entities
                keys[key] = None
                events += self._compare(time, key, names, reading)
        if len(self._since) > _DEVICES:
            seen = {entity for _, entities in keys for entity in entities}
            self._since = {entity: since for entity, since in self._since.items() if entity in seen}
        if self._since != self._saved or time - self._saved_at >= _SAVE_US:
            self._saved_at = time
            self.save()
        return [self._reading(key) for key in keys], events

    def _compare(self, time: int, key: Key, names: Names, reading: Reading) -> list[Event]:
        device_class, entities = key
        last = self._last.setdefault(device_class, _Last())
        fallen: dict[str, list[str]] = {}
        for row, column in last.fell(names, entities, np.array([_whole(reading.columns[name]) for name in names])):
            fallen.setdefault(entities[column], []).append(names[row])
        for entity in entities:
            if entity not in self._since or entity in fallen:
                self._since[entity] = time // SECOND
        return [Event(time, entity, "counter_reset", {"signals": signals}) for entity, signals in fallen.items()]

    def _reading(self, key: Key) -> Reading:
        device_class, entities = key
        since = np.array([self._since[entity] for entity in entities], np.uint32)
        return Reading(device_class, entities, {f"{device_class}.generation": since})

    def save(self) -> None:
        """Keeps what is known; where the disk refuses, a restart begins new generations, which costs one interval."""
        self._saved = dict(self._since)
        last = {device_class: found.as_json() for device_class, found in self._last.items()}
        text = json.dumps({"boot": self._boot, "since": self._since, "last": last})
        self._files.later(self._path, lambda: _write(self._path, text))


class _Last:
    """The newest known counters of one class: a row per signal, a column per device, whatever look they came with."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._values = np.empty((0, 0), np.uint64)
        self._places: dict[tuple[Names, Names], tuple[NDArray[np.intp], ...]] = {}

    @classmethod
    def of(cls, found: dict[str, Any]) -> _Last:
        """What as_json made. Raises ValueError, TypeError, KeyError or OverflowError on anything else."""
        made = cls()
        made._rows = {str(name): row for row, name in enumerate(found["signals"])}
        made._columns = {str(entity): column for column, entity in enumerate(found["entities"])}
        values = [[_MISSING if value is None else int(value) for value in row] for row in found["values"]]
        made._values = np.array(values, np.uint64).reshape(len(made._rows), len(made._columns))
        return made

    def as_json(self) -> dict[str, Any]:
        values = [[None if value == _MISSING else value for value in row] for row in self._values.tolist()]
        return {"signals": list(self._rows), "entities": list(self._columns), "values": values}

    def fell(self, names: Names, entities: Names, now: NDArray[np.uint64]) -> NDArray[np.intp]:
        """(k, 2) signal and device of each counter that went back; a missing value is bridged by the next one.

        One that stood near the top of 32 bits and stands near the bottom has wrapped.
        """
        place = self._place(names, entities)
        before = self._values[place]
        lower = (now < before) & (before != _MISSING)
        self._values[place] = np.where(now == _MISSING, before, now)
        if lower.any():
            lower &= ~((before >= 0.9 * _WRAP) & (before < _WRAP) & (now < 0.1 * _WRAP))
        return np.argwhere(lower)

    def _place(self, names: Names, entities: Names) -> tuple[NDArray[np.intp], ...]:
        """Where the values of these signals and devices are kept; room is made for new ones."""
        if (names, entities) not in self._places:
            if len(self._places) >= _LOOKS or len(self._columns) + len(entities) > _DEVICES:
                self.__init__()  # type: ignore[misc] # devices that come and go: what was known of them is forgotten
            rows = [self._rows.setdefault(name, len(self._rows)) for name in names]
            columns = [self._columns.setdefault(entity, len(self._columns)) for entity in entities]
            larger = np.full((len(self._rows), len(self._columns)), _MISSING, np.uint64)
            larger[: self._values.shape[0], : self._values.shape[1]] = self._values
            self._values = larger
            self._places[names, entities] = np.ix_(rows, columns)
        return self._places[names, entities]


@lru_cache(1024)
def _counting(names: Names, device_class: str) -> Names:
    """Which of these signals count, and do not start again by design. Bounded: a collector has few sets of columns."""
    found = (CATALOGUE.get(name) for name in names)
    return tuple(
        s.name
        for s in found
        if s is not None and s.kind == "counter" and s.device_class == device_class and not s.wraps
    )


def _whole(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Counts as unsigned numbers; what is none is missing."""
    if values.dtype == np.uint64:
        return values
    known = (values >= 0) & (values < _MISSING)
    return np.where(known, np.where(known, values, 0).astype(np.uint64), _MISSING).astype(np.uint64)


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        new = path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, path)


def _kept(path: Path, boot: str) -> tuple[dict[str, int], dict[str, _Last]]:
    """What an agent of the same boot left; nothing if it cannot be read or is not what we wrote."""
    try:
        found = json.loads(path.read_text())
        since = {str(entity): int(second) for entity, second in found["since"].items()}
        last = {str(device_class): _Last.of(table) for device_class, table in found["last"].items()}
        sane = all(0 <= second <= _LATEST for second in since.values())
        return (since, last) if sane and found["boot"] == boot else ({}, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}, {}
