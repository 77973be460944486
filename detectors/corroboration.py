"""Corroboration: a finding names a related finding of another detector that explains it.

Only physical explanations count, and only by another sensor: the same signal twice is not corroboration. It changes no
level: each detector weighs its own corroborating signals (`wants`), and findings of others added false pages and no
faults (docs/decisions.md, ablations).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology, kind_of

_HEAT = ("thermal", "thermal_edge", "coolant", "coolant_edge", "coolant_leak")
_CABLE = ("link", "link_stall", "link_pcie", "link_nvlink")
CORROBORATES: Mapping[str, tuple[str, ...]] = {
    "straggler": (*_CABLE, *_HEAT, "power", "xid", "memory"),
    "straggler_inferred": (*_CABLE, *_HEAT, "power", "xid", "memory"),
    "link": ("link", "link_optic", "link_stall"),
    "thermal": ("thermal_edge", "coolant", "coolant_edge", "coolant_leak"),
    "thermal_edge": ("thermal", "coolant", "coolant_edge", "coolant_leak"),
}
"""Detector -> detectors whose findings explain its own. Wrong results are in no line: only digests show them."""
FRESH = 120 * SECOND
"""us, two repeats of a condition: a finding that was not repeated since then no longer holds. Chosen."""
_EXPLAINS_NOTHING = ("group", "doubted", "meter_doubted")
"""Evidence of findings that explain no other: group events without a blamed member, and doubtful instruments."""
LATE = 600 * SECOND
"""us after the suspect from which a finding of heat explains nothing: an effect follows its cause, heat within minutes;
onsets are estimates. Chosen."""
STALE = 3600 * SECOND
"""us before the suspect from which a finding of the plant explains nothing either: two conditions that last for hours
coincide by chance. The heat of a GPU itself comes and goes with its load. Chosen."""
_OWN = ("gpu", "node")  # kinds whose heat is the suspect's own; cooling of many more must be a ticket to explain
Key = tuple[str, str]


class Corroboration:
    """The findings of the last FRESH us, and which of them explains which other."""

    def __init__(self) -> None:
        self._explaining = frozenset(name for names in CORROBORATES.values() for name in names)
        self._active: dict[Key, Finding] = {}

    def corroborate(self, found: Sequence[Finding], time: int, topology: Topology) -> list[Finding]:
        """Returns the findings of an instant, with the finding that explains each, if any, in its evidence."""
        active = {**self._active, **{(f.detector, f.entity): f for f in found}}
        self._active = {k: f for k, f in active.items() if abs(time - f.time) <= FRESH}
        if not any(f.detector in CORROBORATES for f in found):
            return list(found)
        by_key = self._explaining_findings(topology)
        reasons = ((f, self._reason(f, by_key, topology) if f.detector in CORROBORATES else None) for f in found)
        return [f if reason is None else _with_reason(f, reason) for f, reason in reasons]

    def drop(self, key: Key) -> None:
        """Removes a finding that a person called no fault."""
        self._active.pop(key, None)

    def _explaining_findings(self, topology: Topology) -> dict[str, list[Finding]]:
        """Returns the findings that may explain others, by the keys under which they are looked up."""
        by_key: dict[str, list[Finding]] = {}
        for finding in self._active.values():
            if finding.detector in self._explaining and not any(finding.evidence.get(k) for k in _EXPLAINS_NOTHING):
                for key in _keys_of(finding.entity, topology):
                    by_key.setdefault(key, []).append(finding)
        return by_key

    def _reason(self, finding: Finding, by_key: Mapping[str, list[Finding]], topology: Topology) -> Finding | None:
        """Returns the finding that explains this one and began first."""
        wanted, own = CORROBORATES[finding.detector], set(finding.signals)
        found = {
            (f.onset, f.detector, f.entity): f
            for key in _keys_for(finding.entity, topology)
            for f in by_key.get(key, ())
            if f.detector in wanted and (f.detector, f.entity) != (finding.detector, finding.entity)
            if not own & set(f.signals) or _are_cable_ends(finding.entity, f.entity, topology)
            if f.detector not in _HEAT or _can_heat(f, finding)
            if not (finding.detector in CORROBORATES.get(f.detector, ()) and _began_first(finding, f))
        }
        return found[min(found)] if found else None

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns its state as JSON."""
        return [asdict(f) for f in self._active.values()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restores its state from a snapshot."""
        findings = [Finding(**{**f, "signals": tuple(f["signals"])}) for f in state]
        self._active = {(f.detector, f.entity): f for f in findings}


def _with_reason(finding: Finding, reason: Finding) -> Finding:
    by = {"detector": reason.detector, "entity": reason.entity}
    return replace(finding, evidence={**finding.evidence, "corroborated_by": by})


def _can_heat(reason: Finding, suspect: Finding) -> bool:
    """Returns whether heat can explain the suspect: it began at that time, and heat of a plant is at least a ticket.

    A changed set-point is a suspect for hours, and cools hundreds of GPUs: one of them is slow by chance.
    """
    late = reason.onset - suspect.onset
    return late <= LATE and (kind_of(reason.entity) in _OWN or (reason.level != "suspect" and late >= -STALE))


def _began_first(one: Finding, other: Finding) -> bool:
    """Returns whether `one` began first: of two that could explain each other the earlier explains the later."""
    return (one.onset, one.detector, one.entity) < (other.onset, other.detector, other.entity)


def _are_cable_ends(one: str, other: str, topology: Topology) -> bool:
    """Returns whether they are the two ends of a cable, where two devices measure the same signal."""
    return topology.attributes.get(one, {}).get(PEER) == other or topology.attributes.get(other, {}).get(PEER) == one


def _keys_of(entity: str, topology: Topology) -> Iterator[str]:
    """Yields the keys of an explaining finding: its entity, all that feeds it, the far end of its cable."""
    yield f"={entity}"
    for ancestor in topology.ancestors(entity):
        yield f"<{ancestor}"
    if isinstance(peer := topology.attributes.get(entity, {}).get(PEER), str):
        yield f"={peer}"


def _keys_for(entity: str, topology: Topology) -> Iterator[str]:
    """Yields the keys of what may explain an entity: itself, all that feeds it, all that it feeds, its cable's far end.

    Not the other devices of its node: another warm GPU or another port explains nothing here.
    """
    yield f"={entity}"
    for ancestor in topology.ancestors(entity):
        yield f"={ancestor}"
    yield f"<{entity}"
    if isinstance(peer := topology.attributes.get(entity, {}).get(PEER), str):
        yield f"={peer}"
