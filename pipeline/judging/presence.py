"""Who had a sample lately: silence is never taken for quiet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Instant
from pipeline.model.signals import CLASSES, signals_of_class

PRESENT = 60 * SECOND
"""An entity without a sample for this long is not known to be quiet: six frames of 10 s. Chosen."""
LOOKS = 3
"""Where agents look more seldom, as at disks, so many looks. Chosen: one may fail, another be late."""


def _patience(device_class: str) -> int:
    """How long an entity of a class counts as present after a sample (us), by the signal that is looked at most."""
    own = [s for s in signals_of_class(device_class) if s.name != f"{device_class}.generation"]  # rides with the others
    rhythm = min((s.interval or 1.0 for s in own), default=1.0)
    return max(PRESENT, round(LOOKS * rhythm * SECOND))


_PATIENCE = {device_class: _patience(device_class) for device_class in CLASSES}


class LastSeen:
    """When each entity last had a sample, so that silence is never taken for quiet."""

    def __init__(self) -> None:
        self._times: dict[str, NDArray[np.int64]] = {}
        self._place: dict[str, tuple[str, int]] = {}
        self._ended: dict[str, int] = {}
        self.now = 0

    def know(self, device_class: str, entities: Sequence[str]) -> None:
        """Takes devices that are known to bear telemetry; they are absent until a sample of theirs is noted."""
        times = self._times.get(device_class, np.zeros(0, np.int64))
        for i in range(len(times), len(entities)):
            self._place[entities[i]] = (device_class, i)
        self._times[device_class] = np.concatenate([times, np.zeros(max(0, len(entities) - len(times)), np.int64)])

    def note(self, instant: Instant) -> None:
        """Takes the samples of one instant, which is now the present."""
        self.now = instant.time
        self.end(instant.ended, instant.time)
        for device_class, (names, seen) in instant.seen.items():
            self.know(device_class, names)
            self._times[device_class][: len(seen)][seen] = instant.time

    def end(self, entities: Iterable[str], time: int) -> None:
        """Takes what is no more since `time`, such as the ranks of a job: their silence is no lack of telemetry."""
        self._ended.update(dict.fromkeys(entities, time))

    def present(self, entity: str) -> bool:
        """Whether the entity had a sample lately; True where none is to come (racks, jobs, ended ranks)."""
        place = self._place.get(entity)
        if place is None:
            return True
        device_class, number = place
        last = int(self._times[device_class][number])
        if last <= self._ended.get(entity, -1):
            return True
        return self.now - last <= _PATIENCE.get(device_class, PRESENT)
