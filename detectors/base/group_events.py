"""A cohort of which many are off alike is the event itself: one ticket on what its members share, and no member blamed.

With more than three in ten on one side the median is near its breakdown (Huber, Robust Statistics, 1981, section 1.4),
so nobody can say which member is odd; that something happened to them together can be said all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.state import State, notes
from detectors.base.streams import LEAST_COHORT, LIFT, LINGERS, MOST, Step
from detectors.base.topology_index import JobIndex
from pipeline.model.records import SECOND, Finding, Frame
from pipeline.model.topology import kind_of

Bools = NDArray[np.bool_]
HOLD = 600 * SECOND
"""For so long it must hold: twice the longest benign slowdown, evaluation or step of the load of 300 s; chosen."""
_FEW = MOST / 2  # share of the others that may be off without being part of it; chosen
_FEWEST = 3  # members off alike: two coincide too often; chosen, as folding has it
_SMALL = 8  # members below which two are enough: they are more than a quarter
_STALE = 120 * SECOND  # after so long without many that are off it is over: as long as two repeats of a finding; chosen
_NEARLY = 0.9  # share of those off that lie in one thing, which is then what they share; chosen
_SHOWN = 16  # members named in the evidence
_THINGS = {"gpu": "GPUs", "rank": "ranks", "nic": "ports", "port": "ports"}
Cohort = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is compared, in words. `unit` "share": the streams are of logarithms.

    more, less: what those do that are off to either side, after "13 of 32 GPUs".
    """

    signals: tuple[str, ...]
    more: str
    less: str
    unit: str = "share"

    def words(self, below: bool, effect: float) -> str:
        size = f"{abs(effect):.1%}" if self.unit == "share" else f"{abs(effect):.1f} {self.unit}"
        return f"{self.less if below else self.more} by {size} (median)"


@dataclass(frozen=True, slots=True)
class Group:
    """A cohort that moves now. words: of the cohort; struck, judged: streams that are off, and that could be."""

    words: str
    below: bool
    struck: NDArray[np.int64]
    judged: NDArray[np.int64]


