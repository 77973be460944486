"""Values of the API's JSON: lists, numbers and times. Raises TypeError or ValueError for another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.model.records import from_iso


def require_list(value: Any) -> Sequence[Any]:
    """Returns `value` if it is a list. Raises TypeError otherwise."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def parse_time(text: Any) -> int | None:
    """Converts a time of the API to UTC microseconds; None for null."""
    return None if text is None else from_iso(text)


def parse_number(value: Any) -> float | None:
    """Returns a number, None for null."""
    return None if value is None else float(value)


def parse_names(value: Any) -> tuple[str, ...]:
    """Returns a list of texts; empty for null."""
    return tuple(map(str, require_list(value or [])))
