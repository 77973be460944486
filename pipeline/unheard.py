"""Findings that are told once, hold until they are cleared, and were held back: the end of a mute must bring them up.

An XID is logged once. Its detector tells it for an hour and then leaves it to the Desk, which keeps what holds; under a
mute the Desk never had it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pipeline.model.records import Finding, finite


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
        return json.dumps([finite(dataclasses.asdict(f)) for f in self.findings.values()])

    def restore(self, snapshot: str) -> None:
        """Goes on as if it had never stopped."""
        rows = json.loads(snapshot)
        found = [Finding(**{**row, "score": row["score"] or 0.0, "signals": tuple(row["signals"])}) for row in rows]
        self.findings = {(f.detector, f.entity): f for f in found}
