"""Bounds how often the same thing is told, without losing count: what is held back is counted in a later event."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from pipeline.model.records import Event

MOST_KEYS = 4096
"""Most different things that are told apart; chosen: patterns times devices of a large node are some hundreds."""


@dataclass
class _Window:
    begun: int
    given: int = 0
    held: int = 0
    first: int = 0
    last: Event | None = None


@dataclass
class Repeats:
    """At most `burst` events per key and `window` microseconds; their `count` adds up to all that happened."""

    burst: int
    window: int
    most: int = MOST_KEYS
    _windows: OrderedDict[Hashable, _Window] = field(default_factory=OrderedDict, init=False, repr=False)

    def admit(self, key: Hashable, event: Event) -> list[Event]:
        """The events to send now: this one, what was counted before it, or none."""
        found, evicted = self._windows.get(key), []
        if found is None:
            found = self._windows[key] = _Window(event.time)
            if len(self._windows) > self.most:
                evicted = _told(self._windows.popitem(last=False)[1])
        elif not 0 <= event.time - found.begun < self.window:  # over, or the clock was set back behind its begin
            evicted = _told(found)
            found.begun, found.given = event.time, 0
        if found.given < self.burst:
            found.given += 1
            return [*evicted, replace(event, data={**event.data, "count": 1})]
        found.first = event.time if not found.held else found.first
        found.held, found.last = found.held + 1, event
        return evicted

    def due(self, now: int) -> list[Event]:
        """What was held back in windows that have ended; forgets keys that have been silent for a window."""
        found = []
        for key, window in list(self._windows.items()):
            if 0 <= now - window.begun < self.window:
                continue
            found += _told(window)
            del self._windows[key]
        return found

    def rest(self) -> list[Event]:
        """All that is held back."""
        return [event for window in self._windows.values() for event in _told(window)]


def _told(window: _Window) -> list[Event]:
    """One event for all that the window held back, as the last of them said it."""
    if window.last is None:
        return []
    event = replace(window.last, data={**window.last.data, "count": window.held, "since": window.first})
    window.held, window.last = 0, None
    return [event]
