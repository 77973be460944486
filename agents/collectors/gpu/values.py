"""The values of one read of the GPUs: two flat arrays, with columns per device class as views.

Flat, so that thousands of values of the driver are stored by one assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.signals import CATALOGUE

MISSING = np.iinfo(np.uint64).max


class GpuValues:
    """Gauges and states as f8, counters and 64-bit masks as u8. `index_of` returns where a value is stored."""

    def __init__(self, classes: Sequence[tuple[Sequence[str], Sequence[str]]]) -> None:
        """classes: (signals, entities) of each device class."""
        self._entities = {signal: tuple(entities) for signals, entities in classes for signal in signals}
        self._starts: dict[str, tuple[bool, int]] = {}
        sizes = {True: 0, False: 0}
        for signal, entities in self._entities.items():
            whole = CATALOGUE[signal].type == "u8"
            self._starts[signal] = whole, sizes[whole]
            sizes[whole] += len(entities)
        self.gauges = np.full(sizes[False], np.nan)
        self.counters = np.full(sizes[True], MISSING, np.uint64)

    def index_of(self, signal: str, device: int) -> tuple[bool, int]:
        """Returns (whether it is in the counters array, index there)."""
        is_counter, start = self._starts[signal]
        return is_counter, start + device

    def set_value(self, place: tuple[bool, int], value: float) -> None:
        """Stores one value. A value that does not fit a counter is stored as missing."""
        whole, index = place
        if not whole:
            self.gauges[index] = value
        elif 0 <= value < MISSING:
            self.counters[index] = value

    def clear_all(self) -> None:
        """Sets every value to missing."""
        self.gauges.fill(np.nan)
        self.counters.fill(MISSING)

    def clear_device(self, signals: Iterable[str], device: int) -> None:
        """Sets the values of one device to missing."""
        for signal in signals:
            whole, index = self.index_of(signal, device)
            if whole:
                self.counters[index] = MISSING
            else:
                self.gauges[index] = np.nan

    def columns(self, signals: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Returns a copy of the column of each signal."""
        gauges, counters = self.gauges.copy(), self.counters.copy()
        found: dict[str, NDArray[Any]] = {}
        for signal in signals:
            whole, start = self._starts[signal]
            found[signal] = (counters if whole else gauges)[start : start + len(self._entities[signal])]
        return found
