"""The generic detector: finds changes in signals whose meaning is not known, and in those that it is configured for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from detectors.anomaly.changes import (
    KNOWN,
    LASTS,
    PEERS,
    RECENT,
    SCALES,
    STRONGEST,
    ClassChanges,
    CohortOrder,
    DeviceClasses,
)
from detectors.base.budget import DAY_S
from detectors.base.cohorts import comparable_attributes
from detectors.base.detector import PER_NODE, Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import USUAL_STEP
from detectors.base.topology_index import members_mask, per_device_topology
from pipeline.model.entity_names import pager_title
from pipeline.model.records import Finding, Frame, Level
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.model.topology import kind_of

_SIGNALS = ("custom.value",)
_EXCLUDED = "rank"  # ranks wait for each other: blame needs the meaning of the signal
_UNUSED = "declared signal that no other detector uses"
_MANY = frozenset(PER_NODE) | {"sensor", "disk"}  # classes of eight devices a node and more: would cost too much
_LISTED, _SHOWN = 5, 3  # signals of a finding, and those of its title; chosen


def _rests(signal: Signal) -> bool:
    """Returns whether a signal stands still while all is well, on devices of which a node has few."""
    counts_harm = signal.kind == "counter" and signal.harm == "up"
    return signal.device_class not in _MANY and (counts_harm or bool(signal.kind == "state" and signal.normal))


@dataclass
class Anomaly(Detector):
    """Reports that an entity has changed: how unusual the moves of its signals are, against the past of each.

    A move is the difference of two exponential means, 1 against 10 and 3 against 30 samples. Its size counts in mean
    excesses above its own 95 % quantile, learnt over `memory` samples; a level change of less than `least` never
    reaches the limit. The three strongest signals of an entity count, by their mean over three samples, so neither one
    signal nor one sample suffices; from 8 entities alike (kind and attributes) their common part is subtracted first.
    Counters count by their rate, states by their changes; where a signal declares the direction of harm, only that
    direction. An error counter that grows after a long time without growth is enough. What is reported is not learnt.

    `limit` holds at 10 s and follows the interval of each stream, for the same alarms a day: a lone signal of 5 min
    needs 3.4 excesses less, and never less than 4. Suspect: the limit. Ticket: three signals or more, for a minute or
    three samples, and the two newest samples are off, too, so a glitch is none; or the second change within an hour. It
    never pages, since it does not know the meaning. A condition is over when it is half as unusual, or after 30
    samples: then the new level is the normal one.

    It judges the signals of `signals`; in a replay with `--signals` also those that the file declares and no other
    detector uses: no pipeline receives them. Of the other signals that no detector uses, live as in replay: error
    counters that grow after standing still and states that leave their normal, which are always suspects, on devices of
    which a node has few.

    Source: peaks over a threshold of Siffer et al. (SPOT, KDD 2017) with an exponential tail; the least change of
    10 % of Greyhound (2025), which took the false alarms of change-point detection from 18 % to none. Compared with
    isolation forest, LOF, nearest neighbours, PCA, ECOD, HBOS and half-space trees in docs/decisions.md.
    """

    name: ClassVar[str] = "anomaly"
    family: ClassVar[str] = "anomaly"
    device_class: ClassVar[str] = "custom"
    needs: ClassVar[tuple[str, ...]] = _SIGNALS
    takes_unused_signals: ClassVar[bool] = True
    cannot_see: ClassVar[str] = (
        "Drifts slower than some 30 samples, a level that has been wrong since the first samples, one of many signals "
        "that moves alone, and whether a change is harmful."
    )

    limit: float = 9.5
    least: float = 0.1
    memory: float = 5000.0
    signals: tuple[str, ...] = _SIGNALS

    known: DeviceClasses = part(DeviceClasses, kept=True)
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    changed: dict[str, dict[str, Any]] = notes()  # entity -> onset, score, summary, evidence, signals of its condition

    def __post_init__(self) -> None:
        self.choose_signals(CATALOGUE.keys(), None, CATALOGUE)

    def choose_signals(
        self, used: Collection[str], available: Collection[str] | None, catalogue: Mapping[str, Signal]
    ) -> list[str]:
        """See `Detector.choose_signals`."""
        declared = sorted(name for name, signal in catalogue.items() if CATALOGUE.get(name) is not signal)
        wanted = dict.fromkeys([*self.signals, *(name for name in declared if name not in used)])
        unread = [name for name in CATALOGUE if name not in used and name not in wanted and _rests(catalogue[name])]
        by_class: dict[str, list[Signal]] = {}
        for name in (n for n in (*wanted, *unread) if n in catalogue and (available is None or n in available)):
            signal = catalogue[name]
            if signal.device_class != _EXCLUDED and not signal.name.endswith(".generation"):
                by_class.setdefault(signal.device_class, []).append(signal)
        self.known.begin(by_class, frozenset(unread))
        return [] if by_class or available is None else [_UNUSED]

    def deciding_signals(self) -> tuple[str, ...]:
        """See `Detector.deciding_signals`; signals that it was given, not those that no other detector uses."""
        every = self.known.classes.values()
        return tuple(s.name for changes in every for s in changes.signals if s.name not in changes.resting)

    def missing_inputs(self, present: Callable[[str], bool]) -> list[str]:
        """See `Detector.missing_inputs`; one signal is enough."""
        mine = self.deciding_signals()
        return [] if any(map(present, mine)) else [" or ".join(mine[:_LISTED]) or _UNUSED]

    def input_signals(self) -> tuple[str, ...]:
        """See `Detector.input_signals`."""
        return tuple(s.name for changes in self.known.classes.values() for s in changes.signals)

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        tail = (1 - KNOWN) * math.exp(-self.limit)
        return [
            f"a lone signal: {self.limit:g} mean excesses beyond its {KNOWN:.0%} quantile are exceeded in {tail:.2g} of"
            f" samples, up to {1000 * DAY_S / USUAL_STEP * SCALES * tail:.2g} suspects per 1,000 entity-days at"
            f" {USUAL_STEP:g} s and longer intervals",
            f"several signals: the mean of {STRONGEST}, over {RECENT} samples, must exceed it; it never pages",
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
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

    def _judge(self, frame: Frame, changes: ClassChanges, holding: set[str]) -> list[Finding]:
        """Judges one class; removes from `holding` the entities whose condition is over."""
        settings = (self.limit, self.memory, self.least)
        on = changes.step(frame, self._cohorts(frame), self.gates.maintenance_mask(frame), settings)
        holding.difference_update(frame.entities if holding else ())
        found = []
        for i in np.flatnonzero(on).tolist():
            entity = frame.entities[i]
            if kind_of(entity) == _EXCLUDED:
                continue
            holding.add(entity)
            if changes.score[i] < 0:  # nothing was measured now
                continue
            level = self._level(changes, i)
            if due := due_report(self.conditions, entity, frame.time, changes.onset(i), level):
                found.append(self._finding(frame, changes, i, due))
        return found

    def _level(self, changes: ClassChanges, i: int) -> Level:
        """Returns a ticket for a change of an entity with several signals that lasts."""
        return "ticket" if changes.has_several(i) and changes.is_sustained(i) else "suspect"

    @per_device_topology
    def _cohorts(self, frame: Frame) -> CohortOrder:
        """Returns entities by cohort, and where each cohort begins; cohorts that are too small are left out."""
        cohorts: dict[str, list[int]] = {}
        for i, entity in enumerate(frame.entities):
            like = f"{kind_of(entity)} {comparable_attributes(frame.topology.attributes.get(entity, {}))}"
            cohorts.setdefault(like, []).append(i)
        large = [found for found in cohorts.values() if len(found) >= PEERS]
        starts = np.cumsum([0, *map(len, large)], dtype=np.int64)
        return np.array([i for found in large for i in found], np.int64), starts

    def _finding(self, frame: Frame, changes: ClassChanges, i: int, due: tuple[int, Level]) -> Finding:
        """Reports the change as it was when the condition began; later the newest move would show its end."""
        entity, (onset, level) = frame.entities[i], due
        first = self.changed.get(entity)
        if first is None or first["onset"] != onset:
            first = {"onset": onset, **self._describe_change(frame, changes, i)}
            self.changed[entity] = first
        shown = (first["score"], first["summary"], first["evidence"], tuple(first["signals"]))
        return Finding(frame.time, onset, entity, self.name, level, *shown)

    def _describe_change(self, frame: Frame, changes: ClassChanges, i: int) -> dict[str, Any]:
        moved = changes.moves(i)[:_LISTED]
        first, peers = moved[0], self._count_peers(frame, changes, i)
        against = f"its own past and {peers} devices like it" if peers else "its own past"
        numbers = (against, peers, first.value - first.expected, first.unit)
        compared = None if first.grew_after_rest else Comparison(first.value, first.expected, None, *numbers)
        clears = f"its moves become half as unusual, or the new level lasts for {LASTS} samples"
        strengths = {move.signal.name: round(move.score, 1) for move in moved}
        evidence = make_evidence(clears, compared, moves=strengths, judged_signals=int(changes.judged[i]))
        summary = pager_title(frame.entities[i], f"changed: {'; '.join(move.words for move in moved[:_SHOWN])}")
        names = [move.signal.name for move in moved]
        return {"score": float(changes.score[i]), "summary": summary, "evidence": dict(evidence), "signals": names}

    def _count_peers(self, frame: Frame, changes: ClassChanges, i: int) -> int:
        """Returns how many entities like this one were measured, too; 0 where they are too few to compare with."""
        order, starts = self._cohorts(frame)
        for at in np.flatnonzero(order == i).tolist():
            cohort = int(np.searchsorted(starts, at, "right"))
            measured = np.count_nonzero(changes.score[order[starts[cohort - 1] : starts[cohort]]] >= 0)
            return int(measured) - 1 if measured >= PEERS else 0
        return 0

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """See `Detector.accept_as_normal`; the present level becomes the normal one."""
        super().accept_as_normal(entity, frames)
        for device_class, changes in self.known.classes.items():
            frame = frames.get(device_class)
            if frame is not None:
                for i in np.flatnonzero(members_mask((entity,), frame)).tolist():
                    changes.settle(i)
