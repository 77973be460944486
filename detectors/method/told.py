"""Reading what events tell: their data come from other programs, and none of it is what it ought to be for certain."""

from __future__ import annotations

import math

LONGEST_S = 86_400.0
"""Seconds that anything told lasts at most: what is longer is a mistake, or is told anew. Chosen."""


def number(value: object, low: float = 0.0, high: float = 2.0**63) -> float | None:
    """A finite number within [low, high], else None; truths and texts are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and low <= found <= high else None


def whole(value: object, low: int = 0, high: int = 2**63) -> int | None:
    """An integer within [low, high], else None."""
    found = number(value, low, high)
    return int(found) if found is not None and found == int(found) else None


def seconds(value: object, most: float = LONGEST_S) -> float | None:
    """How long something took or will take: above 0, at most `most`."""
    found = number(value)
    return None if found is None or found <= 0 else min(found, most)


def text(value: object) -> str:
    """A text, "" for anything else."""
    return value if isinstance(value, str) else ""
