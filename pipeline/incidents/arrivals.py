"""The Desk of a running pipeline: findings of events are visible on arrival, before their frames close.

Two Desks: the frame Desk receives findings with their frames, as a replay does. The visible Desk is the frame Desk plus
the early findings that still wait for their frames. So an event minutes ahead of the frames absorbs no older condition,
and the incidents do not depend on the order in which events and frames arrive. If the frames show that an early
incident belongs to another one, it is merged into that.

Incidents keep the state that people saw when they acknowledged or resolved them. Findings of the pipeline itself (a
silent site) are final: no frame changes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from pipeline.incidents.apart import are_apart
from pipeline.incidents.cases import Case, classify_change, derive_id, visibility_order
from pipeline.incidents.changes import Change, is_only_retitled
from pipeline.incidents.confidence import make_explanation
from pipeline.incidents.desk import ACTOR, QUIET_PERIOD, REOPEN_WINDOW, Desk, HasTelemetry
from pipeline.incidents.merges import MergeProposal
from pipeline.incidents.resolve_mutes import ResolveMutes
from pipeline.model.errors import Refused
from pipeline.model.records import LEVELS, SECOND, Finding, Incident, Level, to_json
from pipeline.model.topology import Topology

MAX_EARLY = 1000
"""Most early findings that wait for frames; beyond it, the visible state becomes final. Chosen: it bounds the work."""
STEP_WINDOW = 60 * SECOND
"""Early findings this close to each other are applied in one step: half of REFINE_WINDOW."""


@dataclass(frozen=True, slots=True)
class EarlyFinding:
    """A finding that waits for its frame.

    due:      event time of its frame, the one that ends next.
    admitted: the finding as modes and mutes pass it to the Desk; None: suppressed.
    """

    due: int
    finding: Finding
    admitted: Finding | None

    def as_json(self) -> dict[str, Any]:
        """Returns the finding as plain data."""
        admitted = None if self.admitted is None else to_json(dataclasses.asdict(self.admitted))
        return {"due": self.due, "finding": to_json(dataclasses.asdict(self.finding)), "heard": admitted}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EarlyFinding:
        """Restores a finding from `as_json`."""
        admitted = None if data["heard"] is None else _decode_finding(data["heard"])
        return cls(data["due"], _decode_finding(data["finding"]), admitted)


class RunningDesk(Desk):
    """A Desk that people correct, and that can be copied and compared with another one."""

    def adopt(self, case: Case) -> None:
        """Takes in an incident of the store that it no longer has, so that a person can reopen it."""
        if case.incident.id not in self._cases:
            self._cases[case.incident.id] = case
            for key in case.conditions:
                self._case_ids.setdefault(key, case.incident.id)

    def reopen(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """Reopens an incident until a person resolves it; ends what its resolution muted. What is in another open one
        by now stays there. Raises as `resolve`, and Refused if that is all of it."""
        case = self._find_case(incident_id)
        if case.is_open:
            raise Refused(f"incident {incident_id}: is not resolved")
        if case.folded_into is not None or not case.conditions:
            raise Refused(f"incident {incident_id}: was merged into {case.folded_into}; split it there")
        before, elsewhere = replace(case.incident), self._find_elsewhere(case)
        if len(elsewhere) == len(case.conditions):
            raise Refused(f"incident {incident_id}: its findings are in {', '.join(sorted({*elsewhere.values()}))} now")
        for key in elsewhere:
            del case.conditions[key]
            case.adopted.discard(key)
        for key in case.conditions:
            self._mutes.end(key[0], {case.incident.cause, self._causes.find_suspect(key[1])})
            self._case_ids[key] = incident_id
        if elsewhere:
            case.refresh_incident(self._causes, replace(before, cause=""), self.time)
        case.resolved_by_person, case.reopened, case.quiet_from = False, {*case.conditions}, self.time
        case.incident.resolved, case.incident.state, case.incident.updated = None, "open", time
        return case.make_change("reopened", before, user, comment, time)

    def merge(self, kept_id: str, others: Sequence[str], user: str, comment: str, time: int) -> list[Change]:
        """Merges open incidents into one, which keeps its cause. Raises as `resolve`."""
        kept, cases = self._find_case(kept_id), [self._find_case(i) for i in dict.fromkeys(others) if i != kept_id]
        for case in (kept, *cases):
            case.require_open("merged")
        self._start_instant()
        self._now = time
        self._mark_changed(kept)
        kept.set_apart = False  # a person joined it with another one again
        for case in cases:
            kept.adopted |= case.conditions.keys() | case.adopted
            kept.apart = (kept.apart | case.apart) - {kept_id, *others}
            self._absorb_case(kept, case)
        kept.refresh_incident(self._causes, self._before[kept_id], self.time)
        made = [replace(c, actor=user) for c in self._collect_changes()]
        names = ", ".join(case.incident.id for case in cases)
        row = kept.make_change("merged", kept.public_incident(), user, f"{names}: {comment}", time)
        own = [
            replace(c, kind="merged", comment=row.comment) if c.kind == "updated" else c
            for c in made
            if c.incident.id == kept_id
        ]
        own += [row] if own[0].kind != "merged" else []
        return own + [replace(c, comment=f"{c.comment}: {comment}") for c in made if c.incident.id != kept_id]

    def split(self, incident_id: str, entities: Collection[str], user: str, comment: str, time: int) -> list[Change]:
        """Moves the findings about some members into an incident of their own, which is never merged back by itself.

        If the cause leaves with them, that of the rest is derived from what stays; so are severity, onset and title.
        Raises as `resolve`, and Refused unless some members stay.
        """
        case = self._find_case(incident_id)
        case.require_open("split")
        moved = {key: c for key, c in case.conditions.items() if key[1] in entities}
        if not 0 < len(moved) < len(case.conditions):
            members = ", ".join(case.list_members())
            raise Refused(f"incident {incident_id}: expected some of its members, not all: {members}")
        elsewhere = self._find_elsewhere(case).keys()
        before, first = replace(case.incident), min(moved.values(), key=lambda c: (c.onset, c.detector, c.entity))
        id_ = derive_id(first.entity, first.detector, str(first.onset), incident_id)
        id_ = derive_id(id_, str(time)) if id_ in self._cases else id_
        made = case.split_off(id_, moved, self._causes.find_suspect(first.entity), self.time, time)
        self._cases[id_] = made
        self._case_ids.update(dict.fromkeys(moved.keys() - elsewhere, id_))
        made.adopted |= moved.keys()
        self._derive_cause(case, made)
        made.refresh_incident(self._causes, None, self.time)
        case.refresh_incident(self._causes, replace(before, cause=""), self.time)
        self._assess([made, case])
        keys = tuple((c.detector, c.entity, c.onset) for c in moved.values())
        opened = Change("opened", made.public_incident(), time, user, f"split from {incident_id}: {comment}", keys)
        new = {"cause": case.incident.cause, "severity": case.incident.severity}
        said = "".join(f"; {name}: {value}" for name, value in new.items() if value != getattr(before, name))
        left = case.make_change("split", before, user, f"{id_}: {comment}{said}", time)
        return [left, replace(opened, split_from=incident_id)]

    def _find_elsewhere(self, case: Case) -> dict[tuple[str, str], str]:
        """Returns the conditions of an incident that are in another open one by now -> that one."""
        homes = {key: self._cases.get(self._case_ids.get(key, "")) for key in case.conditions}
        return {
            key: one.incident.id for key, one in homes.items() if one is not None and one is not case and one.is_open
        }

    def _derive_cause(self, case: Case, made: Case) -> None:
        """Sets the cause of an incident after a split: it stays while a finding names it, or while it explains several
        suspects and does not belong to the split-off; else the suspect of the worst finding that stays."""
        cause, every = case.incident.cause, case.conditions.values()
        suspects = {self._causes.find_suspect(c.entity) for c in every}
        explains = all(self._causes.explains(cause, c.detector, c.entity, c.signals) for c in every)
        if cause in suspects or (explains and len(suspects) > 1 and cause != made.incident.cause):
            return
        worst = min(case.deciding_conditions(), key=lambda c: (-LEVELS.index(c.level), c.onset, c.detector, c.entity))
        case.incident.cause, case.reason = self._causes.find_suspect(worst.entity), ""
        case.adopted |= case.conditions.keys()

    def _assess(self, cases: Sequence[Case]) -> None:
        """Sets the confidence of incidents that a person changed."""
        every = [c for c in self._cases.values() if c.is_open]
        for case, assessed in zip(cases, self._causes.assess(cases, every), strict=True):
            case.incident.confidence = assessed.confidence
            case.incident.explanation = make_explanation(case, assessed)

    def _find_absorbing_case(self, finding: Finding) -> Case | None:
        """See Desk. What a person split off takes the findings about its members; None if it is to be reopened."""
        found = super()._find_absorbing_case(finding)
        if found is None or finding.entity in found.list_members():
            return found
        apart = [self._cases[id_] for id_ in sorted(found.apart) if id_ in self._cases]
        own = [case for case in apart if finding.entity in case.list_members()]
        return next((case for case in own if case.is_open), None) if own else found

    def _reopen_case(self, finding: Finding) -> Case | None:
        """See Desk. A finding that returns reopens its own incident, not the one from which a person split it."""
        found = super()._reopen_case(finding)
        own = self._cases.get(self._case_ids.get((finding.detector, finding.entity), ""))
        if found is None or own is None or own.is_open or own.incident.id not in found.apart:
            return found
        self._mark_changed(own)
        own.incident.resolved, own.incident.state = None, "open"
        own.resolved_by_person, own.folded_into = False, None
        return own

    def _merge_cases(self, proposal: MergeProposal) -> None:
        """See Desk. The incident that has the cause already takes in none that a person split from it."""
        holder = self._find_open_by_cause(proposal.cause)
        if holder is None or not are_apart((holder, *proposal.cases)):
            super()._merge_cases(proposal)
        elif joins := tuple(case for case in proposal.cases if not are_apart((holder, case))):
            super()._merge_cases(replace(proposal, cases=joins))
        else:
            kept, *others = sorted(proposal.cases, key=visibility_order)
            self._mark_changed(kept)
            kept.incident.cause, kept.reason = proposal.cause, proposal.reason or kept.reason
            self._absorb_cases(kept, others)
            kept.refresh_incident(self._causes, self._before[kept.incident.id], self.time)

    def _absorb_case(self, kept: Case, case: Case) -> None:
        """See Desk. What a person split from a merged incident stays apart from the one that has its findings now."""
        kept.apart |= case.apart - {kept.incident.id}
        super()._absorb_case(kept, case)

    def copy(self) -> RunningDesk:
        """Returns an independent copy."""
        other = RunningDesk(self.topology, self._is_simulated, self._site_of)
        other.time, other._causes = self.time, self._causes
        other._cases = {id_: case.copy() for id_, case in self._cases.items()}
        other._case_ids = dict(self._case_ids)
        other._mutes = ResolveMutes(QUIET_PERIOD, dict(self._mutes.entries))
        return other

    def sync_quiet_times(self, other: RunningDesk) -> None:
        """Takes over the times of the last findings from another Desk, not its incidents."""
        self.time, self._mutes = other.time, other._mutes
        for id_, case in self._cases.items():
            if (newer := other._cases.get(id_)) is not None:
                case.quiet_from = max(case.quiet_from, newer.quiet_from)
                for key in case.conditions.keys() & newer.conditions.keys():
                    case.conditions[key].last = max(case.conditions[key].last, newer.conditions[key].last)

    def keep_opened_times(self, before: RunningDesk) -> None:
        """Keeps the times at which people first saw the incidents of `before`."""
        for id_, case in self._cases.items():
            if id_ in before._cases:
                case.visible_since = before._cases[id_].visible_since

    def changes_since(
        self, before: RunningDesk, keys: Mapping[str, Sequence[tuple[str, str, int]]], now: int
    ) -> list[Change]:
        """Returns the changes from the incidents of `before` to these. keys: keys of new findings by incident id."""
        changes = []
        for id_, case in self._cases.items():
            then = before._cases[id_].public_incident() if id_ in before._cases else None
            shown, new_keys = case.public_incident(), tuple(keys.get(id_, ()))
            if then is not None and then == replace(shown, updated=then.updated) and not new_keys:
                continue
            kind, comment = classify_change(then, case)
            if kind == "updated" and then is not None and not new_keys and is_only_retitled(then, shown):
                kind = "retitled"
            into = case.folded_into if kind == "resolved" else None
            changes.append(Change(kind or "updated", shown, now, ACTOR, comment, new_keys, then, into))
        return [*changes, *(self._withdraw(case, now) for case in before._cases_missing_in(self) if case.is_open)]

    def matches(self, incident: Incident) -> bool:
        """Returns whether this Desk has the same incident, apart from its opened and updated times."""
        case = self._cases.get(incident.id)
        return case is not None and case.matches(incident)

    def keep_resolved(self, before: RunningDesk) -> None:
        """Keeps incidents that only `before` had, as resolved, so that they can be reopened."""
        for case in before._cases_missing_in(self):
            if case.is_open:
                self._close_withdrawn(case)
            if self.time - (case.incident.resolved or 0) <= REOPEN_WINDOW:
                self._cases[case.incident.id] = case

    def _cases_missing_in(self, other: RunningDesk) -> list[Case]:
        """Returns copies of the cases that another Desk does not have."""
        return [case.copy() for id_, case in self._cases.items() if id_ not in other._cases]

    def _withdraw(self, case: Case, now: int) -> Change:
        """Resolves an incident that people saw early and that the frames do not confirm as a separate incident."""
        before = case.public_incident()
        self._close_withdrawn(case)
        comment = f"merged into {case.folded_into}" if case.folded_into else "not confirmed by its frame"
        return Change("resolved", case.public_incident(), now, ACTOR, comment, (), before, case.folded_into)

    def _close_withdrawn(self, case: Case) -> None:
        homes = (self._case_ids.get(key) for key in case.conditions)
        case.folded_into = next((home for home in homes if home in self._cases), None)
        self._resolve_case(case, max(self.time, case.incident.onset))
        case.conditions = {}


class LiveDesk:
    """The frame Desk and the visible Desk; they are the same object while no finding waits for its frame."""

    def __init__(
        self, topology: Topology, is_simulated: Callable[[str], bool], site_of: Callable[[str], str | None]
    ) -> None:
        self._frame_desk = self._visible_desk = RunningDesk(topology, is_simulated, site_of)
        self._waiting: list[EarlyFinding] = []

    def list_due(self, end: int) -> list[Finding]:
        """Returns the early findings that belong to the frame that ends at `end`."""
        return [early.finding for early in self._waiting if early.due < end]

    def observe(
        self,
        time: int,
        end: int,
        findings: Sequence[Finding],
        has_telemetry: HasTelemetry,
        now: int,
        is_monitored: HasTelemetry | None = None,
    ) -> list[Change]:
        """Processes all findings of the instant before `end`, including those that were due. See Desk.observe."""
        if not self._waiting:
            return self._frame_desk.observe(time, findings, has_telemetry, now, is_monitored)
        known = self._early_keys()
        left = [early for early in self._waiting if early.due >= end]
        changes = self._frame_desk.observe(time, findings, has_telemetry, now, is_monitored)
        self._waiting = left
        if left and self._are_visible(changes, known):
            return []
        return self._publish(changes, known, now)

    def observe_early(self, found: Sequence[EarlyFinding], now: int) -> list[Change]:
        """Processes findings of events before their frames close."""
        if not found:
            return []
        if not self._waiting:
            self._visible_desk = self._frame_desk.copy()
        found = sorted(found, key=lambda early: early.due)
        self._waiting = sorted([*self._waiting, *found], key=lambda early: early.due)
        visible = self._visible_desk
        changes = [c for due, admitted in _group_steps(found) for c in visible.observe_early(due, admitted, now)]
        if len(self._waiting) > MAX_EARLY:
            self._adopt_visible()
        return changes

    def observe_own(self, time: int, findings: Sequence[Finding]) -> list[Change]:
        """Processes findings of the pipeline itself at `time`, the wall clock; no frame changes them."""
        changes = self._frame_desk.observe_early(time, findings, time)
        return self._publish(changes, self._early_keys(), time) if self._waiting else changes

    def acknowledge(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """See `Desk.acknowledge`."""
        self._adopt_visible()
        return self._frame_desk.acknowledge(incident_id, user, comment, time)

    def comment(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """See `Desk.comment`."""
        return self._visible_desk.comment(incident_id, user, comment, time)

    def resolve(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """See `Desk.resolve`."""
        self._adopt_visible()
        return self._frame_desk.resolve(incident_id, user, comment, time)

    def adopt(self, case: Case) -> None:
        """See `Desk.adopt`."""
        self._adopt_visible()
        self._frame_desk.adopt(case)

    def reopen(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        """See `Desk.reopen`."""
        self._adopt_visible()
        return self._frame_desk.reopen(incident_id, user, comment, time)

    def merge(self, kept_id: str, others: Sequence[str], user: str, comment: str, time: int) -> list[Change]:
        """See `Desk.merge`."""
        self._adopt_visible()
        return self._frame_desk.merge(kept_id, others, user, comment, time)

    def split(self, incident_id: str, entities: Collection[str], user: str, comment: str, time: int) -> list[Change]:
        """See `Desk.split`."""
        self._adopt_visible()
        return self._frame_desk.split(incident_id, entities, user, comment, time)

    @property
    def incidents(self) -> dict[str, Incident]:
        """Visible incidents, by id."""
        return self._visible_desk.incidents

    def list_conditions(self, incident_id: str) -> list[tuple[str, str]]:
        """See `Desk.list_conditions`."""
        return self._visible_desk.list_conditions(incident_id)

    def open_level(self, finding: Finding) -> Level | None:
        """Returns the level of its condition in a visible open incident, None if it is in none."""
        return self._visible_desk.open_level(finding)

    def open_level_by_frames(self, finding: Finding) -> Level | None:
        """Returns the level of its condition in an open incident of the frame Desk, None if it is in none."""
        return self._frame_desk.open_level(finding)

    def snapshot(self) -> str:
        """Returns all state as JSON. See `Desk.snapshot`."""
        state = self._frame_desk.as_json()
        if self._waiting:
            state |= {"waiting": [early.as_json() for early in self._waiting], "seen": self._visible_desk.as_json()}
        return json.dumps(state)

    def restore(self, snapshot: str) -> None:
        """Restores a snapshot, also of a version with only one Desk."""
        data = json.loads(snapshot)
        self._frame_desk.load_json(data)
        self._waiting = [EarlyFinding.from_json(early) for early in data.get("waiting", ())]
        self._visible_desk = self._frame_desk
        if self._waiting:
            self._visible_desk = self._frame_desk.copy()
            self._visible_desk.load_json(data["seen"])

    def _early_keys(self) -> set[tuple[str, str, int]]:
        """Returns the keys of the early findings."""
        return {early.finding.key for early in self._waiting}

    def _publish(self, changes: Sequence[Change], known: AbstractSet[tuple[str, str, int]], now: int) -> list[Change]:
        """Replaces the visible Desk and returns the changes from the one before."""
        before = self._visible_desk
        self._frame_desk.keep_opened_times(before)
        self._visible_desk, more = self._apply_early(now)
        keys: dict[str, list[tuple[str, str, int]]] = {}
        for change in (*changes, *more):
            keys.setdefault(change.incident.id, []).extend(k for k in change.finding_keys if k not in known)
        visible_changes = self._visible_desk.changes_since(before, keys, now)
        if self._waiting:
            self._visible_desk.keep_resolved(before)
        return visible_changes

    def _are_visible(self, changes: Sequence[Change], known: AbstractSet[tuple[str, str, int]]) -> bool:
        """Returns whether all changes of the frame Desk are visible already."""
        visible = self._visible_desk
        return all(known >= set(change.finding_keys) and visible.matches(change.incident) for change in changes)

    def _apply_early(self, now: int) -> tuple[RunningDesk, list[Change]]:
        """Returns a copy of the frame Desk with all early findings applied in order of time, and the changes."""
        if not self._waiting:
            return self._frame_desk, []
        desk, changes = self._frame_desk.copy(), []
        for due, admitted in _group_steps(self._waiting):
            changes += desk.observe_early(due, admitted, now)
        desk.keep_opened_times(self._visible_desk)
        return desk, changes

    def _adopt_visible(self) -> None:
        """Makes the visible state final; the frames of early findings no longer change it."""
        if self._waiting:
            self._visible_desk.sync_quiet_times(self._frame_desk)
            self._frame_desk, self._waiting = self._visible_desk, []


def _group_steps(waiting: Sequence[EarlyFinding]) -> Iterator[tuple[int, list[Finding]]]:
    """Yields (time, admitted findings) in order of time, grouped by STEP_WINDOW."""
    step: list[Finding] = []
    first = 0
    for early in waiting:
        if early.admitted is None:
            continue
        if step and early.due - first >= STEP_WINDOW:
            yield first, step
            step = []
        first = first if step else early.due
        step.append(early.admitted)
    if step:
        yield first, step


def _decode_finding(row: dict[str, Any]) -> Finding:
    """Restores a finding from JSON, which has no infinite score."""
    return Finding(**{**row, "score": row["score"] or 0.0, "signals": tuple(row["signals"])})
