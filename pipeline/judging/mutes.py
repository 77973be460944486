"""Who may speak of what: the mode of each detector by scope, and mutes with a reason and an end.

What a detector finds is always stored. Whether it opens incidents and pages depends on its mode: `record` stores it,
`notify` opens incidents and tells receivers, `act` also lets acts be proposed. A mute silences one detector (or all)
on one scope (or everywhere) until it expires. Both are applied between detectors and Desk, by event time, so that a
restart comes to the same.

Findings that are told once, hold until they are cleared, and were held back: the end of a mute must bring them up.

An XID is logged once. Its detector tells it for an hour and then leaves it to the Desk, which keeps what holds; under a
mute the Desk never had it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.sections import ANY, Mode, ModeRule
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import LEVELS, SECOND, Finding, Level, iso, to_json
from pipeline.model.topology import Topology, kind_of


@dataclass(slots=True)
class Unheard:
    """The last such finding of each detector about each entity; as many as there are broken devices that are mute."""

    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def note(self, finding: Finding, heard: bool) -> None:
        """Keeps what was held back if nobody will tell it again."""
        cleared = finding.evidence.get("cleared") is True
        if not heard and not cleared and finding.evidence.get("holds") is True:
            self.findings[finding.detector, finding.entity] = finding

    def freed(self, time: int, told: Iterable[Finding], held_back: Callable[[Finding], bool]) -> list[Finding]:
        """Takes out those that nothing holds back any more, dated now, and those of which something new is told."""
        for finding in told:
            self.findings.pop((finding.detector, finding.entity), None)
        free = [f for f in (replace(f, time=time) for f in self.findings.values()) if not held_back(f)]
        for finding in free:
            del self.findings[finding.detector, finding.entity]
        return free

    def snapshot(self) -> str:
        """All of it as JSON; belongs into the transaction that stores what the Desk heard."""
        return json.dumps([to_json(dataclasses.asdict(f)) for f in self.findings.values()])

    def restore(self, snapshot: str) -> None:
        """Goes on as if it had never stopped."""
        rows = json.loads(snapshot)
        found = [Finding(**{**row, "score": row["score"] or 0.0, "signals": tuple(row["signals"])}) for row in rows]
        self.findings = {(f.detector, f.entity): f for f in found}


LONGEST_MUTE = 30 * 86_400 * SECOND
"""Nothing is muted for longer at once: a mute that everybody forgot hides the next fault. Chosen."""
MOST_MUTES = 1000
"""Mutes that may stand at the same time; each is looked at for every finding. Chosen."""

_GROUPS = frozenset({"fleet", "site"})
"""Kinds that findings name and no topology does: what is so everywhere."""

Standing = Callable[[Finding], Level | None]
"""The level at which a condition stands in an open incident; None: in none."""


@dataclass(frozen=True, slots=True)
class Mute:
    """One detector (or *) says nothing about a scope (or *) from `since` until `until` (us), or until it was ended."""

    id: str
    detector: str
    scope: str
    since: int
    until: int
    reason: str
    user: str
    ended: int | None = None
    ended_by: str | None = None

    def holds(self, detector: str, around: Collection[str], time: int) -> bool:
        """Whether it silences a detector about something that is, or lies below, one of `around`."""
        end = self.until if self.ended is None else min(self.until, self.ended)
        return self.since <= time < end and self.detector in (ANY, detector) and self.scope in (ANY, *around)

    def as_json(self) -> dict[str, Any]:
        ended = None if self.ended is None else iso(self.ended)
        times = {"since": iso(self.since), "until": iso(self.until), "ended": ended}
        return {
            "id": self.id,
            "detector": self.detector,
            "scope": self.scope,
            **times,
            "reason": self.reason,
            "user": self.user,
            "ended_by": self.ended_by,
        }


@dataclass
class Voice:
    """The rules of the configuration and the mutes in force."""

    topology: Topology
    rules: Sequence[ModeRule] = ()
    mutes: list[Mute] = field(default_factory=list)
    unheard: Unheard = field(default_factory=Unheard)

    def mode(self, finding: Finding) -> Mode:
        """The rule of the nearest scope; on one scope that of the detector itself before that of all; else notify."""
        around = (finding.entity, *self.topology.ancestors(finding.entity), ANY)
        best: tuple[int, bool] | None = None
        mode: Mode = "notify"
        for rule in self.rules:
            if rule.detector in (ANY, finding.detector) and rule.scope in around:
                rank = (around.index(rule.scope), rule.detector == ANY)
                if best is None or rank <= best:  # of two alike the later line holds, as in most files
                    best, mode = rank, rule.mode
        return mode

    def muted(self, finding: Finding) -> Mute | None:
        """The mute that silences a finding at its time."""
        if not self.mutes:
            return None
        around = (finding.entity, *self.topology.ancestors(finding.entity))
        return next((m for m in self.mutes if m.holds(finding.detector, around, finding.time)), None)

    def judged(self, findings: Sequence[Finding], standing: Standing, time: int) -> tuple[list[Finding], list[Finding]]:
        """All findings, told apart in their evidence where something holds them back, and those that the Desk hears.

        What stands in an open incident already goes on to, though no louder: a mute opens and raises nothing, and it
        does not end what still is. That something was cleared is always heard. What holds although it was told only
        once comes up when nothing holds it back any more.
        """
        findings = [*self.unheard.freed(time, findings, self._held_back), *findings]
        every: list[Finding] = []
        heard: list[Finding] = []
        for finding in findings:
            told, said = self.early(finding, standing)
            every.append(told)
            if said is not None:
                heard.append(said)
            if self._held_back(finding):
                self.unheard.note(finding, said is not None and said.level == finding.level)
        return every, heard

    def early(self, finding: Finding, standing: Standing) -> tuple[Finding, Finding | None]:
        """A finding as `judged` tells it, and what the Desk hears of it, if anything; nothing is kept of it."""
        if not self.rules and not self.mutes:
            return finding, finding
        mute, mode = self.muted(finding), self.mode(finding)
        if mute is None and mode != "record":
            told = _with(finding, mode=mode) if mode == "act" else finding
            return told, told
        why = {"id": mute.id, "reason": mute.reason, "until": iso(mute.until)} if mute is not None else None
        told = _with(finding, muted=why) if why else _with(finding, mode=mode)
        level = finding.level if finding.evidence.get("cleared") is True else standing(finding)
        return told, level and replace(told, level=min(level, finding.level, key=LEVELS.index))

    def _held_back(self, finding: Finding) -> bool:
        if not self.rules and not self.mutes:
            return False
        return self.mode(finding) == "record" or self.muted(finding) is not None

    def forget(self, time: int) -> None:
        """Lets go of mutes that were over before `time`; the store keeps them."""
        self.mutes = [m for m in self.mutes if min(m.until, m.ended or m.until) > time]


def check_rules(rules: Iterable[ModeRule], known: Collection[str]) -> None:
    """Raises ConfigError on a rule for a detector that does not exist: it would silently rule nothing."""
    for rule in rules:
        if rule.detector not in (ANY, *known):
            wanted = f"wanted one of {', '.join(known)}, or {ANY}"
            raise ConfigError(f"[[modes]] detector = {rule.detector!r}: no such detector; {wanted}")


def checked(detector: str, scope: str, seconds: float, reason: str, known: Iterable[str]) -> None:
    """Raises UsageError on a mute that nobody could want: no reason, no end, no such detector."""
    if detector != ANY and detector not in known:
        raise UsageError(f"detector = {detector!r}: no such detector; wanted one of {', '.join(known)}, or {ANY}")
    if scope != ANY and ":" not in scope.strip(":"):
        raise UsageError(f"scope = {scope!r}: wanted an entity such as rack:r12, or {ANY} for everywhere")
    if not 0 < seconds * SECOND <= LONGEST_MUTE:
        days = LONGEST_MUTE // (86_400 * SECOND)
        raise UsageError(f"seconds = {seconds:g}: wanted more than 0 and at most {days} days; renew it if it must last")
    if not reason.strip():
        raise UsageError("reason: is empty; wanted why, for whoever wonders at 3 in the morning")
    if detector == ANY and scope == ANY:
        raise UsageError("detector and scope are both *: that would silence everything; name one of them")


def doubt(scope: str, topology: Topology, sends: Callable[[str], bool]) -> str:
    """What to say of a scope that nobody knows; empty if it is known. It may come yet, so it is no error."""
    above = {e for parents in topology.parents.values() for e in parents}
    known = scope == ANY or kind_of(scope) in _GROUPS or sends(scope) or scope in topology.parents or scope in above
    if known:
        return ""
    near = difflib.get_close_matches(scope, {*topology.parents, *above}, 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"scope = {scope!r}: nothing of that name is known here, so this silences nothing until it comes{hint}"


def _with(finding: Finding, **more: Any) -> Finding:
    return replace(finding, evidence={**finding.evidence, **more})
