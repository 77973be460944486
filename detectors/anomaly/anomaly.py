"""The generic detector: finds changes in signals whose meaning nobody knows, and in those that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from detectors.anomaly import changes as change_kernel
from detectors.anomaly.changes import LASTS, PEERS, Changes, Order
from detectors.base.budget import DAY_S
from detectors.base.cohorts import likeness
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import USUAL_STEP
from detectors.base.topology_index import members_mask
from pipeline.model.records import Finding, Frame, Level
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.model.topology import kind_of

_SIGNALS = ("custom.value",)
_NEVER = "rank"  # ranks wait for each other: who is blamed for that must know what it looks at
_UNUSED = "declared signal that no other detector uses"
_TOLD, _SHOWN = 5, 3  # signals of a finding, and those of its sentence; chosen
_STRONG = 2.0  # times the limit at which several signals together are worth a ticket; chosen
_STRONG_HOLD = 5  # samples for which they must go on; chosen


class Known:
    """What is known of every class that is judged; a class of other signals than before begins anew."""

    def __init__(self) -> None:
        self.classes: dict[str, Changes] = {}

    def judge(self, signals: Mapping[str, list[Signal]]) -> None:
        self.classes = {c: Changes(found) for c, found in signals.items()}

    def snapshot(self) -> dict[str, Any]:
        return {c: changes.snapshot() for c, changes in self.classes.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for c, changes in self.classes.items():
            if c in state:
                changes.restore(state[c])


@dataclass
class Anomaly(Detector):
    """Tells that an entity has changed: how unusual its signals' moves are, by what each of them did before.

    A move is the difference of two exponential means, 1 against 10 and 3 against 30 samples. Its size counts in mean
    excesses above its own 95 % quantile, learnt over `memory` samples and at least so large that `limit` of them are
    `least` of the level. Of an entity the three strongest signals count, by their mean; from 8 alike (kind and
    attributes) their common part is taken off first. Counters count by their rate, states by their changes; where a
    signal says which way is harm, only that way. A counter of harm that grows after standing still tells by itself.

    Suspect: `limit` for 2 samples. Ticket: twice that by three signals or more, still unusual after 5 samples. It never
    pages, since it does not know what it looks at. A condition is over when it is half as unusual, or after 30
    samples: then the new level is the normal one. Judged are the signals of `signals`, live and in replay; in a
    replay with `--signals` also those that the file declares and no other detector uses: no pipeline receives them.

    Source: peaks over a threshold of Siffer et al. (SPOT, KDD 2017) with an exponential tail; the least change of
    10 % of Greyhound (2025), which took the false alarms of change-point detection from 18 % to none.
    """

    name: ClassVar[str] = "anomaly"
    family: ClassVar[str] = "anomaly"
    device_class: ClassVar[str] = "custom"
    needs: ClassVar[tuple[str, ...]] = _SIGNALS
    takes_unused_signals: ClassVar[bool] = True
    cannot_see: ClassVar[str] = (
        "Drifts slower than some 30 samples, a level that has been wrong since the first samples, one of many signals "
        "that moves alone, and whether a change is harm."
    )

    limit: float = 6.0
    least: float = 0.1
    memory: float = 5000.0
    signals: tuple[str, ...] = _SIGNALS

    known: Known = part(Known)
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    changed: dict[str, dict[str, Any]] = notes()
    _orders: dict[str, tuple[tuple[int, int], Order]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.choose_signals(frozenset(), None, CATALOGUE)

    def choose_signals(
        self, used: Collection[str], available: Collection[str] | None, catalogue: Mapping[str, Signal]
    ) -> list[str]:
        declared = sorted(name for name, signal in catalogue.items() if CATALOGUE.get(name) is not signal)
        wanted = dict.fromkeys([*self.signals, *(name for name in declared if name not in used)])
        by_class: dict[str, list[Signal]] = {}
        for name in (n for n in wanted if n in catalogue and (available is None or n in available)):
            signal = catalogue[name]
            if signal.device_class != _NEVER and not signal.name.endswith(".generation"):
                by_class.setdefault(signal.device_class, []).append(signal)
        self.known.judge(by_class)
        return [] if by_class or available is None else [_UNUSED]

    def deciding_signals(self) -> tuple[str, ...]:
        return self.input_signals()

    def missing_inputs(self, there: Callable[[str], bool]) -> list[str]:
        """One signal is enough."""
        mine = self.input_signals()
        return [] if any(map(there, mine)) else [" or ".join(mine[:_TOLD]) or _UNUSED]

    def input_signals(self) -> tuple[str, ...]:
        return tuple(s.name for changes in self.known.classes.values() for s in changes.signals)

    def budget(self) -> list[str]:
        tail = (1 - change_kernel.KNOWN) * math.exp(-self.limit)
        suspects = 1000 * DAY_S / USUAL_STEP * change_kernel.SCALES * tail**2
        return [
            f"a lone signal: {self.limit:g} mean excesses beyond its {change_kernel.KNOWN:.0%} quantile are passed in"
            f" {tail:.2g} of samples, twice running and independent that is {suspects:.2g} silent suspects per 1,000"
            f" entity-days at {USUAL_STEP:g} s; moves go on for some samples, so up to {suspects / tail:.2g}",
            f"several signals: the mean of {change_kernel.STRONGEST} must pass it, a ticket {_STRONG:g} times that for"
            f" {_STRONG_HOLD} samples; it never pages",
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        found: list[Finding] = []
        holding = set(self.conditions)
        for device_class, changes in self.known.classes.items():
            frame = frames.get(device_class)
            if frame is not None and len(frame.entities) and any(s.name in frame.values for s in changes.signals):
                found += self._judge(frame, changes, holding)
        close_ended(self.conditions, holding)
        for entity in [e for e in self.changed if e not in holding]:
            del self.changed[entity]
        return found

    def _judge(self, frame: Frame, changes: Changes, holding: set[str]) -> list[Finding]:
        """One class; takes out of `holding` whose condition is over."""
        settings = (self.limit, self.memory, self.least)
        on = changes.step(frame, self._order(frame), self.gates.maintenance_mask(frame), settings)
        holding.difference_update(frame.entities if holding else ())
        found = []
        for i in np.flatnonzero(on).tolist():
            entity = frame.entities[i]
            if kind_of(entity) == _NEVER:
                continue
            holding.add(entity)
            if changes.score[i] < 0:  # nothing was measured now
                continue
            level = self._level(changes, i, entity)
            if due := due_report(self.conditions, entity, frame.time, changes.onset(i), level):
                found.append(self._finding(frame, changes, i, due))
        return found

    def _level(self, changes: Changes, i: int, entity: str) -> Level:
        """A ticket for what is strong, shows in several signals and goes on."""
        strong = self.changed.get(entity, {}).get("score", 0.0) >= _STRONG * self.limit
        several = changes.judged[i] >= change_kernel.STRONGEST
        return "ticket" if strong and several and changes.lasted(i) >= _STRONG_HOLD else "suspect"

    def _order(self, frame: Frame) -> Order:
        """Entities by cohort, and where each cohort begins; cohorts too small to tell are left out."""
        key = (frame.topology.version, len(frame.entities))
        if frame.device_class not in self._orders or self._orders[frame.device_class][0] != key:
            cohorts: dict[str, list[int]] = {}
            for i, entity in enumerate(frame.entities):
                look = f"{kind_of(entity)} {likeness(frame.topology.attributes.get(entity, {}))}"
                cohorts.setdefault(look, []).append(i)
            large = [found for found in cohorts.values() if len(found) >= PEERS]
            starts = np.cumsum([0, *map(len, large)], dtype=np.int64)
            order = np.array([i for found in large for i in found], np.int64)
            self._orders[frame.device_class] = key, (order, starts)
        return self._orders[frame.device_class][1]

    def _finding(self, frame: Frame, changes: Changes, i: int, due: tuple[int, Level]) -> Finding:
        """What changed stays as it was when the condition began; later the newest move would tell of its end."""
        entity, (onset, level) = frame.entities[i], due
        said = self.changed.get(entity)
        if said is None or said["onset"] != onset:
            said = {"onset": onset, **self._said(frame, changes, i)}
            self.changed[entity] = said
        shown = (said["score"], said["summary"], said["evidence"], tuple(said["signals"]))
        return Finding(frame.time, onset, entity, self.name, level, *shown)

    def _said(self, frame: Frame, changes: Changes, i: int) -> dict[str, Any]:
        moved = changes.told(i)[:_TOLD]
        first, peers = moved[0], self._peers(frame, changes, i)
        against = f"its own past and {peers} devices like it" if peers else "its own past"
        numbers = (against, peers, first.value - first.expected, first.unit)
        compared = None if first.stirs else Comparison(first.value, first.expected, None, *numbers)
        clears = f"its moves become half as unusual, or the new level lasts for {LASTS} samples"
        strengths = {t.signal.name: round(t.score, 1) for t in moved}
        more = make_evidence(clears, compared, moves=strengths, judged_signals=int(changes.judged[i]))
        words = "; ".join(t.words for t in moved[:_SHOWN])
        summary = f"{frame.entities[i]} changed against {against}: {words}"
        names = [t.signal.name for t in moved]
        return {"score": float(changes.score[i]), "summary": summary, "evidence": dict(more), "signals": names}

    def _peers(self, frame: Frame, changes: Changes, i: int) -> int:
        """How many entities like this one were measured, too; 0 where they are too few to compare with."""
        order, starts = self._order(frame)
        for place in np.flatnonzero(order == i).tolist():
            cohort = int(np.searchsorted(starts, place, "right"))
            measured = np.count_nonzero(changes.score[order[starts[cohort - 1] : starts[cohort]]] >= 0)
            return int(measured) - 1 if measured >= PEERS else 0
        return 0

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """The level that it has now is the normal one."""
        super().accept_as_normal(entity, frames)
        for device_class, changes in self.known.classes.items():
            frame = frames.get(device_class)
            if frame is not None:
                for i in np.flatnonzero(members_mask((entity,), frame)).tolist():
                    changes.settle(i)
