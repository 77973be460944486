"""Clock errors of senders, measured from their messages, to distinguish a wrong clock from a late message.

A message has the time at which the agent sealed it (`sent`, its clock) and the time at which it arrived (our clock or
the brokers'). `sent - arrived` is the agent's clock error minus the delay of the message, so it is never above the
error: one message proves a clock that is ahead. A clock that is behind looks like a delay. The two differ over time: a
backlog catches up while it is sent (agents send a backlog at least twice as fast as it was measured), a clock that is
behind does not.

If most senders show the same error, the reference clock or a shared delay is more likely the cause than each sender's
clock: this is reported once, for the site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


LEAST = 3
"""Senders alive of which most must agree; chosen: of two, nobody can tell which one is wrong."""
HOLD, LONGEST = 20 * SECOND, 60 * SECOND
"""How long a wrong clock waits before it is reported by itself, where there are LEAST: those that share its error are
measured at other moments. Chosen: one window of the measurement, or the longest interval of those alive, to LONGEST."""


class CommonClock:
    """Which errors most senders share, and which are a sender's own. For one thread; times in UTC us, errors in us."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._since: dict[str, int] = {}  # when an error began to count as its sender's own

    def split(
        self, errors: Mapping[str, int], alive: Mapping[str, int], now: int
    ) -> tuple[tuple[int, int] | None, dict[str, int]]:
        """The shared error with the number of senders that have it, or None; and the errors to report one by one.

        errors: those of wrong clocks.  alive: senders that are heard -> how far apart their messages are (0: unknown).
        """
        error = shared_error([errors.get(node, 0) for node in alive], self._bound)
        alike = set() if error is None else {n for n, e in errors.items() if abs(e - error) <= self._bound}
        hold = 0 if max(len(alive), len(errors)) < LEAST else max(HOLD, min(LONGEST, max(alive.values(), default=0)))
        since = self._since
        self._since = {n: now if n in alike else min(since.get(n, now), now) for n in errors}
        own = {n: e for n, e in errors.items() if n not in alike and now - self._since[n] >= hold}
        return (None if error is None else (error, len(alike & alive.keys()))), own


def shared_error(errors: Iterable[int], bound: int) -> int | None:
    """The error beyond `bound` that more than half of at least LEAST senders have within `bound`, or None.

    errors: one of each sender that is heard, 0 of a right clock.
    """
    ordered = sorted(errors)
    if len(ordered) < LEAST:
        return None
    middle = ordered[len(ordered) // 2]  # of more than half that agree, the middle one is one
    alike = sum(abs(error - middle) <= bound for error in ordered)
    return middle if abs(middle) > bound and 2 * alike > len(ordered) else None
