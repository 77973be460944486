"""The values of one look at the GPUs: two flat arrays, and a table per device class as a view into them.

Flat, so that thousands of answers of the driver are put in their places by one assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.signals import CATALOGUE

MISSING = np.iinfo(np.uint64).max


class Values:
    """Gauges and states as f8, counters and masks of 64 bits as u8; `place` says where a signal of a device lies."""

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

    def place(self, signal: str, device: int) -> tuple[bool, int]:
        """(whether it is among the counters, index there)."""
        whole, start = self._starts[signal]
        return whole, start + device

    def put(self, place: tuple[bool, int], value: float) -> None:
        """Stores one value; what a counter cannot hold is missing."""
        whole, index = place
        if not whole:
            self.gauges[index] = value
        elif 0 <= value < MISSING:
            self.counters[index] = value

    def forget(self) -> None:
        """Every value is missing again."""
        self.gauges.fill(np.nan)
        self.counters.fill(MISSING)

    def clear(self, signals: Iterable[str], device: int) -> None:
        """The values of one device are missing again."""
        for signal in signals:
            whole, index = self.place(signal, device)
            if whole:
                self.counters[index] = MISSING
            else:
                self.gauges[index] = np.nan

    def columns(self, signals: Iterable[str]) -> dict[str, NDArray[Any]]:
        """A column of its own per signal."""
        gauges, counters = self.gauges.copy(), self.counters.copy()
        found: dict[str, NDArray[Any]] = {}
        for signal in signals:
            whole, start = self._starts[signal]
            found[signal] = (counters if whole else gauges)[start : start + len(self._entities[signal])]
        return found
