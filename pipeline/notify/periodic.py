"""When a receiver gets its next periodic message: the Watchdog, all firing alerts once more, or a health check."""

from __future__ import annotations

from pipeline.model.records import SECOND
from pipeline.notify.health import ReceiverHealth

WATCHDOG_INTERVAL_S = 300
"""Interval of the Watchdog (s): twice within the 10 min after which a dead man's switch should alarm. Chosen."""


class PeriodicMessage:
    """The periodic message of one receiver. Times in UTC us.

    resend_s: interval of the resend (s), without three of which an Alertmanager ends the alerts; 0: it needs none.
    due: time of the next one.   accepted: when the receiver accepted the last one; at first, the start.
    """

    def __init__(self, resend_s: float, start: int) -> None:
        self.resend_s, self.due, self.accepted = resend_s, start, start

    def is_due(self, now: int, health: ReceiverHealth) -> bool:
        """Whether it is to be sent now. A pause delays a resend by one interval at most, since alerts that are firing
        would end at the receiver one interval later."""
        if now < self.due:
            return False
        is_late = self.resend_s > 0 and now - self.accepted >= 2 * self.resend_s * SECOND
        return is_late or not health.is_paused(now)

    def begin(self, now: int) -> None:
        """Plans the one after that which is sent now."""
        self.due = now + int(self._interval_s * SECOND)

    def record_success(self, now: int) -> None:
        """Records that the receiver accepted it."""
        self.accepted = now

    def record_failure(self, now: int, health: ReceiverHealth) -> None:
        """Plans a resend that was not accepted: with the next probe, or after half an interval of a pause, so that two
        are tried before the alerts end. Of the others none is retried: the absence of the Watchdog is the alarm."""
        if not self.resend_s:
            return
        half = now + int(self.resend_s / 2 * SECOND)
        self.due = min(self.due, half if health.is_paused(now) else health.next_probe)

    def move_back(self, now: int) -> None:
        """Plans it as usual after a backward clock step."""
        self.due, self.accepted = min(self.due, now + int(self._interval_s * SECOND)), min(self.accepted, now)

    @property
    def _interval_s(self) -> float:
        return self.resend_s or WATCHDOG_INTERVAL_S
