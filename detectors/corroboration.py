"""Two witnesses: a suspect becomes a page when a finding of a family that explains it stands on something related.

Only what explains it physically counts, and only through another sensor: the same signal twice is no second witness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline.links import PEER
from pipeline.records import SECOND, Finding
from pipeline.topology import Topology, kind_of

_HEAT = ("thermal", "thermal_edge", "coolant", "coolant_edge", "coolant_leak")
_CABLE = ("link", "link_stall", "link_pcie", "link_nvlink")
CORROBORATES: Mapping[str, tuple[str, ...]] = {
    "straggler": (*_CABLE, *_HEAT, "power", "xid", "memory"),
    "straggler_inferred": (*_CABLE, *_HEAT, "power", "xid", "memory"),
    "link": ("link", "link_optic", "link_stall"),
    "thermal": ("thermal_edge", "coolant", "coolant_edge", "coolant_leak", "straggler", "straggler_inferred"),
    "thermal_edge": ("thermal", "coolant", "coolant_edge", "coolant_leak"),
}
"""Detector -> those whose findings make its suspect a page. Wrong results are in no line: only digests page there."""
FRESH = 120 * SECOND
"""Two repeats of a condition: what was not said since then no longer holds. Chosen."""
_BLAMES_NOBODY = ("group", "doubted", "meter_doubted")
"""Evidence of findings that explain nothing else: many that are off alike, of whom nobody is blamed, and instruments
that may lie."""
LATE = 600 * SECOND
"""A finding of heat that began so much later than the suspect explains nothing: an effect follows its cause, and heat
does so within minutes; onsets are estimates. Chosen."""
STALE = 3600 * SECOND
"""A plant's finding that had begun so long before the suspect explains nothing either: two conditions that last for
hours meet by chance. What a GPU's own heat does comes and goes with its load. Chosen."""
_OWN = ("gpu", "node")  # whose heat is a suspect's own; what cools many more must be told by itself before it explains
Key = tuple[str, str]


class Corroboration:
    """What was found lately, and what of it bears out what else. State is bounded by FRESH."""

    def __init__(self, pairs: Mapping[str, tuple[str, ...]] = CORROBORATES) -> None:
        self.pairs = pairs
        self._explaining = frozenset(name for names in pairs.values() for name in names)
        self._active: dict[Key, Finding] = {}

    def raised(self, found: Sequence[Finding], time: int, topology: Topology) -> list[Finding]:
        """The findings of an instant, suspects raised where something explains them, those that wait since then too."""
        fresh = {(f.detector, f.entity): f for f in found}
        active = {**self._active, **fresh}
        self._active = {k: f for k, f in active.items() if abs(time - f.time) <= FRESH}
        waiting = {k for k, f in self._active.items() if f.level == "suspect" and f.detector in self.pairs}
        places = self._places(topology) if waiting else {}
        reasons = {k: self._reason(self._active[k], places, topology) for k in self._active if k in waiting}
        for key, reason in reasons.items():
            if reason is not None:
                self._active[key] = _borne_out(self._active[key], reason, time)
        raised = [key for key, reason in reasons.items() if reason is not None]
        told = [f for f in found if f is not fresh[f.detector, f.entity] or (f.detector, f.entity) not in raised]
        return [*told, *(self._active[key] for key in raised)]

    def forget(self, key: Key) -> None:
        """A person said that it is no fault."""
        self._active.pop(key, None)

    def _places(self, topology: Topology) -> dict[str, list[Finding]]:
        """What may explain something, by where one would look for it."""
        places: dict[str, list[Finding]] = {}
        for finding in self._active.values():
            if finding.detector in self._explaining and not any(finding.evidence.get(k) for k in _BLAMES_NOBODY):
                for place in _at(finding.entity, topology):
                    places.setdefault(place, []).append(finding)
        return places

    def _reason(self, finding: Finding, places: Mapping[str, list[Finding]], topology: Topology) -> Finding | None:
        """The finding that explains this one and began first."""
        wanted, own = self.pairs[finding.detector], set(finding.signals)
        found = {
            (f.onset, f.detector, f.entity): f
            for place in _sought(finding.entity, topology)
            for f in places.get(place, ())
            if f.detector in wanted and (f.detector, f.entity) != (finding.detector, finding.entity)
            if not own & set(f.signals) or _ends(finding.entity, f.entity, topology)
            if f.detector not in _HEAT or _heats(f, finding)
        }
        return found[min(found)] if found else None

    def snapshot(self) -> list[dict[str, Any]]:
        return [asdict(f) for f in self._active.values()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        findings = [Finding(**{**f, "signals": tuple(f["signals"])}) for f in state]
        self._active = {(f.detector, f.entity): f for f in findings}


def _borne_out(finding: Finding, reason: Finding, time: int) -> Finding:
    by = {"detector": reason.detector, "entity": reason.entity}
    summary = f"{finding.summary}; {reason.detector} on {reason.entity} explains it"
    evidence = {**finding.evidence, "corroborated_by": by}
    onset = min(finding.onset, time)  # the clock may have gone back
    return replace(finding, time=time, onset=onset, level="page", evidence=evidence, summary=summary)


def _heats(reason: Finding, suspect: Finding) -> bool:
    """Whether heat there can be what is suspected here: it began about then, and of a plant it is more than a suspect.

    A set-point that was moved is a suspect for hours, and hundreds of GPUs hang on it: one of them is slow by chance.
    """
    late = reason.onset - suspect.onset
    return late <= LATE and (kind_of(reason.entity) in _OWN or (reason.level != "suspect" and late >= -STALE))


def _ends(one: str, other: str, topology: Topology) -> bool:
    """Whether they are the two ends of a cable, which count the same signal by two devices."""
    return topology.attributes.get(one, {}).get(PEER) == other or topology.attributes.get(other, {}).get(PEER) == one


def _at(entity: str, topology: Topology) -> Iterator[str]:
    """Where an explaining finding is found: as itself, below whatever feeds it, in its node, at its cable's far end."""
    yield f"={entity}"
    for above in topology.above(entity):
        yield f"<{above}"
    if (node := topology.above_of_kind(entity, "node")) is not None:
        yield f"@{node}"
    if isinstance(peer := topology.attributes.get(entity, {}).get(PEER), str):
        yield f"={peer}"


def _sought(entity: str, topology: Topology) -> Iterator[str]:
    """Where a suspect looks: itself, all that feeds it, all that it feeds, its node, its cable's far end."""
    yield f"={entity}"
    for above in topology.above(entity):
        yield f"={above}"
    yield f"<{entity}"
    if (node := topology.above_of_kind(entity, "node")) is not None:
        yield f"@{node}"
    if isinstance(peer := topology.attributes.get(entity, {}).get(PEER), str):
        yield f"={peer}"
