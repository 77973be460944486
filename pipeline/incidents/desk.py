"""The Desk: turns findings into incidents, one per suspected cause.

It reads no clock and no store. The same findings give the same incidents, live and in replay, in any order within an
instant. All decisions use event time. Only `opened` is the time when people could see an incident: the clock when live
(passed as `now`), the event time of the instant in replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.incidents.cases import (
    GENERIC_DETECTORS,
    SEVERITIES,
    Case,
    Condition,
    NoSuchIncident,
    classify_change,
    detector_family,
    instant_order,
    make_incident_id,
    visibility_order,
)
from pipeline.incidents.causes import ABSORB_WINDOW, NODE_SILENCE, REFINE_WINDOW, CauseRules
from pipeline.incidents.changes import Change
from pipeline.incidents.confidence import make_explanation
from pipeline.incidents.factors import SYMPTOM_FAMILY
from pipeline.incidents.likelihood import BaseRates
from pipeline.incidents.merges import MergeProposal
from pipeline.incidents.resolve_mutes import ResolveMutes
from pipeline.model.records import LEVELS, SECOND, Finding, Incident, Level
from pipeline.model.topology import Topology, kind_of

QUIET_PERIOD = 600 * SECOND
"""Time without a finding, with telemetry present, after which an incident resolves: ten repeats; chosen."""
REOPEN_WINDOW = 1800 * SECOND
"""A condition that returns this soon after its incident resolved reopens it: flapping is one incident. Chosen."""
SLOW_GPU_WINDOW = 86_400 * SECOND
"""The same for a slow GPU, which only a job shows: the next job may begin hours later. Chosen: a day."""
MAX_RESOLVED = 1000
"""Resolved incidents kept in memory, at most for these times; the store keeps all. Chosen."""
ACTOR = "fleetpulse"
HasTelemetry = Callable[[str], bool]
__all__ = ["Change", "Desk", "NoSuchIncident"]


def _unknown_site(entity: str) -> str | None:
    """Default of `site_of`. A function of the module, so that a Desk can be pickled."""
    return None


class Desk:
    """All open incidents and recently resolved ones. site_of: `site:NAME` of an entity, None if unknown."""

    def __init__(
        self,
        topology: Topology,
        is_simulated: Callable[[str], bool] = lambda _: False,
        site_of: Callable[[str], str | None] = _unknown_site,
    ) -> None:
        self.topology, self.time, self._now = topology, 0, 0
        self._site_of = site_of
        self._causes, self._is_simulated = CauseRules(topology), is_simulated
        self._cases: dict[str, Case] = {}
        self._case_ids: dict[tuple[str, str], str] = {}
        self._mutes = ResolveMutes(QUIET_PERIOD)
        self._before: dict[str, Incident | None] = {}
        self._new_keys: dict[str, list[tuple[str, str, int]]] = {}
        self._retitled: set[str] = set()  # incidents of which only the title changed in this instant

    @property
    def incidents(self) -> dict[str, Incident]:
        """Incidents as people see them, by id."""
        return {id_: case.public_incident() for id_, case in self._cases.items()}

    def observe(
        self,
        time: int,
        findings: Sequence[Finding],
        has_telemetry: HasTelemetry | None = None,
        now: int | None = None,
        is_monitored: HasTelemetry | None = None,
    ) -> list[Change]:
        """Processes all findings of one instant and returns the changes. An instant older than the newest is ignored.

        has_telemetry: whether an entity sends telemetry now; without it, missing data counts as quiet.
        now: the clock (UTC us); None: the time of the instant.
        is_monitored: whether an entity sends telemetry itself now; without it, all members of a group have.
        """
        if time < self.time:
            return []
        self.time, self._now = time, time if now is None else now
        self._causes.start_instant(time, is_monitored)
        self._start_instant()
        for finding in sorted(findings, key=instant_order):
            self._handle_finding(finding)
        self._refine_causes()
        self._assess_causes()
        self._causes.count_new((self._cases[id_] for id_ in self._before), time)
        self._resolve_quiet(has_telemetry)
        self._drop_old_resolved()
        return self._collect_changes()

    def observe_early(self, time: int, findings: Sequence[Finding], now: int) -> list[Change]:
        """Processes findings of events at `time` before their frames close. The time of the frames does not advance."""
        of_frames, self.time, self._now = self.time, max(self.time, time), now
        try:
            self._start_instant()
            for finding in sorted(findings, key=instant_order):
                self._handle_finding(finding)
            self._refine_causes()
            self._assess_causes()
            return self._collect_changes()
        finally:
            self.time = of_frames

    def _start_instant(self) -> None:
        self._before, self._new_keys, self._retitled = {}, {}, set()

    def acknowledge(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """Acknowledges an incident. Raises NoSuchIncident, or Refused if it is resolved."""
        case = self._find_case(incident_id)
        case.require_open("acknowledged")
        before = replace(case.incident)
        case.incident.state, case.incident.updated = "acknowledged", time
        return case.make_change("acknowledged", before, user, comment, time)

    def comment(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """Adds a comment to the history. Raises NoSuchIncident."""
        case = self._find_case(incident_id)
        return case.make_change("commented", replace(case.incident), user, comment, time)

    def resolve(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """Resolves an incident for a person. Its cause and detectors are muted up to their level until they clear once.

        Raises NoSuchIncident, or Refused if it is resolved.
        """
        case = self._find_case(incident_id)
        case.require_open("resolved")
        before = replace(case.incident)
        for (detector, entity), condition in case.conditions.items():
            for suspect in (case.incident.cause, self._causes.find_suspect(entity)):
                self._mutes.add(suspect, detector, condition.level, self.time)
        case.resolved_by_person, case.reopened = True, set()
        self._resolve_case(case, max(time, case.incident.opened))
        return case.make_change("resolved", before, user, comment, time)

    def list_conditions(self, incident_id: str) -> list[tuple[str, str]]:
        """Returns (detector, entity) of every condition of an incident. Raises NoSuchIncident."""
        return list(self._find_case(incident_id).conditions)

    def open_level(self, finding: Finding) -> Level | None:
        """Returns the level of its condition in an open incident, None if it is in none."""
        return case.find_level(finding) if (case := self._find_open_case(finding)) else None

    def snapshot(self) -> str:
        """Returns all state as JSON, to be stored in the transaction of the changes."""
        return json.dumps(self.as_json())

    def restore(self, snapshot: str) -> None:
        """Restores the state of a snapshot."""
        self.load_json(json.loads(snapshot))

    def as_json(self) -> dict[str, Any]:
        """Returns all state as plain data."""
        cases, mutes = [c.as_json() for c in self._cases.values()], self._mutes.as_json()
        known = {"rates": self._causes.rates.as_json(), "changed": self._causes.index.as_json()}
        homes = self._derive_case_ids()
        odd = [[*key, self._case_ids.get(key)] for key, id_ in homes.items() if self._case_ids.get(key) != id_]
        return {"time": self.time, "cases": cases, "mutes": mutes, **known} | ({"homes": odd} if odd else {})

    def load_json(self, data: Mapping[str, Any]) -> None:
        """Restores the state of `as_json`."""
        self.time = data["time"]
        self._cases = {case.incident.id: case for case in map(Case.from_json, data["cases"])}
        self._case_ids = self._derive_case_ids()
        for detector, entity, id_ in data.get("homes", ()):
            del self._case_ids[detector, entity]
            self._case_ids |= {(detector, entity): id_} if id_ in self._cases else {}
        self._mutes.restore(data["mutes"])
        self._causes.solver.rates = BaseRates.from_json(data.get("rates"))
        self._causes.index.load_json(data.get("changed", ()))

    def _derive_case_ids(self) -> dict[tuple[str, str], str]:
        """Returns condition -> the newest case that has it, an open one if there is one. The case that gets its
        findings may be another one: what returns while its condition is elsewhere keeps it."""
        known = sorted(self._cases.values(), key=lambda c: c.is_open)
        return {key: c.incident.id for c in known for key in c.conditions}

    def _find_case(self, incident_id: str) -> Case:
        if incident_id not in self._cases:
            raise NoSuchIncident(f"incident {incident_id}: no such incident is open or recently resolved")
        return self._cases[incident_id]

    def _handle_finding(self, finding: Finding) -> None:
        if finding.evidence.get("cleared") is True:
            self._clear_condition(finding)
            return
        known = self._find_open_case(finding)  # before the mutes: a mute of another incident must not end this one
        if known is None:
            chain = self._causes.list_suspects(finding.entity)
            if self._mutes.suppresses(chain, finding.detector, finding.level, self.time):
                return
            self._leave_case(finding)
        case = (
            known
            or self._find_silent_site(finding)
            or self._find_absorbing_case(finding)
            or self._reopen_case(finding)
            or self._create_case(finding)
        )
        self._add_to_case(case, finding)

    def _clear_condition(self, finding: Finding) -> None:
        """Ends a held condition after a clean retest or a reset; the quiet period begins."""
        key = (finding.detector, finding.entity)
        case = self._cases.get(self._case_ids.get(key, ""))
        if case is not None and key in case.held:
            self._mark_changed(case)
            case.held.discard(key)
            case.quiet_from = case.conditions[key].last = self.time
            case.refresh_incident(self._causes, self._before[case.incident.id], self.time)

    def _find_open_case(self, finding: Finding) -> Case | None:
        """Returns the open case that has this condition, or that absorbs a new onset on its members."""
        case = self._cases.get(self._case_ids.get((finding.detector, finding.entity), ""))
        if case is None or not case.is_open:
            return None
        if self._causes.outlasts(case, finding, self.time):
            return None
        blamed = case.incident.cause == self._causes.find_suspect(finding.entity)
        adopted = (finding.detector, finding.entity) in case.adopted
        goes_on = case.has_condition(finding) or blamed or adopted
        return case if goes_on or self._causes.can_absorb_at(case, self.time) else None

    def _find_silent_site(self, finding: Finding) -> Case | None:
        """Returns the open case of a silent site to which a silent node belongs."""
        if finding.detector != NODE_SILENCE:
            return None
        sites = [c for c in self._cases.values() if c.is_open and kind_of(c.incident.cause) == "site"]
        if not sites:
            return None
        own = finding.entity if kind_of(finding.entity) == "site" else self._site_of(finding.entity)
        covering = (c for c in sites if self._causes.site_covers_nodes(c, self.time))
        return next((c for c in covering if own in (c.incident.cause, "site:all")), None)

    def _leave_case(self, finding: Finding) -> None:
        """Removes a member whose problem goes on, or returns, after the cause of its incident is well again."""
        key = finding.detector, finding.entity
        case = self._cases.get(self._case_ids.get(key, ""))
        if case is None or not case.is_open or not self._causes.outlasts(case, finding, self.time):
            return
        self._mark_changed(case)
        if case.conditions.keys() <= {key}:  # what is left of it is about this member
            case.incident.cause = self._causes.find_suspect(finding.entity)
        else:
            case.held.discard(key)
            self._drop_conditions(case, lambda c: (c.detector, c.entity) == key)
        case.refresh_incident(self._causes, self._before[case.incident.id], self.time)

    def _find_absorbing_case(self, finding: Finding) -> Case | None:
        """Returns the open case whose cause explains the finding: the nearest, then the one with the earliest onset.

        A ticket or page finding joins a watch incident only if no other case absorbs it.
        """
        chain = self._causes.list_suspects(finding.entity)
        severity, near = SEVERITIES[LEVELS.index(finding.level)], {*self._causes.causes_near(finding.entity)}
        of_coolant = detector_family(finding.detector) == "coolant"
        found = [
            case
            for case in self._cases.values()  # thousands for each finding of a burst: what is quick comes first
            if (
                case.incident.cause in near
                or (of_coolant and self._causes.is_same_leak(case, finding.detector, finding.entity))
            )
            and case.is_open
            and (case.incident.cause == chain[0] or self._causes.can_absorb_at(case, self.time))
            and self._causes.can_absorb(case, finding, severity, finding.onset)
        ]
        distance = {entity: place for place, entity in enumerate(chain)}

        def order(case: Case) -> tuple[bool, int, int, str]:
            """Stronger cases, nearer causes and earlier onsets first."""
            weaker = severity != "watch" and case.incident.severity == "watch"
            return weaker, distance.get(case.incident.cause, len(chain)), case.incident.onset, case.incident.id

        return min(found, key=order, default=None)

    def _reopen_case(self, finding: Finding) -> Case | None:
        """Reopens and returns the resolved case that this finding continues: the same condition, or a flapping
        cause."""
        home = self._case_ids.get((finding.detector, finding.entity), "")
        case = self._cases.get(home) or self._cases.get(make_incident_id(finding)) or self._find_same_slow_gpu(finding)
        if case is None or case.incident.resolved is None:
            return case if home else None  # an open case of this id dropped the condition: _take_over_cause
        blamed = case.incident.cause == self._causes.find_suspect(finding.entity)
        window = SLOW_GPU_WINDOW if case.is_slow_gpu else REOPEN_WINDOW
        flaps = blamed and not case.resolved_by_person and self.time - case.incident.resolved <= window
        if not (flaps or case.has_condition(finding) or case.incident.id == make_incident_id(finding)):
            return None
        if (other := self._find_open_by_cause(case.incident.cause)) is not None and not other.is_generic:
            return other
        self._mark_changed(case)
        case.incident.resolved, case.incident.state = None, "open"
        case.resolved_by_person, case.folded_into = False, None
        return case

    def _find_same_slow_gpu(self, finding: Finding) -> Case | None:
        """Returns the newest resolved case of the same slow GPU: each job has other ranks, so other conditions."""
        if detector_family(finding.detector) != SYMPTOM_FAMILY:
            return None
        cause = self._causes.find_suspect(finding.entity)
        found = [c for c in self._cases.values() if c.incident.cause == cause and not c.is_open and c.is_slow_gpu]
        return max(found, key=lambda c: (c.incident.resolved or 0, c.incident.id), default=None)

    def _find_open_by_cause(self, cause: str) -> Case | None:
        found = (c for c in self._cases.values() if c.is_open and c.incident.cause == cause)
        return min(found, key=lambda c: c.is_generic, default=None)

    def _create_case(self, finding: Finding) -> Case:
        base, id_ = self._causes.find_suspect(finding.entity), make_incident_id(finding)
        if id_ in self._cases:
            id_ = make_incident_id(finding, self._cases[id_].incident.cause)
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
        case = Case(incident, visible_since=self._now)
        self._before[incident.id] = None
        self._cases[incident.id] = case
        return case

    def _add_to_case(self, case: Case, finding: Finding) -> None:
        before, key = replace(case.incident), (finding.detector, finding.entity)
        if (old := self._cases.get(self._case_ids.get(key, ""))) not in (None, case):
            old.held.discard(key)  # its clean retest ends it here
        self._case_ids[key] = case.incident.id
        if case.add_finding(finding, self.time):
            self._before.setdefault(case.incident.id, before)
            self._new_keys.setdefault(case.incident.id, []).append(finding.key)
            if before.severity == "watch" and finding.level != "suspect":
                self._take_over_cause(case, finding)
            if (leaks := self._causes.locate_leak(case)) is not None and self._find_open_by_cause(leaks[0]) is None:
                case.incident.cause, case.reason = leaks
            case.refresh_incident(self._causes, self._before[case.incident.id], self.time)
            self._retitled.discard(case.incident.id)
        elif case.refresh_title():
            case.incident.updated = self.time
            if case.incident.id not in self._before:
                self._before[case.incident.id] = before
                self._retitled.add(case.incident.id)

    def _take_over_cause(self, case: Case, finding: Finding) -> None:
        """Makes a finding above suspect the cause of a watch incident, unless enough children have the same problem.

        Conditions that the new cause does not explain are dropped; their next findings open their own incidents.
        """
        base = self._causes.find_suspect(finding.entity)
        if case.incident.cause == base or self._causes.has_enough_children(case, finding.detector):
            return
        case.incident.cause = base
        self._drop_conditions(case, lambda c: not self._causes.explains(base, c.detector, c.entity, c.signals))

    def _drop_conditions(self, case: Case, leaves: Callable[[Condition], bool]) -> None:
        """Drops conditions that are not held; their next findings open their own incidents."""
        for key in [k for k, c in case.conditions.items() if k not in case.held and leaves(c)]:
            del case.conditions[key]
            if self._case_ids.get(key) == case.incident.id:
                del self._case_ids[key]

    def _mark_changed(self, case: Case) -> None:
        self._before.setdefault(case.incident.id, replace(case.incident))
        self._retitled.discard(case.incident.id)
        case.incident.updated = self.time

    def _refine_causes(self) -> None:
        """Merges cases with a common cause until none is left; only after new findings."""
        if not self._new_keys:
            return
        while True:
            open_ = [c for c in self._cases.values() if c.is_open]
            fresh = [c for c in open_ if c.incident.severity == "watch" or self.time - c.raised_at <= REFINE_WINDOW]
            new = {c.incident.id for c in fresh}
            recent = [c for c in open_ if c.incident.id in new or self.time - c.raised_at <= ABSORB_WINDOW]
            absorbing = [c for c in open_ if self._causes.can_absorb_at(c, self.time)]
            folds = self._causes.propose_merges(fresh, recent, absorbing)
            if not folds:
                return
            for fold in folds:
                self._merge_cases(fold)

    def _assess_causes(self) -> None:
        """Sets the confidence of the incidents with new findings."""
        if not self._new_keys:
            return
        every = [c for c in self._cases.values() if c.is_open]
        changed = [c for c in every if c.incident.id in self._before and c.incident.id not in self._retitled]
        for case, assessed in zip(changed, self._causes.assess(changed, every), strict=True):
            case.incident.confidence = assessed.confidence
            case.incident.explanation = make_explanation(case, assessed)

    def _merge_cases(self, proposal: MergeProposal) -> None:
        """Merges cases into the case of that cause, else into the one that people saw first."""
        cause, cases = proposal.cause, proposal.cases
        kept = holder = self._find_open_by_cause(cause)
        if kept is None or self._before.get(kept.incident.id, kept.incident) is None:
            kept = min(cases, key=visibility_order)
        self._mark_changed(kept)
        kept.incident.cause, kept.reason = cause, proposal.reason or kept.reason
        self._absorb_cases(kept, cases if holder is None or holder in cases else (*cases, holder))
        self._drop_conditions(
            kept, lambda c: c.detector in GENERIC_DETECTORS and not self._causes.explains(cause, c.detector, c.entity)
        )
        kept.incident.simulated = kept.incident.simulated or self._is_simulated(cause)
        kept.refresh_incident(self._causes, self._before[kept.incident.id], self.time)

    def _absorb_cases(self, kept: Case, cases: Iterable[Case]) -> None:
        """Merges the other cases into one, also what was merged into one of them that was never shown."""
        before = set(self._cases)
        for case in cases:
            if case is not kept:
                self._absorb_case(kept, case)
        if never_shown := before - self._cases.keys():
            for case in self._cases.values():
                if case.folded_into in never_shown:
                    case.folded_into = kept.incident.id

    def _absorb_case(self, kept: Case, case: Case) -> None:
        self._mark_changed(case)
        kept.conditions.update(case.conditions)
        kept.held |= case.held
        kept.reopened |= case.reopened
        kept.quiet_from = max(kept.quiet_from, case.quiet_from)
        self._case_ids.update(dict.fromkeys(case.conditions, kept.incident.id))
        self._new_keys.setdefault(kept.incident.id, []).extend(self._new_keys.pop(case.incident.id, ()))
        if self._before[case.incident.id] is None:  # never shown
            del self._cases[case.incident.id], self._before[case.incident.id]
            return
        case.conditions, case.folded_into = {}, kept.incident.id
        self._resolve_case(case, self.time)

    def _resolve_case(self, case: Case, time: int) -> None:
        case.incident.resolved, case.incident.state, case.incident.updated = time, "resolved", time
        case.held.clear()

    def _resolve_quiet(self, present: HasTelemetry | None) -> None:
        """Resolves quiet incidents and ends quiet mutes; an entity without telemetry is not quiet."""

        def sends_telemetry(entity: str) -> bool:
            return present is None or present(entity) or present(self._causes.find_suspect(entity))

        for case in self._cases.values():
            if not case.is_open or case.quiet_from == self.time:
                continue
            if not all(sends_telemetry(member) for member in case.incident.members):
                case.quiet_from = self.time
            elif not case.held and not case.reopened and self.time - case.quiet_from >= QUIET_PERIOD:
                self._mark_changed(case)
                self._resolve_case(case, self.time)
        self._mutes.expire(sends_telemetry, self.time)

    def _drop_old_resolved(self) -> None:
        resolved = sorted((c.incident.resolved, i) for i, c in self._cases.items() if c.incident.resolved is not None)
        windows = {i: SLOW_GPU_WINDOW if self._cases[i].is_slow_gpu else REOPEN_WINDOW for _, i in resolved}
        old = [i for resolved_at, i in resolved if self.time - resolved_at > windows[i]]
        for id_ in dict.fromkeys((*old, *(i for _, i in resolved[:-MAX_RESOLVED]))):
            if id_ not in self._before:
                for key in self._cases.pop(id_).conditions:
                    if self._case_ids.get(key) == id_:
                        del self._case_ids[key]

    def _collect_changes(self) -> list[Change]:
        changes = []
        for id_, before in self._before.items():
            case = self._cases[id_]
            kind, comment = classify_change(before, case)
            if kind == "updated" and id_ in self._retitled:
                kind = "retitled"
            if kind is not None:
                keys, into = tuple(self._new_keys.get(id_, ())), case.folded_into if kind == "resolved" else None
                changes.append(Change(kind, case.public_incident(), self._now, ACTOR, comment, keys, before, into))
        return changes
