"""Matches alerts and events: as many events as possible, one alert each, the earlier alerts first.

Alerts are assigned in order of time to an event that they answer, and may move an earlier alert to another event that
it answers as well (augmenting paths: Berge 1957, Kuhn 1955), so the order of the lines loses no event. An answered
event stays answered; in the end each event gets the earliest alert that answers it and no other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from detectors.scoring.alerts import Alert
from detectors.scoring.answer_rules import ANSWER_RULES, ANY_PAGE, SOFT_RULES, AnswerRule
from detectors.scoring.inputs import Truth
from detectors.scoring.placement import Placement
from pipeline.model.records import SECOND, Level
from pipeline.model.topology import kind_of

LEAD, GRACE = 60 * SECOND, 600 * SECOND
"""us before the onset and after the end of an event within which an alert belongs to it."""
FREE = 6 * 3600 * SECOND
"""us within which further alerts of the same incident on the same event are not false."""


def answer_rule(kind: str, detectability: str = "hard") -> AnswerRule:
    """Returns the rule for answers to events of a kind."""
    soft = SOFT_RULES.get(kind) if detectability == "soft" else None
    return soft or ANSWER_RULES.get(kind, ANY_PAGE)


def row_name(kind: str, detectability: str) -> str:
    """Returns the row of the figures: a kind that may be soft or a logged fact has two."""
    return f"{kind} (soft)" if detectability == "soft" and kind in SOFT_RULES else kind


def is_in_time(time: int | None, event: Truth) -> bool:
    """Returns whether an alert at that time belongs to the event."""
    return time is not None and event.onset - LEAD <= time <= event.end + GRACE


def is_answer(alert: Alert, event: Truth, world: Placement) -> bool:
    """Returns whether detector, cause, level and time make it an answer; to an invisible event only on its entity."""
    wanted = answer_rule(event.kind, event.detectability)
    time = alert.time_at(wanted.level)
    if time is None or not is_in_time(time, event):
        return False
    if wanted.detectors is not None and not {alert.detector, alert.found_by} & wanted.detectors:
        return False
    if wanted.causes is not None and kind_of(alert.cause) not in wanted.causes:
        return False
    cause, invisible = alert.cause, event.detectability == "invisible"
    return any(
        world.is_same(cause, root, time) or (not invisible and cause in world.ancestors(root, time))
        for root in event.entities
    )


def is_related(alert: Alert, event: Truth, world: Placement) -> bool:
    """Returns whether an entity that it names is the event's entity, or above or below it."""
    roots = dict.fromkeys((event.entity, *event.entities))
    return any(world.is_connected(named, root, alert.time) for root in roots for named in alert.suspects)


def match_alerts(events: Sequence[Truth], alerts: Sequence[Alert], world: Placement) -> dict[int, int]:
    """Returns event -> the alert that answers it, by their positions; invisible events come last."""
    timeline = AlertTimeline(alerts)
    edges = [
        (a, e)
        for e, event in enumerate(events)
        if event.detectability != "benign"
        for a in timeline.alerts_during(event, answer_rule(event.kind, event.detectability).level)
        if is_answer(alerts[a], event, world)
    ]
    answered: dict[int, int] = {}
    for invisible in (False, True):
        busy = set(answered.values())
        open_ = [(a, e) for a, e in edges if (events[e].detectability == "invisible") is invisible and a not in busy]
        answered |= _assigned(events, alerts, open_)
    return answered


class AlertTimeline:
    """Alerts by their time, for a fast search of those of one event."""

    def __init__(self, alerts: Sequence[Alert]) -> None:
        self._times: dict[Level, list[tuple[int, int]]] = {}
        levels: tuple[Level, ...] = ("ticket", "page")
        for level in levels:
            times = ((alert.time_at(level), a) for a, alert in enumerate(alerts))
            self._times[level] = sorted((time, a) for time, a in times if time is not None)

    def alerts_during(self, event: Truth, level: Level) -> list[int]:
        """Returns the positions of alerts at that level, or above, in the time of an event."""
        times = self._times[level]
        low = bisect_left(times, event.onset - LEAD, key=lambda line: line[0])
        high = bisect_right(times, event.end + GRACE, key=lambda line: line[0])
        return [a for _, a in times[low:high]]


def _assigned(events: Sequence[Truth], alerts: Sequence[Alert], edges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Returns event -> alert for as many events as possible."""
    options: dict[int, list[int]] = {}
    for a, e in edges:
        options.setdefault(a, []).append(e)
    for a, answerable in options.items():
        answerable.sort(key=lambda e: (abs(alerts[a].time - events[e].onset), events[e].id))
    answered: dict[int, int] = {}
    for a in sorted(options, key=lambda a: (alerts[a].time, alerts[a].cause, alerts[a].found_by, alerts[a].incident)):
        _augment(a, options, answered)
    _prefer_early(events, alerts, options, answered)
    return answered


def _augment(start: int, options: Mapping[int, Sequence[int]], answered: dict[int, int]) -> None:
    """Assigns an event to an alert if possible, moving other alerts to other events that they answer."""
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
    """Gives each alert on the path the event that it reached, and its former event to the alert before it."""
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
    """Replaces an alert that became a page late by an earlier one that answers no other event."""
    idle: dict[int, list[int]] = {}
    for a in options.keys() - set(answered.values()):
        for e in options[a]:
            idle.setdefault(e, []).append(a)
    taken: set[int] = set()
    for e in sorted(answered, key=lambda e: (events[e].onset, events[e].id)):
        level = answer_rule(events[e].kind, events[e].detectability).level
        times = {
            a: time
            for a in (answered[e], *idle.get(e, ()))
            if a not in taken and (time := alerts[a].time_at(level)) is not None
        }
        answered[e] = min(times, key=lambda a: (times[a], a != answered[e], alerts[a].cause, alerts[a].found_by, a))
        taken.add(answered[e])
