"""Rows of devices -> readings: devices that measure the same things share one, so that no column is empty by nature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from pipeline.model.signals import CATALOGUE

Row = Mapping[str, float | None]
"""What one device gives: signal -> value; None or NaN = missing now. Its signals are the same at every look."""

_TYPES = {s.name: np.dtype(s.type if s.type.startswith("u") else float) for s in CATALOGUE.values()}
_LARGEST = np.iinfo(np.uint64).max  # also how a missing count is written
_MISSING = {name: np.iinfo(t).max if t.kind == "u" else np.nan for name, t in _TYPES.items()}


def readings(rows: Iterable[tuple[str, Row]], device_class: str = "sensor") -> tuple[Reading, ...]:
    """One reading per set of signals, in the order in which the rows bring them."""
    groups: dict[tuple[str, ...], tuple[list[str], list[Row]]] = {}
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
    """Values of one signal as the agent takes them: what is None, NaN or does not fit the column's type is missing."""
    missing, dtype = _MISSING[signal], _TYPES[signal]
    if dtype.kind == "u":
        return np.array([_whole(value, int(missing)) for value in values], dtype)
    return np.array([missing if value is None else value for value in values], dtype)


def _whole(value: float | None, missing: int) -> int:
    """A value as a whole number of the column's type; what does not fit it is missing, NaN too."""
    return int(value) if value is not None and 0 <= value < missing else missing


def count_column(numbers: Iterable[int | None]) -> NDArray[np.uint64]:
    """One count per device; None and what no counter can hold are missing."""
    return np.array([_LARGEST if n is None or not 0 <= n < _LARGEST else n for n in numbers], np.uint64)


def value_column(value: float | int) -> NDArray[Any]:
    """A value of a single device as the column of a reading."""
    return count_column([value]) if isinstance(value, int) else np.array([value])
