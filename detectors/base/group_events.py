"""Group events: many members of a cohort deviate together, which is one ticket on what they share; no member is blamed.

With more than three in ten on one side the median is near its breakdown (Huber, Robust Statistics, 1981, section 1.4):
it does not show which members are wrong, only that something happened to them together. What they share is blamed if
one fault of it is more likely than as many independent ones, by the share of streams that are off elsewhere; of few
members each is a suspect instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import OpenConditions, build_finding, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.job_index import JobIndex
from detectors.base.state import State, notes
from detectors.base.streams import LEAST_COHORT, LIFT, LINGERS, MOST, Step
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

Bools = NDArray[np.bool_]
HOLD = 600 * SECOND
"""us for which it must hold: twice the longest benign slowdown, evaluation or step of the load of 300 s; chosen."""
_FEWEST = 2  # members that deviate together
_SHIFTED = 1e-3  # share of the time that a group is shifted: recirculation 0.5 per hall-month, for hours (assumed)
_MISS = 0.5  # chance that a member of a shifted group does not show it: at rest it gets neither hot nor slow (assumed)
_USUALLY_OFF = 0.01  # share of streams that are off for reasons of their own, until seen elsewhere; chosen
_WEIGHT = 100  # streams that this share counts as; chosen
_STALE = 120 * SECOND  # us without many members off after which it is over: two repeats of a finding; chosen
_SHOWN = 16  # members named in the evidence
_THINGS = {"gpu": "GPUs", "rank": "ranks", "nic": "ports", "port": "ports"}
Cohort = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Quantity:
    """The compared quantity in words. `unit` "share": the streams are of logarithms.

    more, less: verb phrases for members that are off to either side, after "13 of 32 GPUs".
    """

    signals: tuple[str, ...]
    more: str
    less: str
    unit: str = "share"

    def words(self, below: bool, effect: float) -> str:
        """Returns the verb phrase with the median effect."""
        size = f"{100 * abs(effect):.1f} %" if self.unit == "share" else f"{abs(effect):.1f} {self.unit}"
        return f"{self.less if below else self.more} by {size}"


@dataclass(frozen=True, slots=True)
class Group:
    """A cohort that is shifted now. words: its name; off, judged: its streams that are off, and all that are judged.

    usual: share of streams that are off in cohorts that are not shifted.
    """

    words: str
    below: bool
    off: NDArray[np.int64]
    judged: NDArray[np.int64]
    usual: float


@dataclass
class GroupEvents(State):
    """Follows the shifted cohorts of one metric; a part() of a detector.

    Nothing is reported while jobs have just begun or ended on most of the members that are off, or their versions
    changed: these are consequences. Nor while what they share is in maintenance.

    began:      cohort and side -> since, seen, entities: what is blamed.
    conditions: by entity that is reported.
    """

    quantity: Quantity
    hold: int = HOLD
    began: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()
    _jobs: JobIndex = field(default_factory=JobIndex, init=False, repr=False)

    def update(
        self,
        frame: Frame,
        names: Sequence[str],
        step: Step,
        cohort: Cohort,
        gates: Gates,
        detector: str,
        counted: Bools | None = None,
        blamed: Collection[str] = (),
    ) -> list[Finding]:
        """Returns the findings of cohorts that are due after a sample.

        names: entity of each stream.   cohort: returns the name of a stream's cohort, which begins with the entity that
        its members share.   counted: False: off for a known reason, no sign of a group event.   blamed: entities that
        the detector reports already.
        """
        if not self.began and not step.moved.any():
            return []
        found: dict[str, Finding] = {}
        shifted = self._shifted(step, counted, cohort, frame.time)
        holding = {entity for began in self.began.values() for entity in began.get("entities", ())}
        for key in sorted(shifted, key=lambda key: (self.began[key]["since"], key)):
            group, began = shifted[key], self.began[key]
            mine = [names[i] for i in group.off.tolist()]
            if self._too_early(began, mine, frame, gates):
                continue
            shared = began.get("entities") or shared_entities(group, names, frame.topology, frame.device_class)
            level: Level = "ticket" if shared else "suspect"
            onset = frame.time - int(np.median(step.held[group.off])) * SECOND
            for entity in shared or mine:
                if entity in found or entity in blamed or gates.in_maintenance(entity, frame.topology, frame.time):
                    continue
                if shared:
                    began["entities"] = shared
                holding.add(entity)
                if due := due_report(self.conditions, entity, frame.time, onset, level):
                    found[entity] = self._finding(frame, entity, group, mine, step, due, detector)
        close_ended(self.conditions, holding)
        return [found[entity] for entity in sorted(found)]

    def _shifted(self, step: Step, counted: Bools | None, cohort: Cohort, time: int) -> dict[str, Group]:
        """Returns the groups that are shifted now, by cohort and side; keeps since when."""
        shifted: dict[str, Group] = {}
        judged = step.judged & (step.groups >= 0)
        everyone = np.where(judged, step.off, 0)
        off = everyone if counted is None else np.where(counted, everyone, 0)
        quiet = judged & ~step.moved
        usual = (_USUALLY_OFF * _WEIGHT + np.count_nonzero(off[quiet])) / (_WEIGHT + np.count_nonzero(quiet))
        for mine in _cohorts(step):
            size = int(np.count_nonzero(judged[mine]))
            more, less = mine[off[mine] > 0], mine[off[mine] < 0]
            worse = int(np.count_nonzero(everyone[mine] > 0))
            below = worse <= MOST * size < len(less)  # of a cohort that is split in halves, the worse one is reported
            members = less if below else more
            if len(members) < _FEWEST or size < LEAST_COHORT:
                continue
            words = cohort(int(members[0]))
            key = f"{words}{' -' if below else ' +'}"
            if key in self.began or len(members) > MOST * size:
                self.began.setdefault(key, {"since": time})["seen"] = time
                shifted[key] = Group(words, below, members, mine[judged[mine]], usual)
        self.began = {key: began for key, began in self.began.items() if 0 <= time - began["seen"] <= _STALE}
        return shifted

    def _too_early(self, began: dict[str, Any], members: Sequence[str], frame: Frame, gates: Gates) -> bool:
        """Returns whether it is too early to report: just begun, most members just changed, or most are in
        maintenance."""
        topology, time = frame.topology, frame.time
        began["since"] = min(began["since"], time)  # the clock may have been set back
        if time - began["since"] < self.hold:
            return True
        if sum(gates.in_maintenance(e, topology, time) for e in members) > len(members) / 2:
            return True
        return sum(self._changed_lately(e, frame, gates) for e in members) > len(members) / 2

    def _changed_lately(self, entity: str, frame: Frame, gates: Gates) -> bool:
        """Returns whether its job began or ended, or its versions changed, less than the hold ago."""
        topology, time = frame.topology, frame.time
        job = topology.ancestor_of_kind(entity, "job") or self._jobs.job_on(entity, topology)
        of_job = (gates.job_started_at(job), gates.job_ended_at(job)) if job else ()
        times = [gates.last_change(entity, topology), *of_job]
        return any(at is not None and 0 <= time - at < self.hold for at in times)

    def _finding(
        self,
        frame: Frame,
        entity: str,
        group: Group,
        names: Sequence[str],
        step: Step,
        due: tuple[int, Level],
        detector: str,
    ) -> Finding:
        effects, unit = step.effect[group.off].astype(np.float64), self.quantity.unit
        median = float(np.median(np.expm1(effects) if unit == "share" else effects))
        size, things = len(group.judged), _THINGS.get(kind_of(names[0]), "devices")
        words = self.quantity.words(group.below, median)
        return build_finding(
            *(detector, frame.time, entity, due),
            score=float(np.median(step.score[group.off])),
            summary=pager_title(entity, f"{len(names)} of {size} {things} {words}"),
            signals=self.quantity.signals,
            clears=f"ends when at most {MOST:.0%} of them were off for {LINGERS // SECOND // 60} min, or"
            f" {LIFT // 3600} h after it began, when their present level becomes the normal one",
            group=group.words,
            struck=len(names),
            peers=size,
            median_effect=round(median, 4),
            unit=unit,
            direction="less" if group.below else "more",
            members=list(names[:_SHOWN]),
        )


def _cohorts(step: Step) -> list[NDArray[np.int64]]:
    """Returns the members of each cohort that is shifted."""
    if not step.moved.any():
        return []
    moved = np.bincount(step.groups[step.moved]) > 0
    at = np.flatnonzero((step.groups >= 0) & (step.groups < len(moved)))
    at = at[moved[step.groups[at]]]
    at = at[np.argsort(step.groups[at], kind="stable")]
    return np.split(at, np.flatnonzero(np.diff(step.groups[at])) + 1)


def shared_entities(group: Group, names: Sequence[str], topology: Topology, device_class: str) -> list[str]:
    """Returns what is blamed for the members that are off: entities of one kind above them, such as two of four loops,
    or what the cohort shares, whichever explains the members best; empty if independent faults explain them as well."""
    off_below = Counter(a for i in group.off.tolist() for a in topology.ancestors(names[i]))
    judged = Counter(a for i in group.judged.tolist() for a in topology.ancestors(names[i]))
    off, size = len(group.off), len(group.judged)
    gains = {a: _log_odds(n, judged[a], group.usual) for a, n in off_below.items() if judged[a] < size}
    kinds: dict[str, list[str]] = {}
    for entity in sorted(gains):
        if gains[entity] > 0:
            kinds.setdefault(kind_of(entity), []).append(entity)

    def order(mine: list[str]) -> tuple[float, int, bool, str]:
        """The most likely first; of equals the smaller, and not a PDU: of that they would be off."""
        return -sum(gains[e] for e in mine), sum(judged[e] for e in mine), kind_of(mine[0]) == "pdu", mine[0]

    whole = _log_odds(off, size, group.usual)
    best = min(kinds.values(), key=order, default=[])
    if best and sum(gains[e] for e in best) > whole:
        return best
    if whole <= 0:
        return []
    first = group.words.split(", ", 1)[0]
    if first in topology.parents or kind_of(first) in ("stage", "job"):
        return [first]
    return [next((a for a in off_below if judged[a] == size), f"fleet:{device_class}")]


def _log_odds(off: int, size: int, usual: float) -> float:
    """Returns the log odds that a group is shifted, against `off` of `size` members that are off by themselves."""
    alone = min(usual, 1 - _MISS)
    return math.log(_SHIFTED) + off * math.log((1 - _MISS) / alone) + (size - off) * math.log(_MISS / (1 - alone))
