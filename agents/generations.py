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
from pipeline.records import SECOND, Event
from pipeline.signals import CATALOGUE

_MISSING = np.iinfo(np.uint64).max
_WRAP = 1 << 32
Key = tuple[str, tuple[str, ...]]
Names = tuple[str, ...]
_KEYS = 512
"""Sets of devices that are remembered; chosen: 20 collectors see a few classes each, and sets change with hardware."""


class Generations:
    """Follows the counters of one node. `path` keeps what was found; `boot` is the boot in which it holds."""

    def __init__(self, path: Path, boot: bytes) -> None:
        self._path, self._boot = path, boot.hex()
        self._since: dict[str, int] = _kept(path, self._boot)
        self._last: dict[Key, _Last] = {}
        self._saved = dict(self._since)

    def follow(self, time: int, readings: Iterable[Reading]) -> tuple[list[Reading], list[Event]]:
        """Readings with the generation of every device that counts, and an event for each that was reset."""
        keys: dict[Key, None] = {}
        events: list[Event] = []
        for reading in readings:
            if names := _counting(tuple(reading.columns), reading.device_class):
                key = reading.device_class, reading.entities
                keys[key] = None
                events += self._compare(time, key, names, reading)
        if self._since != self._saved:
            self._save()
        return [self._reading(key) for key in keys], events

    def _compare(self, time: int, key: Key, names: Names, reading: Reading) -> list[Event]:
        if key not in self._last and len(self._last) >= _KEYS:
            self._last.clear()
        last = self._last.setdefault(key, _Last(len(reading.entities)))
        fallen: dict[str, list[str]] = {}
        for row, column in last.fell(names, np.array([_whole(reading.columns[name]) for name in names])):
            fallen.setdefault(reading.entities[column], []).append(names[row])
        for entity in reading.entities:
            if entity not in self._since or entity in fallen:
                self._since[entity] = time // SECOND
        return [Event(time, entity, "counter_reset", {"signals": signals}) for entity, signals in fallen.items()]

    def _reading(self, key: Key) -> Reading:
        device_class, entities = key
        since = np.array([self._since[entity] for entity in entities], np.uint32)
        return Reading(device_class, entities, {f"{device_class}.generation": since})

    def _save(self) -> None:
        """Keeps what is known; where the disk refuses, a restart begins new generations, which costs one interval."""
        self._saved = dict(self._since)
        text = json.dumps({"boot": self._boot, "since": self._since})
        with contextlib.suppress(OSError):
            new = self._path.with_suffix(".new")
            new.write_text(text)
            os.replace(new, self._path)


class _Last:
    """The newest known values of all counters of some devices, one row per signal, whichever look they came with."""

    def __init__(self, devices: int) -> None:
        self._rows: dict[str, int] = {}
        self._values = np.empty((0, devices), np.uint64)
        self._places: dict[Names, NDArray[np.intp]] = {}

    def fell(self, names: Names, now: NDArray[np.uint64]) -> NDArray[np.intp]:
        """(k, 2) signal and device of each counter that went back; a missing value is bridged by the next one.

        One that stood near the top of 32 bits and stands near the bottom has wrapped.
        """
        places = self._place(names)
        before = self._values[places]
        lower = (now < before) & (before != _MISSING)
        self._values[places] = np.where(now == _MISSING, before, now)
        if lower.any():
            lower &= ~((before >= 0.9 * _WRAP) & (before < _WRAP) & (now < 0.1 * _WRAP))
        return np.argwhere(lower)

    def _place(self, names: Names) -> NDArray[np.intp]:
        if names not in self._places:
            fresh = [name for name in names if name not in self._rows]
            self._rows |= {name: len(self._rows) + i for i, name in enumerate(fresh)}
            unknown = np.full((len(fresh), self._values.shape[1]), _MISSING, np.uint64)
            self._values = np.concatenate([self._values, unknown])
            self._places[names] = np.array([self._rows[name] for name in names], np.intp)
        return self._places[names]


@lru_cache(1024)
def _counting(names: Names, device_class: str) -> Names:
    """Which of these signals count. Bounded: a collector has a few sets of columns, by rhythm."""
    found = (CATALOGUE.get(name) for name in names)
    return tuple(s.name for s in found if s is not None and s.kind == "counter" and s.device_class == device_class)


def _whole(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Counts as unsigned numbers; what is none is missing."""
    if values.dtype == np.uint64:
        return values
    known = (values >= 0) & (values < _MISSING)
    return np.where(known, np.where(known, values, 0).astype(np.uint64), _MISSING).astype(np.uint64)


def _kept(path: Path, boot: str) -> dict[str, int]:
    """What an agent of the same boot left; nothing if it cannot be read or is not what we wrote."""
    try:
        found = json.loads(path.read_text())
        since = {str(entity): int(second) for entity, second in found["since"].items()}
        return since if found["boot"] == boot else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
