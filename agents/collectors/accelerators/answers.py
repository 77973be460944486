"""Converts answers of vendor libraries and JSON into columns of signals: missing stays missing, other types are
rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.signals import CATALOGUE

MISSING = np.iinfo(np.uint64).max
_HIGHEST = int(MISSING) - 1


class SignalColumns:
    """Values of each requested signal, one per device."""

    def __init__(self, signals: Iterable[str], devices: int) -> None:
        self._columns: dict[str, NDArray[Any]] = {
            name: np.full(devices, MISSING, np.uint64) if CATALOGUE[name].type == "u8" else np.full(devices, np.nan)
            for name in signals
        }

    def set_row(self, row: int, values: Mapping[str, object]) -> None:
        """Sets the values of one device; signals that were not requested are ignored."""
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                continue
            if column.dtype.kind == "u":
                column[row] = to_count(value)
            else:
                column[row] = to_float(value)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns signal -> values of all devices."""
        return self._columns


def to_float(value: object) -> float:
    """Returns a number of a library or JSON; NaN for anything else, such as "N/A"."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan


def to_count(value: object) -> int:
    """Returns a count; the highest value, which means missing, for anything else."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # above that a float is not a count
        value = int(value)
    return value if isinstance(value, int) and 0 <= value <= _HIGHEST else int(MISSING)


def scale(value: object, by: float) -> float:
    """Returns a number times a factor; NaN for anything else."""
    return to_float(value) * by


def sum_counts(values: Iterable[object]) -> int | None:
    """Returns the sum of counts; None if one is missing, since a sum that falls would look like a reset."""
    found = [to_count(value) for value in values]
    return sum(found) if found and int(MISSING) not in found else None


def to_text(value: object) -> str:
    """Returns a library's text, printable and bounded; empty for "N/A" and the like."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        return ""
    found = "".join(c for c in str(value) if c.isprintable()).strip()
    return "" if found.upper() in ("N/A", "UNKNOWN", "NONE") else found[:200]


def due_signals(signals: Iterable[str], due: int, slower: Mapping[str, int]) -> list[str]:
    """Returns the signals of this read: at the catalogue's interval, or at that of `slower`."""
    return [name for name in signals if slower.get(name, CATALOGUE[name].interval or 1) <= due]
