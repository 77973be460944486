"""The simplest topology rule: which findings have one suspected cause.

A cause explains what is blamed on it and, where its kind fits the kind of trouble, what is blamed below it. Nobody need
blame it: enough of its children in the same trouble at the same time are a reason to suspect it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.incidents.cases import SEVERITIES, UNEXPLAINED, Case, Condition
from pipeline.model.links import PEER
from pipeline.model.topology import Topology, kind_of

LEAST_UNITS = 3
"""Children in trouble that put their parent under suspicion: two coincide too often, four delay the page. Chosen."""
LEAST_SHARE = 0.2
"""Share of all its children: silent children speak for the parent, as in SCORE (Kompella et al., NSDI 2005). Chosen."""
SYMPTOM = "straggler"
"""The family that physical trouble causes and that causes none: it follows link, power, coolant and clocks."""
EXPLAINS: dict[str, frozenset[str] | None] = {
    "node": None,
    "rack": frozenset({"coolant", "thermal", "power", "telemetry", SYMPTOM}),
    "cdu": frozenset({"coolant", "thermal", SYMPTOM}),
    "leaf": frozenset({"link", "telemetry", SYMPTOM}),
    "rail": frozenset({"link", SYMPTOM}),
    "pdu": frozenset({"power", "telemetry", SYMPTOM}),
}
"""Kinds that a fault can be shared through, with the families that such a fault shows as; None: all of them."""
PLANT = frozenset({"rack", "cdu", "leaf", "rail", "pdu"})
"""What many nodes hang on: its trouble goes on to make symptoms for as long as it lasts."""
_UNIT = {"rack": "node", "cdu": "node", "pdu": "node", "leaf": "port", "rail": "port"}
_TELLING = frozenset(_UNIT.values())  # kinds of which each is one more below what is over it
_OWN = frozenset({"telemetry_sensor", "telemetry_clock"})
"""Instruments break one by one: several at once are no reason to suspect what they hang on."""
_NEVER_A_SYMPTOM = frozenset({"sdc"})  # wrong results are no consequence of heat, power or links


def family_of(detector: str) -> str:
    """The kind of trouble: a detector's name up to the first underscore (`link_flap` finds link trouble)."""
    return detector.split("_", 1)[0]


@dataclass(frozen=True, slots=True)
class Fold:
    """Cases that are one: `cause` explains all of them."""

    cause: str
    cases: tuple[Case, ...]