@dataclass
class GroupEvents(State):
    """Follows the cohorts of one metric that moved; a part() of a detector. State is by cohort, in plain data.

    Nothing is said while jobs have only just begun or ended on most of those that are off, or their versions changed:
    what follows from that is no event. Nor while people work on what they share.
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
        """What is due to be said of cohorts after a sample.

        names: entity of each stream.   cohort: the cohort of a stream, in words that begin with what its members share.
        counted: False: is off for a reason that is known, and speaks for no group.   blamed: by the detector already.
        """
        if not self.began and not step.moved.any():
            return []
        found: dict[str, Finding] = {}
        moving = self._moving(step, counted, cohort, frame.time)
        for key in sorted(moving, key=lambda key: (self.began[key]["since"], key)):
            group, began = moving[key], self.began[key]
            mine = [names[i] for i in group.struck.tolist()]
            if self._early(began, mine, frame, gates):
                continue
            entity = began.get("entity") or shared_entity(group, names, frame)
            if entity in found or entity in blamed or gates.in_maintenance(entity, frame.topology, frame.time):
                continue
            began["entity"] = entity
            onset = frame.time - int(np.median(step.held[group.struck])) * SECOND
            if due := due_report(self.conditions, key, frame.time, onset, "ticket"):
                found[entity] = self._finding(frame, entity, group, mine, step, due[0], detector)
        close_ended(self.conditions, set(self.began))
        return [found[entity] for entity in sorted(found)]

    def _moving(self, step: Step, counted: Bools | None, cohort: Cohort, time: int) -> dict[str, Group]:
        """Those that move now, by cohort and side; keeps since when."""
        moving: dict[str, Group] = {}
        judged = step.judged & (step.groups >= 0)
        everyone = np.where(judged, step.off, 0)
        off = everyone if counted is None else np.where(counted, everyone, 0)
        for mine in _cohorts(step):
            size = int(np.count_nonzero(judged[mine]))
            more, less = mine[off[mine] > 0], mine[off[mine] < 0]
            worse = int(np.count_nonzero(everyone[mine] > 0))
            below = worse <= MOST * size < len(less)  # of a cohort that is in halves, the worse one is told
            struck = less if below else more
            if len(struck) < (_FEWEST if size >= _SMALL else _FEWEST - 1) or size < LEAST_COHORT:
                continue
            words = cohort(int(struck[0]))
            key = f"{words}{' -' if below else ' +'}"
            if key in self.began or len(struck) > MOST * size:
                self.began.setdefault(key, {"since": time})["seen"] = time
                moving[key] = Group(words, below, struck, mine[judged[mine]])
        self.began = {key: began for key, began in self.began.items() if 0 <= time - began["seen"] <= _STALE}
        return moving

    def _early(self, began: dict[str, Any], members: Sequence[str], frame: Frame, gates: Gates) -> bool:
        """Whether it is too early to speak, since it began or something was done to members, or people work on most."""
        topology, time = frame.topology, frame.time
        began["since"] = min(began["since"], time)  # the clock may have gone back
        if time - began["since"] < self.hold:
            return True
        if sum(gates.in_maintenance(e, topology, time) for e in members) > len(members) / 2:
            return True
        return sum(self._touched(e, frame, gates) for e in members) > len(members) / 2

    def _touched(self, entity: str, frame: Frame, gates: Gates) -> bool:
        """Whether its job began or ended, or its versions changed, less than the hold ago."""
        topology, time = frame.topology, frame.time
        job = topology.ancestor_of_kind(entity, "job") or self._jobs.job_on(entity, topology)
        told = [
            gates.last_change(entity, topology),
            *((gates.job_started_at(job), gates.job_ended_at(job)) if job else ()),
        ]
        return any(at is not None and 0 <= time - at < self.hold for at in told)

    def _finding(
        self,
        frame: Frame,
        entity: str,
        group: Group,
        names: Sequence[str],
        step: Step,
        onset: int,
        detector: str,
    ) -> Finding:
        effects, unit = step.effect[group.struck].astype(np.float64), self.quantity.unit
        median = float(np.median(np.expm1(effects) if unit == "share" else effects))
        whose = "" if group.words == entity else f" of {group.words}"
        minutes, size = (frame.time - onset) / SECOND / 60, len(group.judged)
        summary = (
            f"{entity}: {len(names)} of {size} {_THINGS.get(kind_of(names[0]), 'devices')}{whose} "
            f"{self.quantity.words(group.below, median)} for {minutes:.0f} min; so many alike have a cause in common, "
            f"and none of them is blamed"
        )
        clears = (
            f"ends when at most {MOST:.0%} of them were off for {LINGERS // SECOND // 60} min, or {LIFT // 3600} h "
            "after it began, when what they show then is taken for usual"
        )
        told: dict[str, Any] = {
            "group": group.words,
            "struck": len(names),
            "peers": size,
            "median_effect": round(median, 4),
        }
        told |= {"unit": unit, "direction": "less" if group.below else "more", "members": list(names[:_SHOWN])}
        score = float(np.median(step.score[group.struck]))
        signals = self.quantity.signals
        return Finding(
            frame.time, onset, entity, detector, "ticket", score, summary, make_evidence(clears, **told), signals
        )


def _cohorts(step: Step) -> list[NDArray[np.int64]]:
    """Members of each cohort that moved."""
    if not step.moved.any():
        return []
    moved = np.bincount(step.groups[step.moved]) > 0
    at = np.flatnonzero((step.groups >= 0) & (step.groups < len(moved)))
    at = at[moved[step.groups[at]]]
    at = at[np.argsort(step.groups[at], kind="stable")]
    return np.split(at, np.flatnonzero(np.diff(step.groups[at])) + 1)


def shared_entity(group: Group, names: Sequence[str], frame: Frame) -> str:
    """What those share that are off: the least thing that nearly all of them lie in and few others, else what the
    cohort shares: the entity that its words begin with, the nearest thing over all, or the fleet."""
    topology = frame.topology
    struck = Counter(a for i in group.struck.tolist() for a in topology.ancestors(names[i]))
    judged = Counter(a for i in group.judged.tolist() for a in topology.ancestors(names[i]))
    off, size = len(group.struck), len(group.judged)
    nearly = [a for a, n in struck.items() if n >= _NEARLY * off]
    apart = [a for a in nearly if judged[a] < size and off - struck[a] <= _FEW * (size - judged[a])]
    if apart:
        return min(apart, key=lambda a: (judged[a], kind_of(a) == "pdu", nearly.index(a)))  # of a PDU they would be off
    first = group.words.split(", ", 1)[0]
    if first in topology.parents or kind_of(first) in ("stage", "job"):
        return first
    return next((a for a in nearly if judged[a] == size), f"fleet:{frame.device_class}")
