"""Second witnesses: a finding says which finding of a family that explains it stands on something related.

Only what explains it physically counts, and only through another sensor: the same signal twice is no second witness.
It is said and moves no level: each detector weighs its own witnesses (`wants`), and what others found added false pages
and no fault to what was paged (docs/decisions.md, ablations).
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
"""Detector -> those whose findings explain its own. Wrong results are in no line: only digests speak of them."""
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

    def __init__(self) -> None:
        self._explaining = frozenset(name for names in CORROBORATES.values() for name in names)
        self._active: dict[Key, Finding] = {}

    def explained(self, found: Sequence[Finding], time: int, topology: Topology) -> list[Finding]:
        """The findings of an instant, each with what explains it, if anything does."""
        active = {**self._active, **{(f.detector, f.entity): f for f in found}}
        self._active = {k: f for k, f in active.items() if abs(time - f.time) <= FRESH}
        if not any(f.detector in CORROBORATES for f in found):
            return list(found)
        places = self._places(topology)
        reasons = ((f, self._reason(f, places, topology) if f.detector in CORROBORATES else None) for f in found)
        return [f if reason is None else _borne_out(f, reason) for f, reason in reasons]

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
        wanted, own = CORROBORATES[finding.detector], set(finding.signals)
        found = {
            (f.onset, f.detector, f.entity): f
            for place in _sought(finding.entity, topology)
            for f in places.get(place, ())
            if f.detector in wanted and (f.detector, f.entity) != (finding.detector, finding.entity)
            if not own & set(f.signals) or _ends(finding.entity, f.entity, topology)
            if f.detector not in _HEAT or _heats(f, finding)
            if not (finding.detector in CORROBORATES.get(f.detector, ()) and _first(finding, f))
        }
        return found[min(found)] if found else None

    def snapshot(self) -> list[dict[str, Any]]:
        return [asdict(f) for f in self._active.values()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        findings = [Finding(**{**f, "signals": tuple(f["signals"])}) for f in state]
        self._active = {(f.detector, f.entity): f for f in findings}


def _borne_out(finding: Finding, reason: Finding) -> Finding:
    by = {"detector": reason.detector, "entity": reason.entity}
    summary = f"{finding.summary}; {reason.detector} on {reason.entity} explains it"
    return replace(finding, evidence={**finding.evidence, "corroborated_by": by}, summary=summary)


def _heats(reason: Finding, suspect: Finding) -> bool:
    """Whether heat there can be what is suspected here: it began about then, and of a plant it is more than a suspect.

    A set-point that was moved is a suspect for hours, and hundreds of GPUs hang on it: one of them is slow by chance.
    """
    late = reason.onset - suspect.onset
    return late <= LATE and (kind_of(reason.entity) in _OWN or (reason.level != "suspect" and late >= -STALE))


def _first(one: Finding, other: Finding) -> bool:
    """Whether it began first: of two that could explain each other the earlier explains the later, and not both."""
    return (one.onset, one.detector, one.entity) < (other.onset, other.detector, other.entity)


def _ends(one: str, other: str, topology: Topology) -> bool:
    """Whether they are the two ends of a cable, which count the same signal by two devices."""
    return topology.attributes.get(one, {}).get(PEER) == other or topology.attributes.get(other, {}).get(PEER) == one


def _at(entity: str, topology: Topology) -> Iterator[str]:
    """Where an explaining finding is found: as itself, below whatever feeds it, at its cable's far end."""
    yield f"={entity}"
    for above in topology.ancestors(entity):
        yield f"<{above}"
    if isinstance(peer := topology.attributes.get(entity, {}).get(PEER), str):
        yield f"={peer}"


def _sought(entity: str, topology: Topology) -> Iterator[str]:
    """Where an explanation is looked for: itself, all that feeds it, all that it feeds, its cable's far end.

    Not what else is in its node: another GPU that is warm, or another port, explains nothing here.
    """
    yield f"={entity}"
    for above in topology.ancestors(entity):
        yield f"={above}"
    yield f"<{entity}"
    if isinstance(peer := topology.attributes.get(entity, {}).get(PEER), str):
        yield f"={peer}"
