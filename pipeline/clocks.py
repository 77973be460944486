"""How far the clock of one sender is off, measured from its messages, to tell a wrong clock from a late message.

A message bears the time at which the agent sealed it (`sent`, its clock) and is given the time at which it arrived (our
clock or the brokers'). `sent - arrived` is the error of the agent's clock less the delay of the message, so it is never
above the error: one message proves a clock that is ahead. A clock that is behind looks like a delay. The two differ in
time: a backlog gains on the clock as it is sent (agents send what they kept at least twice as fast as it was measured),
a clock that is behind does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.model.records import SECOND

BOUND = 5 * SECOND
"""Default of [pipeline] clock_bound: agents are synchronised by NTP to milliseconds, and half a frame does no harm."""
WINDOW = 20 * SECOND
"""Time over which the shortest delay is taken; chosen: four messages of an agent that sends every 5 s. Two equal
windows prove that a clock is behind, so that its node has samples again before it counts as silent (60 s)."""


@dataclass(slots=True)
class SenderClock:
    """The measured error of one clock (us). Above 0: ahead, below 0: behind, 0: right within the bound.

    best, begun: the largest `sent - arrived` of the current window, and when that window began. before: `best` of the
    window before it.
    """

    error: int = 0
    best: int | None = None
    begun: int = 0
    before: int | None = None

    def measure(self, sent: int, arrived: int, exact: bool, bound: int) -> int:
        """Takes one message; returns by how much its times are to be moved back (us; negative: forward).

        exact: whether the message arrived just then. Else it may have waited for us, which proves no clock behind.
        """
        difference = sent - arrived
        if difference > bound:
            self.error = max(self.error, difference)
        elif difference > self.error + bound:  # it was behind, and is not any more
            self.error, self.best, self.before = 0, None, None
        if exact or difference > bound:
            self._take(difference, arrived, bound)
        return self.error if difference > bound or self.error < 0 else 0

    def forget_windows(self) -> None:
        """Begins to measure anew; the error that is known stays."""
        self.best, self.before = None, None

    def _take(self, difference: int, arrived: int, bound: int) -> None:
        if self.best is None or arrived < self.begun:
            self.best, self.begun = difference, arrived
            return
        if arrived - self.begun < WINDOW:
            self.best = max(self.best, difference)
            return
        self._end_window(bound)
        self.before, self.best, self.begun = self.best, difference, arrived

    def _end_window(self, bound: int) -> None:
        """Takes the error from the shortest delay of the window that ends."""
        assert self.best is not None, "a window that ends has had a message"
        if self.best >= -bound:
            self.error = self.best if self.best > bound else 0
        elif self.before is not None and abs(self.best - self.before) <= bound:
            self.error = max(self.best, self.before)
