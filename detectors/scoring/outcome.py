"""Matches events and alerts of one run and makes records of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from detectors.scoring.alerts import Alert, Heard
from detectors.scoring.counts import DELTA_MIN, NOT_FOUND, folded, says
from detectors.scoring.inputs import Meta, Truth
from detectors.scoring.matching import FREE, GRACE, LEAD, counting, fits, match, related, within
from detectors.scoring.records import EventRecord, FalseRecord, Records, RunRecord
from detectors.scoring.world import World
from pipeline.model.records import SECOND, iso


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


def recorded(events: Sequence[Truth], heard: Heard, world: World, meta: Meta) -> Records:
    """What came of one run."""
    case = Case(events, heard.alerts, world)
    run = RunRecord(
        meta.node_days,
        meta.gpus,
        meta.cpu_seconds,
        meta.samples,
        heard.incidents,
        heard.conditions,
        heard.page_conditions,
        heard.stray,
    )
    told = tuple(_event(i, case, meta.end) for i in range(len(events)))
    false = [_false(alert, level, case) for level in ("page", "ticket") for alert in _wrong(case, level)]
    return Records(told, tuple(false), (run,))


def _event(place: int, case: Case, recording_end: int | None) -> EventRecord:
    event = case.events[place]
    end = event.end if recording_end is None else min(event.end, recording_end)
    least = DELTA_MIN.get(event.effect_unit or "")
    record = EventRecord(
        run=0,
        id=event.id,
        kind=event.kind,
        detectability=event.detectability,
        row=folded(event.attribution),
        severity=event.severity,
        large=least is None or event.effect is None or abs(event.effect) >= least,
        length_s=(end - event.visible) / SECOND,
    )
    if place in case.answers:
        return replace(record, **_answer(place, end, case))
    blamed = case.blamed(event)
    return replace(record, said=says(blamed.detector, blamed.cause) if blamed else NOT_FOUND)


def _answer(place: int, end: int, case: Case) -> dict[str, Any]:
    """Delays end with the event, but not those of an instant, which would all be 0."""
    event, alert = case.events[place], case.alerts[case.answers[place]]
    time = alert.at(counting(event.kind, event.detectability).level)
    assert time is not None
    late = time > end > event.onset
    places = [any(case.world.same(named, root, time) for root in event.entities) for named in alert.suspects[:3]]
    return {
        "delay_s": max(0, (end if late else time) - event.visible) / SECOND,
        "late": late,
        "detector": alert.detector,
        "level": _level(place, case),
        "incident": alert.incident,
        "top1": places[0],
        "top3": any(places),
        "said": says(alert.detector, alert.cause),
    }


def _level(place: int, case: Case) -> str | None:
    """A page where its incident paged about the event, a ticket where that never paged at all."""
    if case.paged(place) is not None:
        return "page"
    return None if case.alerts[case.answers[place]].incident in case.paging else "ticket"


def _wrong(case: Case, level: str) -> list[Alert]:
    """The first alert of each page, or ticket, that is false.

    What one incident says without answering anything is one page, and one more for every further 6 hours. Incidents
    that paged have no tickets.
    """
    wrong: list[Alert] = []
    answered: dict[str, list[int]] = defaultdict(list)
    for e, a in case.answers.items():
        answered[case.alerts[a].incident].append(e)
    for incident, places in case.members.items():
        if level == "page":
            wrong += _leftover(_paged(places, case), _page_answers(answered[incident], case), case.world)
        elif incident not in case.paging:
            idle = [case.alerts[a] for a in places if a not in case.event_of]
            answers = [(case.alerts[case.answers[e]].time, case.events[e]) for e in answered[incident]]
            wrong += _leftover(idle, answers, case.world)
    return sorted(wrong, key=lambda a: (a.time, a.cause, a.heard))


def _paged(places: Sequence[int], case: Case) -> list[Alert]:
    """Pages that answer nothing, those too that answered as a ticket and rose when the event was long over."""
    return [
        alert
        for alert, event in ((case.alerts[a], case.event_of.get(a)) for a in places)
        if alert.paged is not None and (event is None or not within(alert.paged, event))
    ]


def _page_answers(answered: Sequence[int], case: Case) -> list[tuple[int, Truth]]:
    """When an incident paged about which event; where only a ticket answers, its pages are not free."""
    told = ((case.paged(e), case.events[e]) for e in answered)
    return [(time, event) for time, event in told if time is not None]


def _leftover(idle: Sequence[Alert], answers: Sequence[tuple[int, Truth]], world: World) -> list[Alert]:
    """Of an incident's alerts that answer nothing, those that are not on what it answered within 6 hours."""
    first: list[Alert] = []
    for alert in sorted(idle, key=lambda a: (a.time, a.cause, a.heard)):
        free = any(_free(alert, time, event, world) for time, event in answers)
        if not free and not (first and alert.time - first[-1].time <= FREE):
            first.append(alert)
    return first


def _free(alert: Alert, answered: int, event: Truth, world: World) -> bool:
    """Whether it only says again what its incident answered; about what is invisible it must fit by itself."""
    again = within(alert.time, event) and abs(alert.time - answered) <= FREE
    return again and (event.detectability != "invisible" or fits(alert, event, world))


def _false(alert: Alert, level: str, case: Case) -> FalseRecord:
    why, event = _why(alert, case)
    beside = (event.kind, event.id) if event else (None, None)
    said = says(alert.detector, alert.cause)
    return FalseRecord(0, level, iso(alert.time), alert.detector, alert.cause, said, why, *beside)


def _why(alert: Alert, case: Case) -> tuple[str, Truth | None]:
    """What it may have been about: an answered event, else something harmless, else a fault; of several the latest."""
    now = case.now(alert.time)
    for e in now:
        if e in case.answers and fits(alert, case.events[e], case.world):
            return "duplicate", case.events[e]
    near = [case.events[e] for e in now if related(alert, case.events[e], case.world)]
    for why, harmless in (("benign", True), ("wrong", False)):
        for event in near:
            if (event.detectability == "benign") is harmless:
                return why, event
    return "nothing", None
