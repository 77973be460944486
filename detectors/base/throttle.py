"""Clock event reasons of NVML: which bits are throttling, which are policy, and which readings are invalid."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detectors.base.streams import Bools

IDLE, CAPPED = 0x1, 0x4
"""Bits of an idle GPU and of a software power cap, which is policy."""
NAMES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Reasons that are not policy; those on which Azure's node health checks fail."""
_TITLES = {0x8: "HW slowdown", 0x20: "SW thermal throttle", 0x40: "HW thermal throttle", 0x80: "power brake"}
THROTTLE = sum(NAMES)
_HIGHEST = 2.0**53  # from here a float has no single bits: the reading is invalid, as one below 0 is


def read_reasons(readings: ArrayLike) -> tuple[NDArray[np.uint64], Bools]:
    """Returns (N,) the reasons, 0 where they are not known; and (N,) where they are known."""
    values = np.asarray(readings, np.float64)
    known = np.asarray((values >= 0) & (values < _HIGHEST))  # False of NaN, too
    return np.where(known, values, 0).astype(np.uint64), known


def has_reason(bits: NDArray[np.uint64], reasons: int) -> Bools:
    """Returns (N,) GPUs with any of some reasons."""
    return np.asarray((bits & np.uint64(reasons)) != 0)


def reason_names(bits: int) -> str:
    """Returns throttle bits in words; empty if there are none."""
    return " and ".join(f"{name} 0x{bit:x}" for bit, name in NAMES.items() if bits & bit)


def reason_title(bits: int) -> str:
    """Returns throttle bits for a title: `HW thermal throttle`, `power brake`; empty if there are none."""
    return " and ".join(name for bit, name in _TITLES.items() if bits & bit)
