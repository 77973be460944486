"""Which alert answers which event: as many events as possible, one alert each, the earlier alerts first.

Alerts are taken in order of time; each takes an event that it fits, and may send an alert before it to another event
that that one fits as well (augmenting paths: Berge 1957, Kuhn 1955), so no order of the lines loses an event. What an
alert answered stays answered; at last each event takes the earliest alert that fits it and answers nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from detectors.scoring.alerts import Alert
from detectors.scoring.counts import ANY, COUNTS, SOFT, Counting
from detectors.scoring.inputs import Truth
from detectors.scoring.world import World
from pipeline.model.records import SECOND, Level
from pipeline.model.topology import kind_of

LEAD, GRACE = 60 * SECOND, 600 * SECOND
"""How long before the onset and after the end an alert still belongs to an event."""
FREE = 6 * 3600 * SECOND
"""How long further alerts of the same incident on the same event cost nothing."""


def counting(kind: str, detectability: str = "hard") -> Counting:
    """What answers an event of a kind."""
    soft = SOFT.get(kind) if detectability == "soft" else None
    return soft or COUNTS.get(kind, ANY)


def row_of(kind: str, detectability: str) -> str:
    """Row of the figures: soft events of a kind that is a logged fact in others have one of their own."""
    return f"{kind} (soft)" if detectability == "soft" and kind in SOFT else kind


def within(time: int | None, event: Truth) -> bool:
    """Whether something said at that time belongs to the event."""
    return time is not None and event.onset - LEAD <= time <= event.end + GRACE


def fits(alert: Alert, event: Truth, world: World) -> bool:
    """Whether detector, cause, level and time make it an answer. What is invisible excuses a page on itself alone."""
    wanted = counting(event.kind, event.detectability)
    time = alert.at(wanted.level)
    if time is None or not within(time, event):
        return False
    if wanted.detectors is not None and not {alert.detector, alert.heard} & wanted.detectors:
        return False
    if wanted.causes is not None and kind_of(alert.cause) not in wanted.causes:
        return False
    cause, itself = alert.cause, event.detectability == "invisible"
    return any(
        world.same(cause, root, time) or (not itself and cause in world.above(root, time)) for root in event.entities
    )


def related(alert: Alert, event: Truth, world: World) -> bool:
    """Whether anything that it names is the event's entity, or lies above or below it."""
    roots = dict.fromkeys((event.entity, *event.entities))
    return any(world.joined(named, root, alert.time) for root in roots for named in alert.suspects)


def match(events: Sequence[Truth], alerts: Sequence[Alert], world: World) -> dict[int, int]:
    """Event -> the alert that answers it, by their places. Events that are looked for go before invisible ones."""
    clock = Clock(alerts)
    edges = [
        (a, e)
        for e, event in enumerate(events)
        if event.detectability != "benign"
        for a in clock.during(event, counting(event.kind, event.detectability).level)
        if fits(alerts[a], event, world)
    ]
    answered: dict[int, int] = {}
    for invisible in (False, True):
        busy = set(answered.values())
        open_ = [(a, e) for a, e in edges if (events[e].detectability == "invisible") is invisible and a not in busy]
        answered |= _assigned(events, alerts, open_)
    return answered


class Clock:
    """Alerts by when they were told, so that an event looks only at those of its own time."""

    def __init__(self, alerts: Sequence[Alert]) -> None:
        self._told: dict[Level, list[tuple[int, int]]] = {}
        levels: tuple[Level, ...] = ("ticket", "page")
        for level in levels:
            told = ((alert.at(level), a) for a, alert in enumerate(alerts))
            self._told[level] = sorted((time, a) for time, a in told if time is not None)

    def during(self, event: Truth, level: Level) -> list[int]:
        """Places of the alerts that were told at that level, or above, while the event counts."""
        told = self._told[level]
        low = bisect_left(told, event.onset - LEAD, key=lambda line: line[0])
        high = bisect_right(told, event.end + GRACE, key=lambda line: line[0])
        return [a for _, a in told[low:high]]


def _assigned(events: Sequence[Truth], alerts: Sequence[Alert], edges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Event -> alert for as many events as can be."""
    options: dict[int, list[int]] = {}
    for a, e in edges:
        options.setdefault(a, []).append(e)
    for a, fitting in options.items():
        fitting.sort(key=lambda e: (abs(alerts[a].time - events[e].onset), events[e].id))
    answered: dict[int, int] = {}
    for a in sorted(options, key=lambda a: (alerts[a].time, alerts[a].cause, alerts[a].heard, alerts[a].incident)):
        _augment(a, options, answered)
    _prefer_early(events, alerts, options, answered)
    return answered


def _augment(start: int, options: Mapping[int, Sequence[int]], answered: dict[int, int]) -> None:
    """Gives an alert an event if there is one, moving others on where they fit elsewhere too."""
    reached: dict[int, int] = {}
    queue = deque([start])
    while queue:
        alert = queue.popleft()
        for event in options[alert]:
            if event in reached:
                continue
            reached[event] = alert
            if event not in answered:
                _shift(event, start, reached, answered)
                return
            queue.append(answered[event])


def _shift(event: int, start: int, reached: Mapping[int, int], answered: dict[int, int]) -> None:
    """Each alert on the way takes the event that it reached; what it had goes to the one before it."""
    had = {} if reached[event] == start else {alert: e for e, alert in answered.items()}
    while True:
        alert = reached[event]
        answered[event] = alert
        if alert == start:
            return
        event = had[alert]


def _prefer_early(
    events: Sequence[Truth], alerts: Sequence[Alert], options: Mapping[int, Sequence[int]], answered: dict[int, int]
) -> None:
    """An alert that rose to a page late gives way to one that said so before and answers nothing else."""
    idle: dict[int, list[int]] = {}
    for a in options.keys() - set(answered.values()):
        for e in options[a]:
            idle.setdefault(e, []).append(a)
    taken: set[int] = set()
    for e in sorted(answered, key=lambda e: (events[e].onset, events[e].id)):
        level = counting(events[e].kind, events[e].detectability).level
        told = {
            a: time
            for a in (answered[e], *idle.get(e, ()))
            if a not in taken and (time := alerts[a].at(level)) is not None
        }
        answered[e] = min(told, key=lambda a: (told[a], a != answered[e], alerts[a].cause, alerts[a].heard, a))
        taken.add(answered[e])
