"""Jobs whose results are in doubt, as findings of wrong results say.

What a device computed since its last right result may be wrong, also in jobs that ended since. Times are event
times (us).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pipeline.model.records import SECOND, Finding, Incident, from_iso

FAMILY = "sdc"
"""Detectors of wrong results: this one, which names the jobs, and those whose names begin with it and `_`."""
LASTS = 600 * SECOND
"""Time for which a finding counts (us): as long as the Desk waits to resolve. An incident keeps what it had."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a finding says. jobs: None: those that its incident reaches.  since: 0: not known.  time: of the finding."""

    jobs: tuple[str, ...] | None
    since: int
    time: int


@dataclass(slots=True)
class DoubtBook:
    """The doubts that hold. of: (detector, entity) -> its doubt."""

    of: dict[tuple[str, str], Doubt] = field(default_factory=dict)

    def note(self, finding: Finding) -> bool:
        """Reads a finding; returns whether it takes a doubt back: its device was not at fault."""
        detector, evidence, key = finding.detector, finding.evidence, (finding.detector, finding.entity)
        if detector.partition("_")[0] != FAMILY:
            return False
        if evidence.get("cleared") is True:  # right again or exchanged: earlier results stay in doubt
            self.of.pop(key, None)
            return evidence.get("retest") == "superseded" and evidence.get("state") != "exchanged"
        if detector == FAMILY:
            jobs, since = tuple(evidence.get("jobs_in_doubt") or ()), _read_time(evidence.get("last_clean_before"))
            self.of[key] = Doubt(jobs, since, finding.time)
        else:
            self.of[key] = Doubt(None, finding.onset, finding.time)
        return False

    def drop_old(self, time: int) -> None:
        """Forgets findings that are no longer repeated."""
        self.of = {key: doubt for key, doubt in self.of.items() if 0 <= time - doubt.time <= LASTS}

    def find(self, incident: Incident, reached: Collection[str]) -> Mapping[str, int]:
        """Returns job -> since when its results are in doubt by an incident, the earliest. reached: jobs on it."""
        found: dict[str, int] = {}
        for (detector, entity), doubt in self.of.items():
            if doubt.jobs is None and detector != incident.detector:
                continue  # evidence in an incident about something else
            if entity == incident.cause or entity in incident.members:
                for job in reached if doubt.jobs is None else doubt.jobs:
                    found[job] = min(filter(None, (doubt.since, found.get(job, 0))), default=0)
        return found


def _read_time(text: object) -> int:
    """Returns a time of the evidence, 0 if it is not known."""
    try:
        return from_iso(str(text))
    except ValueError:
        return 0
