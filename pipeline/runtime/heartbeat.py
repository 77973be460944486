"""Heartbeats: a loop renews its own, other threads read how long ago that was and what the loop did then."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.model.records import SECOND

FRAMES = 3
"""Frames of [pipeline] frame after which judging that does not move is reported (DESIGN: three frames)."""

STANDS_STILL = "judging has stood still"
"""Beginning of the reasons that readiness gives for it."""


class Heartbeat:
    """Renewed by one thread with `beat`, read by any. A wall clock that jumps does not matter: the time is monotonic.

    monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic(), "starting"

    def beat(self, doing: str) -> None:
        """Renews it. doing: what the loop does next, as a noun: it is named if that never returns."""
        self._last = self._monotonic(), doing

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return self._monotonic() - self._last[0]

    @property
    def doing(self) -> str:
        """What the loop was about to do at the last beat."""
        return self._last[1]


class JudgingProgress:
    """Whether judging moves on: the loop renews its heartbeat, and what is stored is judged within three frames.

    frame, lateness: those of [pipeline], s.
    """

    def __init__(self, frame: float, lateness: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.heart = Heartbeat(monotonic)
        self.patience_s = FRAMES * frame
        self._lateness, self._monotonic = lateness + frame, monotonic
        self._closed: int | None = None
        self._moved = monotonic()
        self._lag_s = self._ahead_s = 0.0

    def note(self, closed: int, newest: int | None, now: int | None = None) -> None:
        """Takes up to which event time frames are closed, the newest that is stored, and our clock (all UTC us)."""
        self._ahead_s = 0.0 if now is None else (closed - now) / SECOND
        if closed != self._closed:
            self._closed, self._moved = closed, self._monotonic()
        self._lag_s = 0.0 if newest is None else (newest - closed) / SECOND

    def trouble(self) -> str | None:
        """Why judging stands still, in words; None while it moves."""
        age = self.heart.age_s
        if age > self.patience_s:
            return f"{STANDS_STILL} for {age:.0f} s: no return from {self.heart.doing}"
        if self._ahead_s > self.patience_s:
            return f"{STANDS_STILL}: our clock was set back: what comes in the next {self._ahead_s:.0f} s is late"
        still = self._monotonic() - self._moved
        if self._lag_s > self._lateness + self.patience_s and still > self.patience_s:
            return f"{STANDS_STILL} for {still:.0f} s: the newest {self._lag_s:.0f} s of telemetry are not judged"
        return None
