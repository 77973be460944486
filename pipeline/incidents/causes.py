"""Rules that decide over the topology which findings have one suspected cause.

A cause explains findings about itself and, if its kind fits the family of the detector, findings about entities below
it. It needs no finding: enough children with the same problem at the same time make it the suspect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.incidents.cases import GENERIC_DETECTORS, SEVERITIES, Case, Condition
from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology, kind_of

REFINE_WINDOW = 120 * SECOND
"""Time after an incident became a ticket or page in which its suspected cause may change. Chosen: slow detectors join,
and a page keeps its cause afterwards."""
ABSORB_WINDOW = 1800 * SECOND
"""Time in which a shared cause absorbs new conditions below it; later ones open their own incidents. Chosen."""
NODE_SILENCE = "telemetry"
"""The detector of silent nodes; a silent site is the cause of its silent nodes."""
SITE_SILENCE = "telemetry_site"
MIN_CHILDREN = 3
"""Affected children that make their parent the suspect: two coincide too often, four delay the page. Chosen."""
MIN_CHILD_SHARE = 0.2
"""Least share of affected children: healthy children clear the parent (SCORE, Kompella et al., NSDI 2005).
Chosen."""
SYMPTOM_FAMILY = "straggler"
"""The family that is a symptom of physical faults (link, power, coolant, clocks) and causes none."""
EXPLAINED_FAMILIES: dict[str, frozenset[str] | None] = {
    "node": None,
    "rack": frozenset({"coolant", "thermal", "power", "telemetry", SYMPTOM_FAMILY}),
    "cdu": frozenset({"coolant", "thermal", SYMPTOM_FAMILY}),
    "leaf": frozenset({"link", "telemetry", SYMPTOM_FAMILY}),
    "rail": frozenset({"link", SYMPTOM_FAMILY}),
    "pdu": frozenset({"power", "telemetry", SYMPTOM_FAMILY}),
}
"""Kinds of shared cause, with the families of detectors that find their symptoms; None: all families."""
SHARED_PLANT = frozenset({"rack", "cdu", "leaf", "rail", "pdu"})
"""Equipment that many nodes depend on: it causes new symptoms for as long as its fault lasts."""
_CHILD_KIND = {"rack": "node", "cdu": "node", "pdu": "node", "leaf": "port", "rail": "port"}
_COUNTED_KINDS = frozenset(_CHILD_KIND.values())  # kinds that are counted as children of a shared cause
_INDEPENDENT_DETECTORS = frozenset({"telemetry_sensor", "telemetry_clock"})
"""Instruments fail independently: several faulty ones do not make their parent the suspect."""
_NEVER_SYMPTOMS = frozenset({"sdc"})  # wrong results do not follow from heat, power or links


def detector_family(detector: str) -> str:
    """Returns a detector's name up to the first underscore: `link` for `link_stall`."""
    return detector.split("_", 1)[0]


@dataclass(frozen=True, slots=True)
class MergeProposal:
    """Cases to merge, since `cause` explains all of them."""

    cause: str
    cases: tuple[Case, ...]


