"""The solver: which shared causes explain the conditions found, by the odds of one fault against independent ones.

A shared fault F with n affected and s silent members (section "Root cause" of docs/root_cause.md):

    G(F) = ln P(F fails in T) + n ln((1 - MISS) / p) + w s ln(MISS / (1 - p))

T is the time within which the members began, p the chance that a member begins by itself in T, w the weight of silence.
All factors are weighed together in numpy: pairs of a factor and an affected unit, sorted by factor and onset, with
cumulative sums from the end, so that every beginning of the time span is tried. The form is that of maximum-posterior
explanations: SCORE (Kompella et al., NSDI 2005) and Flock (Harsh et al., CoNEXT 2023).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.incidents.cases import Case, Condition, detector_family
from pipeline.incidents.factors import FACTOR_KINDS, FactorIndex
from pipeline.incidents.likelihood import DAY, FRAILTY, MISS, WINDOW, BaseRates, Rate, describe_odds, describe_span
from pipeline.model.entity_names import KINDS
from pipeline.model.links import PEER
from pipeline.model.records import SECOND
from pipeline.model.topology import WORK, Topology, kind_of

MOST_COUNTED = 256
"""Members of a factor that are asked whether they are silent; of more, an even sample is asked. Chosen: it gives the
share to 6 %, and keeps the sum over all factors below a tenth of a second."""
_TOGETHER = "+"  # the group in which all families count that one fault of the kind shows together
Floats = NDArray[np.float64]
_SILENCE = "telemetry"
_ONE_BY_ONE = frozenset({"node", "version", "change"})
"""Factors whose members may fall silent one after another: parts of a node, and devices with a version."""
_SOFTWARE = frozenset({"version", "change"})
_PLACES = frozenset({"rack", "row", "cdu", "pdu", "pod", "leaf"})
_CLEARLY = 3.0  # log odds by which the place must be more likely than the version: 20 times; chosen
ONE_MOMENT = 60 * SECOND
"""Devices that fall silent at one moment were last seen up to one interval of the slowest collectors apart."""
Pair = tuple[str, str, str]
"""Factor, group of families, unit."""
Affected = tuple[Pair, int, int, Case]
"""A pair with the onset of the condition there and its first finding."""


@dataclass(frozen=True, slots=True)
class SharedCause:
    """A cause above several affected units, with its log odds against independent faults.

    cases: those that began in its time span, by id.   size: monitored units below it.
    safe:  log odds with the uncertainty of the rate, by which it is believed.
    """

    cause: str
    cases: Mapping[str, Case]
    units: tuple[str, ...]
    size: int
    span: int
    log_odds: float
    safe: float

    def describe(self) -> str:
        """Returns the evidence as a sentence."""
        words = KINDS.get(kind_of(self.units[0]), ("unit", "units"))[1]
        ratio = describe_odds(self.safe)
        return (
            f"{len(self.units)} of {self.size} {words} within {describe_span(self.span)}: "
            f"one shared fault is {ratio} as likely as separate ones"
        )


@dataclass(slots=True)
class Solver:
    """Weighs the factors of an index.

    explains:     whether a fault of a factor can have a finding (detector, entity, signals) as a symptom.
    rates:        how often a condition begins by chance.
    is_monitored: whether an entity sends telemetry itself; without it, all do.
    """

    index: FactorIndex
    explains: Callable[[str, str, str, Collection[str]], bool]
    rates: BaseRates = field(default_factory=BaseRates)
    is_monitored: Callable[[str], bool] | None = None
    _generation: int = -1
    _known: dict[tuple[str, str, tuple[str, ...]], tuple[frozenset[str], tuple[Pair, ...]]] = field(
        default_factory=dict
    )

    @property
    def least_odds(self) -> float:
        """Log odds from which a shared cause is believed: half the logarithm of how many there are."""
        return math.log(1 + len(self.index.units) + self.index.number["node"]) / 2

    def weigh(self, cases: Iterable[Case], only: str = "", family: str = "") -> list[SharedCause]:
        """Returns every factor above several affected units, for each family of detectors and those that go together.

        only: the one factor to weigh, by all conditions instead of those that decide a case; family: of those.
        """
        groups = _Groups.of(_begun_together([p for case in cases for p in self._pairs_of_case(case, only, family)]))
        if groups is None:
            return []
        rates = [self._rate(group, units) for group, units in groups.units()]
        silent = np.zeros(len(groups.keys))
        bound, *_ = groups.odds(rates, silent)
        possible: list[int] = np.flatnonzero(bound > 0).tolist()
        for g in possible:
            silent[g] = self._count_silent(groups.keys[g][0], groups.names(g))
        odds, safe, since = groups.odds(rates, silent)
        others = _Others(self.index, groups)
        made = []
        for g in possible:
            if self._is_of_one_place(*groups.keys[g], groups.names(g, int(since[g]))):
                continue
            found = others.lower(g, int(since[g]), rates[g], float(odds[g]), silent[g])
            made.append(groups.make(g, int(since[g]), silent[g], found, found - float(odds[g] - safe[g])))
        return made

    def _pairs_of_case(self, case: Case, only: str, family: str) -> Iterable[Affected]:
        """Returns the factors that explain all conditions that decide a case, with the units affected."""
        if only:
            conditions = [
                c for c in case.conditions.values() if not c.intended and family in ("", detector_family(c.detector))
            ]
            return [(p, c.began, c.first, case) for c in conditions for p in self._reach_of(c)[1] if p[0] == only]
        conditions = [c for c in case.deciding_conditions() if not c.intended]
        known = [self._reach_of(c) for c in conditions]
        common = frozenset.intersection(*(factors for factors, _ in known)) if known else frozenset[str]()
        reached = zip(conditions, (pairs for _, pairs in known), strict=True)
        return [(p, c.began, c.first, case) for c, pairs in reached for p in pairs if p[0] in common]

    def factors_over(self, entity: str) -> tuple[str, ...]:
        """Returns all factors whose fault may reach an entity."""
        index = self.index
        over = (*index.chain(index.suspect_of(entity)), *index.around(entity), *index.works_of(entity))
        return tuple(f for f in (*over, *index.software_of(entity)) if kind_of(f) in FACTOR_KINDS)

    def _reach_of(self, condition: Condition) -> tuple[frozenset[str], tuple[Pair, ...]]:
        """Returns the factors that explain a condition, and its pairs. Cached by detector, entity and signals until
        the index changes."""
        if self._generation != self.index.generation:
            self._generation, self._known = self.index.generation, {}
        detector, entity, signals = key = condition.detector, condition.entity, condition.signals
        if (known := self._known.get(key)) is None:
            family = detector_family(detector)
            factors = frozenset(f for f in self.factors_over(entity) if self.explains(f, detector, entity, signals))
            pairs = []
            for factor in sorted(factors):
                if (unit := self.index.unit_of(factor, entity)) is not None:
                    pairs.append((factor, family, unit))
                    if family in FACTOR_KINDS[kind_of(factor)].together:
                        pairs.append((factor, _TOGETHER, unit))
            known = self._known[key] = factors, tuple(pairs)
        return known

    def _rate(self, group: tuple[str, str], units: Sequence[str]) -> Rate:
        """Returns how often a condition of the families begins on such a unit; of several kinds the most frequent."""
        factor, family = group
        kinds = {kind_of(unit) for unit in units}
        number = self.index.number
        families = FACTOR_KINDS[kind_of(factor)].together if family == _TOGETHER else {family}
        found = []
        for kind in sorted(kinds):
            each = [self.rates.rate(f, kind, number, len(units)) for f in sorted(families)]
            found.append(Rate(sum(r.per_day for r in each), min(r.shape for r in each)))
        best = max(found, key=lambda rate: rate.per_day)
        # the parts of one node are frail together
        return Rate(best.per_day, min(best.shape, FRAILTY)) if kind_of(factor) == "node" else best

    def _is_of_one_place(self, factor: str, family: str, affected: Sequence[str]) -> bool:
        """Returns whether the affected of a version lie so close together that it is the place, not the version.

        Which nodes a fault of a version hits has nothing to do with where they are. So for each place that can have
        such symptoms the likelihood of its share of the affected is compared with that of its share of the version.
        """
        if kind_of(factor) not in _SOFTWARE:
            return False
        mine, index = set(self.index.units.get(factor, ())), self.index
        counted = Counter(place for unit in affected for place in (*index.above_node(unit), *index.around(unit)))
        for place, hit in counted.items():
            kind = FACTOR_KINDS.get(kind_of(place))
            if hit < 2 or kind_of(place) not in _PLACES or kind is None or family not in (kind.families or {family}):
                continue
            below = len(mine & {node for unit in index.units[place] if (node := index.node_of(unit)) is not None})
            tried = math.log(max(1, index.number[kind_of(place)]))
            if concentration(hit, len(affected), below, len(mine)) - tried > _CLEARLY:
                return True
        return False

    def _count_silent(self, factor: str, affected: Sequence[str]) -> int:
        """Returns how many monitored members of a factor show nothing, at most as many as outweigh the affected."""
        hit, units = set(affected), self._members(factor, affected)
        step = max(1, len(units) // MOST_COUNTED)
        asked = units[::step]
        return round(sum(self._is_silent(unit, hit) for unit in asked) * len(units) / max(1, len(asked)))

    def _members(self, factor: str, affected: Sequence[str]) -> Sequence[str]:
        """Returns the units of a factor: parts of the affected kinds of a node, racks where only racks are affected."""
        kinds, topology = {kind_of(unit) for unit in affected}, self.index.topology
        if kind_of(factor) == "node":
            return [e for e in topology.descendants(factor) if kind_of(e) in kinds]
        units = self.index.units.get(factor, ())
        if kinds == {"rack"}:
            over = (topology.ancestor_of_kind(unit, "rack") for unit in units)
            return list(dict.fromkeys(rack for rack in over if rack is not None))
        return units

    def _is_silent(self, unit: str, affected: set[str]) -> bool:
        """Returns whether a unit, or a part of it, is monitored, and neither it nor anything above is affected."""
        topology = self.index.topology
        if unit in affected or not affected.isdisjoint(topology.ancestors(unit)):
            return False
        if self.is_monitored is None or self.is_monitored(unit):
            return True
        peer = topology.attributes.get(unit, {}).get(PEER)
        return any(map(self.is_monitored, topology.descendants(unit))) or (
            isinstance(peer, str) and self.is_monitored(peer)
        )


@dataclass(slots=True)
class _Groups:
    """Pairs of a group (factor and families) and an affected unit, in CSR form: sorted by group, then by onset.

    keys: group number -> factor, families. first: (G+1,) where each group begins. began, unit: (P,) of each pair.
    cases: (group, unit) -> the cases there.
    """

    keys: list[tuple[str, str]]
    first: NDArray[np.int64]
    began: NDArray[np.int64]
    unit: NDArray[np.int64]
    unit_names: list[str]
    cases: dict[tuple[int, int], list[Case]]

    @classmethod
    def of(cls, pairs: Sequence[Affected]) -> _Groups | None:
        """Returns the groups with at least two units; None if there is none."""
        keys: dict[tuple[str, str], int] = {}
        units: dict[str, int] = {}
        group = np.array([keys.setdefault((p[0], p[1]), len(keys)) for p, *_ in pairs], np.int64)
        unit = np.array([units.setdefault(p[2], len(units)) for p, *_ in pairs], np.int64)
        began = np.array([at for _, at, *_ in pairs], np.int64)
        order = np.lexsort((began, unit, group))
        group, unit, began = group[order], unit[order], began[order]
        new = np.ones(len(group), bool)
        new[1:] = (group[1:] != group[:-1]) | (unit[1:] != unit[:-1])
        count = np.bincount(group[new], minlength=len(keys))
        kept = np.flatnonzero(count >= 2)
        if not len(kept):
            return None
        rank = np.full(len(keys), -1)
        names = list(keys)
        kept = np.array(sorted(kept.tolist(), key=lambda g: names[g]))
        rank[kept] = np.arange(len(kept))
        cases: dict[tuple[int, int], list[Case]] = {}
        for g, u, place in zip(rank[group].tolist(), unit.tolist(), order.tolist(), strict=True):
            if g >= 0:
                cases.setdefault((g, u), []).append(pairs[place][3])
        chosen = new & (rank[group] >= 0)
        group, unit, began = rank[group[chosen]], unit[chosen], began[chosen]
        order = np.lexsort((unit, began, group))
        first = np.concatenate([[0], np.cumsum(count[kept])])
        return cls([names[g] for g in kept.tolist()], first, began[order], unit[order], list(units), cases)

    def names(self, g: int, since: int = 0) -> list[str]:
        """Returns the affected units of a group, by onset; since: only those that began then or later."""
        mine = slice(self.first[g], self.first[g + 1])
        return [self.unit_names[u] for u in self.unit[mine][self.began[mine] >= since].tolist()]

    def units(self) -> Iterable[tuple[tuple[str, str], list[str]]]:
        """Yields each group with its affected units."""
        return ((key, self.names(g)) for g, key in enumerate(self.keys))

    def odds(self, rates: Sequence[Rate], silent: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Returns of each group the log odds over the best time span, those that are safe, and the onset of its first
        member."""
        size = np.diff(self.first)
        group = np.repeat(np.arange(len(size)), size)
        left = (self.first[1:][group] - np.arange(len(group))).astype(float)
        days = np.maximum(self.began[self.first[1:] - 1][group] - self.began, WINDOW) / DAY
        kinds = [FACTOR_KINDS[kind_of(factor)] for factor, _ in self.keys]
        prior = np.array([kind.per_day for kind in kinds])[group]
        weight = np.array([kind.silence for kind in kinds])[group]
        alone = -np.expm1(-np.array([r.per_day for r in rates])[group] * days)
        steps = np.log1p((left - 1) / np.array([r.shape for r in rates])[group])
        sums = np.concatenate([[0.0], np.cumsum(steps)])
        unsure = sums[self.first[1:]][group] - sums[:-1]
        odds = log_odds(-np.expm1(-prior * days), left, weight * silent[group], alone)
        safe = odds - unsure
        best = np.array([a + int(np.argmax(safe[a:b])) for a, b in zip(self.first[:-1], self.first[1:], strict=True)])
        return odds[best], safe[best], self.began[best]

    def make(self, g: int, since: int, silent: float, odds: float, safe: float) -> SharedCause:
        """Returns a group as a shared cause."""
        low, high = int(self.first[g]), int(self.first[g + 1])
        inside = [
            u for u, at in zip(self.unit[low:high].tolist(), self.began[low:high].tolist(), strict=True) if at >= since
        ]
        cases = {case.incident.id: case for u in inside for case in self.cases[g, u]}
        units = tuple(sorted(self.unit_names[u] for u in inside))
        span = int(self.began[high - 1]) - since
        return SharedCause(self.keys[g][0], cases, units, high - low + int(silent), span, odds, safe)


