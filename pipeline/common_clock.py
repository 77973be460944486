"""Clocks that seem wrong alike: our own clock, or a delay that all share, is told once and nobody is blamed for it.

Every error is measured against one clock, ours or that of the brokers (pipeline/clocks.py). Where most senders measure
the same, it is more likely that one, or the way that all messages take, than each of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.model.records import SECOND

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
