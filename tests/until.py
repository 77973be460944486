"""Waiting for another thread or process that sends no event."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Returns once `holds` is true. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.01)
