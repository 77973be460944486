"""Alerts: conditions that reached a ticket or a page, and the incidents that merge them.

An alert is one such condition (detector, entity, onset). It blames the cause of its incident, as that is the entity
that a person reads. Without incidents each condition blames its own entity.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.model.records import LEVELS, SECOND, Level

Row = Mapping[str, Any]
SEEN_AFTER = 60 * SECOND
"""us from the newest sample of a finding to its incident at most: twice the lateness of 30 s. Chosen."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that was reported as a ticket at least.

    incident:  that it is merged into.   detector: of the incident.   found_by: detector of the condition.
    suspects:  the named entities, most suspected first.
    ticketed:  when it was a ticket or more (us).   paged: when it was a page; None if it never was.
    """

    incident: str
    cause: str
    detector: str
    found_by: str
    suspects: tuple[str, ...]
    ticketed: int
    paged: int | None

    def time_at(self, level: Level) -> int | None:
        """Returns when it was reported at `level` or above; None if never."""
        return self.paged if level == "page" else self.ticketed

    @property
    def time(self) -> int:
        """When it paged, else when it was a ticket."""
        return self.ticketed if self.paged is None else self.paged


@dataclass(frozen=True, slots=True)
class Alerts:
    """All alerts of a run.

    incidents: those that page.   conditions, page_conditions: in them, of all levels and pages alone.   stray: pages in
    no incident.
    """

    alerts: tuple[Alert, ...]
    incidents: int | None = None
    conditions: int = 0
    page_conditions: int = 0
    stray: int = 0


@dataclass(slots=True)
class _Condition:
    detector: str
    entity: str
    onset: int
    times: list[int | None]  # when it first was a suspect, a ticket, a page, or more

    @property
    def first(self) -> int:
        """When it was reported first."""
        assert self.times[0] is not None
        return self.times[0]

    def was_reported_within(self, since: int, until: int) -> bool:
        """Returns whether it began or rose within these times."""
        return any(t is not None and since <= t <= until for t in self.times)


def find_alerts(findings: Sequence[Row], incidents: Sequence[Row] | None) -> Alerts:
    """Returns the alerts of findings and incidents as `inputs` reads them."""
    conditions = _conditions(findings)
    if incidents is None:
        return Alerts(tuple(_single_alert(c) for c in conditions if c.times[1] is not None))
    by_entity: dict[str, list[_Condition]] = defaultdict(list)
    for condition in conditions:
        by_entity[condition.entity].append(condition)
    alerts: list[Alert] = []
    held: dict[int, _Condition] = {}
    paging = [i for i in incidents if i["severity"] == "page"]
    for incident in incidents:
        mine = _members(incident, by_entity)
        if incident["severity"] != "watch":
            alerts += _incident_alerts(incident, mine)
        if incident["severity"] == "page":
            held |= {id(c): c for c in mine}
    pages = sum(c.times[2] is not None for c in held.values())
    stray = sum(c.times[2] is not None for c in conditions if id(c) not in held)
    return Alerts(tuple(alerts), len(paging), len(held), pages, stray)


def _conditions(findings: Iterable[Row]) -> list[_Condition]:
    """Returns the conditions in order of their first report."""
    found: dict[tuple[str, str, int], _Condition] = {}
    for f in findings:
        key = (f["detector"], f["entity"], f["onset"])
        times = found.setdefault(key, _Condition(*key, [None] * len(LEVELS))).times
        for i in range(LEVELS.index(f["level"]) + 1):
            known = times[i]
            times[i] = f["time"] if known is None else min(known, f["time"])
    return sorted(found.values(), key=lambda c: (c.first, c.entity, c.detector, c.onset))


def _single_alert(c: _Condition) -> Alert:
    assert c.times[1] is not None
    key = f"{c.detector} {c.entity} {c.onset}"
    return Alert(key, c.entity, c.detector, c.detector, (c.entity,), c.times[1], c.times[2])


def _members(incident: Row, by_entity: Mapping[str, Sequence[_Condition]]) -> list[_Condition]:
    """Returns the conditions of an incident's members while it was open.

    The time of a finding is that of its newest sample; an incident is opened when people can see it, which is later.
    """
    until = sys.maxsize if incident["resolved"] is None else incident["resolved"]
    opened = incident["opened"]
    since = min(opened, max(incident.get("onset", opened), opened - SEEN_AFTER))
    members = dict.fromkeys(incident["members"])
    mine = [c for m in members for c in by_entity.get(m, ()) if c.was_reported_within(since, until)]
    return sorted(mine, key=lambda c: (c.first, c.entity, c.detector, c.onset))


def _incident_alerts(incident: Row, mine: Sequence[_Condition]) -> list[Alert]:
    """Returns its conditions that were a ticket or a page; an incident without any is one alert itself."""
    alerted = sorted((c for c in mine if c.times[1] is not None), key=lambda c: (c.times[1], c.entity, c.detector))
    cause, detector = incident["cause"], incident.get("detector") or (mine[0].detector if mine else "")
    named = [cause, incident.get("entity") or cause, *(c.entity for c in alerted), *incident["members"]]
    suspects = tuple(dict.fromkeys(named))
    if not alerted:
        time = _second_suspect_time(mine, incident["opened"])
        paged = time if incident["severity"] == "page" else None
        return [Alert(incident["id"], cause, detector, detector, suspects, time, paged)]
    return [
        Alert(incident["id"], cause, detector, c.detector, suspects, c.times[1], c.times[2])
        for c in alerted
        if c.times[1] is not None
    ]


def _second_suspect_time(mine: Sequence[_Condition], opened: int) -> int:
    """Returns the time of the second of several suspects: two that corroborate each other are a ticket."""
    return mine[1].first if len(mine) > 1 else opened
