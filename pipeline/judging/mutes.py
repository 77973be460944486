"""Modes, mutes and the page budget: which findings reach the Desk, and whether they page.

All findings are stored. The mode of a detector decides what else happens: `record` nothing, `notify` opens incidents
and sends alerts, `act` also proposes actions. A mute suppresses one detector (or all) on one scope (or everywhere)
until it expires. Both are applied by event time between detectors and Desk, so that a restart gives the same result.

Some findings are reported once and then hold until they are cleared, such as an XID. If a mute suppresses one, it is
kept and released when the mute ends.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.sections import ANY, Mode, ModeRule
from pipeline.judging.page_budget import PageBudget
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.places import list_place
from pipeline.model.records import LEVELS, SECOND, Finding, Level, iso, to_json
from pipeline.model.topology import Topology, kind_of


@dataclass(slots=True)
class HeldFindings:
    """Suppressed findings that hold: the last of each detector and entity. Bounded by the number of muted devices."""

    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def keep(self, finding: Finding, admitted: bool) -> None:
        """Keeps a suppressed finding that holds, since its detector will not report it again."""
        cleared = finding.evidence.get("cleared") is True
        if not admitted and not cleared and finding.evidence.get("holds") is True:
            self.findings[finding.detector, finding.entity] = finding

    def release(self, time: int, new: Iterable[Finding], is_suppressed: Callable[[Finding], bool]) -> list[Finding]:
        """Removes and returns the findings that are no longer suppressed, dated `time`. Drops those with new
        findings."""
        for finding in new:
            self.findings.pop((finding.detector, finding.entity), None)
        free = [f for f in (replace(f, time=time) for f in self.findings.values()) if not is_suppressed(f)]
        for finding in free:
            del self.findings[finding.detector, finding.entity]
        return free

    def snapshot(self) -> str:
        """Returns all state as JSON, to be stored in the transaction of the changes."""
        return json.dumps([to_json(dataclasses.asdict(f)) for f in self.findings.values()])

    def restore(self, snapshot: str) -> None:
        """Restores the state of a snapshot."""
        rows = json.loads(snapshot)
        found = [Finding(**{**row, "score": row["score"] or 0.0, "signals": tuple(row["signals"])}) for row in rows]
        self.findings = {(f.detector, f.entity): f for f in found}


MAX_MUTE_US = 30 * 86_400 * SECOND
"""Longest mute, 30 days: a forgotten mute hides the next fault. Chosen."""
MAX_MUTES = 1000
"""Most active mutes; each is compared with every finding. Chosen."""

SHOWN_UNKNOWN = 3
"""Unknown entities that a warning names. Chosen: a misspelt one is among them."""

_WHOLE_SITE = "site:all"
"""What findings name that are about no part of the site."""

OpenLevel = Callable[[Finding], Level | None]
"""Returns the level of a condition in an open incident, None if it is in none."""


@dataclass(frozen=True, slots=True)
class Mute:
    """A mute of one detector (or *) on one scope (or *) from `since` until `until` (us), or until it was ended."""

    id: str
    detector: str
    scope: str
    since: int
    until: int
    reason: str
    user: str
    ended: int | None = None
    ended_by: str | None = None

    @property
    def version(self) -> int:
        """1, and 2 after it was ended: nothing else changes a mute."""
        return 1 if self.ended is None else 2

    def applies_to(self, detector: str, around: Collection[str], time: int) -> bool:
        """Returns whether it mutes a detector at `time`. around: the entity and everything above it."""
        end = self.until if self.ended is None else min(self.until, self.ended)
        return self.since <= time < end and self.detector in (ANY, detector) and self.scope in (ANY, *around)

    def as_json(self) -> dict[str, Any]:
        """Returns the mute in the form of the API."""
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
            "version": self.version,
        }


@dataclass
class FindingFilter:
    """Applies the rules of [[modes]] and the active mutes to findings. site: the pipeline's; it covers everything."""

    topology: Topology
    rules: Sequence[ModeRule] = ()
    mutes: list[Mute] = field(default_factory=list)
    held: HeldFindings = field(default_factory=HeldFindings)
    budget: PageBudget = field(default_factory=PageBudget)
    site: str = ""

    def _list_around(self, entity: str) -> tuple[str, ...]:
        """Returns an entity and all that it is a part of, nearest first; the last is the site of the pipeline."""
        return (*list_place(entity, self.topology), f"site:{self.site}")

    def find_mode(self, finding: Finding) -> Mode:
        """Returns the mode of the rule with the nearest scope, on one scope the detector's own; `notify` without a
        rule."""
        around = (*self._list_around(finding.entity), ANY)
        best: tuple[int, bool] | None = None
        mode: Mode = "notify"
        for rule in self.rules:
            if rule.detector in (ANY, finding.detector) and rule.scope in around:
                rank = (around.index(rule.scope), rule.detector == ANY)
                if best is None or rank <= best:  # of two equal rules the later one applies
                    best, mode = rank, rule.mode
        return mode

    def find_mute(self, finding: Finding) -> Mute | None:
        """Returns the mute that applies to a finding at its time, None if there is none."""
        if not self.mutes:
            return None
        around = self._list_around(finding.entity)
        return next((m for m in self.mutes if m.applies_to(finding.detector, around, finding.time)), None)

    def filter_findings(
        self, findings: Sequence[Finding], open_level: OpenLevel, time: int
    ) -> tuple[list[Finding], list[Finding]]:
        """Returns (all findings, findings for the Desk); suppressed findings name mute or mode in their evidence.

        Already-open conditions still reach the incident but cannot raise its severity. Cleared findings always pass. A
        held finding is released when neither mute nor mode suppresses it any more.
        """
        findings = [*self.held.release(time, findings, self._is_suppressed), *findings]
        every: list[Finding] = []
        admitted: list[Finding] = []
        for finding in findings:
            annotated, passed = self.annotate(finding, open_level)
            every.append(annotated)
            if passed is not None:
                admitted.append(passed)
            if self._is_suppressed(finding):
                self.held.keep(finding, passed is not None and passed.level == finding.level)
        return every, admitted

    def annotate(self, finding: Finding, open_level: OpenLevel) -> tuple[Finding, Finding | None]:
        """Returns (the finding with mute or mode in its evidence, the finding for the Desk or None). Keeps no state."""
        if self.budget.lowers(finding.detector, finding.level):
            finding = _with(finding, over_budget=True)
            annotated, passed = self._annotate(finding, open_level)
            return annotated, passed and replace(passed, level=min(passed.level, "ticket", key=LEVELS.index))
        return self._annotate(finding, open_level)

    def _annotate(self, finding: Finding, open_level: OpenLevel) -> tuple[Finding, Finding | None]:
        """Returns what `annotate` does, as far as modes and mutes decide it."""
        if not self.rules and not self.mutes:
            return finding, finding
        mute, mode = self.find_mute(finding), self.find_mode(finding)
        if mute is None and mode != "record":
            annotated = _with(finding, mode=mode) if mode == "act" else finding
            return annotated, annotated
        why = {"id": mute.id, "reason": mute.reason, "until": iso(mute.until)} if mute is not None else None
        annotated = _with(finding, muted=why) if why else _with(finding, mode=mode)
        level = finding.level if finding.evidence.get("cleared") is True else open_level(finding)
        return annotated, level and replace(annotated, level=min(level, finding.level, key=LEVELS.index))

    def _is_suppressed(self, finding: Finding) -> bool:
        if not self.rules and not self.mutes:
            return False
        return self.find_mode(finding) == "record" or self.find_mute(finding) is not None

    def drop_expired(self, time: int) -> None:
        """Drops mutes that ended before `time`; the store keeps them."""
        self.mutes = [m for m in self.mutes if min(m.until, m.ended or m.until) > time]


