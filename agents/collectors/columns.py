"""Columns of readings from the values of devices.

Devices that measure the same signals share one reading, so that no column is empty by design.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from pipeline.model.signals import CATALOGUE

DeviceValues = Mapping[str, float | None]
"""Values of one device: signal -> value; None or NaN = missing now. The set of signals is the same at every read."""

_TYPES = {s.name: np.dtype(s.type if s.type.startswith("u") else float) for s in CATALOGUE.values()}
_LARGEST = np.iinfo(np.uint64).max  # the value of a missing count
_MISSING = {name: np.iinfo(t).max if t.kind == "u" else np.nan for name, t in _TYPES.items()}


def readings_by_signals(rows: Iterable[tuple[str, DeviceValues]], device_class: str = "sensor") -> tuple[Reading, ...]:
    """Returns one reading per set of signals, in the order of the rows."""
    groups: dict[tuple[str, ...], tuple[list[str], list[DeviceValues]]] = {}
    for entity, row in rows:
        entities, found = groups.setdefault(tuple(row), ([], []))
        entities.append(entity)
        found.append(row)
    return tuple(
        Reading(
            device_class,
            tuple(entities),
            {signal: signal_column(signal, [row[signal] for row in found]) for signal in signals},
        )
        for signals, (entities, found) in groups.items()
    )


def signal_column(signal: str, values: Sequence[float | None]) -> NDArray[Any]:
    """Returns the values of one signal as a column of its wire type.

    None, NaN and values that do not fit are missing.
    """
    missing, dtype = _MISSING[signal], _TYPES[signal]
    if dtype.kind == "u":
        return np.array([_to_unsigned(value, int(missing)) for value in values], dtype)
    return np.array([missing if value is None else value for value in values], dtype)


def _to_unsigned(value: float | None, missing: int) -> int:
    """Returns a value as a whole number of an unsigned type; `missing` if it is NaN or does not fit."""
    return int(value) if value is not None and 0 <= value < missing else missing


def count_column(numbers: Iterable[int | None]) -> NDArray[np.uint64]:
    """Returns one count per device. None and numbers that do not fit a counter are missing."""
    return np.array([_LARGEST if n is None or not 0 <= n < _LARGEST else n for n in numbers], np.uint64)


def value_column(value: float | int) -> NDArray[Any]:
    """Returns the value of a single device as a column."""
    return count_column([value]) if isinstance(value, int) else np.array([value])
