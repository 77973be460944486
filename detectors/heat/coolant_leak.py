"""Finds leaks: leak detectors that are wet, until they are dry again, and reservoirs that empty before one is wet.

Reservoirs: slopes of the level over minutes, hours and days, in bounded state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, notes, part
from detectors.base.event_data import as_edge_event, edge_events, values_by_entity
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.state import N, State, memory
from detectors.base.streams import Floats
from detectors.heat.drift import SURE, SlowTrends, trend_budget
from pipeline.model.entity_names import pager_title
from pipeline.model.records import LEVELS, SECOND, Event, Finding, Frame, Level, to_json
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

_BIN_S = 120  # s of one mean: a float on moving water is noisy from second to second; chosen
_BINS = 60  # two hours
_WINDOWS = (8, 20, 60)  # bins over which a line is fitted: a burst hose, a coupling, a weeping seal; chosen
_SIGMAS = 8.0  # standard errors of the slope; chosen: three windows are tested all the time
_LINEAR = 0.9  # share of the variance that the line must explain: a refill or a jump of the float is not a leak; chosen
_KEPT = 0.5  # share of these limits at which a loss that is reported goes on: noise at a limit is no end; chosen
_FALLEN = 0.03  # share of the reservoir; 10 K of warming change water and glycol by half a percent; chosen
_SIGNAL = "leak.state"
_STATES = CATALOGUE[_SIGNAL].states
_LEVELS: Mapping[str, Level] = {"warning": "ticket", "critical": "page"}


@dataclass(frozen=True, slots=True)
class CoolantLoss:
    """A loop that loses coolant: level now, share that is gone, share per hour, and seconds of the trend."""

    level: float
    fallen: float
    per_hour: float
    seconds: float

    @property
    def hours_left(self) -> float:
        """Hours until the reservoir is empty at this rate."""
        return self.level / self.per_hour


@dataclass
class Reservoirs(State):
    """Levels of all loops. bins: means of two hours; sums: sum and number of samples of the bin that is filling."""

    bins: Floats = memory(np.nan, shape=(N, _BINS))
    sums: Floats = memory(0.0, shape=(2, N))
    number: int = notes(int)
    days: SlowTrends = part(SlowTrends)

    def add(self, level: Floats, time: int, held: Collection[int]) -> dict[int, CoolantLoss] | None:
        """Adds one sample each, NaN = none; every two minutes returns loop number -> its loss, else None.

        held: loops whose loss is reported, which ends at half of the limits.
        """
        self.grow(len(level))
        now, due = time // (_BIN_S * SECOND), False
        if now > self.number:
            due = self.number > 0
            if due:
                self._close_bin(int(min(now - self.number, _BINS)))
        self.number = now  # also where the clock went back, so that no frame far ahead stops it
        known = np.isfinite(level)
        self.sums[0, : len(level)][known] += level[known]
        self.sums[1, : len(level)] += known
        self.days.add(-level, time)
        return self._find_losses(held) if due else None

    def restart(self, i: int) -> None:
        """Drops the past level of a loop after maintenance."""
        if i < len(self.bins):
            self.bins[i] = np.nan
            self.days.reset(np.arange(len(self.bins)) == i)

    def _close_bin(self, passed: int) -> None:
        """Starts a new bin; those of which nothing was measured stay empty."""
        self.bins[:, :-passed] = self.bins[:, passed:]
        self.bins[:, -passed:] = np.nan
        total, count = self.sums
        self.bins[:, -passed] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        self.sums[:] = 0.0

    def _find_losses(self, held: Collection[int]) -> dict[int, CoolantLoss]:
        found: dict[int, CoolantLoss] = {}
        z, grown = self.days.test()
        for i, row in enumerate(self.bins):
            share = _KEPT if i in held else 1.0
            fits = [loss for window in _WINDOWS if (loss := _fit_loss(row[-window:], share)) is not None]
            if fits:
                found[i] = max(fits, key=lambda loss: loss.per_hour)
            elif z[i] > SURE and grown[i] >= _FALLEN and (slope := self.days.slope(i)) > 0 and np.isfinite(row[-1]):
                found[i] = CoolantLoss(float(row[-1]), float(grown[i]), slope, float(grown[i]) / slope * 3600)
        return found


def _fit_loss(row: Floats, share: float) -> CoolantLoss | None:
    """Returns the loss that a straight line through the bins shows, if it is one. share: of the limits."""
    at = np.flatnonzero(np.isfinite(row))
    if len(at) < max(4, len(row) // 2):
        return None
    y = row[at]
    x = at - at.mean()
    slope = float((x * y).sum() / (x * x).sum())
    rest = y - y.mean() - slope * x
    whole = float(((y - y.mean()) ** 2).sum())
    error = float(np.sqrt((rest * rest).sum() / (len(at) - 2) / (x * x).sum()))
    fallen = -slope * (at[-1] - at[0])
    explained = whole - float((rest * rest).sum())
    if fallen < share * _FALLEN or -slope < share * _SIGMAS * error or explained < share * _LINEAR * whole:
        return None
    per_hour = -slope * 3600 / _BIN_S
    return CoolantLoss(float(y[-1]), float(fallen), per_hour, float((at[-1] - at[0]) * _BIN_S))


def reservoir_budget() -> str:
    """Returns what the level costs in false alarms, by chance alone, as one line."""
    chance, tests = math.erfc(_SIGMAS / math.sqrt(2)) / 2, len(_WINDOWS) * 86_400 // _BIN_S
    return (
        f"a slope beyond {_SIGMAS:g} standard errors in one of {len(_WINDOWS)} windows, {tests} tests a day and loop:"
        f" {chance * tests:.1e} false alarms a day by chance, and {_FALLEN:.0%} of the reservoir must be gone;"
        f" {trend_budget(1)}"
    )


@dataclass
class CoolantLeak(Detector):
    """A leak detector at critical pages, at warning it is a ticket; both last until it is OK again.

    A reservoir that sinks along a line, by at least 3 %, is a leak, mostly before a rope is wet: page if it is empty
    within `empty` h at that rate or a rope below it is wet, else ticket. After maintenance of the loop its level is
    learned again.

    From the agents' event `leak`, as it arrives, and from leak.state, so a lost event delays the finding by one frame
    only. No statistics: the controller has debounced the rope, and water beside 100 kW is urgent.

    Source: Redfish LeakDetector DetectorState (DSP2046): Warning and Critical are the detector's own verdict.
    """

    name: ClassVar[str] = "coolant_leak"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "leak"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = (_SIGNAL, "reservoir.level")
    wants: ClassVar[tuple[str, ...]] = ("event:leak", "coolant.pressure")
    on_arrival: ClassVar[tuple[str, ...]] = ("leak",)
    cannot_see: ClassVar[str] = (
        "Leaks of less than 3 % of a reservoir where there is no rope; which rack leaks before its rope is wet; and "
        "condensation that a rope reports as a leak."
    )

    dry: int = 2
    """Frames in a row with a dry detector that end a leak without an end event; chosen."""

    empty: float = 24.0
    """Hours; a ticket is read by the next morning; chosen."""

    leaks: dict[str, dict[str, Any]] = notes()
    levels: Reservoirs = part(Reservoirs, of="coolant", kept=True)
    gates: Gates = part(Gates)
    losses: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on leak detectors that report, and on sinking reservoirs."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        over = self._read_events(frames) | self._read_states(values_by_entity(frames.get("leak"), _SIGNAL), time)
        dry = (over - set(self.leaks)) & set(self.conditions)
        found = [self._cleared_finding(e, time, self.conditions[e]) for e in sorted(dry)]
        self._measure_levels(frames)
        close_ended(self.conditions, set(self.leaks) | set(self.losses))
        above = next(iter(frames.values())).topology.ancestors
        wet = {e for leak, now in self.leaks.items() if now["leak"] == "critical" for e in above(leak)}
        for entity, loss in sorted(self.losses.items()):
            level: Level = "page" if loss["hours"] <= self.empty or entity in wet else "ticket"
            if entity not in self.leaks and (due := due_report(self.conditions, entity, time, loss["onset"], level)):
                found.append(self._loss_finding(entity, time, due, loss, entity in wet))
        for entity, leak in sorted(self.leaks.items()):
            sank = [self.losses[e]["onset"] for e in above(entity) if e in self.losses]  # it leaked before it was wet
            onset = min([leak["onset"], *sank])
            if due := due_report(self.conditions, entity, time, onset, _LEVELS[leak["leak"]]):
                found.append(self._leak_finding(entity, time, due, leak))
        return found

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """See `Detector.judge_event`."""
        edge, leak = as_edge_event(event), str(event.data.get("leak"))
        if edge is None or not edge.active or leak not in _LEVELS:
            return None
        known = self.conditions.get(event.entity)
        if known is not None and LEVELS.index(known["level"]) >= LEVELS.index(_LEVELS[leak]):
            return None
        onset = edge.since if known is None else known["onset"]
        return self._leak_finding(event.entity, event.time, (onset, _LEVELS[leak]), {"leak": leak})

    def budget(self) -> list[str]:
        """Returns the false alarm rates of ropes and reservoirs."""
        return [f"rope: {rule_line('states of leak detectors')}", f"reservoir: {reservoir_budget()}"]

    def _measure_levels(self, frames: Mapping[str, Frame]) -> None:
        """Adds the levels of the reservoirs; the losses are renewed every two minutes."""
        self.gates.update(frames)
        frame = frames.get("coolant")
        if frame is None or not len(frame.entities):
            return
        for i in np.flatnonzero(self.gates.maintenance_mask(frame)).tolist():
            self.levels.restart(i)
        held = [i for i, entity in enumerate(frame.entities) if entity in self.losses]
        losses = self.levels.add(frame["reservoir.level"], frame.time, held)
        if losses is None:
            return
        before, self.losses = self.losses, {}
        pressure = frame["coolant.pressure"]
        for i, loss in losses.items():
            entity = frame.entities[i]
            onset = before.get(entity, {}).get("onset", frame.time - int(loss.seconds * SECOND))
            numbers = {"level": loss.level, "fallen": loss.fallen, "per_hour": loss.per_hour, "hours": loss.hours_left}
            self.losses[entity] = {"onset": onset, "pressure": float(pressure[i]), **numbers}

    def _loss_finding(
        self, entity: str, time: int, due: tuple[int, Level], loss: Mapping[str, float], wet: bool
    ) -> Finding:
        rope = "rope wet" if wet else "no rope wet yet"
        left = f"{loss['hours']:.0f} h" if loss["hours"] >= 2 else f"{loss['hours'] * 60:.0f} min"
        return self.finding(
            time,
            entity,
            due,
            score=loss["per_hour"] * 24,
            summary=pager_title(entity, f"reservoir at {100 * loss['level']:.0f} %, empty in {left}, {rope}"),
            signals=("reservoir.level", "coolant.pressure"),
            clears="ends when the level stops falling, or it is refilled",
            compared=Comparison(
                loss["level"], loss["level"] + loss["fallen"], None, "own past", 0, loss["fallen"], "1"
            ),
            per_hour=round(loss["per_hour"], 5),
            hours_to_empty=round(loss["hours"], 1),
            pressure=to_json(loss["pressure"]),
        )

    def _read_events(self, frames: Mapping[str, Frame]) -> set[str]:
        """Reads the events; returns the detectors that are dry again."""
        over: set[str] = set()
        for event in edge_events(frames, ("leak",)):
            leak = str(event.event.data.get("leak"))
            if event.active and leak in _LEVELS:
                self._record_leak(event.entity, leak, event.since)
                over.discard(event.entity)
            elif not event.active and event.entity in self.leaks:
                del self.leaks[event.entity]
                over.add(event.entity)
        return over

    def _read_states(self, states: Mapping[str, float], time: int) -> set[str]:
        """Reads the states; returns the detectors that are dry again. Unknown states change nothing."""
        over = set()
        for entity, value in states.items():
            state = _STATES[int(value)] if 0 <= value < len(_STATES) else ""
            if state in _LEVELS:
                self._record_leak(entity, state, time)
            elif state == "ok" and entity in self.leaks:
                self.leaks[entity]["dry"] += 1
                if self.leaks[entity]["dry"] >= self.dry:
                    del self.leaks[entity]
                    over.add(entity)
        return over

    def _record_leak(self, entity: str, state: str, onset: int) -> None:
        leak = self.leaks.setdefault(entity, {"leak": state, "onset": onset, "dry": 0})
        leak["leak"] = "critical" if "critical" in (leak["leak"], state) else state
        leak["dry"] = 0

    def _cleared_finding(self, entity: str, time: int, condition: dict[str, Any]) -> Finding:
        return self.finding(
            time,
            entity,
            (condition["onset"], condition["level"]),
            score=0.0,
            summary=pager_title(entity, "dry again"),
            signals=(_SIGNAL,),
            clears="it is over",
            cleared=True,
        )

    def _leak_finding(self, entity: str, time: int, due: tuple[int, Level], leak: dict[str, Any]) -> Finding:
        return self.finding(
            time,
            entity,
            due,
            score=2.0 if leak["leak"] == "critical" else 1.0,
            summary=pager_title(entity, f"leak detected, {leak['leak']}"),
            signals=(_SIGNAL,),
            clears="ends when the detector is dry",
            state=leak["leak"],
            holds=True,
        )
