"""Rules that decide over the topology which findings have one suspected cause.

A cause explains findings about itself and, if its kind fits the family of the detector, findings about entities below
it. It needs no finding: it becomes the suspect if one fault of it is more likely than independent faults of its members
(pipeline.incidents.solver). Members that no cause explains stay incidents of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from pipeline.incidents.apart import keep_together
from pipeline.incidents.cases import (
    GENERIC_DETECTORS,
    PAIR_WINDOW,
    Case,
    Condition,
    age_order,
    detector_family,
    families_of,
)
from pipeline.incidents.confidence import Assessment, assess
from pipeline.incidents.factors import FACTOR_KINDS, NETWORK_VERSIONS, SYMPTOM_FAMILY, FactorIndex
from pipeline.incidents.likelihood import BaseRates, Rate, describe_odds, describe_span, weigh_pair
from pipeline.incidents.merges import MergeProposal, take_independent
from pipeline.incidents.solver import SharedCause, Solver, sum_of_parts
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
SHARED_PLANT = frozenset({"rack", "row", "cdu", "leaf", "rail", "pdu", "pod"})
"""Equipment that many nodes depend on: it causes new symptoms for as long as its fault lasts."""
STOPS_JOB = 900 * SECOND
"""A job that hangs this long after what it runs on failed is a symptom: hangs are found after 6 min. Chosen."""
_LEAK = "coolant_leak"
_INDEPENDENT_DETECTORS = frozenset({"telemetry_sensor", "telemetry_clock"})
"""Instruments fail independently: several faulty ones do not make their parent the suspect."""
_AIR = "thermal_inlet"  # intake air, which no coolant loop warms
_INSTRUMENTS = "telemetry"  # family of suspects that corroborate none: wrong readings explain others, and prove nothing
_SLOW_NOTHING = frozenset({"memory"})  # corrected errors cost no time, and others end the job
_SUPPLIES, _REASONS = frozenset({"rack", "row", "cdu", "pdu"}), "gpu.throttle_reasons"  # heat or lost power sets these
_NETWORK = frozenset({"leaf", "rail"})
_COLLECTIVES = _NETWORK | {"pod"}  # of which collectives become slow, and nothing else
_COMPUTING = frozenset({"rank.compute_time", "gpu.sm_clock", "gpu.throttle_reasons", "node.cpu_pressure"})
"""Signals of slowness in computing: no leaf, rail or pod lowers a clock or makes a kernel longer."""
_CLOCKED = frozenset({"gpu.sm_clock", "gpu.throttle_reasons"})
"""Signals of slowness of a device itself: work makes kernels longer, but lowers no clock of single GPUs."""
_UNHEATED = frozenset({"port", "filesystem", "disk", "service"})
"""Parts without a way to the clocks of GPUs. Not an NVLink: its errors and throttling may be one fault of a GPU."""
_NOT_SHOWN = dict.fromkeys(_COLLECTIVES, _COMPUTING) | dict.fromkeys(WORK | _UNHEATED, _CLOCKED)
"""Kind of cause -> signals of slowness that no fault of it shows in its members."""
_WARM = frozenset(
    {("sensor.temperature",), ("sensor.temperature", "sensor.fan_speed"), ("coolant.supply_temperature",)}
)
"""Signals of a cooling fault that only warms: what a GPU is hotter than its air or coolant then is its own fault."""
_RESISTANCE = "thermal"  # judges each GPU against its air or coolant; throttling that warm air explains is a suspect
_LOOPS = frozenset({"cdu", "loop"})
_COOLING = _LOOPS | {"rack", "row"}
COOLS_WITHIN = 300 * SECOND
"""Time after the last sign of a cooling fault in which heat is still its symptom. Chosen: GPUs are cool within a minute
of the return of flow, and a loop of some 500 L within minutes."""
STAYS_HOT = 300 * SECOND
"""Time after COOLS_WITHIN in which heat that goes on is still a symptom, although almost all members are well. Chosen:
detectors report a condition for minutes after its last reading."""
_FEW = 0.05  # share of a cooling fault's hot or slow members that is few beside those that are well again; chosen
_SOFTWARE = frozenset({"version", "change"})
_CLEARLY = 3.0  # log odds by which another cause must be more likely to replace an inferred one: 20 times; chosen
_SOFT = _SOFTWARE | {"job", "stage"}
"""Causes that are no device: most of their members rightly show nothing, so that they take in only what many share."""
_HEAT = frozenset({"thermal", SYMPTOM_FAMILY})
_NEVER_SYMPTOMS = frozenset({"sdc"})  # wrong results do not follow from heat, power or links


@dataclass(slots=True)
class CauseRules:
    """Rules over one topology."""

    topology: Topology
    index: FactorIndex = field(init=False)
    solver: Solver = field(init=False)
    time: int = 0
    _long_over: dict[str, bool] = field(default_factory=dict)
    _few: dict[str, bool] = field(default_factory=dict)
    _many: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = FactorIndex(self.topology)
        self.solver = Solver(self.index, self.explains)

    @property
    def rates(self) -> BaseRates:
        """How often a condition begins by chance."""
        return self.solver.rates

    def start_instant(self, time: int, is_monitored: Callable[[str], bool] | None) -> None:
        """Sets the monitored entities, and adds the time since the last instant to the time observed."""
        self.time, self.solver.is_monitored = time, is_monitored
        for known in (self._long_over, self._few, self._many):
            known.clear()
        self.rates.advance(time)

    def find_suspect(self, entity: str) -> str:
        """Returns the suspect of a finding: see FactorIndex.suspect_of."""
        return self.index.suspect_of(entity)

    def list_suspects(self, entity: str) -> tuple[str, ...]:
        """Returns the suspect of a finding and everything above it, nearest first."""
        self.index.refresh(self.time)
        return self.index.chain(self.index.suspect_of(entity))

    def causes_near(self, entity: str) -> tuple[str, ...]:
        """Returns everything whose fault may reach an entity, nearest first."""
        above = self.list_suspects(entity)
        upward = (
            [e for e in self.topology.descendants(entity) if kind_of(e) == "rack"] if kind_of(entity) == "cdu" else []
        )
        return (*above, *sorted(self.index.reaching(entity)), *upward)

    def explains(self, cause: str, detector: str, entity: str, signals: Collection[str] = ()) -> bool:
        """Returns whether a fault of `cause` can have this finding as a symptom. signals: that show it."""
        family, chain = detector_family(detector), self.list_suspects(entity)
        if cause == chain[0]:
            return True
        kind = kind_of(cause)
        if detector in _INDEPENDENT_DETECTORS or (detector == _AIR and kind == "cdu"):
            return kind == "node" and cause in chain
        if (known := FACTOR_KINDS.get(kind)) is None:
            return cause in chain and family == SYMPTOM_FAMILY
        if known.families is not None and family not in known.families:
            return False
        if family == SYMPTOM_FAMILY and not _NOT_SHOWN.get(kind, frozenset()).isdisjoint(signals):
            return False
        if kind in WORK:
            return cause in self.index.works_of(entity)
        if kind in _SOFTWARE:
            at_ports = cause.partition(":")[2].startswith(NETWORK_VERSIONS)
            return at_ports == (family == "link") and cause in self.index.software_of(entity)
        return cause in chain or (family == SYMPTOM_FAMILY and cause in self.index.around(entity))

    def locate_leak(self, case: Case) -> tuple[str, str] | None:
        """Returns where the loop of a case leaks, and why: the rack of the only leak detectors that are wet; the loop,
        if a wet leak detector in no rack is the cause so far. None if that is not known."""
        every = case.conditions.values()
        if kind_of(case.incident.cause) == "leak_detector":
            loops = sorted(c.entity for c in every if kind_of(c.entity) in _LOOPS)
            return (loops[0], f"{loops[0]} loses coolant") if loops else None
        if kind_of(case.incident.cause) not in _LOOPS:
            return None
        wet = {self.find_suspect(c.entity) for c in every if kind_of(c.entity) == "leak_detector"}
        own = [c for c in every if c.entity == case.incident.cause]
        leaks = bool(own) and min(own, key=lambda c: c.began).detector == _LEAK  # a pump that fails first is no leak
        rack = wet.pop() if leaks and len(wet) == 1 and kind_of(min(wet)) == "rack" else None
        return None if rack is None else (rack, f"its leak detector names {rack}")

    def is_same_leak(self, case: Case, detector: str, entity: str) -> bool:
        """Returns whether a rope is wet below a loop that leaks, or the loop above a wet rope loses coolant.

        A rope of which no loop is known belongs to the loop that loses coolant while it is wet: a rack leaks once in 50
        years (as in FACTOR_KINDS), so that two leaks within hours are no coincidence."""
        if detector_family(detector) != "coolant":
            return False
        every, cause = case.conditions.values(), case.incident.cause
        if kind_of(entity) == "leak_detector":
            loses = kind_of(cause) in _LOOPS and any(c.detector == _LEAK for c in every)
            return loses and (cause in self.list_suspects(entity) or not self._loops_above(entity))
        ropes = {c.entity for c in every if kind_of(c.entity) == "leak_detector"}
        loses = detector == _LEAK and kind_of(entity) in _LOOPS
        loses &= {c.entity for c in every if kind_of(c.entity) in _LOOPS} <= {entity}
        return any(entity in self.list_suspects(e) or (loses and not self._loops_above(e)) for e in ropes)

    def _loops_above(self, entity: str) -> list[str]:
        return [e for e in (*self.list_suspects(entity), *self.topology.ancestors(entity)) if kind_of(e) in _LOOPS]

    def _find_begin(self, case: Case) -> int:
        """Returns when the fault of its cause began: by findings about the cause, else the first quarter of the others,
        since one of them may be an older condition that it took in."""
        own = self._list_own(case)
        firm = [c for c in own if c.level != "suspect"] or own
        began = sorted(c.began for c in firm or case.conditions.values())
        return began[0] if firm else began[len(began) // 4]

    def _is_over(self, case: Case, family: str, began: int) -> bool:
        """Returns whether a symptom began after its cause was well again: slowness after the last sign of a bad
        network, which leaves nothing, or heat after the last sign of bad cooling that still sends telemetry."""
        cause = case.incident.cause
        if kind_of(cause) in _NETWORK and family == SYMPTOM_FAMILY:
            lasts = [c.last for c in case.conditions.values() if detector_family(c.detector) != SYMPTOM_FAMILY]
            return began > max(lasts, default=began) + PAIR_WINDOW
        if kind_of(cause) not in _COOLING or family not in _HEAT or not self._is_monitored(cause):
            return False
        own = self._list_own(case)
        signs = [c for c in own if detector_family(c.detector) not in _HEAT] or own  # its hot GPUs are symptoms too
        holds = any((c.detector, c.entity) in case.held for c in signs)
        return not holds and began > max((c.last for c in signs), default=began) + COOLS_WITHIN

    def _list_own(self, case: Case) -> list[Condition]:
        """Returns the conditions about the cause itself; none if it is inferred."""
        return [c for c in case.conditions.values() if self.find_suspect(c.entity) == case.incident.cause]

    def _is_monitored(self, entity: str) -> bool:
        return self.solver.is_monitored is None or self.solver.is_monitored(entity)

    def outlasts(self, case: Case, finding: Finding, time: int) -> bool:
        """Returns whether a finding about a member shows a separate problem: a fault that the cause does not explain,
        or one that goes on though the cause is well again: a node that is silent for longer than its site, or after
        cooling came back new heat, or heat that few keep."""
        if self.outlasts_site(case, finding, time):
            return True
        family, adopted = detector_family(finding.detector), (finding.detector, finding.entity) in case.adopted
        if adopted or self.find_suspect(finding.entity) == case.incident.cause:
            return False
        if self._has_own_fault(case, finding):
            return True
        if case.has_condition(finding):
            return family in _HEAT and self._heat_of_few(case)
        return self._is_over(case, family, finding.onset)

    def _has_own_fault(self, case: Case, symptom: Finding | Condition) -> bool:
        """Returns whether a member shows what its cause cannot do: slow computing below a network, a low clock below a
        job or beside a port or disk, or a page about its own cooling below air or coolant that is only warm, unless so
        many page that it is their common fault."""
        cause, family = case.incident.cause, detector_family(symptom.detector)
        if unlike := _NOT_SHOWN.get(kind_of(cause)):
            return family == SYMPTOM_FAMILY and not unlike.isdisjoint(symptom.signals)
        if symptom.detector != _RESISTANCE or symptom.level != "page" or kind_of(cause) not in _COOLING:
            return False
        own = self._list_own(case)
        if not own or not all(c.signals in _WARM for c in own):
            return False
        known = self._many.get(case.incident.id)
        if known is None:
            pages = {key: c for key, c in case.conditions.items() if c.level == "page"}
            found = self.solver.weigh([replace(case, conditions=pages)], cause, family)
            known = self._many[case.incident.id] = any(s.safe > self.solver.least_odds for s in found)
        return not known

    def _is_long_over(self, case: Case) -> bool:
        """Returns whether cooling has been well for so long that heat and slowness of now are no symptoms."""
        if kind_of(case.incident.cause) not in _COOLING:
            return False
        known = self._long_over.get(case.incident.id)
        if known is None:  # once an instant: it is asked for each of thousands of hot GPUs
            known = self._long_over[case.incident.id] = self._is_over(case, SYMPTOM_FAMILY, self.time - STAYS_HOT)
        return known

    def _heat_of_few(self, case: Case) -> bool:
        """Returns whether heat or slowness goes on long after cooling came back, where almost all members are well."""
        if not self._is_long_over(case):
            return False
        known = self._few.get(case.incident.id)
        if known is None:
            symptoms = [c for c in case.conditions.values() if detector_family(c.detector) in _HEAT]
            members = {c.entity for c in symptoms} - {case.incident.cause}
            going_on = {c.entity for c in symptoms if c.last > self.time - PAIR_WINDOW} & members
            known = self._few[case.incident.id] = len(going_on) <= _FEW * len(members)
        return known

    def _stops_job(self, case: Case, work: str, detector: str, began: int) -> bool:
        """Returns whether a job hangs or slows down soon after what many of its nodes depend on failed."""
        late = began - self._find_begin(case)
        return (
            kind_of(work) in WORK
            and detector_family(detector) == SYMPTOM_FAMILY
            and kind_of(case.incident.cause) in SHARED_PLANT
            and case.incident.severity == "page"
            and -PAIR_WINDOW <= late <= STOPS_JOB
            and case.incident.cause in self.index.reaching(work)
        )

    def can_absorb(self, case: Case, symptom: Finding | Condition, severity: str, began: int) -> bool:
        """Returns whether an open case absorbs a finding below its cause: not one that began long before, one more
        severe than a cause that is not firm, or slowness long after coolant or power failed without a reason, or after
        the network works again."""
        cause, family = case.incident.cause, detector_family(symptom.detector)
        if case.is_generic and symptom.detector not in GENERIC_DETECTORS:
            return False
        if cause == self.find_suspect(symptom.entity) or self.is_same_leak(case, symptom.detector, symptom.entity):
            return True
        if self._has_own_fault(case, symptom):
            return False
        if began < case.incident.onset - ABSORB_WINDOW or (family in _NEVER_SYMPTOMS and not self._is_inferred(case)):
            return False
        late = kind_of(cause) in _SUPPLIES and began > self._find_begin(case) + ABSORB_WINDOW
        over = self._is_over(case, family, began) or (family in _HEAT and self._is_long_over(case))
        if over or (family == SYMPTOM_FAMILY and late and _REASONS not in symptom.signals):
            return False
        if self._stops_job(case, symptom.entity, symptom.detector, began):
            return True
        enough = family == SYMPTOM_FAMILY or kind_of(cause) in _SOFT
        if case.is_less_severe(severity) or kind_of(cause) in _SOFT:
            firm = case.is_firm and kind_of(cause) not in _SOFT
            if not (enough and (firm or self.has_enough_children(case, symptom.detector))):
                return False
        return self.explains(cause, symptom.detector, symptom.entity, symptom.signals)

    def can_absorb_at(self, case: Case, time: int) -> bool:
        """Returns whether new conditions may still be caused by the case: while shared plant fails, else for a time."""
        kind, own = kind_of(case.incident.cause), self._list_own(case)
        leaks = any(c.detector == _LEAK for c in own)  # slowly: a rope may be wet hours after the reservoir sinks
        lasts = kind in SHARED_PLANT and (case.incident.severity == "page" or leaks)
        newest = [c.last for c in own or case.conditions.values()] if lasts else [c.onset for c in own]
        return kind not in FACTOR_KINDS or time - max(case.incident.opened, *newest, 0) <= ABSORB_WINDOW

    def site_covers_nodes(self, case: Case, time: int) -> bool:
        """Returns whether silent nodes belong to the silent site: until REFINE_WINDOW after the site returned."""
        known = case.conditions.get((SITE_SILENCE, case.incident.cause))
        if known is None:  # a part of a site: reported by the detector of silent nodes, as is work on nodes in turn
            own = case.conditions.get((NODE_SILENCE, case.incident.cause))
            return own is None or not own.intended
        return (SITE_SILENCE, case.incident.cause) in case.held or time - known.last <= REFINE_WINDOW

    def outlasts_site(self, case: Case, finding: Finding, time: int) -> bool:
        """Returns whether a node is still silent after its site returned, so that it has its own problem."""
        of_site = kind_of(case.incident.cause) == "site" and finding.entity != case.incident.cause
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
        self.index.refresh(self.time)
        mine = self.solver.weigh([case], case.incident.cause, detector_family(detector))
        return any(shared.safe > self.solver.least_odds for shared in mine)

    def explain_corroboration(self, case: Case) -> str:
        """Returns why one fault is more likely than coincidence: two related conditions, or many below one cause; empty
        if it is not.

        Two conditions are related if one device has both, one is part of the other, or a slow rank is a symptom.
        """
        self.index.refresh(self.time)
        shared = self.solver.weigh([case], case.incident.cause) if self._is_inferred(case) else []
        found = max(shared, key=lambda s: s.safe, default=None)
        if found is not None and found.safe > self.solver.least_odds:
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
        rates = self._rate(first, one), self._rate(second, other)
        return weigh_pair(kind_of(root), abs(a.began - b.began), *rates)

    def propose_merges(
        self, fresh: Sequence[Case], recent: Sequence[Case], absorbing: Sequence[Case]
    ) -> list[MergeProposal]:
        """Returns merges that are independent of each other, the first to be done first; none if no two cases belong
        together.

        fresh:     cases whose cause may still change.
        recent:    cases that a software version may still take over, whose faults show one by one.
        absorbing: open cases that may absorb others.
        """
        found = self._propose_below_causes(fresh, absorbing) or self._propose_shared_cause(fresh)
        return found or (self._propose_shared_cause(recent, _SOFTWARE) if len(recent) > len(fresh) else [])

    def assess(self, cases: Sequence[Case], every: Sequence[Case]) -> list[Assessment]:
        """Returns how sure the causes of some cases are. every: all cases that may have a common cause."""
        self.index.refresh(self.time)
        by_case: dict[str, list[SharedCause]] = {}
        for shared in self.solver.weigh(every):
            for id_ in shared.cases:
                by_case.setdefault(id_, []).append(shared)
        made = []
        for case in cases:
            suspects = {c.entity: self.find_suspect(c.entity) for c in case.conditions.values()}
            own = self.solver.weigh([case], case.incident.cause) if kind_of(case.incident.cause) in FACTOR_KINDS else []
            placed = any(self.index.is_placed(e) for e in {case.incident.cause, *suspects})
            made.append(assess(case, suspects, own, by_case.get(case.incident.id, ()), placed))
        return made

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
            if len(cases := keep_together(first.incident.cause, (first, *taken[first.incident.id]))) < 2:
                continue
            near = {e for c in cases for e in self._over(c) if e in of_cause} | {first.incident.cause}
            near |= {node for c in cases if (node := self._node_of(c)) is not None}
            if not done.isdisjoint(near):
                break
            done |= near | {c.incident.cause for c in cases}
            found.append(MergeProposal(first.incident.cause, cases))
        return found

    def _over(self, case: Case) -> tuple[str, ...]:
        """Returns the possible causes of a case: its suspect, its ancestors, and the network around it."""
        entity = case.incident.entity
        return self.causes_near(entity)

    def _can_absorb_case(self, case: Case, other: Case) -> bool:
        severity = other.incident.severity
        deciding = other.deciding_conditions()
        if all(self.can_absorb(case, c, severity, c.began) for c in deciding):
            return True
        node, newest = self._node_of(case), max((c.onset for c in case.conditions.values()), default=0)
        return (
            all(detector_family(c.detector) == SYMPTOM_FAMILY and not self._has_own_fault(case, c) for c in deciding)
            and min(c.began for c in deciding) <= newest + ABSORB_WINDOW
            and bool(families_of(case) - {SYMPTOM_FAMILY} - _NEVER_SYMPTOMS - GENERIC_DETECTORS - _SLOW_NOTHING)
            and not {"gpu"} >= {kind_of(case.incident.cause), kind_of(other.incident.cause)}
            and (case.is_firm or not case.is_less_severe(other.incident.severity))
            and node is not None
            and node == self._node_of(other)
        )

    def _node_of(self, case: Case) -> str | None:
        return self.topology.ancestor_of_kind(case.incident.cause, "node")

    def _propose_shared_cause(
        self, fresh: Sequence[Case], kinds: AbstractSet[str] = FACTOR_KINDS.keys()
    ) -> list[MergeProposal]:
        """Returns the shared causes that are more likely than the causes below them together: that with the highest
        odds, and those that it leaves as they are."""
        self.index.refresh(self.time)
        found = self.solver.weigh(fresh)
        by_case: dict[str, list[SharedCause]] = {}
        for shared in found:
            for id_ in shared.cases:
                by_case.setdefault(id_, []).append(shared)
        least, good = self.solver.least_odds, []
        joined = {id(s): keep_together(s.cause, [*s.cases.values()]) for s in found}
        for shared in found:
            possible = len(joined[id(shared)]) >= min(2, len(shared.cases)) and kind_of(shared.cause) in kinds
            if possible and shared.safe > least and self._can_change(shared):
                near = {id(s): s for id_ in shared.cases for s in by_case[id_]}
                if shared.log_odds > sum_of_parts(shared, [*near.values()], least, self.topology):
                    good.append(shared)
        good.sort(key=lambda s: (-round(s.log_odds, 6), s.size, s.cause))
        return take_independent([MergeProposal(s.cause, joined[id(s)], s.describe()) for s in good], self._over)

    def _can_change(self, shared: SharedCause) -> bool:
        """Returns whether it explains several cases, or one whose cause was inferred and is clearly less likely."""
        if len(shared.cases) > 1:
            return True
        (case,) = shared.cases.values()
        if case.incident.cause == shared.cause or not self._is_inferred(case):
            return False
        own = self.solver.weigh([case], case.incident.cause)
        return shared.log_odds > max((s.log_odds for s in own), default=0.0) + _CLEARLY

    def _rate(self, family: str, unit: str) -> Rate:
        self.index.refresh(self.time)
        return self.rates.rate(family, kind_of(unit), self.index.number, 1)

    def _is_inferred(self, case: Case) -> bool:
        return not self._list_own(case)
