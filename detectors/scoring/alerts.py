"""What was said: conditions that reached a ticket or a page, and the incidents that merge them.

An alert is one such condition (detector, entity, onset). What it blames is the cause of the incident that holds it:
that is what a person reads. Without incidents each condition stands for itself.
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
"""Longest time from the newest sample of a finding to its incident: twice the lateness of 30 s. Chosen."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that was told as a ticket at least.

    incident:  what it is merged into.   detector: the incident's own.   heard: the condition's.
    suspects:  the entities that are named, most blamed first.
    ticketed:  when it was a ticket or more (us).   paged: when it was a page; None if it never was.
    """

    incident: str
    cause: str
    detector: str
    heard: str
    suspects: tuple[str, ...]
    ticketed: int
    paged: int | None

    def at(self, level: Level) -> int | None:
        """When it was told at `level` or above."""
        return self.paged if level == "page" else self.ticketed

    @property
    def time(self) -> int:
        """When it woke somebody, else when it was written down."""
        return self.ticketed if self.paged is None else self.paged


@dataclass(frozen=True, slots=True)
class Heard:
    """All alerts; how many conditions of which level the incidents that page hold; pages that no incident holds."""

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
        assert self.times[0] is not None
        return self.times[0]

    def within(self, since: int, until: int) -> bool:
        return any(t is not None and since <= t <= until for t in self.times)


def heard(findings: Sequence[Row], incidents: Sequence[Row] | None) -> Heard:
    """Alerts of findings and incidents as `inputs` reads them."""
    conditions = _conditions(findings)
    if incidents is None:
        return Heard(tuple(_alone(c) for c in conditions if c.times[1] is not None))
    by_entity: dict[str, list[_Condition]] = defaultdict(list)
    for condition in conditions:
        by_entity[condition.entity].append(condition)
    alerts: list[Alert] = []
    held: dict[int, _Condition] = {}
    paging = [i for i in incidents if i["severity"] == "page"]
    for incident in incidents:
        mine = _members(incident, by_entity)
        if incident["severity"] != "watch":
            alerts += _of_incident(incident, mine)
        if incident["severity"] == "page":
            held |= {id(c): c for c in mine}
    pages = sum(c.times[2] is not None for c in held.values())
    stray = sum(c.times[2] is not None for c in conditions if id(c) not in held)
    return Heard(tuple(alerts), len(paging), len(held), pages, stray)


def _conditions(findings: Iterable[Row]) -> list[_Condition]:
    """In the order in which they were first told."""
    found: dict[tuple[str, str, int], _Condition] = {}
    for f in findings:
        key = (f["detector"], f["entity"], f["onset"])
        times = found.setdefault(key, _Condition(*key, [None] * len(LEVELS))).times
        for i in range(LEVELS.index(f["level"]) + 1):
            known = times[i]
            times[i] = f["time"] if known is None else min(known, f["time"])
    return sorted(found.values(), key=lambda c: (c.first, c.entity, c.detector, c.onset))


def _alone(c: _Condition) -> Alert:
    assert c.times[1] is not None
    key = f"{c.detector} {c.entity} {c.onset}"
    return Alert(key, c.entity, c.detector, c.detector, (c.entity,), c.times[1], c.times[2])


def _members(incident: Row, by_entity: Mapping[str, Sequence[_Condition]]) -> list[_Condition]:
    """Conditions of an incident's members while it was open.

    A finding bears the time of its newest sample, and an incident is opened when people can see it, which is later.
    """
    until = sys.maxsize if incident["resolved"] is None else incident["resolved"]
    opened = incident["opened"]
    since = min(opened, max(incident.get("onset", opened), opened - SEEN_AFTER))
    members = dict.fromkeys(incident["members"])
    mine = [c for m in members for c in by_entity.get(m, ()) if c.within(since, until)]
    return sorted(mine, key=lambda c: (c.first, c.entity, c.detector, c.onset))


def _of_incident(incident: Row, mine: Sequence[_Condition]) -> list[Alert]:
    """Its conditions that were a ticket or a page; an incident without any is one alert itself."""
    told = sorted((c for c in mine if c.times[1] is not None), key=lambda c: (c.times[1], c.entity, c.detector))
    cause, detector = incident["cause"], incident.get("detector") or (mine[0].detector if mine else "")
    named = [cause, incident.get("entity") or cause, *(c.entity for c in told), *incident["members"]]
    suspects = tuple(dict.fromkeys(named))
    if not told:
        time = _agreed(mine, incident["opened"])
        paged = time if incident["severity"] == "page" else None
        return [Alert(incident["id"], cause, detector, detector, suspects, time, paged)]
    return [
        Alert(incident["id"], cause, detector, c.detector, suspects, c.times[1], c.times[2])
        for c in told
        if c.times[1] is not None
    ]


def _agreed(mine: Sequence[_Condition], opened: int) -> int:
    """When the second of several suspects came: two that bear each other out are a ticket, one alone is silent."""
    return mine[1].first if len(mine) > 1 else opened
