"""The Desk: findings become incidents, one per suspected cause. It reads no clock and no store: the same findings in
the same instants give the same incidents, live and in replay, in whatever order they stand within an instant.

All it decides by is event time. `opened` alone is when people could see an incident: live the clock, which the caller
passes as `now`; in replay the event time of the instant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.incidents.cases import (
    SEVERITIES,
    UNEXPLAINED,
    Case,
    Change,
    Condition,
    NoSuchIncident,
    difference,
    incident_id,
    order_within_instant,
)
from pipeline.incidents.causes import EXPLAINS, PLANT, Folding
from pipeline.incidents.resolve_mutes import Mutes
from pipeline.model.errors import Refused
from pipeline.model.records import LEVELS, SECOND, Finding, Incident, Level
from pipeline.model.topology import Topology, kind_of

QUIET = 600 * SECOND
"""Quiet with telemetry present that ends a condition: ten repeats of a detector that repeats each minute. Chosen."""
REFINE = 120 * SECOND
"""How long after it became more than a watch its suspected cause may change: slow detectors join, and a page is not
moved later. Chosen."""
ABSORB = 1800 * SECOND
"""How long a shared cause takes in what begins below it; later troubles have causes of their own. Chosen."""
REOPEN = 1800 * SECOND
"""A condition that returns this soon after its incident resolved reopens it: flapping is one incident. Chosen."""
KEPT = 1000
"""Most resolved incidents in memory, and none longer than REOPEN; all of them are in the store. Chosen."""
SILENCE = "telemetry"
"""The detector of silent nodes: where their whole site is silent, that is their cause."""
SITE_SILENCE = "telemetry_site"
ACTOR = "fleetpulse"
Present = Callable[[str], bool]
__all__ = ["Change", "Desk", "NoSuchIncident"]


def _no_site(entity: str) -> str | None:
    """The site of nothing is known; a function of the module, so that checkpoints can hold a Desk."""
    return None


class Desk:
    """All that is open, and what was resolved lately. site_of: `site:NAME` of an entity, where it is known."""

    def __init__(
        self,
        topology: Topology,
        is_simulated: Callable[[str], bool] = lambda _: False,
        site_of: Callable[[str], str | None] = _no_site,
    ) -> None:
        self.topology, self.time, self._now = topology, 0, 0
        self._site_of = site_of
        self._folding, self._is_simulated = Folding(topology), is_simulated
        self._cases: dict[str, Case] = {}
        self._home: dict[tuple[str, str], str] = {}
        self._mutes = Mutes(QUIET)
        self._before: dict[str, Incident | None] = {}
        self._keys: dict[str, list[tuple[str, str, int]]] = {}

    @property
    def incidents(self) -> dict[str, Incident]:
        return {id_: case.shown() for id_, case in self._cases.items()}

    def observe(
        self, time: int, findings: Sequence[Finding], present: Present | None = None, now: int | None = None
    ) -> list[Change]:
        """Takes all findings of one instant, also none; an instant before the newest one was taken already.

        present: whether telemetry of an entity arrives now; without it silence counts as quiet.
        now: what the clock shows; None: the time of the instant.
        """
        if time < self.time:
            return []
        self.time, self._now = time, time if now is None else now
        self._before, self._keys = {}, {}
        for finding in sorted(findings, key=order_within_instant):
            self._take(finding)
        self._refine()
        self._let_go(present)
        self._forget()
        return self._changes()

    def foresee(self, time: int, findings: Sequence[Finding], now: int) -> list[Change]:
        """Takes findings of events at `time` before their frames are closed: the time of the frames stands, so that
        none of them counts as taken."""
        of_frames, self.time, self._now = self.time, max(self.time, time), now
        try:
            self._before, self._keys = {}, {}
            for finding in sorted(findings, key=order_within_instant):
                self._take(finding)
            self._refine()
            return self._changes()
        finally:
            self.time = of_frames

    def acknowledge(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """Somebody looks after it. Raises Refused if it is resolved."""
        case = self._case(incident_id)
        self._refuse_resolved(case, "acknowledged")
        before = replace(case.incident)
        case.incident.state, case.incident.updated = "acknowledged", time
        return case.told("acknowledged", before, user, comment, time)

    def comment(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """A note for the history."""
        case = self._case(incident_id)
        return case.told("commented", replace(case.incident), user, comment, time)

    def resolve(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """Somebody says that it is over: its cause and detectors are mute, no louder, until they were quiet once."""
        case = self._case(incident_id)
        self._refuse_resolved(case, "resolved")
        before = replace(case.incident)
        for (detector, entity), condition in case.conditions.items():
            for suspect in (case.incident.cause, self._folding.base(entity)):
                self._mutes.add(suspect, detector, condition.level, self.time)
        case.by_person = True
        self._close(case, max(time, case.incident.opened))
        return case.told("resolved", before, user, comment, time)

    def blamed(self, incident_id: str) -> list[tuple[str, str]]:
        """Detector and entity of every condition of an incident. Raises NoSuchIncident."""
        return list(self._case(incident_id).conditions)

    def standing(self, finding: Finding) -> Level | None:
        """The level at which its condition stands in an open incident; None: in none."""
        return case.level_of(finding) if (case := self._known(finding)) else None

    def snapshot(self) -> str:
        """All state as JSON; belongs into the transaction that stores the changes."""
        return json.dumps(self.as_json())

    def restore(self, snapshot: str) -> None:
        """Takes the state of a snapshot; goes on as if it had never stopped."""
        self.take_over(json.loads(snapshot))

    def as_json(self) -> dict[str, Any]:
        """All state as plain data."""
        return {"time": self.time, "cases": [c.as_json() for c in self._cases.values()], "mutes": self._mutes.as_json()}

    def take_over(self, data: Mapping[str, Any]) -> None:
        """Takes the state of `as_json`."""
        self.time = data["time"]
        self._cases = {case.incident.id: case for case in map(Case.from_json, data["cases"])}
        known = sorted(self._cases.values(), key=lambda c: c.open)
        self._home = {key: c.incident.id for c in known for key in c.conditions}
        self._mutes.restore(data["mutes"])

    def copy(self) -> Desk:
        """One that goes on from here by itself."""
        other = Desk(self.topology, self._is_simulated, self._site_of)
        other.time, other._folding = self.time, self._folding
        other._cases = {id_: case.copy() for id_, case in self._cases.items()}
        other._home = dict(self._home)
        other._mutes = Mutes(QUIET, dict(self._mutes.last))
        return other

    def catch_up(self, other: Desk) -> None:
        """Takes how long ago everything was found by a Desk that goes on; what people see of it stays."""
        self.time, self._mutes = other.time, other._mutes
        for id_, case in self._cases.items():
            if (newer := other._cases.get(id_)) is not None:
                case.quiet_from = max(case.quiet_from, newer.quiet_from)
                for key in case.conditions.keys() & newer.conditions.keys():
                    case.conditions[key].last = max(case.conditions[key].last, newer.conditions[key].last)

    def keep_opened(self, before: Desk) -> None:
        """What people saw in `before` was opened when they saw it first."""
        for id_, case in self._cases.items():
            if id_ in before._cases:
                case.visible = before._cases[id_].visible

    def changes_since(self, before: Desk, keys: Mapping[str, Sequence[tuple[str, str, int]]], now: int) -> list[Change]:
        """How what people see differs from what `before` showed them. keys: of findings that are new, by incident."""
        changes = []
        for id_, case in self._cases.items():
            then = before._cases[id_].shown() if id_ in before._cases else None
            if then == replace(shown := case.shown(), updated=then.updated if then else 0) and not keys.get(id_):
                continue
            kind, comment = difference(then, case)
            into = case.folded_into if kind == "resolved" else None
            changes.append(Change(kind or "updated", shown, now, ACTOR, comment, tuple(keys.get(id_, ())), then, into))
        return [*changes, *(self._end(case, now) for case in before._unlike(self) if case.open)]

    def shows(self, incident: Incident) -> bool:
        """Whether people see an incident as it is here, whenever they saw it first."""
        case = self._cases.get(incident.id)
        return case is not None and replace(case.incident, opened=0, updated=0) == replace(
            incident, opened=0, updated=0
        )

    def remember(self, before: Desk) -> None:
        """Keeps what people saw in `before` and no longer see, as resolved: should it come back, it is reopened."""
        for case in before._unlike(self):
            if case.open:
                self._over(case)
            if self.time - (case.incident.resolved or 0) <= REOPEN:
                self._cases[case.incident.id] = case

    def _unlike(self, other: Desk) -> list[Case]:
        """Copies of the cases that another Desk has not."""
        return [case.copy() for id_, case in self._cases.items() if id_ not in other._cases]

    def _end(self, case: Case, now: int) -> Change:
        """The end of an incident that people saw early and that frames show to be no incident of its own."""
        before = case.shown()
        self._over(case)
        comment = f"folded into {case.folded_into}" if case.folded_into else "its frame does not bear it out"
        return Change("resolved", case.shown(), now, ACTOR, comment, (), before, case.folded_into)

    def _over(self, case: Case) -> None:
        homes = (self._home.get(key) for key in case.conditions)
        case.folded_into = next((home for home in homes if home in self._cases), None)
        self._close(case, max(self.time, case.incident.onset))
        case.conditions = {}

    def _case(self, incident_id: str) -> Case:
        if incident_id not in self._cases:
            raise NoSuchIncident(f"incident {incident_id}: neither open nor resolved lately; wanted one of those")
        return self._cases[incident_id]

    def _refuse_resolved(self, case: Case, verb: str) -> None:
        if not case.open:
            raise Refused(f"incident {case.incident.id}: is resolved, so it cannot be {verb}; comment on it instead")

    def _take(self, finding: Finding) -> None:
        if finding.evidence.get("cleared") is True:
            self._clear(finding)
            return
        known = self._known(finding)  # before the mutes: a mute left by another incident must not let this one starve
        chain = self._folding.chain(finding.entity)
        if known is None and self._mutes.hold(chain, finding.detector, finding.level, self.time):
            return
        if known is None:
            self._leave(finding)
        case = (
            known
            or self._silent_site(finding)
            or self._absorber(finding)
            or self._reopened(finding)
            or self._created(finding)
        )
        self._fold(case, finding)

    def _clear(self, finding: Finding) -> None:
        """A clean retest or a reset: what held the incident open no longer does; quiet begins."""
        key = (finding.detector, finding.entity)
        case = self._cases.get(self._home.get(key, ""))
        if case is not None and key in case.holding:
            self._touch(case)
            case.holding.discard(key)
            case.quiet_from = case.conditions[key].last = self.time
            case.describe(self._folding.base, self._before[case.incident.id], self.time)

    def _known(self, finding: Finding) -> Case | None:
        """The open case that has this condition already, or takes in what begins anew on its members."""
        case = self._cases.get(self._home.get((finding.detector, finding.entity), ""))
        if case is None or not case.open:
            return None
        if self._outlasts(case, finding):
            return None
        blamed = case.incident.cause == self._folding.base(finding.entity)
        return case if case.has(finding) or blamed or self._absorbs_now(case) else None

    def _silent_site(self, finding: Finding) -> Case | None:
        """The open incident of a silent site that silent nodes are a part of."""
        if finding.detector != SILENCE:
            return None
        sites = [c for c in self._cases.values() if c.open and kind_of(c.incident.cause) == "site"]
        if not sites:
            return None
        own = finding.entity if kind_of(finding.entity) == "site" else self._site_of(finding.entity)
        return next((c for c in sites if own in (c.incident.cause, "site:all") and self._covers(c)), None)

    def _outlasts(self, case: Case, finding: Finding) -> bool:
        """Whether a node is silent though its site has been heard again for a while: it has a trouble of its own."""
        return finding.detector == SILENCE and kind_of(case.incident.cause) == "site" and not self._covers(case)

    def _leave(self, finding: Finding) -> None:
        """Takes a node that outlasts the silence of its site out of the incident of the site."""
        key = finding.detector, finding.entity
        case = self._cases.get(self._home.get(key, ""))
        if case is None or not case.open or not self._outlasts(case, finding):
            return
        self._touch(case)
        case.holding.discard(key)
        self._drop(case, lambda c: (c.detector, c.entity) == key)
        case.describe(self._folding.base, self._before[case.incident.id], self.time)

    def _covers(self, case: Case) -> bool:
        """Whether silent nodes are a part of the silence of their site: until REFINE after the site is heard again."""
        known = case.conditions.get((SITE_SILENCE, case.incident.cause))
        if known is None:  # a part of a site, which the detector of silent nodes reports itself
            return True
        return (SITE_SILENCE, case.incident.cause) in case.holding or self.time - known.last <= REFINE

    def _absorber(self, finding: Finding) -> Case | None:
        """The open case whose cause explains the finding: the nearest, then the one that began first.

        What is more than a suspicion goes to one that is only watched if nothing else takes it.
        """
        chain = self._folding.chain(finding.entity)
        severity = SEVERITIES[LEVELS.index(finding.level)]
        found = [
            case
            for case in self._cases.values()
            if case.open
            and (case.incident.cause == chain[0] or self._absorbs_now(case))
            and self._folding.absorbs(case, finding.detector, finding.entity, severity)
        ]
        distance = dict(zip(chain, range(len(chain)), strict=True))

        def order(case: Case) -> tuple[bool, int, int, str]:
            weaker = severity != "watch" and case.incident.severity == "watch"
            return weaker, distance.get(case.incident.cause, len(chain)), case.incident.onset, case.incident.id

        return min(found, key=order, default=None)

    def _absorbs_now(self, case: Case) -> bool:
        """Whether what begins now may follow from it: from what many hang on while it is found, else for a time."""
        kind, every = kind_of(case.incident.cause), case.conditions.values()
        own = [c for c in every if self._folding.base(c.entity) == case.incident.cause]
        lasts = kind in PLANT and case.incident.severity == "page"
        newest = [c.last for c in own or every] if lasts else [c.onset for c in own]
        return kind not in EXPLAINS or self.time - max(case.incident.opened, *newest, 0) <= ABSORB

    def _reopened(self, finding: Finding) -> Case | None:
        """The resolved case that this finding continues: the same condition, or its cause flaps."""
        home = self._home.get((finding.detector, finding.entity), "")
        case = self._cases.get(home) or self._cases.get(incident_id(finding))
        if case is None or case.incident.resolved is None:
            return case if home else None  # an open one of that id alone let the condition go: see _claim
        blamed = case.incident.cause == self._folding.base(finding.entity)
        flaps = blamed and not case.by_person and self.time - case.incident.resolved <= REOPEN
        if not (flaps or case.has(finding) or case.incident.id == incident_id(finding)):
            return None
        if (other := self._open_with(case.incident.cause)) is not None:
            return other
        self._touch(case)
        case.incident.resolved, case.incident.state = None, "open"
        case.by_person, case.folded_into = False, None
        return case

    def _open_with(self, cause: str) -> Case | None:
        return next((c for c in self._cases.values() if c.open and c.incident.cause == cause), None)

    def _created(self, finding: Finding) -> Case:
        base, id_ = self._folding.base(finding.entity), incident_id(finding)
        if id_ in self._cases:
            id_ = incident_id(finding, self._cases[id_].incident.cause)
        incident = Incident(
            id=id_,
            cause=base,
            opened=self.time,
            onset=finding.onset,
            severity="watch",
            summary=finding.summary,
            detector=finding.detector,
            entity=finding.entity,
            members=(finding.entity,),
            simulated=self._is_simulated(base) or self._is_simulated(finding.entity),
            updated=self.time,
        )
        case = Case(incident, visible=self._now)
        self._before[incident.id] = None
        self._cases[incident.id] = case
        return case

    def _fold(self, case: Case, finding: Finding) -> None:
        before = replace(case.incident)
        self._home[finding.detector, finding.entity] = case.incident.id
        if case.take(finding, self.time):
            self._before.setdefault(case.incident.id, before)
            self._keys.setdefault(case.incident.id, []).append(finding.key)
            if before.severity == "watch" and finding.level != "suspect":
                self._claim(case, finding)
            case.describe(self._folding.base, self._before[case.incident.id], self.time)

    def _claim(self, case: Case, finding: Finding) -> None:
        """A suspicion names nothing that is more: what rises takes the incident over, and what it does not explain
        leaves, to be an incident of its own with its next finding. Not where enough of the same kind agree."""
        base = self._folding.base(finding.entity)
        if case.incident.cause == base or self._folding.agrees(case, finding.detector):
            return
        case.incident.cause = base
        self._drop(case, lambda c: not self._explains(case, c))

    def _explains(self, case: Case, condition: Condition) -> bool:
        return self._folding.explains(case.incident.cause, condition.detector, condition.entity)

    def _drop(self, case: Case, leaves: Callable[[Condition], bool]) -> None:
        """Lets conditions go that nothing but new findings ends: their next ones make incidents of their own."""
        for key in [k for k, c in case.conditions.items() if k not in case.holding and leaves(c)]:
            del case.conditions[key], self._home[key]

    def _touch(self, case: Case) -> None:
        self._before.setdefault(case.incident.id, replace(case.incident))
        case.incident.updated = self.time

    def _refine(self) -> None:
        """Folds cases together until each stands for itself; only after news, each round leaves fewer cases."""
        if not self._keys:
            return
        while True:
            open_ = [c for c in self._cases.values() if c.open]
            fresh = [c for c in open_ if c.incident.severity == "watch" or self.time - c.raised <= REFINE]
            fold = self._folding.best(fresh, [c for c in open_ if self._absorbs_now(c)])
            if fold is None:
                return
            self._merge(fold.cause, fold.cases)

    def _merge(self, cause: str, cases: Sequence[Case]) -> None:
        """Makes one case of several: the one that is known for the cause already, else the first that people saw."""
        kept = holder = self._open_with(cause)
        if kept is None or self._before.get(kept.incident.id, kept.incident) is None:
            kept = min(cases, key=_first_seen)
        self._touch(kept)
        kept.incident.cause = cause
        for case in cases if holder is None or holder in cases else (*cases, holder):
            if case is not kept:
                self._absorb(kept, case)
        self._drop(kept, lambda c: c.detector in UNEXPLAINED and not self._explains(kept, c))
        kept.incident.simulated = kept.incident.simulated or self._is_simulated(cause)
        kept.describe(self._folding.base, self._before[kept.incident.id], self.time)

    def _absorb(self, kept: Case, case: Case) -> None:
        self._touch(case)
        kept.conditions.update(case.conditions)
        kept.holding |= case.holding
        kept.quiet_from = max(kept.quiet_from, case.quiet_from)
        self._home.update(dict.fromkeys(case.conditions, kept.incident.id))
        self._keys.setdefault(kept.incident.id, []).extend(self._keys.pop(case.incident.id, ()))
        if self._before[case.incident.id] is None:  # nobody heard of it
            del self._cases[case.incident.id], self._before[case.incident.id]
            for other in self._cases.values():
                if other.folded_into == case.incident.id:
                    other.folded_into = kept.incident.id
            return
        case.conditions, case.folded_into = {}, kept.incident.id
        self._close(case, self.time)

    def _close(self, case: Case, time: int) -> None:
        case.incident.resolved, case.incident.state, case.incident.updated = time, "resolved", time
        case.holding.clear()

    def _let_go(self, present: Present | None) -> None:
        """Resolves what was quiet long enough, and unmutes likewise; silence of a source is not quiet."""

        def seen(entity: str) -> bool:
            return present is None or present(entity) or present(self._folding.base(entity))

        for case in self._cases.values():
            if not case.open or case.quiet_from == self.time:
                continue
            if not all(seen(member) for member in case.incident.members):
                case.quiet_from = self.time
            elif not case.holding and self.time - case.quiet_from >= QUIET:
                self._touch(case)
                self._close(case, self.time)
        self._mutes.end(seen, self.time)

    def _forget(self) -> None:
        resolved = sorted((c.incident.resolved, i) for i, c in self._cases.items() if c.incident.resolved is not None)
        old = [i for resolved_at, i in resolved if self.time - resolved_at > REOPEN]
        for id_ in dict.fromkeys((*old, *(i for _, i in resolved[:-KEPT]))):
            if id_ not in self._before:
                for key in self._cases.pop(id_).conditions:
                    if self._home.get(key) == id_:
                        del self._home[key]

    def _changes(self) -> list[Change]:
        changes = []
        for id_, before in self._before.items():
            case = self._cases[id_]
            kind, comment = difference(before, case)
            if kind is not None:
                keys, into = tuple(self._keys.get(id_, ())), case.folded_into if kind == "resolved" else None
                changes.append(Change(kind, case.shown(), self._now, ACTOR, comment, keys, before, into))
        return changes


def _first_seen(case: Case) -> tuple[bool, int, int, int, str]:
    """What was more than watched first; a watch only among watches."""
    incident = case.incident
    return (incident.severity == "watch", case.raised, incident.opened, incident.onset, incident.id)
