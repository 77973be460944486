"""Who had a sample lately: silence is never taken for quiet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.frames import Instant
from pipeline.records import SECOND

PRESENT = 60 * SECOND
"""An entity without a sample for this long is not known to be quiet: six frames of 10 s. Chosen."""


class LastSeen:
    """When each entity last had a sample, so that silence is never taken for quiet."""

    def __init__(self) -> None:
        self._times: dict[str, NDArray[np.int64]] = {}
        self._place: dict[str, tuple[str, int]] = {}
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
        for device_class, frame in instant.frames.items():
            if frame.values:
                self.know(device_class, frame.entities)
            for values in frame.values.values():
                self._times[device_class][: len(values)][~np.isnan(values)] = frame.time

    def present(self, entity: str) -> bool:
        """Whether the entity had a sample lately; True for what bears no telemetry of its own (racks, jobs)."""
        place = self._place.get(entity)
        return place is None or self.now - int(self._times[place[0]][place[1]]) <= PRESENT