def _begun_together(pairs: list[Affected]) -> list[Affected]:
    """Returns the pairs without silences that began apart from most others below the same place.

    A place without power or network silences its members at one moment. Those that fall silent one after another, each
    after the one before was reported, are worked on in turn: updates of BMCs, restarts of agents, reboots.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for (factor, family, _), began, first, _ in pairs:
        if family == _SILENCE and kind_of(factor) not in _ONE_BY_ONE:
            spans.setdefault(factor, []).append((began, max(first, began + ONE_MOMENT)))
    moments = {factor: _fullest_moment(found) for factor, found in spans.items()}
    return [
        p for p in pairs if p[0][1] != _SILENCE or p[1] <= moments.get(p[0][0], p[1]) <= max(p[2], p[1] + ONE_MOMENT)
    ]


def _fullest_moment(spans: Sequence[tuple[int, int]]) -> int:
    """Returns the first moment at which most of the spans (begin, end) have begun and not ended."""
    begins, ends = np.sort(np.array(spans, np.int64), axis=0).T
    return int(begins[np.argmax(np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins))])


@dataclass(slots=True)
class _Others:
    """What has hit all factors of a kind alike is no fault of one."""

    index: FactorIndex
    groups: _Groups

    def lower(self, g: int, since: int, rate: Rate, odds: float, silent: float) -> float:
        """Returns the log odds, at most those against the share of the other factors' members that began since then."""
        factor, family = self.groups.keys[g]
        kind, low, high = kind_of(factor), int(self.groups.first[g]), int(self.groups.first[g + 1])
        alike = [i for i, (f, fam) in enumerate(self.groups.keys) if i != g and fam == family and kind_of(f) == kind]
        others = max(self.index.number[kind], len(alike) + 1) - 1
        if kind in WORK or factor not in self.index.units or 2 * len(alike) <= others:
            return odds
        last = int(self.groups.began[high - 1])
        from_ = min(since, last - WINDOW)
        shares = np.zeros(others)
        for place, i in enumerate(alike):
            mine = self.groups.began[self.groups.first[i] : self.groups.first[i + 1]]
            shares[place] = np.count_nonzero(mine >= from_) / max(
                1, len(self.index.units.get(self.groups.keys[i][0], mine))
            )
        share = float(np.sort(shares)[others // 2])
        days = max(last - since, WINDOW) / DAY
        if share <= -math.expm1(-rate.per_day * days):
            return odds
        known = FACTOR_KINDS[kind]
        count = int(np.count_nonzero(self.groups.began[low:high] >= since))
        return min(odds, float(log_odds(-math.expm1(-known.per_day * days), count, known.silence * silent, share)))


def concentration(hit: int, affected: int, below: int, members: int) -> float:
    """Returns how many times as likely (log) it is that `hit` of the affected lie in a place if they are drawn by that
    share than if they are drawn from all members, of which `below` are in it; 0 if it has no more than its share."""
    if not 0 < below < members or hit * members <= affected * below:
        return 0.0
    rest = affected - hit
    outside = rest * math.log(rest / affected / (1 - below / members)) if rest else 0.0
    return hit * math.log(hit / affected / (below / members)) + outside


def log_odds(shared: Any, affected: Any, silent: Any, alone: Any) -> Any:
    """Returns the log odds of the formula above, of numbers or arrays.

    Silence never counts for a shared fault: a member may have had a condition that ended within the time.
    """
    by_chance = np.clip(alone, 1e-12, 1 - MISS)
    return np.log(shared) + affected * np.log((1 - MISS) / by_chance) + silent * np.log(MISS / (1 - by_chance))


def sum_of_parts(shared: SharedCause, found: Sequence[SharedCause], least: float, topology: Topology) -> float:
    """Returns the log odds of the best separate causes of parts of the same cases: two loops instead of a row.

    Only causes with the same kind of unit compare. Infinite if something below it explains all of them: of equals
    the most specific is blamed.
    """
    unit = FACTOR_KINDS[kind_of(shared.cause)].unit
    parts: dict[str, SharedCause] = {}
    for part in found:
        known = parts.get(part.cause, part)
        if part.cause != shared.cause and FACTOR_KINDS[kind_of(part.cause)].unit == unit:
            parts[part.cause] = max(known, part, key=lambda s: s.log_odds)
    odds, left = 0.0, set(shared.cases)
    for part in sorted(parts.values(), key=lambda s: (-s.log_odds, s.cause)):
        if part.cases.keys() == shared.cases.keys():
            if part.safe > least and shared.cause in topology.ancestors(part.cause):
                return math.inf
        elif part.safe > 0 and part.cases.keys() <= left:
            odds, left = odds + part.log_odds, left - part.cases.keys()
    return odds
