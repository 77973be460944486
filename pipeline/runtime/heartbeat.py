"""Heartbeats of loops, and whether evaluation advances; read by other threads."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.model.records import SECOND

MAX_FRAMES = 3
"""Frames without progress of the evaluation after which the pipeline is not ready (DESIGN: three frames)."""

STALLED = "evaluation stalled"
"""Start of the readiness reasons of a stalled evaluation."""


class Heartbeat:
    """Renewed by one thread with `beat`, read by any. monotonic: clock (s), which does not jump."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic(), "starting"

    def beat(self, doing: str) -> None:
        """Renews the heartbeat. doing: the next step of the loop, as a noun; it is named if it never returns."""
        self._last = self._monotonic(), doing

    @property
    def age_s(self) -> float:
        """Time since the last beat (s)."""
        return self._monotonic() - self._last[0]

    @property
    def doing(self) -> str:
        """The step of the loop at the last beat."""
        return self._last[1]


class EvaluationProgress:
    """Whether evaluation advances: the loop renews its heartbeat, and stored data is evaluated within three frames.

    frame, lateness: settings of [pipeline] (s).
    """

    def __init__(self, frame: float, lateness: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.heartbeat = Heartbeat(monotonic)
        self.limit_s = MAX_FRAMES * frame
        self._lateness, self._monotonic = lateness + frame, monotonic
        self._closed: int | None = None
        self._moved = monotonic()
        self._lag_s = self._ahead_s = 0.0
        self._has_closed = False

    def record(self, closed: int, newest: int | None, now: int | None = None) -> None:
        """Records the event time of the last closed frame, the newest stored event time, and our clock (UTC us)."""
        self._ahead_s = 0.0 if now is None else (closed - now) / SECOND
        if closed != self._closed:
            self._closed, self._moved = closed, self._monotonic()
        self._lag_s = 0.0 if newest is None else (newest - closed) / SECOND
        self._has_closed = closed > 0

    def describe_trouble(self) -> str | None:
        """Returns why the evaluation is stalled, None while it advances."""
        age = self.heartbeat.age_s
        if age > self.limit_s:
            return f"{STALLED} for {age:.0f} s: no return from {self.heartbeat.doing}"
        if self._ahead_s > self.limit_s:
            return f"{STALLED}: clock was set back: data of the next {self._ahead_s:.0f} s is late"
        unchanged_s = self._monotonic() - self._moved
        if self._lag_s > self._lateness + self.limit_s and unchanged_s > self.limit_s:
            lag = f"the newest {self._lag_s:.0f} s of telemetry are" if self._has_closed else "all stored telemetry is"
            return f"{STALLED} for {unchanged_s:.0f} s: {lag} not evaluated"
        return None
