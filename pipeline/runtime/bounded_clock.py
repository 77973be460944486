"""A clock for what deletes old rows: one that is set forward by mistake must delete nothing."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.model.records import SECOND

AHEAD_S = 3600
"""How far the clock may go ahead of the time since the start (s). Chosen: more than it is corrected by."""


class BoundedClock:
    """The clock, but at most AHEAD_S ahead of the time since the start; UTC us. After a correct step forward, rows stay
    longer until the next start."""

    def __init__(self, clock: Callable[[], int], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._started, self._begun = clock(), monotonic()

    def now(self) -> int:
        """Returns the time by which rows are old."""
        since_start = self._monotonic() - self._begun
        return min(self._clock(), self._started + round((since_start + AHEAD_S) * SECOND))
