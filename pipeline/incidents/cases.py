"""What the Desk knows of one incident: its conditions, what holds it open, and for how long it is quiet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pipeline.model.errors import UsageError
from pipeline.model.records import LEVELS, SECOND, Finding, Incident, Level, Severity
from pipeline.model.topology import kind_of

SEVERITIES: tuple[Severity, ...] = ("watch", "ticket", "page")
Kind = Literal[
    "opened",
    "updated",
    "cause_changed",
    "severity_raised",
    "acknowledged",
    "commented",
    "resolved",
    "reopened",
]
_DOWN_OR_UP = frozenset({"nic.state", "nic.carrier_changes"})
PAIR_WINDOW = 120 * SECOND
"""Suspects further apart than this are a coincidence; as long as a cause is refined. Chosen."""
UNEXPLAINED = frozenset({"anomaly"})
"""Detectors that report a change without its meaning: their findings corroborate and explain nobody else's."""
_OF_LEVEL: dict[Level, Severity] = {"suspect": "watch", "ticket": "ticket", "page": "page"}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that happened to an incident: a row of its history. Incidents are copies.

    before:      the incident before it; None if it is new.
    folded_into: the incident that took over what this one held, if it was resolved for that.
    """

    kind: Kind
    incident: Incident
    time: int
    actor: str
    comment: str = ""
    finding_keys: tuple[tuple[str, str, int], ...] = ()
    before: Incident | None = None
    folded_into: str | None = None


class NoSuchIncident(UsageError, KeyError):  # noqa: N818 - reads as what it says
    """The Desk has no incident of that id: it never had, or it was resolved long ago."""

    __str__ = Exception.__str__


@dataclass(slots=True)
class Condition:
    """The newest findings of one detector about one entity; the level is the highest so far."""

    detector: str
    entity: str
    onset: int
    level: Level
    first: int
    last: int
    score: float
    summary: str
    signals: tuple[str, ...]

    def take(self, finding: Finding, time: int) -> bool:
        """Adds a finding; True if the condition is a new one or its level rose."""
        new = self.onset != finding.onset
        rises = LEVELS.index(finding.level) > LEVELS.index(self.level)
        # of one level the strongest words stay: a condition that fades reads as if nothing had been
        if rises or new or (self.level == finding.level and finding.score >= self.score):
            self.score, self.summary, self.signals = finding.score, finding.summary, finding.signals
        if rises:
            self.level = finding.level
        self.onset, self.last = finding.onset, time
        return new or rises


@dataclass(slots=True)
class Case:
    """An incident and its conditions by (detector, entity): a flapping one costs no more memory than a steady one.

    incident:   its `opened` is event time here; `shown` has the one that people see.
    visible:    when people could see it first: the clock at that moment, in replay event time.
    holding:    conditions that only a cleared finding or a person ends.
    quiet_from: since when nothing was found with telemetry present.
    raised:     when it became more than a watch; 0 while it is one.
    """

    incident: Incident
    conditions: dict[tuple[str, str], Condition] = field(default_factory=dict)
    holding: set[tuple[str, str]] = field(default_factory=set)
    quiet_from: int = 0
    by_person: bool = False
    folded_into: str | None = None
    raised: int = 0
    visible: int = 0

    def shown(self) -> Incident:
        """A copy as people see it: opened when it became visible. After an outage it may have been over before."""
        return replace(self.incident, opened=self.visible or self.incident.opened)

    def copy(self) -> Case:
        """One that later findings of this one leave alone."""
        conditions = {key: replace(c) for key, c in self.conditions.items()}
        return replace(self, incident=replace(self.incident), conditions=conditions, holding=set(self.holding))

    @property
    def open(self) -> bool:
        return self.incident.resolved is None

    def has(self, finding: Finding) -> bool:
        """Whether this very condition is among the folded ones."""
        known = self.conditions.get((finding.detector, finding.entity))
        return known is not None and known.onset == finding.onset

    def level_of(self, finding: Finding) -> Level | None:
        """The level at which its condition stands here."""
        known = self.conditions.get((finding.detector, finding.entity))
        return None if known is None else known.level

    def take(self, finding: Finding, time: int) -> bool:
        """Folds a finding in; True if it tells anything new."""
        key = (finding.detector, finding.entity)
        self.quiet_from = time
        known = self.conditions.get(key)
        if known is None:
            f = finding
            self.conditions[key] = Condition(
                f.detector, f.entity, f.onset, f.level, time, time, f.score, f.summary, f.signals
            )
        news = known is None or known.take(finding, time)
        if finding.evidence.get("holds") is True and key not in self.holding:
            self.holding.add(key)
            news = True
        return news

    def severity(self) -> Severity:
        """Of the highest level, and never lower than it was; suspects that corroborate each other are a ticket."""
        levels = [_OF_LEVEL[c.level] for c in self.conditions.values()]
        if self.corroborated() or self.seen_from_both_ends():
            levels.append("ticket")
        return max((self.incident.severity, *levels), key=SEVERITIES.index)

    def describe(self, base: Callable[[str], str], before: Incident | None, time: int) -> None:
        """Writes what others see of the conditions; who is blamed most changes only with severity or cause.

        base:   what to suspect for an entity.   before: the incident as it was before this instant.
        """
        incident, severity = self.incident, self.severity()
        if severity != "watch" and not self.raised:
            self.raised = time
        blamed = min(self.conditions.values(), key=lambda c: self._standing(c, base(c.entity)))
        if before is None or severity != incident.severity or incident.cause != before.cause:
            incident.entity, incident.detector = blamed.entity, blamed.detector
        incident.severity, incident.updated = severity, time
        incident.onset = min(incident.onset, *(c.onset for c in self.conditions.values()))
        incident.members = self.members()
        others = len(incident.members) - 1
        suspected = incident.cause != base(blamed.entity)
        incident.summary = f"{incident.cause} is suspected: {blamed.summary}" if suspected else blamed.summary
        incident.summary += self._still(blamed)
        if others:
            incident.summary += f" (and {others} more {'entity' if others == 1 else 'entities'})"

    def _still(self, blamed: Condition) -> str:
        """What holds until it is cleared, such as a leak, in its own words: what else is blamed never hides it."""
        held = [c for key, c in self.conditions.items() if key in self.holding and c is not blamed]
        if not held or (blamed.detector, blamed.entity) in self.holding:
            return ""
        return f"; {min(held, key=lambda c: (-LEVELS.index(c.level), c.onset, c.detector, c.entity)).summary}"

    def telling(self) -> list[Condition]:
        """The conditions by which it is judged what explains the incident: suspects, and changes of which nobody knows
        the meaning, only where there is nothing else."""
        every = list(self.conditions.values())
        known = [c for c in every if c.detector not in UNEXPLAINED] or every
        return [c for c in known if c.level != "suspect"] or known

    def corroborated(self, within: int = PAIR_WINDOW) -> bool:
        """Whether two detectors that look at different signals said so at about the same time."""
        newest = max((c.last for c in self.conditions.values()), default=0)
        known = [c for c in self.conditions.values() if c.detector not in UNEXPLAINED]
        fresh = [c for c in known if newest - c.last <= within]
        return any(
            a.detector != b.detector and not set(a.signals) & set(b.signals)
            for i, a in enumerate(fresh)
            for b in fresh[:i]
        )

    def seen_from_both_ends(self, within: int = PAIR_WINDOW) -> bool:
        """Whether both ends of a link blame it and one counts errors: that it is down is one fact, seen twice.

        A case whose cause is a port has conditions of that port and of its far end alone (Folding.base).
        """
        if kind_of(self.incident.cause) != "port":
            return False
        newest = max((c.last for c in self.conditions.values()), default=0)
        fresh = [c for c in self.conditions.values() if newest - c.last <= within]
        counted = {signal for c in fresh for signal in c.signals} - _DOWN_OR_UP
        return len({c.entity for c in fresh if kind_of(c.entity) == "port"}) > 1 and bool(counted)

    def _standing(self, condition: Condition, base: str) -> tuple[bool, int, int, str, str]:
        """Least for the condition that speaks for the incident: at the cause itself, highest level, earliest onset."""
        k = condition
        return (self.incident.cause not in (k.entity, base), -LEVELS.index(k.level), k.onset, k.detector, k.entity)

    def members(self) -> tuple[str, ...]:
        """Entities with folded findings, in the order in which they joined."""
        joined = sorted(self.conditions.values(), key=lambda c: (c.first, c.onset, c.entity))
        return tuple(dict.fromkeys(c.entity for c in joined))

    def told(self, kind: Kind, before: Incident, user: str, comment: str, time: int) -> Change:
        """What a person did to it."""
        return Change(kind, self.shown(), time, user, comment, (), before)

    def as_json(self) -> dict[str, Any]:
        return {
            "incident": asdict(self.incident),
            "conditions": [asdict(c) for c in self.conditions.values()],
            "holding": sorted(map(list, self.holding)),
            "quiet_from": self.quiet_from,
            "by_person": self.by_person,
            "folded_into": self.folded_into,
            "raised": self.raised,
            "visible": self.visible,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        found = [Condition(**{**values, "signals": tuple(values["signals"])}) for values in data["conditions"]]
        return cls(
            Incident(**{**data["incident"], "members": tuple(data["incident"]["members"])}),
            {(c.detector, c.entity): c for c in found},
            {(detector, entity) for detector, entity in data["holding"]},
            data["quiet_from"],
            data["by_person"],
            data["folded_into"],
            data.get("raised", data["incident"]["opened"]),
            data.get("visible", 0),
        )


def incident_id(finding: Finding, apart: str = "") -> str:
    """Always the same for the same entity, detector and onset: of a million, two are alike once in 560 times.

    apart: the cause of the open incident that has this id and that the finding has left.
    """
    text = "\x1f".join((finding.entity, finding.detector, str(finding.onset), *filter(None, (apart,))))
    return f"inc-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def order_within_instant(f: Finding) -> tuple[int, str, str, int, str, str, bool]:
    """A total order over what the Desk looks at, so that the order of arrival within an instant does not count."""
    strength = -LEVELS.index(f.level)
    return (f.onset, f.entity, f.detector, strength, repr(f.score), f.summary, f.evidence.get("cleared") is True)


def difference(before: Incident | None, case: Case) -> tuple[Kind | None, str]:
    """The most telling kind of what happened to a case within one instant, in words too."""
    now = case.incident
    if before is None:
        return "opened", ""
    if now.resolved is not None:
        if before.resolved is not None:
            return None, ""
        return "resolved", f"folded into {case.folded_into}" if case.folded_into else "quiet with telemetry present"
    if before.resolved is not None:
        return "reopened", "the condition is back"
    if now.cause != before.cause:
        return "cause_changed", f"from {before.cause} to {now.cause}"
    if now.severity != before.severity:
        return "severity_raised", f"from {before.severity} to {now.severity}"
    return "updated", ""