@dataclass(slots=True)
class CauseRules:
    """Rules over one topology; the index derived from it is rebuilt when the topology changes."""

    topology: Topology
    _version: int = -1
    _size: dict[str, int] = field(default_factory=dict)
    _around: dict[str, frozenset[str]] = field(default_factory=dict)

    def find_suspect(self, entity: str) -> str:
        """Returns the suspect of a finding: the entity, the GPU of a rank, or one of the two ends of a link."""
        kind = kind_of(entity)
        if kind == "port":
            return self._link_suspect(entity)
        return (self.topology.ancestor_of_kind(entity, "gpu") if kind == "rank" else None) or entity

    def _link_suspect(self, port: str) -> str:
        """Returns the end that represents the link, a node's port first, so that both ends give one suspect."""
        peer = self.topology.attributes.get(port, {}).get(PEER)
        if not isinstance(peer, str):
            return port
        over = self.topology.ancestor_of_kind
        return min((port, peer), key=lambda e: (over(e, "node") is None, over(e, "leaf") is None, e))

    def list_suspects(self, entity: str) -> tuple[str, ...]:
        """Returns the suspect of a finding and everything above it, nearest first."""
        base = self.find_suspect(entity)
        return (base, *self.topology.ancestors(base))

    def explains(self, cause: str, detector: str, entity: str) -> bool:
        """Returns whether a fault of `cause` can have this finding as a symptom."""
        family, chain = detector_family(detector), self.list_suspects(entity)
        if cause == chain[0]:
            return True
        kind = kind_of(cause)
        if detector in _INDEPENDENT_DETECTORS:
            return kind == "node" and cause in chain
        if kind not in EXPLAINED_FAMILIES:
            return cause in chain and family == SYMPTOM_FAMILY
        allowed = EXPLAINED_FAMILIES[kind]
        reached = cause in chain or (family == SYMPTOM_FAMILY and cause in self._network_around(entity))
        return reached and (allowed is None or family in allowed)

    def can_absorb(self, case: Case, detector: str, entity: str, severity: str) -> bool:
        """Returns whether an open case absorbs a finding below its cause. A finding of higher severity than the case is
        absorbed only as a symptom of a firm cause."""
        if case.incident.cause == self.find_suspect(entity):
            return True
        family = detector_family(detector)
        if family in _NEVER_SYMPTOMS and not self._is_inferred(case):
            return False
        if _is_more_severe(severity, case) and not (
            family == SYMPTOM_FAMILY and (_is_firm(case) or self.has_enough_children(case, detector))
        ):
            return False
        return self.explains(case.incident.cause, detector, entity)

    def can_absorb_at(self, case: Case, time: int) -> bool:
        """Returns whether new conditions may still be caused by the case: while shared plant fails, else for a time."""
        kind, every = kind_of(case.incident.cause), case.conditions.values()
        own = [c for c in every if self.find_suspect(c.entity) == case.incident.cause]
        lasts = kind in SHARED_PLANT and case.incident.severity == "page"
        newest = [c.last for c in own or every] if lasts else [c.onset for c in own]
        return kind not in EXPLAINED_FAMILIES or time - max(case.incident.opened, *newest, 0) <= ABSORB_WINDOW

    def site_covers_nodes(self, case: Case, time: int) -> bool:
        """Returns whether silent nodes belong to the silent site: until REFINE_WINDOW after the site returned."""
        known = case.conditions.get((SITE_SILENCE, case.incident.cause))
        if known is None:  # a part of a site: reported by the detector of silent nodes
            return True
        return (SITE_SILENCE, case.incident.cause) in case.held or time - known.last <= REFINE_WINDOW

    def outlasts_site(self, case: Case, finding: Finding, time: int) -> bool:
        """Returns whether a node is still silent after its site returned, so that it has its own problem."""
        of_site = kind_of(case.incident.cause) == "site"
        return finding.detector == NODE_SILENCE and of_site and not self.site_covers_nodes(case, time)

    def has_enough_children(self, case: Case, detector: str) -> bool:
        """Returns whether enough children of the cause have a problem of the detector's family, also if only
        suspected."""
        cause, family = case.incident.cause, detector_family(detector)
        self._refresh_index()
        alike = (c.entity for c in case.conditions.values() if detector_family(c.detector) == family)
        units = {unit for unit in (self._child_of(cause, e) for e in alike) if unit is not None}
        return kind_of(cause) in EXPLAINED_FAMILIES and len(units) >= max(
            MIN_CHILDREN, MIN_CHILD_SHARE * self._size.get(cause, 0)
        )

    def propose_merge(self, fresh: Sequence[Case], absorbing: Sequence[Case]) -> MergeProposal | None:
        """Returns the merge that explains most cases; None if no two cases belong together.

        fresh:     cases whose cause may still change.
        absorbing: open cases that may absorb others.
        """
        return (
            self._propose_below_cause(fresh, absorbing)
            or self._propose_shared_cause(fresh)
            or self._propose_pair(fresh)
        )

    def _propose_below_cause(self, fresh: Sequence[Case], absorbing: Sequence[Case]) -> MergeProposal | None:
        """Returns a case with the cases below its cause or the slow ranks on its node; the earliest onset comes
        first."""
        of_cause = {c.incident.cause: c for c in absorbing}
        of_node: dict[str | None, list[Case]] = {}
        for case in absorbing:
            of_node.setdefault(self._node_of(case), []).append(case)
        taken: dict[str, list[Case]] = {}
        for other in fresh:
            entity = other.incident.entity
            over = [of_cause[e] for e in (*self.list_suspects(entity), *self._network_around(entity)) if e in of_cause]
            beside = of_node.get(node, []) if (node := self._node_of(other)) else []
            for case in {c.incident.id: c for c in (*over, *beside)}.values():
                if case is not other and self._can_absorb_case(case, other):
                    taken.setdefault(case.incident.id, []).append(other)
        takers = [c for c in absorbing if c.incident.id in taken]
        if not takers:
            return None
        first = min(takers, key=_age_order)
        return MergeProposal(first.incident.cause, (first, *taken[first.incident.id]))

    def _can_absorb_case(self, case: Case, other: Case) -> bool:
        if all(
            self.can_absorb(case, c.detector, c.entity, other.incident.severity) for c in other.deciding_conditions()
        ):
            return True
        symptoms = all(detector_family(c.detector) == SYMPTOM_FAMILY for c in other.deciding_conditions())
        node = self._node_of(case)
        return (
            symptoms
            and bool(_families_of(case) - {SYMPTOM_FAMILY} - _NEVER_SYMPTOMS - GENERIC_DETECTORS)
            and (_is_firm(case) or not _is_more_severe(other.incident.severity, case))
            and node is not None
            and node == self._node_of(other)
        )

    def _node_of(self, case: Case) -> str | None:
        return self.topology.ancestor_of_kind(case.incident.cause, "node")

    def _propose_shared_cause(self, fresh: Sequence[Case]) -> MergeProposal | None:
        """Returns the cause that explains cases of most children; of equals the one with the fewest children."""
        groups: dict[str, list[Case]] = {}
        for case in fresh:
            for factor in self._possible_causes(case):
                groups.setdefault(factor, []).append(case)
        found = [
            MergeProposal(factor, mine)
            for factor, cases in groups.items()
            if (mine := self._select_cases(factor, cases))
        ]
        key = lambda f: (-len(self._affected_children(f.cause, f.cases)), self._size.get(f.cause, 0), f.cause)  # noqa: E731
        return min(found, key=key, default=None)

    def _possible_causes(self, case: Case) -> set[str]:
        """Returns the shared causes that explain all deciding conditions of a case."""
        over = [
            {
                f
                for f in (*self.list_suspects(c.entity), *self._network_around(c.entity))
                if self._can_be_shared_cause(f, c)
            }
            for c in case.deciding_conditions()
        ]
        return set.intersection(*over)

    def _can_be_shared_cause(self, factor: str, condition: Condition) -> bool:
        return kind_of(factor) in EXPLAINED_FAMILIES and self.explains(factor, condition.detector, condition.entity)

    def _select_cases(self, cause: str, group: Sequence[Case]) -> tuple[Case, ...]:
        """Returns the cases of a group that are enough for the cause; suspects of another family do not count."""
        firm = [c for c in group if c.incident.severity != "watch"]
        kinds = {family for case in firm for family in _families_of(case)}
        suspects = [c for c in group if c.incident.severity == "watch"]
        if self._are_enough(cause, [*firm, *(c for c in suspects if not firm or _families_of(c) & kinds)]):
            return tuple(group)
        return tuple(suspects) if self._are_enough(cause, suspects) else ()

    def _are_enough(self, cause: str, group: Sequence[Case]) -> bool:
        """Returns whether enough children are affected, of all and of those that no other shared cause explains yet."""
        single = [c for c in group if not self._is_inferred(c) and c.incident.cause != cause]
        share = MIN_CHILD_SHARE * self._size.get(cause, 0)
        return (
            len(group) > 1
            and len(self._affected_children(cause, single)) >= MIN_CHILDREN
            and len(self._affected_children(cause, group)) >= max(MIN_CHILDREN, share)
        )

    def _is_inferred(self, case: Case) -> bool:
        return all(self.find_suspect(c.entity) != case.incident.cause for c in case.conditions.values())

    def _propose_pair(self, fresh: Sequence[Case]) -> MergeProposal | None:
        """Returns two suspects on one node that corroborate each other, with the node as cause."""
        lone: dict[str, list[Case]] = {}
        for case in sorted(fresh, key=_age_order):
            if case.incident.severity == "watch" and (node := self._node_of(case)):
                lone.setdefault(node, []).append(case)
        for node, cases in lone.items():
            for i, a in enumerate(cases):
                for b in cases[:i]:
                    if Case(a.incident, {**b.conditions, **a.conditions}).is_corroborated():
                        return MergeProposal(node, (b, a))
        return None

    def _affected_children(self, cause: str, cases: Iterable[Case]) -> set[str]:
        """Returns the affected children: all members of an inferred case, the cause of any other case."""
        blamed = (
            e for case in cases for e in (case.incident.members if self._is_inferred(case) else (case.incident.cause,))
        )
        return {u for u in (self._child_of(cause, e) for e in blamed) if u is not None}

    def _child_of(self, cause: str, entity: str) -> str | None:
        """Returns the child of `cause` that a finding is about; None for the cause itself."""
        if entity == cause:
            return None
        kind = _CHILD_KIND.get(kind_of(cause))
        unit = entity if kind is None else self.topology.ancestor_of_kind(entity, kind)
        return None if unit is None else self.find_suspect(unit)

    def _network_around(self, entity: str) -> frozenset[str]:
        """Returns the leaves and rails of the devices on the entity's node."""
        self._refresh_index()
        return self._around.get(self.topology.ancestor_of_kind(entity, "node") or "", frozenset())

    def _refresh_index(self) -> None:
        if self._version == self.topology.version:
            return
        self._version = self.topology.version
        units: dict[str, set[str]] = {}
        around: dict[str, set[str]] = {}
        alike = set()  # parents already seen: a node's sensors, links and services share them
        for entity, parents in self.topology.parents.items():
            if kind_of(entity) not in _COUNTED_KINDS:
                if parents in alike:
                    continue
                alike.add(parents)
            node = self.topology.ancestor_of_kind(entity, "node")
            for factor in self.topology.ancestors(entity):
                kind = kind_of(factor)
                if kind in EXPLAINED_FAMILIES and (unit := self._child_of(factor, entity)) is not None:
                    units.setdefault(factor, set()).add(unit)
                if kind in ("leaf", "rail") and node is not None:
                    around.setdefault(node, set()).add(factor)
        self._size = {factor: len(found) for factor, found in units.items() if kind_of(factor) != "node"}
        self._around = {node: frozenset(found) for node, found in around.items()}


def _families_of(case: Case) -> set[str]:
    return {detector_family(c.detector) for c in case.conditions.values()}


def _is_firm(case: Case) -> bool:
    """Returns whether the case has a finding above suspect from a specific detector."""
    return any(c.level != "suspect" and c.detector not in GENERIC_DETECTORS for c in case.conditions.values())


def _is_more_severe(severity: str, case: Case) -> bool:
    return SEVERITIES.index(severity) > SEVERITIES.index(case.incident.severity)


def _age_order(case: Case) -> tuple[int, str]:
    """Sorts by onset, then id."""
    return (case.incident.onset, case.incident.id)
