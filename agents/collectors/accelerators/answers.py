"""Columns of one look: what was not told stays missing, and what is no number is not taken for one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.signals import CATALOGUE

MISSING = np.iinfo(np.uint64).max
_HIGHEST = int(MISSING) - 1


class Columns:
    """(devices,) values of each signal asked for."""

    def __init__(self, signals: Iterable[str], devices: int) -> None:
        self._columns: dict[str, NDArray[Any]] = {
            name: np.full(devices, MISSING, np.uint64) if CATALOGUE[name].type == "u8" else np.full(devices, np.nan)
            for name in signals
        }

    def put(self, row: int, values: Mapping[str, object]) -> None:
        """Values of one device; a signal that was not asked for is passed over."""
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                continue
            if column.dtype.kind == "u":
                column[row] = whole(value)
            else:
                column[row] = number(value)

    def taken(self) -> dict[str, NDArray[Any]]:
        return self._columns


def number(value: object) -> float:
    """A number as a library or JSON gives it; NaN for anything else, such as "N/A"."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan


def whole(value: object) -> int:
    """A count; the highest value for what is none."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # above that a float is no count
        value = int(value)
    return value if isinstance(value, int) and 0 <= value <= _HIGHEST else int(MISSING)


def scaled(value: object, by: float) -> float:
    return number(value) * by


def total(values: Iterable[object]) -> int | None:
    """The sum of counts; None where one of them is missing, since a sum that falls would look like a reset."""
    found = [whole(value) for value in values]
    return sum(found) if found and int(MISSING) not in found else None


def text(value: object) -> str:
    """A text of a library as it can be sent; empty for what says nothing."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        return ""
    found = "".join(c for c in str(value) if c.isprintable()).strip()
    return "" if found.upper() in ("N/A", "UNKNOWN", "NONE") else found[:200]


def wanted(signals: Iterable[str], due: int, slower: Mapping[str, int]) -> list[str]:
    """Signals of this look: as often as the catalogue says, or as `slower` does."""
    return [name for name in signals if slower.get(name, CATALOGUE[name].interval or 1) <= due]
