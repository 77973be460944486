"""Presence: when each entity last had a sample, so that missing data never counts as healthy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Instant
from pipeline.model.signals import CLASSES, signals_of_class

PRESENT = 60 * SECOND
"""After this time without a sample an entity is absent (us): six frames of 10 s. Chosen."""
MISSED_READINGS = 3
"""For signals with a longer interval, such as disks: so many intervals. Chosen: one may fail, another be late."""


def _presence_time(device_class: str) -> int:
    """How long an entity of a class counts as present after a sample (us), by its most frequent signal."""
    own = [s for s in signals_of_class(device_class) if s.name != f"{device_class}.generation"]  # sent with the others
    rhythm = min((s.interval or 1.0 for s in own), default=1.0)
    return max(PRESENT, round(MISSED_READINGS * rhythm * SECOND))


_PRESENCE_TIMES = {device_class: _presence_time(device_class) for device_class in CLASSES}


class LastSeen:
    """Time of the last sample of each entity."""

    def __init__(self) -> None:
        self._times: dict[str, NDArray[np.int64]] = {}
        self._slot_of: dict[str, tuple[str, int]] = {}
        self._ended: dict[str, int] = {}
        self.now = 0

    def add_devices(self, device_class: str, entities: Sequence[str]) -> None:
        """Adds devices that have telemetry; they are absent until a sample is recorded."""
        times = self._times.get(device_class, np.zeros(0, np.int64))
        for i in range(len(times), len(entities)):
            self._slot_of[entities[i]] = (device_class, i)
        self._times[device_class] = np.concatenate([times, np.zeros(max(0, len(entities) - len(times)), np.int64)])

    def record_instant(self, instant: Instant) -> None:
        """Records the samples of an instant, which becomes the present."""
        self.now = instant.time
        self.end_entities(instant.ended, instant.time)
        for device_class, (names, seen) in instant.seen.items():
            self.add_devices(device_class, names)
            self._times[device_class][: len(seen)][seen] = instant.time

    def end_entities(self, entities: Iterable[str], time: int) -> None:
        """Records that entities ended at `time`, such as ranks of a job: no telemetry is expected."""
        self._ended.update(dict.fromkeys(entities, time))

    def is_present(self, entity: str) -> bool:
        """Whether the entity had a recent sample; True if none is expected (racks, jobs, ended ranks)."""
        place = self._slot_of.get(entity)
        if place is None:
            return True
        device_class, number = place
        last = int(self._times[device_class][number])
        if last <= self._ended.get(entity, -1):
            return True
        return self.now - last <= _PRESENCE_TIMES.get(device_class, PRESENT)

    def has_sample(self, entity: str) -> bool:
        """Whether the entity itself had a recent sample; False if none is expected."""
        return entity in self._slot_of and self.is_present(entity)
