"""When a rule's condition is told: once as it begins and once as it ends, and never in a storm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.model.records import SECOND, Event

AGAIN = 60 * SECOND
"""Between two beginnings of one condition; chosen: as often as detectors repeat what holds."""
LOOKS = 2
"""Looks in a row that decide: one may be a broken reading, and three at 1 s would spend the 3 s that an event has."""


@dataclass(slots=True)
class Condition:
    """One rule about one entity: looks in a row that speak for it (`bad`) or against it (`good`)."""

    bad: int = 0
    good: int = 0
    onset: int = 0
    on: bool = False
    told: int = -AGAIN
    """When its beginning was told last."""

    def look(self, time: int, bad: bool, good: bool, looks: int = LOOKS, enough: int = LOOKS) -> str:
        """ "active" when it begins, "cleared" when it ends, else "". What is neither bad nor good changes nothing."""
        if bad:
            self.onset = self.onset if self.bad else time
            self.bad, self.good = self.bad + 1, 0
        elif good or not self.on:
            self.bad, self.good = 0, self.good + 1
        if not self.on and self.bad >= looks and not 0 <= time - self.told < AGAIN:
            self.on, self.told = True, time
            return "active"
        if self.on and self.good >= enough:
            self.on = False
            return "cleared"
        return ""


def event(time: int, entity: str, kind: str, state: str, onset: int, **data: Any) -> Event:
    """An edge event: `since` is when the condition was seen first, so `time` - `since` is what deciding took."""
    return Event(time, entity, kind, {"state": state, "since": onset, **data})
