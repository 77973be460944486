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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from pipeline.records import SECOND, Event
from pipeline.signals import CATALOGUE

_MISSING = np.iinfo(np.uint64).max
_WRAP = 1 << 32
Key = tuple[str, tuple[str, ...]]
Counters = dict[str, NDArray[np.uint64]]


class Generations:
    """Follows the counters of one node. `path` keeps what was found; `boot` is the boot in which it holds."""

    def __init__(self, path: Path, boot: bytes) -> None:
        self._path, self._boot = path, boot.hex()
        self._since: dict[str, int] = _kept(path, self._boot)
        self._last: dict[Key, Counters] = {}
        self._saved = dict(self._since)

    def follow(self, time: int, readings: Iterable[Reading]) -> tuple[list[Reading], list[Event]]:
        """Readings with the generation of every device that counts, and an event for each that was reset."""
        groups: dict[Key, Counters] = {}
        for reading in readings:
            if counters := _counters(reading):
                groups.setdefault((reading.device_class, reading.entities), {}).update(counters)
        events = [event for key, counters in groups.items() for event in self._compare(time, key, counters)]
        if self._since != self._saved:
            self._save()
        return [self._reading(key) for key in groups], events

    def _compare(self, time: int, key: Key, counters: Counters) -> list[Event]:
        _, entities = key
        fallen: dict[str, list[str]] = {}
        last = self._last.setdefault(key, {})
        for signal, now in counters.items():
            before = last.get(signal)
            if before is not None:
                for index in np.flatnonzero(_fell(before, now)):
                    fallen.setdefault(entities[index], []).append(signal)
                now = np.where(now == _MISSING, before, now)
            last[signal] = now
        for entity in entities:
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


def _counters(reading: Reading) -> Counters:
    return {
        name: values.astype(np.uint64)
        for name, values in reading.columns.items()
        if name in CATALOGUE and CATALOGUE[name].kind == "counter" and values.dtype.kind in "ui"
    }


def _fell(before: NDArray[np.uint64], now: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which counters went back; a wrap at 32 bits stands near the top before and near the bottom after."""
    known = (before != _MISSING) & (now != _MISSING)
    wrapped = (before >= 0.9 * _WRAP) & (before < _WRAP) & (now < 0.1 * _WRAP)
    found: NDArray[np.bool_] = known & (now < before) & ~wrapped
    return found


def _kept(path: Path, boot: str) -> dict[str, int]:
    """What an agent of the same boot left; nothing if it cannot be read or is not what we wrote."""
    try:
        found = json.loads(path.read_text())
        since = {str(entity): int(second) for entity, second in found["since"].items()}
        return since if found["boot"] == boot else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
