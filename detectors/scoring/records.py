"""Records of each event and each false alert, as plain data: all figures are computed from them.

`record_run` matches events and alerts of one run and makes its records. Runs are added up by joining their records, so
nothing is averaged twice. The JSON of `fleetpulse score --json` contains the records.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from detectors.scoring.alerts import Alert, Alerts
from detectors.scoring.answer_rules import DELTA_MIN, NOT_FOUND, alert_class, fault_class
from detectors.scoring.inputs import Meta, Truth
from detectors.scoring.matching import FREE, GRACE, LEAD, answer_rule, is_answer, is_in_time, is_related, match_alerts
from detectors.scoring.placement import Placement
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso


@dataclass(frozen=True, slots=True)
class EventRecord:
    """The result of one labelled event.

    row:      class of the fault, for the confusion matrix.   said: class of the answering or blaming alert.
    large:    its effect is at least delta_min, or the truth has none.
    length_s: from when it is visible to its end, or the recording's; negative if it never is.
    delay_s:  from when it is visible to the answer; None: not found.   late: the answer came after the end.
    level:    of the answer: a page or only a ticket; None also where an incident answers with a ticket, but pages for
              something else: that counts neither way.   incident: of the answer, as an incident is one page.
    top1, top3: the guilty entity is the first, or among the first three, suspects.   detector: of the answer.
    """

    run: int
    id: str
    kind: str
    detectability: str
    row: str
    severity: float | None
    large: bool
    length_s: float
    delay_s: float | None = None
    late: bool = False
    level: str | None = None
    incident: str | None = None
    top1: bool = False
    top3: bool = False
    said: str = NOT_FOUND
    detector: str | None = None

    @property
    def found(self) -> bool:
        """Whether an alert answers it."""
        return self.delay_s is not None


@dataclass(frozen=True, slots=True)
class FalseRecord:
    """One page or ticket without an event.

    why:    duplicate (of an answer), benign (a harmless event was present), wrong (a fault was present, but device,
            type or level do not match the rule) or nothing.
    beside: kind of the event that was present, and its id.
    """

    run: int
    level: str
    time: str
    detector: str
    cause: str
    said: str
    why: str
    beside: str | None = None
    beside_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One recording. conditions: of all levels in the incidents that paged; page_conditions: pages alone."""

    node_days: float | None
    gpus: float | None
    cpu_seconds: float | None
    samples: float | None
    incidents: int | None
    conditions: int
    page_conditions: int
    stray: int


