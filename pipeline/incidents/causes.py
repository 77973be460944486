"""Rules that decide over the topology which findings have one suspected cause.

A cause explains findings about itself and, if its kind fits the family of the detector, findings about entities below
it. It needs no finding: it becomes the suspect if one fault of it is more likely than independent faults of its members
(pipeline.incidents.likelihood). Members that no cause explains stay incidents of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from pipeline.incidents.cases import (
    GENERIC_DETECTORS,
    PAIR_WINDOW,
    Case,
    Condition,
    age_order,
    detector_family,
    families_of,
)
from pipeline.incidents.likelihood import (
    BaseRates,
    GroupOdds,
    Rate,
    SharedCause,
    describe_odds,
    describe_span,
    weigh_group,
    weigh_pair,
)
from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import WORK, Topology, kind_of

REFINE_WINDOW = 120 * SECOND
"""Time after an incident became a ticket or page in which its suspected cause may change. Chosen: slow detectors join,
and a page keeps its cause afterwards."""
ABSORB_WINDOW = 1800 * SECOND
"""Time in which a shared cause absorbs new conditions below it; later ones open their own incidents. Chosen."""
NODE_SILENCE = "telemetry"
"""The detector of silent nodes; a silent site is the cause of its silent nodes."""
SITE_SILENCE = "telemetry_site"
SYMPTOM_FAMILY = "straggler"
"""The family that is a symptom of physical faults (link, power, coolant, clocks) and causes none."""
EXPLAINED_FAMILIES: dict[str, frozenset[str] | None] = {
    "node": None,
    "rack": frozenset({"coolant", "thermal", "power", "telemetry", SYMPTOM_FAMILY}),
    "row": frozenset({"thermal", SYMPTOM_FAMILY}),
    "cdu": frozenset({"coolant", "thermal", SYMPTOM_FAMILY}),
    "leaf": frozenset({"link", "telemetry", SYMPTOM_FAMILY}),
    "rail": frozenset({"link", SYMPTOM_FAMILY}),
    "pdu": frozenset({"power", "telemetry", SYMPTOM_FAMILY}),
}
"""Kinds of shared cause, with the families of detectors that find their symptoms; None: all families."""
SHARED_PLANT = frozenset({"rack", "row", "cdu", "leaf", "rail", "pdu"})
"""Equipment that many nodes depend on: it causes new symptoms for as long as its fault lasts."""
_CHILD_KIND = {"rack": "node", "row": "node", "cdu": "node", "pdu": "node", "leaf": "port", "rail": "port"}
MOST_SILENT = 30
"""Silent units counted for each affected one: more than outweigh it at the quietest site, where it takes
ln(0.5 / (LEAST_RATE WINDOW / 8)) / ln 2 = 21 for one of eight GPUs."""
_COUNTED_KINDS = frozenset(_CHILD_KIND.values())  # kinds that are counted as children of a shared cause
_INDEPENDENT_DETECTORS = frozenset({"telemetry_sensor", "telemetry_clock"})
"""Instruments fail independently: several faulty ones do not make their parent the suspect."""
_AIR = "thermal_inlet"  # intake air, which no coolant loop warms
_INSTRUMENTS = "telemetry"  # family of suspects that corroborate none: wrong readings explain others, and prove nothing
_SLOW_NOTHING = frozenset({"memory"})  # corrected errors cost no time, and others end the job
_SUPPLIES, _REASONS = frozenset({"rack", "row", "cdu", "pdu"}), "gpu.throttle_reasons"  # heat or lost power sets these
_NEVER_SYMPTOMS = frozenset({"sdc"})  # wrong results do not follow from heat, power or links


@dataclass(frozen=True, slots=True)
class MergeProposal:
    """Cases to merge, since `cause` explains all of them. reason: why, where no finding names the cause."""

    cause: str
    cases: tuple[Case, ...]
    reason: str = ""


@dataclass(slots=True)
class CauseRules:
    """Rules over one topology; the index derived from it is rebuilt when the topology changes.

    rates:        how often a condition begins by chance.
    is_monitored: whether an entity sends telemetry of its own; without it, all do.
    """

    topology: Topology
    rates: BaseRates = field(default_factory=BaseRates)
    is_monitored: Callable[[str], bool] | None = None
    _version: int = -1
    _chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _shared: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    _units: dict[str, set[str]] = field(default_factory=dict)
    _around: dict[str, frozenset[str]] = field(default_factory=dict)
    _number: Counter[str] = field(default_factory=Counter)

    def start_instant(self, time: int, is_monitored: Callable[[str], bool] | None) -> None:
        """Sets what is monitored now, and adds the time since the last instant to the time observed."""
        self.is_monitored = is_monitored
        self.rates.advance(time)

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
        self._refresh_index()
        if (known := self._chains.get(entity)) is None:
            base = self.find_suspect(entity)
            known = self._chains[entity] = (base, *self.topology.ancestors(base))
        return known

    def explains(self, cause: str, detector: str, entity: str) -> bool:
        """Returns whether a fault of `cause` can have this finding as a symptom."""
        family, chain = detector_family(detector), self.list_suspects(entity)
        if cause == chain[0]:
            return True
        kind = kind_of(cause)
        if detector in _INDEPENDENT_DETECTORS or (detector == _AIR and kind == "cdu"):
            return kind == "node" and cause in chain
        if kind not in EXPLAINED_FAMILIES:
            return cause in chain and family == SYMPTOM_FAMILY
        allowed = EXPLAINED_FAMILIES[kind]
        reached = cause in chain or (family == SYMPTOM_FAMILY and cause in self.network_around(entity))
        return reached and (allowed is None or family in allowed)

    def can_absorb(self, case: Case, symptom: Finding | Condition, severity: str, began: int) -> bool:
        """Returns whether an open case absorbs a finding below its cause: not what began long before, what is more
        severe than a cause that is not firm, or what is slow long after coolant or power failed and says not why."""
        cause, family = case.incident.cause, detector_family(symptom.detector)
        if case.is_generic and symptom.detector not in GENERIC_DETECTORS:
            return False
        if cause == self.find_suspect(symptom.entity):
            return True
        if began < case.incident.onset - ABSORB_WINDOW or (family in _NEVER_SYMPTOMS and not self._is_inferred(case)):
            return False
        late = kind_of(cause) in _SUPPLIES and began > case.incident.onset + ABSORB_WINDOW
        if family == SYMPTOM_FAMILY and late and _REASONS not in symptom.signals:
            return False
        if case.is_less_severe(severity) and not (
            family == SYMPTOM_FAMILY and (case.is_firm or self.has_enough_children(case, symptom.detector))
        ):
            return False
        return self.explains(cause, symptom.detector, symptom.entity)

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

    def count_new(self, cases: Iterable[Case], time: int) -> None:
        """Counts the conditions that began in this instant towards the base rates, unless a cause above is blamed."""
        for case in cases:
            for c in case.conditions.values():
                suspect = self.find_suspect(c.entity)
                if c.first == time and suspect == case.incident.cause:
                    above = (self.topology.ancestor_of_kind(suspect, kind) for kind in ("node", "rack"))
                    kinds = dict.fromkeys(kind_of(e) for e in (suspect, *above) if e is not None)
                    self.rates.count(detector_family(c.detector), tuple(kinds))

    def has_enough_children(self, case: Case, detector: str) -> bool:
        """Returns whether the case's conditions of the detector's family, also suspects, show a fault of its cause."""
        family = detector_family(detector)
        shared = self._weigh_case(case, family)
        return shared is not None and shared.safe > self._least_odds()

    def explain_corroboration(self, case: Case) -> str:
        """Returns why one fault is more likely than coincidence: two related conditions, or many below one cause; empty
        if it is not.

        Two conditions are related if one device has both, one is part of the other, or a slow rank is a symptom.
        """
        shared = [self._weigh_case(case, f) for f in sorted(families_of(case))] if self._is_inferred(case) else []
        found = max((s for s in shared if s is not None), key=lambda s: s.safe, default=None)
        if found is not None and found.safe > self._least_odds():
            return found.describe()
        newest = max((c.last for c in case.conditions.values()), default=0)
        known = [c for c in case.conditions.values() if c.detector not in GENERIC_DETECTORS and not c.intended]
        fresh = [c for c in known if newest - c.last <= PAIR_WINDOW]
        pairs = [(self._weigh_pair(a, b), a, b) for i, a in enumerate(fresh) for b in fresh[:i]]
        best = max(((odds, a, b) for odds, a, b in pairs if odds > 0), key=lambda p: p[0], default=None)
        if best is None:
            return ""
        odds, a, b = best
        apart = describe_span(abs(a.began - b.began))
        return f"{a.detector} and {b.detector} within {apart}: one fault is {describe_odds(odds)} as likely as two"

    def _weigh_pair(self, a: Condition, b: Condition) -> float:
        """Returns the log odds of one fault against two; minus infinity without a path from one to the other."""
        one, other = self.find_suspect(a.entity), self.find_suspect(b.entity)
        first, second = detector_family(a.detector), detector_family(b.detector)
        if a.detector == b.detector or _INSTRUMENTS in (first, second) or set(a.signals) & set(b.signals):
            return -math.inf
        if one in self.list_suspects(other):
            root = one
        elif other in self.list_suspects(one):
            root = other
        elif SYMPTOM_FAMILY in (first, second) and not {first, second} & _NEVER_SYMPTOMS and first != second:
            root = other if first == SYMPTOM_FAMILY else one
            if self.topology.ancestor_of_kind(one, "node") != self.topology.ancestor_of_kind(other, "node"):
                return -math.inf
        else:
            return -math.inf
        rates = self._rate(first, (one,), 1), self._rate(second, (other,), 1)
        return weigh_pair(kind_of(root), abs(a.began - b.began), *rates)

    def propose_merges(self, fresh: Sequence[Case], absorbing: Sequence[Case]) -> list[MergeProposal]:
        """Returns merges that are independent of each other, the first to be done first; none if no two cases belong
        together.

        fresh:     cases whose cause may still change.
        absorbing: open cases that may absorb others.
        """
        return self._propose_below_causes(fresh, absorbing) or self._propose_shared_cause(fresh)

    def _propose_below_causes(self, fresh: Sequence[Case], absorbing: Sequence[Case]) -> list[MergeProposal]:
        """Returns cases with the cases below their cause or the slow ranks on their node; the earliest onset comes
        first. It ends before a case that one of the merges may concern: so a flood of findings takes few passes."""
        of_cause = {c.incident.cause: c for c in absorbing}
        of_node: dict[str | None, list[Case]] = {}
        for case in absorbing:
            of_node.setdefault(self._node_of(case), []).append(case)
        taken: dict[str, list[Case]] = {}
        for other in fresh:
            over = [of_cause[e] for e in self._over(other) if e in of_cause]
            beside = of_node.get(node, []) if (node := self._node_of(other)) else []
            for case in {c.incident.id: c for c in (*over, *beside)}.values():
                if case is not other and self._can_absorb_case(case, other):
                    taken.setdefault(case.incident.id, []).append(other)
        found, done = list[MergeProposal](), set[str]()
        for first in sorted((c for c in absorbing if c.incident.id in taken), key=age_order):
            cases = (first, *taken[first.incident.id])
            near = {e for c in cases for e in self._over(c) if e in of_cause} | {first.incident.cause}
            near |= {node for c in cases if (node := self._node_of(c)) is not None}
            if not done.isdisjoint(near):
                break
            done |= near | {c.incident.cause for c in cases}
            found.append(MergeProposal(first.incident.cause, cases))
        return found

    def _over(self, case: Case) -> tuple[str, ...]:
        """Returns what may be the cause of a case: its suspect, what is above, and the network around it."""
        entity = case.incident.entity
        return (*self.list_suspects(entity), *self.network_around(entity))

    def _can_absorb_case(self, case: Case, other: Case) -> bool:
        severity = other.incident.severity
        deciding = other.deciding_conditions()
        if all(self.can_absorb(case, c, severity, c.began) for c in deciding):
            return True
        node, newest = self._node_of(case), max((c.onset for c in case.conditions.values()), default=0)
        return (
            all(detector_family(c.detector) == SYMPTOM_FAMILY for c in deciding)
            and min(c.began for c in deciding) <= newest + ABSORB_WINDOW
            and bool(families_of(case) - {SYMPTOM_FAMILY} - _NEVER_SYMPTOMS - GENERIC_DETECTORS - _SLOW_NOTHING)
            and not {"gpu"} >= {kind_of(case.incident.cause), kind_of(other.incident.cause)}
            and (case.is_firm or not case.is_less_severe(other.incident.severity))
            and node is not None
            and node == self._node_of(other)
        )

    def _node_of(self, case: Case) -> str | None:
        return self.topology.ancestor_of_kind(case.incident.cause, "node")

    def _propose_shared_cause(self, fresh: Sequence[Case]) -> list[MergeProposal]:
        """Returns the shared cause with the highest odds that is more likely than the causes below it together."""
        found = self._weigh_shared_causes(fresh)
        by_case: dict[str, list[SharedCause]] = {}
        for shared in found:
            for id_ in shared.cases:
                by_case.setdefault(id_, []).append(shared)
        least = self._least_odds()
        good = [
            shared
            for shared in found
            if len(shared.cases) > 1 and shared.safe > least and shared.log_odds > self._odds_of_parts(shared, by_case)
        ]
        best = min(good, key=lambda s: (-round(s.log_odds, 6), s.size, s.cause), default=None)
        return [] if best is None else [MergeProposal(best.cause, tuple(best.cases.values()), best.describe())]

    def _odds_of_parts(self, shared: SharedCause, by_case: Mapping[str, Sequence[SharedCause]]) -> float:
        """Returns the log odds of the best separate causes of parts of the same cases: two loops instead of a row.

        Only causes with the same kind of unit compare. Infinite if something below it explains all of them: of equals
        the most specific is blamed.
        """
        unit = _CHILD_KIND.get(kind_of(shared.cause))
        near = {s.cause: s for id_ in shared.cases for s in by_case[id_] if s.cause != shared.cause}
        parts = {cause: s for cause, s in near.items() if _CHILD_KIND.get(kind_of(cause)) == unit}
        odds, left = 0.0, set(shared.cases)
        for part in sorted(parts.values(), key=lambda s: (-s.log_odds, s.cause)):
            if part.cases.keys() == shared.cases.keys():
                if part.safe > self._least_odds() and shared.cause in self.topology.ancestors(part.cause):
                    return math.inf
            elif part.safe > 0 and part.cases.keys() <= left:
                odds, left = odds + part.log_odds, left - part.cases.keys()
        return odds

    def _weigh_shared_causes(self, fresh: Sequence[Case]) -> list[SharedCause]:
        """Returns every cause above several affected units, weighed for each family of detectors alone."""
        began: dict[tuple[str, str], dict[str, int]] = {}
        cases: dict[tuple[str, str], dict[str, list[Case]]] = {}
        for case in fresh:
            conditions = [c for c in case.deciding_conditions() if not c.intended]
            for cause in self._possible_causes(conditions) if conditions else ():
                for c in conditions:
                    if (unit := self._child_of(cause, c.entity)) is not None:
                        key = cause, detector_family(c.detector)
                        at = began.setdefault(key, {})
                        at[unit] = min(at.get(unit, c.began), c.began)
                        cases.setdefault(key, {}).setdefault(unit, []).append(case)
        onsets: dict[tuple[str, str], dict[str, list[int]]] = {}
        for (cause, family), at in began.items():
            onsets.setdefault((kind_of(cause), family), {})[cause] = sorted(at.values())
        return [
            self._weigh_units(*key, at, cases[key], self._share_of_others(key[0], onsets[kind_of(key[0]), key[1]]))
            for key, at in sorted(began.items())
            if len(at) > 1
        ]

    def _weigh_case(self, case: Case, family: str) -> SharedCause | None:
        """Returns the case's own cause, weighed by its conditions of a family; None if it has no two units."""
        units: dict[str, int] = {}
        for c in (c for c in case.conditions.values() if not c.intended):
            unit = self._child_of(case.incident.cause, c.entity) if detector_family(c.detector) == family else None
            if unit is not None:
                units[unit] = min(units.get(unit, c.began), c.began)
        if len(units) < 2 or kind_of(case.incident.cause) not in EXPLAINED_FAMILIES:
            return None
        return self._weigh_units(case.incident.cause, family, units, {unit: [case] for unit in units}, lambda _: 0.0)

    def _weigh_units(
        self,
        cause: str,
        family: str,
        began: Mapping[str, int],
        cases: Mapping[str, Sequence[Case]],
        others: Callable[[int], float],
    ) -> SharedCause:
        """Weighs one fault of the cause against independent ones of its affected units."""
        below = (unit for unit in self._units_below(cause, began) if self._is_silent(unit, began))
        silent = sum(1 for _ in islice(below, MOST_SILENT * len(began)))
        onsets, kind, rate = sorted(began.values()), kind_of(cause), self._rate(family, began, len(began))
        odds: GroupOdds = weigh_group(kind, onsets, silent, rate, others)
        units = tuple(sorted(unit for unit, at in began.items() if at >= odds.since))
        mine = {case.incident.id: case for unit in units for case in cases[unit]}
        span, safe = onsets[-1] - odds.since, odds.log_odds - odds.unsure
        return SharedCause(cause, mine, units, len(units) + silent, span, odds.log_odds, safe)

    def _units_below(self, cause: str, affected: Iterable[str]) -> Iterable[str]:
        """Returns the units of a cause: of a node its parts of the affected kinds, racks where only racks are
        affected."""
        self._refresh_index()
        kinds = {kind_of(unit) for unit in affected}
        if kind_of(cause) == "node":
            return [e for e in self.topology.descendants(cause) if kind_of(e) in kinds]
        units = self._units.get(cause, set())
        if kinds == {"rack"}:
            return {rack for unit in units if (rack := self.topology.ancestor_of_kind(unit, "rack")) is not None}
        return units

    def _is_silent(self, unit: str, affected: Mapping[str, int]) -> bool:
        """Returns whether a unit, or something below it, is monitored and neither it nor what is above it is
        affected."""
        if unit in affected or any(above in affected for above in self.topology.ancestors(unit)):
            return False
        if self.is_monitored is None or self.is_monitored(unit):
            return True
        peer = self.topology.attributes.get(unit, {}).get(PEER)
        return any(map(self.is_monitored, self.topology.descendants(unit))) or (
            isinstance(peer, str) and self.is_monitored(peer)
        )

    def _share_of_others(self, cause: str, onsets: Mapping[str, Sequence[int]]) -> Callable[[int], float]:
        """Returns the median share of affected units since a time among the other causes of its kind."""
        self._refresh_index()
        others = max(self._number[kind_of(cause)], len(onsets)) - 1  # parents may be in no inventory of their own
        if 2 * (len(onsets) - 1) <= others:
            return lambda _: 0.0
        began = np.array([at for times in onsets.values() for at in times])
        owner = np.repeat(np.arange(len(onsets)), [len(times) for times in onsets.values()])
        size = np.array([max(1, len(self._units.get(other, times))) for other, times in onsets.items()])
        own = list(onsets).index(cause)

        def share(since: int) -> float:
            shares = np.bincount(owner[began >= since], minlength=len(onsets)) / size
            known = np.append(np.delete(shares, own), np.zeros(others - len(onsets) + 1))
            return float(np.sort(known)[others // 2])

        return share

    def _rate(self, family: str, units: Iterable[str], own: int) -> Rate:
        """Returns how often a condition of the family begins on such a unit; of several kinds the most frequent."""
        self._refresh_index()
        kinds = {kind_of(unit) for unit in units}
        number = {kind: self._number[kind] for kind in (*kinds - WORK, "node")}
        if work := kinds & WORK:
            number.update(Counter(k for e in self.topology.parents if (k := kind_of(e)) in work))
        rates = [self.rates.rate(family, kind, number, own) for kind in kinds]
        return max(rates, key=lambda rate: rate.per_day)

    def _least_odds(self) -> float:
        """Returns the log odds from which a shared cause is believed: half the logarithm of how many there are."""
        self._refresh_index()
        return math.log(1 + len(self._units) + self._number["node"]) / 2

    def _possible_causes(self, conditions: Sequence[Condition]) -> set[str]:
        """Returns the shared causes that explain all these conditions."""
        return set(frozenset.intersection(*(self._causes_over(c.entity, c.detector) for c in conditions)))

    def _causes_over(self, entity: str, detector: str) -> frozenset[str]:
        """Returns the shared causes that explain a finding."""
        self._refresh_index()
        if (known := self._shared.get((entity, detector))) is None:
            over = (*self.list_suspects(entity), *self.network_around(entity))
            found = (f for f in over if kind_of(f) in EXPLAINED_FAMILIES and self.explains(f, detector, entity))
            known = self._shared[entity, detector] = frozenset(found)
        return known

    def _is_inferred(self, case: Case) -> bool:
        return all(self.find_suspect(c.entity) != case.incident.cause for c in case.conditions.values())

    def _child_of(self, cause: str, entity: str) -> str | None:
        """Returns the unit of `cause` that a finding is about, or the rack below it; None for the cause itself."""
        if entity == cause:
            return None
        kind = _CHILD_KIND.get(kind_of(cause))
        unit = entity if kind is None else self.topology.ancestor_of_kind(entity, kind)
        if unit is None:
            return entity if kind == "node" and kind_of(entity) == "rack" else None
        return self.find_suspect(unit)

    def network_around(self, entity: str) -> frozenset[str]:
        """Returns the leaves and rails of the devices on the entity's node, or on all nodes of a job or its stage."""
        self._refresh_index()
        return self._around.get(self.topology.ancestor_of_kind(entity, "node") or entity, frozenset())

    def _refresh_index(self) -> None:
        if self._version == self.topology.version:
            return
        self._version, self._chains, self._shared = self.topology.version, {}, {}
        units: dict[str, set[str]] = {}
        around: dict[str, set[str]] = {}
        ran: dict[str, set[str]] = {}  # job or stage -> its nodes
        alike = set()  # parents already seen: a node's sensors, links and services share them
        for entity, parents in self.topology.parents.items():
            if kind_of(entity) not in _COUNTED_KINDS:
                if parents in alike:
                    continue
                alike.add(parents)
            node = self.topology.ancestor_of_kind(entity, "node")
            for factor in self.topology.ancestors(entity):
                kind = kind_of(factor)
                child = _CHILD_KIND.get(kind)
                unit = self.topology.ancestor_of_kind(entity, child) if child else None
                if unit is not None:
                    units.setdefault(factor, set()).add(self.find_suspect(unit))
                if node is not None and kind in ("leaf", "rail"):
                    around.setdefault(node, set()).add(factor)
                elif node is not None and kind in ("job", "stage"):
                    ran.setdefault(factor, set()).add(node)
        self._units = units
        self._number = Counter(kind_of(e) for e in {*self.topology.parents, *units})
        around |= {work: {e for node in nodes for e in around.get(node, ())} for work, nodes in ran.items()}
        self._around = {entity: frozenset(found) for entity, found in around.items()}
