"""One incident with its conditions: severity, main finding, title, and when it may resolve."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from pipeline.incidents.changes import QUIET_END, RETURNED, Change, ChangeKind
from pipeline.incidents.titles import count_alike, name_cause
from pipeline.model.entity_names import cut_title
from pipeline.model.errors import Refused, UsageError
from pipeline.model.records import LEVELS, SECOND, Finding, Incident, Level, Severity
from pipeline.model.topology import kind_of

SEVERITIES: tuple[Severity, ...] = ("watch", "ticket", "page")
_LINK_STATE_SIGNALS = frozenset({"nic.state", "nic.carrier_changes"})
PAIR_WINDOW = 120 * SECOND
"""Findings further apart than this do not corroborate each other; equal to the time to refine a cause. Chosen."""
GENERIC_DETECTORS = frozenset({"anomaly"})
"""Detectors that report a change without its meaning: they neither corroborate nor explain other findings."""
_INTENDED = frozenset({"power_cap", "rolling_work"})
"""Evidence of what people did: a limit of power, caps of many are one decision; work on nodes. It proves no fault."""
_SEVERITY_OF_LEVEL: dict[Level, Severity] = {"suspect": "watch", "ticket": "ticket", "page": "page"}


class NoSuchIncident(UsageError, KeyError):  # noqa: N818 - a plain name
    """The Desk has no incident of this id: unknown, or resolved long ago."""

    __str__ = Exception.__str__


@dataclass(slots=True)
class Condition:
    """The findings of one detector about one entity: newest summary, highest level, strongest score and its signals.

    intended: a person set what it shows, so that it corroborates no other.   earliest: first of its onsets.
    """

    detector: str
    entity: str
    onset: int
    level: Level
    first: int
    last: int
    score: float
    summary: str
    signals: tuple[str, ...]
    intended: bool = False
    earliest: int = 0

    def __post_init__(self) -> None:
        self.earliest = self.earliest or self.onset

    @property
    def began(self) -> int:
        """When it began; a later onset of one that is known already is no new coincidence."""
        return min(self.onset, self.first)

    def update(self, finding: Finding, time: int) -> bool:
        """Adds a finding. Returns whether the onset is a new one or the level rose."""
        new = self.onset != finding.onset
        rises = LEVELS.index(finding.level) > LEVELS.index(self.level)
        self.summary, self.intended = finding.summary, not _INTENDED.isdisjoint(finding.evidence)
        if rises or new or (self.level == finding.level and finding.score >= self.score):
            self.score, self.signals = finding.score, finding.signals
        if rises:
            self.level = finding.level
        self.onset, self.last, self.earliest = finding.onset, time, min(self.earliest, finding.onset)
        return new or rises


_OF_CONDITION = tuple(one.name for one in fields(Condition))
_OF_INCIDENT = tuple(one.name for one in fields(Incident) if one.name != "life")  # the store has its life


class Rules(Protocol):
    """What a case needs to know about causes."""

    def find_suspect(self, entity: str) -> str:
        """Returns the suspect of a finding about an entity."""

    def explain_corroboration(self, case: Case) -> str:
        """Returns why the conditions of a case have one cause; empty if they may be a coincidence."""

    def explains(self, cause: str, detector: str, entity: str, signals: Collection[str] = ()) -> bool:
        """Returns whether a fault of `cause` can have a finding as a symptom."""

    def is_same_leak(self, case: Case, detector: str, entity: str) -> bool:
        """Returns whether a finding is about the coolant that is lost where the case says."""


@dataclass(slots=True)
class Case:
    """An incident and its conditions by (detector, entity), so that a flapping condition does not use more memory.

    incident:      its `opened` is event time; `public_incident` has the time that people see.
    held:          conditions that only a cleared finding or a person ends.
    quiet_from:    time since which nothing was found with telemetry present.
    raised_at:     time when it became a ticket or page; 0 while it is a watch.
    visible_since: time when people could first see it: the clock when live, event time in replay.
    reason:        why its cause, or its severity, goes beyond its findings; shown in the history.
    adopted:       conditions that a person merged into it: they belong to it whatever their cause.
    apart:         incidents from which a person split it: they are never merged.
    alike:         members like that of the main finding; 0: not counted yet.
    set_apart:     a person split it off: no cause above it takes it in.
    reopened:      conditions that it had when a person reopened it: only a person resolves what has them.
    """

    incident: Incident
    conditions: dict[tuple[str, str], Condition] = field(default_factory=dict)
    held: set[tuple[str, str]] = field(default_factory=set)
    quiet_from: int = 0
    resolved_by_person: bool = False
    folded_into: str | None = None
    raised_at: int = 0
    visible_since: int = 0
    reason: str = ""
    adopted: set[tuple[str, str]] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    reopened: set[tuple[str, str]] = field(default_factory=set)
    set_apart: bool = False
    alike: int = 0

    def public_incident(self) -> Incident:
        """Returns a copy with the time when people could first see it as `opened`."""
        return replace(self.incident, opened=self.visible_since or self.incident.opened)

    def copy(self) -> Case:
        """Returns an independent copy."""
        conditions = {key: replace(c) for key, c in self.conditions.items()}
        made = replace(self, incident=replace(self.incident), conditions=conditions, held=set(self.held))
        made.adopted, made.apart, made.reopened = set(self.adopted), set(self.apart), set(self.reopened)
        return made

    @property
    def is_open(self) -> bool:
        """Whether the incident is not resolved."""
        return self.incident.resolved is None

    def require_open(self, verb: str) -> None:
        """Raises Refused if the incident is resolved."""
        if not self.is_open:
            raise Refused(f"incident {self.incident.id}: already resolved, cannot be {verb}; write a comment instead")

    def matches(self, incident: Incident) -> bool:
        """Returns whether it is the same incident, apart from its opened and updated times."""
        return replace(self.incident, opened=0, updated=0) == replace(incident, opened=0, updated=0)

    def has_condition(self, finding: Finding) -> bool:
        """Returns whether the case has a condition with this detector, entity and onset."""
        known = self.conditions.get((finding.detector, finding.entity))
        return known is not None and known.onset == finding.onset

    def find_level(self, finding: Finding) -> Level | None:
        """Returns the level of the finding's condition, None if the case does not have it."""
        known = self.conditions.get((finding.detector, finding.entity))
        return None if known is None else known.level

    def add_finding(self, finding: Finding, time: int) -> bool:
        """Adds a finding. Returns whether it is new, has a higher level, or is now held."""
        key = (finding.detector, finding.entity)
        self.quiet_from = time
        known = self.conditions.get(key)
        if known is None:
            f, intended = finding, not _INTENDED.isdisjoint(finding.evidence)
            self.conditions[key] = Condition(
                *(f.detector, f.entity, f.onset, f.level, time, time, f.score, f.summary, f.signals, intended)
            )
        is_new = known is None or known.update(finding, time)
        if finding.evidence.get("holds") is True and key not in self.held:
            self.held.add(key)
            is_new = True
        return is_new

    def describe_return(self, resolved: int) -> str:
        """Returns RETURNED, or which detectors it has after `resolved` that it never had, as severe as itself."""
        known = {c.detector for c in self.conditions.values() if c.first <= resolved}
        worst = {c.detector for c in self.conditions.values() if _SEVERITY_OF_LEVEL[c.level] == self.incident.severity}
        return f"{RETURNED}, with {', '.join(new)}" if (new := sorted(worst - known)) else RETURNED

    def compute_severity(self) -> Severity:
        """Returns the severity of the highest level; it falls only with a split."""
        levels = [_SEVERITY_OF_LEVEL[c.level] for c in self.conditions.values()]
        return max((self.incident.severity, *levels), key=SEVERITIES.index)

    def refresh_incident(self, rules: Rules, before: Incident | None, time: int) -> None:
        """Updates the incident from its conditions. The main finding changes only with severity or cause. Corroborated
        suspects are a ticket.

        before: the incident before this instant; None if it is new.
        """
        incident, severity, find_suspect = self.incident, self.compute_severity(), rules.find_suspect
        if severity == "watch":
            if self.is_seen_from_both_ends():
                severity = "ticket"
            elif reason := rules.explain_corroboration(self):
                severity, self.reason = "ticket", reason
        self.raised_at = 0 if severity == "watch" else self.raised_at or time
        main = min(self.conditions.values(), key=lambda c: self._blame_order(c, find_suspect(c.entity)))
        if before is None or severity != incident.severity or incident.cause != before.cause:
            incident.entity, incident.detector = main.entity, main.detector
        incident.severity, incident.updated = severity, time
        incident.onset = self.find_onset(rules)
        incident.members, self.alike = self.list_members(), 0
        incident.summary = self._title(main)

    def find_onset(self, rules: Rules) -> int:
        """Returns the earliest onset of what the cause explains, so that nothing else that was merged dates it back; of
        all if it explains nothing."""
        first = min(self.conditions.values(), key=lambda c: c.earliest)
        if self._explains(first, rules):  # of thousands, nearly always
            return first.earliest
        own = (c.earliest for c in self.conditions.values() if self._explains(c, rules))
        return min(own, default=first.earliest)

    def _explains(self, c: Condition, rules: Rules) -> bool:
        is_known = rules.explains(self.incident.cause, c.detector, c.entity, c.signals)
        return is_known or rules.is_same_leak(self, c.detector, c.entity)

    def refresh_title(self) -> bool:
        """Sets the title to the newest summary of the main finding. Returns whether it changed."""
        main = self.conditions.get((self.incident.detector, self.incident.entity))
        if main is None or self._title(main) == self.incident.summary:
            return False
        self.incident.summary = self._title(main)
        return True

    def _title(self, main: Condition) -> str:
        """Returns the summaries of the main finding, below a cause of several with that cause, and of a held condition
        (a leak), in TITLE_LENGTH characters."""
        main = self.conditions.get((self.incident.detector, self.incident.entity), main)
        self.alike = self.alike or count_alike(main.entity, self.incident.members)
        summary = name_cause(self.incident.cause, main.entity, main.summary, self.alike)
        held = [self.conditions[key] for key in self.held if key in self.conditions]
        if not held or main in held:
            return cut_title(summary)
        worst = min(held, key=lambda c: (-LEVELS.index(c.level), c.onset, c.detector, c.entity))
        return cut_title(f"{summary}; {worst.summary}")

    @property
    def is_generic(self) -> bool:
        """Whether only generic detectors report it; such an incident takes in no finding of another detector."""
        return bool(self.conditions) and all(c.detector in GENERIC_DETECTORS for c in self.conditions.values())

    @property
    def is_slow_gpu(self) -> bool:
        """Whether it is a GPU on which work is slow, which only a job shows."""
        return kind_of(self.incident.cause) == "gpu" and detector_family(self.incident.detector) == "straggler"

    @property
    def is_firm(self) -> bool:
        """Whether it has a finding above suspect from a specific detector."""
        return any(c.level != "suspect" and c.detector not in GENERIC_DETECTORS for c in self.conditions.values())

    def is_less_severe(self, severity: str) -> bool:
        """Returns whether its severity is below another one."""
        return SEVERITIES.index(severity) > SEVERITIES.index(self.incident.severity)

    def deciding_conditions(self) -> list[Condition]:
        """Returns the conditions that decide the cause. Generic detectors and suspects count only without others."""
        every = list(self.conditions.values())
        known = [c for c in every if c.detector not in GENERIC_DETECTORS] or every
        return [c for c in known if c.level != "suspect"] or known

    def is_seen_from_both_ends(self, within: int = PAIR_WINDOW) -> bool:
        """Returns whether both ends of a link report it and one counts errors; link down alone is one fact, seen twice.

        A case whose cause is a port has only conditions of that port and its far end (CauseRules.find_suspect).
        """
        if kind_of(self.incident.cause) != "port":
            return False
        newest = max((c.last for c in self.conditions.values()), default=0)
        fresh = [c for c in self.conditions.values() if newest - c.last <= within]
        counted = {signal for c in fresh for signal in c.signals} - _LINK_STATE_SIGNALS
        return len({c.entity for c in fresh if kind_of(c.entity) == "port"}) > 1 and bool(counted)

    def _blame_order(self, condition: Condition, base: str) -> tuple[bool, int, bool, int, str, str]:
        """Sorts the main condition first: on the cause itself, highest level, of known meaning, earliest onset."""
        k = condition
        level, generic = -LEVELS.index(k.level), k.detector in GENERIC_DETECTORS
        return (self.incident.cause not in (k.entity, base), level, generic, k.onset, k.detector, k.entity)

    def list_members(self) -> tuple[str, ...]:
        """Returns the entities with findings, in the order in which they joined."""
        joined = sorted(self.conditions.values(), key=lambda c: (c.first, c.onset, c.entity))
        return tuple(dict.fromkeys(c.entity for c in joined))

    def make_change(self, kind: ChangeKind, before: Incident, user: str, comment: str, time: int) -> Change:
        """Returns the change that a person made."""
        return Change(kind, self.public_incident(), time, user, comment, (), before)

    def split_off(self, id_: str, moved: dict[tuple[str, str], Condition], cause: str, time: int, seen: int) -> Case:
        """Moves conditions into a new case at event time `time`, which people see from `seen` on. Severity and onset of
        both are those of their own findings once they are refreshed."""
        first, own = min(moved.values(), key=lambda c: (c.onset, c.detector, c.entity)), self.incident
        about = (first.summary, first.detector, first.entity, (first.entity,))
        incident = Incident(id_, cause, time, first.onset, "watch", *about, simulated=own.simulated, updated=time)
        made = Case(incident, moved, self.held & moved.keys(), self.quiet_from, visible_since=seen, apart={own.id})
        made.set_apart, made.reopened = True, self.reopened & moved.keys()
        self.reopened -= moved.keys()
        self.held -= moved.keys()
        self.adopted -= moved.keys()
        self.conditions = {key: c for key, c in self.conditions.items() if key not in moved}
        self.apart.add(id_)
        own.severity, own.onset = "watch", min(c.earliest for c in self.conditions.values())
        return made

    def as_json(self) -> dict[str, Any]:
        """Returns all state as plain data; nested values are those of the case itself."""
        return {
            "incident": {name: getattr(self.incident, name) for name in _OF_INCIDENT},
            "conditions": [{name: getattr(c, name) for name in _OF_CONDITION} for c in self.conditions.values()],
            "holding": sorted(map(list, self.held)),
            "quiet_from": self.quiet_from,
            "by_person": self.resolved_by_person,
            "folded_into": self.folded_into,
            "raised": self.raised_at,
            "visible": self.visible_since,
            "reason": self.reason,
            "adopted": sorted(map(list, self.adopted)),
            "apart": sorted(self.apart),
            "reopened": sorted(map(list, self.reopened)),
            "set_apart": self.set_apart,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Restores a case from `as_json`."""
        found = [Condition(**{**values, "signals": tuple(values["signals"])}) for values in data["conditions"]]
        known = {(c.detector, c.entity): c for c in found}
        return cls(
            Incident(**{**data["incident"], "members": tuple(data["incident"]["members"])}),
            known,
            {(detector, entity) for detector, entity in data["holding"]},
            data["quiet_from"],
            data["by_person"],
            data["folded_into"],
            data.get("raised", data["incident"]["opened"]),
            data.get("visible", 0),
            data.get("reason", ""),
            {(detector, entity) for detector, entity in data.get("adopted", ())},
            set(data.get("apart", ())),
            {(d, e) for d, e in data["reopened"]} if "reopened" in data else {*known} if data.get("stays") else set(),
            data.get("set_apart", False),
        )


def make_incident_id(finding: Finding, other_cause: str = "") -> str:
    """Returns a fixed id for an entity, detector and onset. Among a million incidents, P(any collision) is 1/560.

    other_cause: cause of the open incident with the same id from which the finding was dropped.
    """
    return derive_id(finding.entity, finding.detector, str(finding.onset), *filter(None, (other_cause,)))


def derive_id(*words: str) -> str:
    """Returns the id that words always give."""
    text = "\x1f".join(words)
    return f"inc-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def instant_order(f: Finding) -> tuple[int, str, str, int, str, str, bool]:
    """Sort key of findings within an instant, so that their order of arrival has no effect."""
    strength = -LEVELS.index(f.level)
    return (f.onset, f.entity, f.detector, strength, repr(f.score), f.summary, f.evidence.get("cleared") is True)


def visibility_order(case: Case) -> tuple[bool, bool, int, int, int, str]:
    """Sorts generic cases last, tickets and pages before watches, then by the time when people saw them."""
    incident = case.incident
    return (case.is_generic, incident.severity == "watch", case.raised_at, incident.opened, incident.onset, incident.id)


def classify_change(before: Incident | None, case: Case) -> tuple[ChangeKind | None, str]:
    """Returns the kind of the change of a case within one instant, and a comment."""
    now = case.incident
    if before is None:
        return "opened", case.reason
    if now.resolved is not None:
        if before.resolved is not None:
            return None, ""
        into = case.folded_into
        return "resolved", f"merged into {into}" if into else QUIET_END
    if before.resolved is not None:
        return "reopened", case.describe_return(before.resolved)
    if now.cause != before.cause:
        return "cause_changed", _with_reason(f"from {before.cause} to {now.cause}", case)
    if now.severity != before.severity:
        return "severity_raised", _with_reason(f"from {before.severity} to {now.severity}", case)
    return "updated", ""


def _with_reason(change: str, case: Case) -> str:
    return f"{change}: {case.reason}" if case.reason else change


def detector_family(detector: str) -> str:
    """Returns a detector's name up to the first underscore: `link` for `link_stall`."""
    return detector.split("_", 1)[0]


def families_of(case: Case) -> set[str]:
    """Returns the families of the detectors that report a case."""
    return {detector_family(c.detector) for c in case.conditions.values()}


def age_order(case: Case) -> tuple[int, str]:
    """Sorts by onset, then id."""
    return (case.incident.onset, case.incident.id)
