"""Debounces the condition of a rule: one report when it begins and one when it ends, and never a storm of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.model.records import SECOND, Event

REPEAT_AFTER = 60 * SECOND
"""Shortest time between two beginnings of one condition; chosen: the interval at which detectors repeat findings."""
CONFIRM_READINGS = 2
"""Readings in a row that decide: one may be wrong, and three at 1 s would take the 3 s within which an event is due."""


@dataclass(slots=True)
class Debouncer:
    """The condition of one rule for one entity.

    bad, good: readings in a row for or against it.  onset: time of the first bad one.
    reported: when its beginning was last reported.
    """

    bad: int = 0
    good: int = 0
    onset: int = 0
    on: bool = False
    reported: int = -REPEAT_AFTER

    def update(
        self,
        time: int,
        bad: bool,
        good: bool,
        begin_after: int = CONFIRM_READINGS,
        end_after: int = CONFIRM_READINGS,
    ) -> str:
        """ "active" when it begins, "cleared" when it ends, else "". A reading may be neither bad nor good."""
        if bad:
            self.onset = self.onset if self.bad else time
            self.bad, self.good = self.bad + 1, 0
        elif good or not self.on:
            self.bad, self.good = 0, self.good + 1
        if not self.on and self.bad >= begin_after and not 0 <= time - self.reported < REPEAT_AFTER:
            self.on, self.reported = True, time
            return "active"
        if self.on and self.good >= end_after:
            self.on = False
            return "cleared"
        return ""


def build_event(time: int, entity: str, kind: str, state: str, onset: int, **data: Any) -> Event:
    """An edge event: `since` is when the condition was first seen, so `time` - `since` is the delay of the decision."""
    return Event(time, entity, kind, {"state": state, "since": onset, **data})
