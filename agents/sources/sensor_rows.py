"""Rows of sensors -> readings: sensors that measure the same things share one, so that no column is empty by nature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Reading
from pipeline.signals import of_class

Row = Mapping[str, float | None]
"""What one sensor gives: signal -> value; None or NaN = missing now. Its signals are the same at every look."""

_TYPES = {s.name: np.dtype(s.type if s.type.startswith("u") else float) for s in of_class("sensor")}
_MISSING = {name: np.iinfo(t).max if t.kind == "u" else np.nan for name, t in _TYPES.items()}


def readings(rows: Iterable[tuple[str, Row]]) -> tuple[Reading, ...]:
    """One reading per set of signals, in the order in which the rows bring them."""
    groups: dict[tuple[str, ...], tuple[list[str], list[Row]]] = {}
    for entity, row in rows:
        entities, found = groups.setdefault(tuple(row), ([], []))
        entities.append(entity)
        found.append(row)
    return tuple(
        Reading("sensor", tuple(entities), {signal: _column(signal, found) for signal in signals})
        for signals, (entities, found) in groups.items()
    )


def _column(signal: str, rows: list[Row]) -> NDArray[Any]:
    missing = _MISSING[signal]
    return np.array([missing if (v := row[signal]) is None or v != v else v for row in rows], _TYPES[signal])