@dataclass(frozen=True, slots=True)
class Records:
    """All records of one run or of many."""

    events: tuple[EventRecord, ...] = ()
    false: tuple[FalseRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the records as JSON data."""
        return {f.name: [_as_dict(line) for line in getattr(self, f.name)] for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Records:
        """Reads records from JSON data. Raises UsageError if they are not of this version."""
        try:
            return cls(
                tuple(EventRecord(**line) for line in data["events"]),
                tuple(FalseRecord(**line) for line in data["false"]),
                tuple(RunRecord(**line) for line in data["runs"]),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"records: {error}; expected the output of `score --json` of this version: score again"
            ) from error


def join_records(parts: Iterable[Records]) -> Records:
    """Returns several as one; runs are renumbered."""
    events: list[EventRecord] = []
    false: list[FalseRecord] = []
    runs: list[RunRecord] = []
    for part in parts:
        events += [replace(line, run=line.run + len(runs)) for line in part.events]
        false += [replace(line, run=line.run + len(runs)) for line in part.false]
        runs += part.runs
    return Records(tuple(events), tuple(false), tuple(runs))


def _as_dict(line: Any) -> dict[str, Any]:
    return {f.name: getattr(line, f.name) for f in fields(line)}


class MatchedRun:
    """One run and its answers: event -> alert, by their positions.

    paging: incidents with a page.   members: alerts of each incident.
    """

    def __init__(self, events: Sequence[Truth], alerts: Sequence[Alert], world: Placement) -> None:
        self.events, self.alerts, self.world = events, alerts, world
        self.answers = match_alerts(events, alerts, world)
        self.event_of = {a: events[e] for e, a in self.answers.items()}
        self.paging = {alert.incident for alert in alerts if alert.paged is not None}
        self.members: dict[str, list[int]] = defaultdict(list)
        for a, alert in enumerate(alerts):
            self.members[alert.incident].append(a)
        self._from = np.array([e.onset - LEAD for e in events], np.int64)
        self._to = np.array([e.end + GRACE for e in events], np.int64)
        self._idle = sorted((alert.time, a) for a, alert in enumerate(alerts) if a not in self.event_of)

    def page_time(self, place: int) -> int | None:
        """Returns when the incident that answers an event paged about it: by the answer, else by its first other alert
        that answers the event; None if it did not."""
        event, answer = self.events[place], self.alerts[self.answers[place]]
        if is_in_time(answer.paged, event):
            return answer.paged
        others = (self.alerts[a] for a in self.members[answer.incident])
        times = (a.paged for a in others if is_in_time(a.paged, event) and is_answer(a, event, self.world))
        return min((time for time in times if time is not None), default=None)

    def events_at(self, time: int) -> list[int]:
        """Returns the positions of the events that an alert at that time may be about, the latest first."""
        on = np.flatnonzero((self._from <= time) & (time <= self._to)).tolist()
        return sorted(on, key=lambda e: (-self.events[e].onset, self.events[e].id))

    def first_blaming_alert(self, event: Truth) -> Alert | None:
        """Returns the first alert without an event that names the event's surroundings in its time, pages first."""
        low = bisect_left(self._idle, event.onset - LEAD, key=lambda line: line[0])
        high = bisect_right(self._idle, event.end + GRACE, key=lambda line: line[0])
        idle = [self.alerts[a] for _, a in self._idle[low:high]]
        for alert in sorted(idle, key=lambda a: (a.paged is None, a.time, a.cause, a.found_by)):
            if is_related(alert, event, self.world):
                return alert
        return None


def record_run(events: Sequence[Truth], alerts: Alerts, world: Placement, meta: Meta) -> Records:
    """Returns the records of one run."""
    case = MatchedRun(events, alerts.alerts, world)
    run = RunRecord(
        meta.node_days,
        meta.gpus,
        meta.cpu_seconds,
        meta.samples,
        alerts.incidents,
        alerts.conditions,
        alerts.page_conditions,
        alerts.stray,
    )
    events_found = tuple(_event_record(i, case, meta.end) for i in range(len(events)))
    false = [_false_record(alert, level, case) for level in ("page", "ticket") for alert in _false_alerts(case, level)]
    return Records(events_found, tuple(false), (run,))


def _event_record(place: int, case: MatchedRun, recording_end: int | None) -> EventRecord:
    event = case.events[place]
    end = event.end if recording_end is None else min(event.end, recording_end)
    least = DELTA_MIN.get(event.effect_unit or "")
    record = EventRecord(
        run=0,
        id=event.id,
        kind=event.kind,
        detectability=event.detectability,
        row=fault_class(event.attribution),
        severity=event.severity,
        large=least is None or event.effect is None or abs(event.effect) >= least,
        length_s=(end - event.visible) / SECOND,
    )
    if place in case.answers:
        return replace(record, **_answer(place, end, case))
    blamed = case.first_blaming_alert(event)
    return replace(record, said=_party(blamed) if blamed else NOT_FOUND)


def _answer(place: int, end: int, case: MatchedRun) -> dict[str, Any]:
    """Returns the fields of an answered event. Delays end with the event, except for instants, where all would be 0."""
    event, alert = case.events[place], case.alerts[case.answers[place]]
    time = alert.time_at(answer_rule(event.kind, event.detectability).level)
    assert time is not None
    late = time > end > event.onset
    places = [any(case.world.is_same(named, root, time) for root in event.entities) for named in alert.suspects[:3]]
    return {
        "delay_s": max(0, (end if late else time) - event.visible) / SECOND,
        "late": late,
        "detector": alert.detector,
        "level": _level(place, case),
        "incident": alert.incident,
        "top1": places[0],
        "top3": any(places),
        "said": _party(alert),
    }


def _party(alert: Alert) -> str:
    return alert_class(alert.detector, alert.cause, alert.paged is not None)


def _level(place: int, case: MatchedRun) -> str | None:
    """Returns page where its incident paged about the event, ticket where the incident never paged."""
    if case.page_time(place) is not None:
        return "page"
    return None if case.alerts[case.answers[place]].incident in case.paging else "ticket"


def _false_alerts(case: MatchedRun, level: str) -> list[Alert]:
    """Returns the first alert of each page, or ticket, that is false.

    The alerts of one incident without an event are one page, and one more for every further 6 hours. Incidents that
    paged have no tickets.
    """
    false: list[Alert] = []
    answered: dict[str, list[int]] = defaultdict(list)
    for e, a in case.answers.items():
        answered[case.alerts[a].incident].append(e)
    for incident, places in case.members.items():
        if level == "page":
            false += _not_free(_unanswered_pages(places, case), _page_answers(answered[incident], case), case.world)
        elif incident not in case.paging:
            idle = [case.alerts[a] for a in places if a not in case.event_of]
            answers = [(case.alerts[case.answers[e]].time, case.events[e]) for e in answered[incident]]
            false += _not_free(idle, answers, case.world)
    return sorted(false, key=lambda a: (a.time, a.cause, a.found_by))


def _unanswered_pages(places: Sequence[int], case: MatchedRun) -> list[Alert]:
    """Returns the pages without an event, also those that answered as a ticket and became a page after the event."""
    return [
        alert
        for alert, event in ((case.alerts[a], case.event_of.get(a)) for a in places)
        if alert.paged is not None and (event is None or not is_in_time(alert.paged, event))
    ]


def _page_answers(answered: Sequence[int], case: MatchedRun) -> list[tuple[int, Truth]]:
    """Returns (time, event) of the pages of an incident about events that it answers."""
    pages = ((case.page_time(e), case.events[e]) for e in answered)
    return [(time, event) for time, event in pages if time is not None]


def _not_free(idle: Sequence[Alert], answers: Sequence[tuple[int, Truth]], world: Placement) -> list[Alert]:
    """Returns the alerts of an incident without an event, except those about an event that it answered within 6 h."""
    first: list[Alert] = []
    for alert in sorted(idle, key=lambda a: (a.time, a.cause, a.found_by)):
        free = any(_is_free(alert, time, event, world) for time, event in answers)
        if not free and not (first and alert.time - first[-1].time <= FREE):
            first.append(alert)
    return first


def _is_free(alert: Alert, answered: int, event: Truth, world: Placement) -> bool:
    """Returns whether it repeats an answer of its incident; to an invisible event it must be an answer itself."""
    again = is_in_time(alert.time, event) and abs(alert.time - answered) <= FREE
    return again and (event.detectability != "invisible" or is_answer(alert, event, world))


def _false_record(alert: Alert, level: str, case: MatchedRun) -> FalseRecord:
    why, event = _reason(alert, case)
    beside = (event.kind, event.id) if event else (None, None)
    said = _party(alert)
    return FalseRecord(0, level, iso(alert.time), alert.detector, alert.cause, said, why, *beside)


def _reason(alert: Alert, case: MatchedRun) -> tuple[str, Truth | None]:
    """Returns why it is false, and the event that was present: answered, else harmless, else a fault; the latest."""
    now = case.events_at(alert.time)
    for e in now:
        if e in case.answers and is_answer(alert, case.events[e], case.world):
            return "duplicate", case.events[e]
    near = [case.events[e] for e in now if is_related(alert, case.events[e], case.world)]
    for why, harmless in (("benign", True), ("wrong", False)):
        for event in near:
            if (event.detectability == "benign") is harmless:
                return why, event
    return "nothing", None
