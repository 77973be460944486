"""What findings say about work beyond numbers: it is lost, makes no progress, or its link is down.

A fact about a device counts for the jobs with ranks on it, as `find_reach` finds them: other jobs that its incident
reaches, such as those below the same CDU, may run at full pace. Times are event times (us).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.incidents.jobs import Parts
from pipeline.incidents.reach import find_carriers
from pipeline.model.records import SECOND, Finding, Incident
from pipeline.model.topology import Topology

LASTS = 600 * SECOND
"""Time for which a finding about a lost or hanging part counts (us): as long as the Desk waits to resolve."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What a finding says about an entity beyond numbers: it is lost, makes no progress, or is cut off: its link is
    down, which a job may survive by other links. on: the entity, or its node if that is lost with it."""

    state: Literal["lost", "hanging", "cut"]
    time: int
    text: str
    on: str


def read_fact(finding: Finding) -> Fact | None:
    """Returns what a finding says about lost, hanging or cut-off work; None: nothing. Suspicions say nothing."""
    cause, on = finding.evidence.get("cause"), finding.entity
    if finding.level == "suspect":
        return None
    if finding.detector == "telemetry" and cause in ("host", "power"):
        # a dead host is reported on the GPU that required its reboot
        return Fact("lost", finding.time, finding.summary, str(finding.evidence.get("node") or on))
    if finding.detector == "xid" and ("79" in (finding.evidence.get("xids") or {})):
        return Fact("lost", finding.time, finding.summary, on)
    if finding.detector == "straggler_job" and cause in ("hang", "stall"):
        return Fact("hanging", finding.time, finding.summary, on)
    if finding.detector == "link" and finding.level == "page" and "down_s" in finding.evidence:
        return Fact("cut", finding.time, finding.summary, on)  # a port below a page carries no job, or is not down long
    return None


@dataclass(slots=True)
class FactBook:
    """The facts that hold. of: entity -> what the newest finding says about it."""

    of: dict[str, Fact] = field(default_factory=dict)
    _carriers: dict[str, frozenset[str]] = field(default_factory=dict)  # of what facts are on, at _version
    _version: int = -1

    def note(self, finding: Finding) -> None:
        """Reads a finding."""
        if finding.evidence.get("cleared") is True:
            self.of.pop(finding.entity, None)
        elif (fact := read_fact(finding)) is not None:
            self.of[finding.entity] = fact

    def drop_old(self, time: int) -> None:
        """Forgets findings that are no longer repeated."""
        self.of = {entity: fact for entity, fact in self.of.items() if 0 <= time - fact.time <= LASTS}

    def list_of(self, incident: Incident) -> Mapping[str, Fact]:
        """Returns the facts about the cause and the members of an incident."""
        if not self.of:
            return {}
        return {e: fact for e in (incident.cause, *incident.members) if (fact := self.of.get(e)) is not None}

    def find(self, job: str, told: Mapping[str, Fact], parts: Parts | None, topology: Topology) -> Fact | None:
        """Returns what facts say about a job, losses first. told: about the devices and work of an incident.  parts: of
        the job; None: it is beside the fault, and only facts about the job itself count."""
        found = [fact for fact in told.values() if parts is not None and self._carries(fact.on, parts, topology)]
        found += [fact] if (fact := self.of.get(job)) is not None else []
        return min(found, key=lambda fact: ("lost", "hanging", "cut").index(fact.state), default=None)

    def _carries(self, entity: str, parts: Parts, topology: Topology) -> bool:
        """Returns whether an entity is a rank of a job or carries one."""
        if self._version != topology.device_version:
            self._version, self._carriers = topology.device_version, {}
        if entity not in self._carriers:
            self._carriers[entity] = find_carriers(entity, topology)
        gpus, nodes, ranks = parts
        carriers = self._carriers[entity]
        return entity in ranks or not (carriers.isdisjoint(gpus) and carriers.isdisjoint(nodes))
