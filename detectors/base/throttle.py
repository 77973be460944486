"""NVML's clock event reasons: what of them is a throttle bit, what is policy, and which readings are none."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from detectors.base.streams import Bools

IDLE, CAPPED = 0x1, 0x4
"""Nothing to do; a software power cap, which is policy."""
NAMES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Reasons that are no policy; the same that Azure's node health checks fail on."""
THROTTLE = sum(NAMES)
_HIGHEST = 2.0**53  # from which a float holds no single bits any more: such a reading is none, nor is one below 0


def read_reasons(told: ArrayLike) -> tuple[NDArray[np.uint64], Bools]:
    """(N,) the reasons, 0 where they are not known; and where they are."""
    values = np.asarray(told, np.float64)
    known = np.asarray((values >= 0) & (values < _HIGHEST))  # False of NaN, too
    return np.where(known, values, 0).astype(np.uint64), known


def has_reason(bits: NDArray[np.uint64], reasons: int) -> Bools:
    """(N,) which have any of some reasons."""
    return np.asarray((bits & np.uint64(reasons)) != 0)


def reason_names(bits: int) -> str:
    """Throttle bits for a sentence; empty if there are none."""
    return " and ".join(f"{name} 0x{bit:x}" for bit, name in NAMES.items() if bits & bit)
