"""The Desk of a running pipeline: it hears findings of events as they arrive, and what becomes of them depends on the
telemetry alone.

People see an early finding at once. It is told again with the frame of its event, as a replay does it, to a Desk that
hears frames only; what people see is that Desk and, on top of it, what still waits for its frame. So an event that is
minutes ahead of the frames takes in nothing that began before it, and incidents are the same in whatever order events
and frames arrive. Where frames show that an early incident is a part of another, it ends as folded into that one.

What a person acknowledges or resolves stays as the person saw it, and what the pipeline says itself, of a silent site,
as it was said: no frame can tell otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from pipeline.incidents.cases import Change
from pipeline.incidents.desk import Desk, Present
from pipeline.model.records import SECOND, Finding, Incident, Level, to_json
from pipeline.model.topology import Topology

MOST_WAITING = 1000
"""Early findings that may wait for their frames; of more, all stay as people see them. Chosen: it bounds the work."""
TOGETHER = 60 * SECOND
"""Early findings so close to one another are shown in one step: half of the time within which causes are refined."""


@dataclass(frozen=True, slots=True)
class Early:
    """A finding before its frame.

    due: the event time at which it is judged: its frame is that which ends next.   heard: what the Desk hears of it by
    modes and mutes; None: nothing.
    """

    due: int
    finding: Finding
    heard: Finding | None

    def as_json(self) -> dict[str, Any]:
        heard = None if self.heard is None else to_json(dataclasses.asdict(self.heard))
        return {"due": self.due, "finding": to_json(dataclasses.asdict(self.finding)), "heard": heard}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Early:
        return cls(data["due"], _finding(data["finding"]), None if data["heard"] is None else _finding(data["heard"]))


class ArrivalDesk:
    """Two Desks: of the frames alone, and of what people see; one and the same while nothing waits for its frame."""

    def __init__(
        self, topology: Topology, is_simulated: Callable[[str], bool], site_of: Callable[[str], str | None]
    ) -> None:
        self._framed = self._seen = Desk(topology, is_simulated, site_of)
        self._waiting: list[Early] = []

    def due(self, end: int) -> list[Finding]:
        """What waits for the frame that ends at `end`, as it was found: it belongs to the findings of that frame."""
        return [early.finding for early in self._waiting if early.due < end]

    def observe(self, time: int, end: int, findings: Sequence[Finding], present: Present, now: int) -> list[Change]:
        """Takes all findings of the instant before `end`, those that were due with it too. See Desk.observe."""
        if not self._waiting:
            return self._framed.observe(time, findings, present, now)
        known = self._known()
        left = [early for early in self._waiting if early.due >= end]
        changes = self._framed.observe(time, findings, present, now)
        self._waiting = left
        if left and self._foretold(changes, known):
            return []
        return self._shown(changes, known, now)

    def arrive(self, found: Sequence[Early], now: int) -> list[Change]:
        """Shows findings of events before their frames are closed."""
        if not found:
            return []
        if not self._waiting:
            self._seen = self._framed.copy()
        found = sorted(found, key=lambda early: early.due)
        self._waiting = sorted([*self._waiting, *found], key=lambda early: early.due)
        changes = [change for due, heard in _steps(found) for change in self._seen.foresee(due, heard, now)]
        if len(self._waiting) > MOST_WAITING:
            self._keep()
        return changes

    def report(self, time: int, findings: Sequence[Finding]) -> list[Change]:
        """Takes findings of the pipeline itself at `time`, the wall clock: no frame changes what becomes of them."""
        changes = self._framed.foresee(time, findings, time)
        return self._shown(changes, self._known(), time) if self._waiting else changes

    def acknowledge(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        self._keep()
        return self._framed.acknowledge(incident_id, user, comment, time)

    def comment(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        return self._seen.comment(incident_id, user, comment, time)

    def resolve(self, incident_id: str, user: str, comment: str, time: int) -> Change:
        self._keep()
        return self._framed.resolve(incident_id, user, comment, time)

    @property
    def incidents(self) -> dict[str, Incident]:
        """What people see, by id."""
        return self._seen.incidents

    def blamed(self, incident_id: str) -> list[tuple[str, str]]:
        return self._seen.blamed(incident_id)

    def standing(self, finding: Finding) -> Level | None:
        """The level at which its condition stands in an incident that people see; None: in none."""
        return self._seen.standing(finding)

    def standing_by_frames(self, finding: Finding) -> Level | None:
        """The same by the frames alone."""
        return self._framed.standing(finding)

    def snapshot(self) -> str:
        """All state as JSON; see Desk.snapshot."""
        state = self._framed.as_json()
        if self._waiting:
            state |= {"waiting": [early.as_json() for early in self._waiting], "seen": self._seen.as_json()}
        return json.dumps(state)

    def restore(self, snapshot: str) -> None:
        """Takes the state of a snapshot, also of a version that had one Desk only."""
        data = json.loads(snapshot)
        self._framed.take_over(data)
        self._waiting = [Early.from_json(early) for early in data.get("waiting", ())]
        self._seen = self._framed
        if self._waiting:
            self._seen = self._framed.copy()
            self._seen.take_over(data["seen"])

    def _known(self) -> set[tuple[str, str, int]]:
        """Keys of what people saw before its frame."""
        return {early.finding.key for early in self._waiting}

    def _shown(self, changes: Sequence[Change], known: AbstractSet[tuple[str, str, int]], now: int) -> list[Change]:
        """What people see from now on, and how that differs from what they saw."""
        before = self._seen
        self._framed.keep_opened(before)
        self._seen, more = self._foreseen(now)
        keys: dict[str, list[tuple[str, str, int]]] = {}
        for change in (*changes, *more):
            keys.setdefault(change.incident.id, []).extend(k for k in change.finding_keys if k not in known)
        told = self._seen.changes_since(before, keys, now)
        if self._waiting:
            self._seen.remember(before)
        return told

    def _foretold(self, changes: Sequence[Change], known: AbstractSet[tuple[str, str, int]]) -> bool:
        """Whether people see already all that frames have changed."""
        return all(known >= set(change.finding_keys) and self._seen.shows(change.incident) for change in changes)

    def _foreseen(self, now: int) -> tuple[Desk, list[Change]]:
        """A Desk that has taken what waits, in order of time, and the changes that this made."""
        if not self._waiting:
            return self._framed, []
        desk, changes = self._framed.copy(), []
        for due, heard in _steps(self._waiting):
            changes += desk.foresee(due, heard, now)
        desk.keep_opened(self._seen)
        return desk, changes

    def _keep(self) -> None:
        """Takes what people see for what is, whatever the frames will say of what waits."""
        if self._waiting:
            self._seen.catch_up(self._framed)
            self._framed, self._waiting = self._seen, []


def _steps(waiting: Sequence[Early]) -> Iterator[tuple[int, list[Finding]]]:
    """What is heard, in order of time, with what follows at once."""
    step: list[Finding] = []
    first = 0
    for early in waiting:
        if early.heard is None:
            continue
        if step and early.due - first >= TOGETHER:
            yield first, step
            step = []
        first = first if step else early.due
        step.append(early.heard)
    if step:
        yield first, step


def _finding(row: dict[str, Any]) -> Finding:
    """JSON has no number for what is not finite."""
    return Finding(**{**row, "score": row["score"] or 0.0, "signals": tuple(row["signals"])})
