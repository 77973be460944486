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
"""Default of [pipeline] clock_bound (us): NTP keeps agents within milliseconds, and half a frame is harmless."""
WINDOW = 20 * SECOND
"""Window of the shortest delay (us); chosen: four messages of an agent that sends every 5 s. Two equal windows prove
that a clock is behind, before its node counts as silent (60 s)."""


@dataclass(slots=True)
class SenderClock:
    """The measured error of one clock (us). Above 0: ahead, below 0: behind, 0: within the bound.

    largest, started: the largest `sent - arrived` of the present window, and its start. previous: `largest` of the
    previous window.
    """

    error: int = 0
    largest: int | None = None
    started: int = 0
    previous: int | None = None

    def measure_message(self, sent: int, arrived: int, exact: bool, bound: int) -> int:
        """Records one message; returns how far its times are moved back (us; negative: forward).

        exact: whether `arrived` is exact. Otherwise the message may have waited for us, which proves nothing.
        """
        difference = sent - arrived
        if difference > bound:
            self.error = max(self.error, difference)
        elif difference > self.error + bound:  # it was behind and no longer is
            self.error, self.largest, self.previous = 0, None, None
        if exact or difference > bound:
            self._add_difference(difference, arrived, bound)
        return self.error if difference > bound or self.error < 0 else 0

    def reset_windows(self) -> None:
        """Restarts the measurement; keeps the known error."""
        self.largest, self.previous = None, None

    def _add_difference(self, difference: int, arrived: int, bound: int) -> None:
        if self.largest is None or arrived < self.started:
            self.largest, self.started = difference, arrived
            return
        if arrived - self.started < WINDOW:
            self.largest = max(self.largest, difference)
            return
        self._end_window(bound)
        self.previous, self.largest, self.started = self.largest, difference, arrived

    def _end_window(self, bound: int) -> None:
        """Updates the error from the shortest delay of the finished window."""
        assert self.largest is not None, "a finished window has a message"
        if self.largest >= -bound:
            self.error = self.largest if self.largest > bound else 0
        elif self.previous is not None and abs(self.largest - self.previous) <= bound:
            self.error = max(self.largest, self.previous)


MIN_SENDERS = 3
"""Minimum alive senders for a majority; chosen: with two it is unknown which one is wrong."""
HOLD, MAX_HOLD = 20 * SECOND, 60 * SECOND
"""Delay before a wrong clock is reported by itself, with MIN_SENDERS or more: senders with the same error are
measured at other times. Chosen: one measurement window, or the longest interval of those alive, up to MAX_HOLD."""


class CommonClock:
    """Separates errors that most senders share from single ones. For one thread; times in UTC us, errors in us."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._since: dict[str, int] = {}  # since when an error counts as its sender's own

    def split_errors(
        self, errors: Mapping[str, int], alive: Mapping[str, int], now: int
    ) -> tuple[tuple[int, int] | None, dict[str, int]]:
        """((shared error, number of senders) or None, single errors to report).

        errors: those of wrong clocks.  alive: present senders -> interval of their messages (0: unknown).
        """
        error = find_shared_error([errors.get(node, 0) for node in alive], self._bound)
        alike = set() if error is None else {n for n, e in errors.items() if abs(e - error) <= self._bound}
        hold = (
            0
            if max(len(alive), len(errors)) < MIN_SENDERS
            else max(HOLD, min(MAX_HOLD, max(alive.values(), default=0)))
        )
        since = self._since
        self._since = {n: now if n in alike else min(since.get(n, now), now) for n in errors}
        own = {n: e for n, e in errors.items() if n not in alike and now - self._since[n] >= hold}
        return (None if error is None else (error, len(alike & alive.keys()))), own


def find_shared_error(errors: Iterable[int], bound: int) -> int | None:
    """The error above `bound` that more than half of at least MIN_SENDERS senders share within `bound`, or None.

    errors: one per present sender, 0 for a right clock.
    """
    ordered = sorted(errors)
    if len(ordered) < MIN_SENDERS:
        return None
    middle = ordered[len(ordered) // 2]  # the median is one of a majority that agrees
    alike = sum(abs(error - middle) <= bound for error in ordered)
    return middle if abs(middle) > bound and 2 * alike > len(ordered) else None
