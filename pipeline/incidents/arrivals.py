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
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pipeline.incidents.cases import Change
from pipeline.incidents.desk import Desk, HasTelemetry
from pipeline.model.records import SECOND, Finding, Incident, Level, to_json
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


class LiveDesk:
    """The frame Desk and the visible Desk; they are the same object while no finding waits for its frame."""

    def __init__(
        self, topology: Topology, is_simulated: Callable[[str], bool], site_of: Callable[[str], str | None]
    ) -> None:
        self._frame_desk = self._visible_desk = Desk(topology, is_simulated, site_of)
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

    def _apply_early(self, now: int) -> tuple[Desk, list[Change]]:
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