def check_rules(rules: Iterable[ModeRule], known: Collection[str], source: str = "configuration") -> None:
    """Raises ConfigError on a rule for an unknown detector. source: the file, for the message."""
    for rule in rules:
        if rule.detector not in (ANY, *known):
            expected = f"expected one of {', '.join(known)}, or {ANY}"
            raise ConfigError(f"{source}: [[modes]] detector = {rule.detector!r}: no such detector; {expected}")


def check_mute(detector: str, scope: str, seconds: float, reason: str, known: Iterable[str]) -> None:
    """Raises UsageError on an invalid mute: unknown detector, bad scope or duration, no reason, or everything muted."""
    if detector != ANY and detector not in known:
        raise UsageError(f"detector = {detector!r}: no such detector; expected one of {', '.join(known)}, or {ANY}")
    if scope != ANY and ":" not in scope.strip(":"):
        raise UsageError(f"scope = {scope!r}: expected an entity such as rack:r12, or {ANY} for everywhere")
    if not 0 < seconds * SECOND <= MAX_MUTE_US:
        days = MAX_MUTE_US // (86_400 * SECOND)
        raise UsageError(
            f"seconds = {seconds:g}: expected more than 0, at most {days} days; renew the mute if necessary"
        )
    if not reason.strip():
        raise UsageError("reason: is empty; expected the reason, for the next person on call")
    if detector == ANY and scope == ANY:
        raise UsageError("detector and scope are both *, which mutes everything; name a detector or a scope")


def warn_unknown_scopes(scopes: Sequence[str], topology: Topology, sends: Callable[[str], bool], site: str) -> str:
    """Returns a warning that names the first unknown scopes; empty if all are known. It is not an error, since an
    entity may appear later. site: the pipeline's."""
    unknown, above = find_unknown_scopes(scopes, topology, sends, site), _list_above(topology)
    said = []
    for scope in unknown[:SHOWN_UNKNOWN]:
        if kind_of(scope) == "site":
            said.append(f"scope = {scope!r}: not the site of this pipeline, site:{site}; covers nothing below it")
            continue
        near = difflib.get_close_matches(scope, {*topology.parents, *above}, 1) if len(unknown) == 1 else []
        hint = f"; did you mean '{near[0]}'?" if near else ""
        said.append(f"scope = {scope!r}: unknown entity; no effect until it appears{hint}")
    more = f"; and {len(unknown) - SHOWN_UNKNOWN} more" if len(unknown) > SHOWN_UNKNOWN else ""
    return "; ".join(said) + more


def find_unknown_scopes(
    scopes: Sequence[str], topology: Topology, sends: Callable[[str], bool], site: str
) -> list[str]:
    """Returns the scopes that no agent and no source of topology names. site: the pipeline's."""
    named, above = {ANY, _WHOLE_SITE, f"site:{site}"}, _list_above(topology)

    def is_known(scope: str) -> bool:
        return (
            scope in named or kind_of(scope) == "fleet" or scope in topology.parents or scope in above or sends(scope)
        )

    return [scope for scope in scopes if not is_known(scope)]


def _list_above(topology: Topology) -> set[str]:
    return {e for parents in topology.parents.values() for e in parents}


def _with(finding: Finding, **more: Any) -> Finding:
    return replace(finding, evidence={**finding.evidence, **more})