@dataclass(slots=True)
class Folding:
    """Answers over one topology; what is derived from it is renewed when it changes."""

    topology: Topology
    _version: int = -1
    _size: dict[str, int] = field(default_factory=dict)
    _around: dict[str, frozenset[str]] = field(default_factory=dict)

    def base(self, entity: str) -> str:
        """What to suspect for a finding: the entity, the GPU that a rank runs on, or for a link one of its two ends."""
        kind = kind_of(entity)
        if kind == "port":
            return self._end(entity)
        return (self.topology.ancestor_of_kind(entity, "gpu") if kind == "rank" else None) or entity

    def _end(self, port: str) -> str:
        """The end that stands for the link: that of a node, else that of a leaf, so that both ends are one suspect."""
        peer = self.topology.attributes.get(port, {}).get(PEER)
        if not isinstance(peer, str):
            return port
        over = self.topology.ancestor_of_kind
        return min((port, peer), key=lambda e: (over(e, "node") is None, over(e, "leaf") is None, e))

    def chain(self, entity: str) -> tuple[str, ...]:
        """What lies over a finding, nearest first."""
        base = self.base(entity)
        return (base, *self.topology.ancestors(base))

    def explains(self, cause: str, detector: str, entity: str) -> bool:
        """Whether a fault of `cause` can show as this finding."""
        family, chain = family_of(detector), self.chain(entity)
        if cause == chain[0]:
            return True
        kind = kind_of(cause)
        if detector in _OWN:
            return kind == "node" and cause in chain
        if kind not in EXPLAINS:
            return cause in chain and family == SYMPTOM
        allowed = EXPLAINS[kind]
        reached = cause in chain or (family == SYMPTOM and cause in self._beside(entity))
        return reached and (allowed is None or family in allowed)

    def absorbs(self, case: Case, detector: str, entity: str, severity: str) -> bool:
        """Whether an open case takes a finding blamed below its cause; a stronger one than itself only as a symptom of
        what is more than suspected."""
        if case.incident.cause == self.base(entity):
            return True
        family = family_of(detector)
        if family in _NEVER_A_SYMPTOM and not self._is_inferred(case):
            return False
        if _stronger(severity, case) and not (family == SYMPTOM and (_is_firm(case) or self.agrees(case, detector))):
            return False
        return self.explains(case.incident.cause, detector, entity)

    def agrees(self, case: Case, detector: str) -> bool:
        """Whether enough children of the cause are in the detector's kind of trouble, be it only suspected."""
        cause, family = case.incident.cause, family_of(detector)
        self._renew()
        alike = (c.entity for c in case.conditions.values() if family_of(c.detector) == family)
        units = {unit for unit in (self._unit(cause, e) for e in alike) if unit is not None}
        return kind_of(cause) in EXPLAINS and len(units) >= max(LEAST_UNITS, LEAST_SHARE * self._size.get(cause, 0))

    def best(self, fresh: Sequence[Case], absorbing: Sequence[Case]) -> Fold | None:
        """The fold that explains most; None if every case stands for itself.

        fresh:     cases whose cause may still change.
        absorbing: open cases that may take others in.
        """
        return self._direct(fresh, absorbing) or self._shared(fresh) or self._pair(fresh)

    def _direct(self, fresh: Sequence[Case], absorbing: Sequence[Case]) -> Fold | None:
        """A case and those below its cause, or slow ranks on its node; the earliest onset takes first."""
        of_cause = {c.incident.cause: c for c in absorbing}
        of_node: dict[str | None, list[Case]] = {}
        for case in absorbing:
            of_node.setdefault(self._node(case), []).append(case)
        taken: dict[str, list[Case]] = {}
        for other in fresh:
            entity = other.incident.entity
            over = [of_cause[e] for e in (*self.chain(entity), *self._beside(entity)) if e in of_cause]
            beside = of_node.get(node, []) if (node := self._node(other)) else []
            for case in {c.incident.id: c for c in (*over, *beside)}.values():
                if case is not other and self._takes(case, other):
                    taken.setdefault(case.incident.id, []).append(other)
        takers = [c for c in absorbing if c.incident.id in taken]
        if not takers:
            return None
        first = min(takers, key=_age)
        return Fold(first.incident.cause, (first, *taken[first.incident.id]))

    def _takes(self, case: Case, other: Case) -> bool:
        if all(self.absorbs(case, c.detector, c.entity, other.incident.severity) for c in other.telling()):
            return True
        symptoms = all(family_of(c.detector) == SYMPTOM for c in other.telling())
        node = self._node(case)
        return (
            symptoms
            and bool(_families(case) - {SYMPTOM} - _NEVER_A_SYMPTOM - UNEXPLAINED)
            and (_is_firm(case) or not _stronger(other.incident.severity, case))
            and node is not None
            and node == self._node(other)
        )

    def _node(self, case: Case) -> str | None:
        return self.topology.ancestor_of_kind(case.incident.cause, "node")

    def _shared(self, fresh: Sequence[Case]) -> Fold | None:
        """The cause that explains most cases of different children; of equals the one with the fewest children."""
        groups: dict[str, list[Case]] = {}
        for case in fresh:
            for factor in self._factors(case):
                groups.setdefault(factor, []).append(case)
        found = [Fold(factor, mine) for factor, cases in groups.items() if (mine := self._together(factor, cases))]
        key = lambda f: (-len(self._units(f.cause, f.cases)), self._size.get(f.cause, 0), f.cause)  # noqa: E731
        return min(found, key=key, default=None)

    def _factors(self, case: Case) -> set[str]:
        """What could be behind all that a case tells."""
        over = [
            {f for f in (*self.chain(c.entity), *self._beside(c.entity)) if self._fits(f, c)} for c in case.telling()
        ]
        return set.intersection(*over)

    def _fits(self, factor: str, condition: Condition) -> bool:
        return kind_of(factor) in EXPLAINS and self.explains(factor, condition.detector, condition.entity)

    def _together(self, cause: str, group: Sequence[Case]) -> tuple[Case, ...]:
        """Those of a group that are enough for the cause; suspects of another kind name nothing that is more."""
        firm = [c for c in group if c.incident.severity != "watch"]
        kinds = {family for case in firm for family in _families(case)}
        suspects = [c for c in group if c.incident.severity == "watch"]
        if self._enough(cause, [*firm, *(c for c in suspects if not firm or _families(c) & kinds)]):
            return tuple(group)
        return tuple(suspects) if self._enough(cause, suspects) else ()

    def _enough(self, cause: str, group: Sequence[Case]) -> bool:
        """Enough children that no other shared cause explains yet, and enough of all children."""
        single = [c for c in group if not self._is_inferred(c) and c.incident.cause != cause]
        share = LEAST_SHARE * self._size.get(cause, 0)
        return (
            len(group) > 1
            and len(self._units(cause, single)) >= LEAST_UNITS
            and len(self._units(cause, group)) >= max(LEAST_UNITS, share)
        )

    def _is_inferred(self, case: Case) -> bool:
        return all(self.base(c.entity) != case.incident.cause for c in case.conditions.values())

    def _pair(self, fresh: Sequence[Case]) -> Fold | None:
        """Two lone suspects on one node that corroborate each other: the node is what they have in common."""
        lone: dict[str, list[Case]] = {}
        for case in sorted(fresh, key=_age):
            if case.incident.severity == "watch" and (node := self._node(case)):
                lone.setdefault(node, []).append(case)
        for node, cases in lone.items():
            for i, a in enumerate(cases):
                for b in cases[:i]:
                    if Case(a.incident, {**b.conditions, **a.conditions}).corroborated():
                        return Fold(node, (b, a))
        return None

    def _units(self, cause: str, cases: Iterable[Case]) -> set[str]:
        """The children in trouble: of an inferred case all that are blamed, of any other the one that it suspects."""
        blamed = (
            e for case in cases for e in (case.incident.members if self._is_inferred(case) else (case.incident.cause,))
        )
        return {u for u in (self._unit(cause, e) for e in blamed) if u is not None}

    def _unit(self, cause: str, entity: str) -> str | None:
        """The child of `cause` that a finding is about; None for the cause itself."""
        if entity == cause:
            return None
        kind = _UNIT.get(kind_of(cause))
        unit = entity if kind is None else self.topology.ancestor_of_kind(entity, kind)
        return None if unit is None else self.base(unit)

    def _beside(self, entity: str) -> frozenset[str]:
        """Leaves, rails and what else the devices of the entity's node hang on."""
        self._renew()
        return self._around.get(self.topology.ancestor_of_kind(entity, "node") or "", frozenset())

    def _renew(self) -> None:
        if self._version == self.topology.version:
            return
        self._version = self.topology.version
        units: dict[str, set[str]] = {}
        around: dict[str, set[str]] = {}
        alike = set()  # a node's sensors, links and services tell nothing that one of them does not
        for entity, parents in self.topology.parents.items():
            if kind_of(entity) not in _TELLING:
                if parents in alike:
                    continue
                alike.add(parents)
            node = self.topology.ancestor_of_kind(entity, "node")
            for factor in self.topology.ancestors(entity):
                kind = kind_of(factor)
                if kind in EXPLAINS and (unit := self._unit(factor, entity)) is not None:
                    units.setdefault(factor, set()).add(unit)
                if kind in ("leaf", "rail") and node is not None:
                    around.setdefault(node, set()).add(factor)
        self._size = {factor: len(found) for factor, found in units.items() if kind_of(factor) != "node"}
        self._around = {node: frozenset(found) for node, found in around.items()}


def _families(case: Case) -> set[str]:
    return {family_of(c.detector) for c in case.conditions.values()}


def _is_firm(case: Case) -> bool:
    """Whether something is known of it, and not only suspected."""
    return any(c.level != "suspect" and c.detector not in UNEXPLAINED for c in case.conditions.values())


def _stronger(severity: str, case: Case) -> bool:
    return SEVERITIES.index(severity) > SEVERITIES.index(case.incident.severity)


def _age(case: Case) -> tuple[int, str]:
    """Earliest onset first; the id decides between equals."""
    return (case.incident.onset, case.incident.id)
