"""One run as matched: who answers what, and what else was near at a moment. Look-ups take no walk over everything."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from detectors.scoring.alerts import Alert
from detectors.scoring.inputs import Truth
from detectors.scoring.matching import GRACE, LEAD, fits, match, related, within
from detectors.scoring.world import World


class Case:
    """answers: event -> alert, by their places.   paging: the incidents that woke somebody.   members: their alerts."""

    def __init__(self, events: Sequence[Truth], alerts: Sequence[Alert], world: World) -> None:
        self.events, self.alerts, self.world = events, alerts, world
        self.answers = match(events, alerts, world)
        self.event_of = {a: events[e] for e, a in self.answers.items()}
        self.paging = {alert.incident for alert in alerts if alert.paged is not None}
        self.members: dict[str, list[int]] = defaultdict(list)
        for a, alert in enumerate(alerts):
            self.members[alert.incident].append(a)
        self._from = np.array([e.onset - LEAD for e in events], np.int64)
        self._to = np.array([e.end + GRACE for e in events], np.int64)
        self._idle = sorted((alert.time, a) for a, alert in enumerate(alerts) if a not in self.event_of)

    def paged(self, place: int) -> int | None:
        """When the incident that answers an event paged about it: the answer itself, else the first other that fits."""
        event, answer = self.events[place], self.alerts[self.answers[place]]
        if within(answer.paged, event):
            return answer.paged
        others = (self.alerts[a] for a in self.members[answer.incident])
        told = (a.paged for a in others if within(a.paged, event) and fits(a, event, self.world))
        return min((time for time in told if time is not None), default=None)

    def now(self, time: int) -> list[int]:
        """Places of the events that something said at that time may be about, the latest first."""
        on = np.flatnonzero((self._from <= time) & (time <= self._to)).tolist()
        return sorted(on, key=lambda e: (-self.events[e].onset, self.events[e].id))

    def blamed(self, event: Truth) -> Alert | None:
        """The first alert that answers nothing and names the event's surroundings in its time: pages before tickets."""
        low = bisect_left(self._idle, event.onset - LEAD, key=lambda line: line[0])
        high = bisect_right(self._idle, event.end + GRACE, key=lambda line: line[0])
        idle = [self.alerts[a] for _, a in self._idle[low:high]]
        for alert in sorted(idle, key=lambda a: (a.paged is None, a.time, a.cause, a.heard)):
            if related(alert, event, self.world):
                return alert
        return None
