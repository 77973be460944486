"""Finds leaks: what a leak detector says, at once and until it is dry, and reservoirs that empty before one is wet.

How fast coolant leaves each loop: slopes of the reservoir's level over minutes, hours and days, in bounded state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, notes, part
from detectors.base.event_data import as_edge_event, edge_events, values_by_entity
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import Floats
from detectors.heat.drift import SURE, Drifts, trend_in_words
from pipeline.model.records import LEVELS, SECOND, Event, Finding, Frame, Level, to_json
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

_BIN_S = 120  # of which a mean is kept: a float on moving water is noisy from second to second; chosen
_BINS = 60  # two hours
_WINDOWS = (8, 20, 60)  # bins over which a line is fitted: a burst hose, a coupling, a weeping seal; chosen
_SIGMAS = 8.0  # standard errors of the slope; chosen: three windows are looked at all the time
_LINEAR = 0.9  # share of the variance that the line must explain: a refill or a jump of the float is no leak; chosen
_FALLEN = 0.03  # share of the reservoir; 10 K of warming change water and glycol by half a percent; chosen


def in_words() -> str:
    """What the level costs in false alarms, by chance alone, as one line."""
    chance, looks = math.erfc(_SIGMAS / math.sqrt(2)) / 2, len(_WINDOWS) * 86_400 // _BIN_S
    return (
        f"a slope beyond {_SIGMAS:g} standard errors in one of {len(_WINDOWS)} windows, {looks} looks a day and loop:"
        f" {chance * looks:.1e} false alarms a day by chance, and {_FALLEN:.0%} of the reservoir must be gone;"
        f" {trend_in_words(1)}"
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """A loop that loses coolant: level now, share that is gone, share an hour, and how long the trend was looked at."""

    level: float
    fallen: float
    per_hour: float
    seconds: float

    @property
    def hours_left(self) -> float:
        return self.level / self.per_hour


@dataclass
class Reservoirs:
    """Levels of all loops; a part() of a detector."""

    bins: Floats = field(default_factory=lambda: np.full((0, _BINS), np.nan))
    sums: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    number: int = 0
    days: Drifts = field(default_factory=Drifts)

    def take(self, level: Floats, time: int) -> dict[int, Loss] | None:
        """One sample each, NaN = none; every two minutes who loses coolant by place, else None."""
        self._grow(len(level))
        now, due = time // (_BIN_S * SECOND), False
        if now > self.number:
            due = self.number > 0
            if due:
                self._close(int(min(now - self.number, _BINS)))
        self.number = now  # also where the clock went back, so that no frame far ahead silences it
        known = np.isfinite(level)
        self.sums[0, : len(level)][known] += level[known]
        self.sums[1, : len(level)] += known
        self.days.take(-level, time)
        return self._losses() if due else None

    def forget(self, place: int) -> None:
        """Somebody worked on it: what the level did before says nothing."""
        if place < len(self.bins):
            self.bins[place] = np.nan
            self.days.reset(np.arange(len(self.bins)) == place)

    def snapshot(self) -> dict[str, Any]:
        return {
            "bins": self.bins.copy(),
            "sums": self.sums.copy(),
            "number": self.number,
            "days": self.days.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bins, self.sums, self.number = state["bins"], state["sums"], state["number"]
        self.days.restore(state["days"])

    def _close(self, passed: int) -> None:
        """A bin is full; those in which nothing was measured stay empty."""
        self.bins[:, :-passed] = self.bins[:, passed:]
        self.bins[:, -passed:] = np.nan
        total, count = self.sums
        self.bins[:, -passed] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        self.sums[:] = 0.0

    def _losses(self) -> dict[int, Loss]:
        found: dict[int, Loss] = {}
        z, grown = self.days.judge()
        for i, row in enumerate(self.bins):
            fits = [loss for window in _WINDOWS if (loss := _fitted(row[-window:])) is not None]
            if fits:
                found[i] = max(fits, key=lambda loss: loss.per_hour)
            elif z[i] > SURE and grown[i] >= _FALLEN and (slope := self.days.slope(i)) > 0 and np.isfinite(row[-1]):
                found[i] = Loss(float(row[-1]), float(grown[i]), slope / 24, float(grown[i]) / slope * 86_400)
        return found

    def _grow(self, size: int) -> None:
        have = len(self.bins)
        if size > have:
            self.bins = np.vstack([self.bins, np.full((size - have, _BINS), np.nan)])
            self.sums = np.hstack([self.sums, np.zeros((2, size - have))])


def _fitted(row: Floats) -> Loss | None:
    """The loss that a straight line through the bins shows, if it is one."""
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
    if slope >= 0 or fallen < _FALLEN or -slope < _SIGMAS * error or (rest * rest).sum() > (1 - _LINEAR) * whole:
        return None
    per_hour = -slope * 3600 / _BIN_S
    return Loss(float(y[-1]), float(fallen), per_hour, float((at[-1] - at[0]) * _BIN_S))


_SIGNAL = "leak.state"
_STATES = CATALOGUE[_SIGNAL].states
_LEVELS: Mapping[str, Level] = {"warning": "ticket", "critical": "page"}


@dataclass
class CoolantLeak(Detector):
    """A leak detector at critical pages, at warning it is a ticket; both hold until it is well again.

    A reservoir that sinks along a line, by at least 3 %, is a leak that no rope has felt yet: page if it is empty
    within `empty` h at that pace, else ticket. Work on the loop ends what was learnt of its level.

    From the agents' event `leak`, as it arrives, and from leak.state, so that a lost event costs a frame and no leak.
    No statistics: a controller has debounced the rope, and water beside 100 kW leaves no time to be sure.

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
        "Leaks of less than 3 % of a reservoir where no rope lies, which rack leaks before its rope is wet, and "
        "condensation taken for a leak."
    )

    dry: int = 2
    """Frames in a row with a dry detector that end a leak whose end no event told; chosen."""

    empty: float = 24.0
    """Hours; until the next morning a ticket is read; chosen."""

    leaks: dict[str, dict[str, Any]] = notes()
    levels: Reservoirs = part(Reservoirs)
    gates: Gates = part(Gates)
    losses: dict[str, dict[str, Any]] = notes()
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        over = self._hear(frames) | self._look(values_by_entity(frames.get("leak"), _SIGNAL), time)
        dry = (over - set(self.leaks)) & set(self.conditions)
        found = [self._cleared(e, time, self.conditions[e]) for e in sorted(dry)]
        self._measure(frames)
        close_ended(self.conditions, set(self.leaks) | set(self.losses))
        above = next(iter(frames.values())).topology.ancestors
        for entity, leak in sorted(self.leaks.items()):
            sank = [self.losses[e]["onset"] for e in above(entity) if e in self.losses]  # it leaked before it was felt
            if due := due_report(self.conditions, entity, time, min([leak["onset"], *sank]), _LEVELS[leak["leak"]]):
                found.append(self._finding(entity, time, due, leak))
        for entity, loss in sorted(self.losses.items()):
            level: Level = "page" if loss["hours"] <= self.empty else "ticket"
            if entity not in self.leaks and (due := due_report(self.conditions, entity, time, loss["onset"], level)):
                found.append(self._sinks(entity, time, due, loss))
        return found

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        said, leak = as_edge_event(event), str(event.data.get("leak"))
        if said is None or not said.active or leak not in _LEVELS:
            return None
        known = self.conditions.get(event.entity)
        if known is not None and LEVELS.index(known["level"]) >= LEVELS.index(_LEVELS[leak]):
            return None
        onset = said.since if known is None else known["onset"]
        return self._finding(event.entity, event.time, (onset, _LEVELS[leak]), {"leak": leak})

    def budget(self) -> list[str]:
        return [f"rope: {rule_line('what leak detectors say')}", f"reservoir: {in_words()}"]

    def _measure(self, frames: Mapping[str, Frame]) -> None:
        """Takes the levels of the reservoirs; what is known of losses is renewed every two minutes."""
        self.gates.update(frames)
        frame = frames.get("coolant")
        if frame is None or not len(frame.entities):
            return
        for i in np.flatnonzero(self.gates.maintenance_mask(frame)).tolist():
            self.levels.forget(i)
        losses = self.levels.take(frame["reservoir.level"], frame.time)
        if losses is None:
            return
        before, self.losses = self.losses, {}
        pressure = frame["coolant.pressure"]
        for i, loss in losses.items():
            entity = frame.entities[i]
            onset = before.get(entity, {}).get("onset", frame.time - int(loss.seconds * SECOND))
            numbers = {"level": loss.level, "fallen": loss.fallen, "per_hour": loss.per_hour, "hours": loss.hours_left}
            self.losses[entity] = {"onset": onset, "pressure": float(pressure[i]), **numbers}

    def _sinks(self, entity: str, time: int, due: tuple[int, Level], loss: Mapping[str, float]) -> Finding:
        pace = f"{loss['per_hour']:.1%} an hour" if loss["per_hour"] >= 0.001 else f"{loss['per_hour'] * 24:.1%} a day"
        left = f"{loss['hours']:.0f} h" if loss["hours"] >= 2 else f"{loss['hours'] * 60:.0f} min"
        summary = (
            f"{entity}: reservoir is at {loss['level']:.0%} and sinks by {pace}, empty in {left} at that pace; "
            "no rope is wet yet, so which rack leaks cannot be told"
        )
        compared = Comparison(loss["level"], loss["level"] + loss["fallen"], None, "own past", 0, loss["fallen"], "1")
        shown = make_evidence(
            "ends when the level no longer sinks, or is filled up",
            compared,
            per_hour=round(loss["per_hour"], 5),
            hours_to_empty=round(loss["hours"], 1),
            pressure=to_json(loss["pressure"]),
        )
        signals = ("reservoir.level", "coolant.pressure")
        return Finding(time, due[0], entity, self.name, due[1], loss["per_hour"] * 24, summary, shown, signals)

    def _hear(self, frames: Mapping[str, Frame]) -> set[str]:
        """Takes the events; returns who is dry again."""
        over: set[str] = set()
        for said in edge_events(frames, ("leak",)):
            leak = str(said.event.data.get("leak"))
            if said.active and leak in _LEVELS:
                self._wet(said.entity, leak, said.since)
                over.discard(said.entity)
            elif not said.active and said.entity in self.leaks:
                del self.leaks[said.entity]
                over.add(said.entity)
        return over

    def _look(self, states: Mapping[str, float], time: int) -> set[str]:
        """Takes the states; a state that is neither well nor a leak says nothing."""
        over = set()
        for entity, value in states.items():
            state = _STATES[int(value)] if 0 <= value < len(_STATES) else ""
            if state in _LEVELS:
                self._wet(entity, state, time)
            elif state == "ok" and entity in self.leaks:
                self.leaks[entity]["dry"] += 1
                if self.leaks[entity]["dry"] >= self.dry:
                    del self.leaks[entity]
                    over.add(entity)
        return over

    def _wet(self, entity: str, state: str, onset: int) -> None:
        leak = self.leaks.setdefault(entity, {"leak": state, "onset": onset, "dry": 0})
        leak["leak"] = "critical" if "critical" in (leak["leak"], state) else state
        leak["dry"] = 0

    def _cleared(self, entity: str, time: int, condition: dict[str, Any]) -> Finding:
        summary = f"{entity} is dry again"
        onset, level = condition["onset"], condition["level"]
        shown = make_evidence("it is over", cleared=True)
        return Finding(time, onset, entity, self.name, level, 0.0, summary, shown, (_SIGNAL,))

    def _finding(self, entity: str, time: int, due: tuple[int, Level], leak: dict[str, Any]) -> Finding:
        shown = make_evidence("ends when the detector says that it is dry", state=leak["leak"], holds=True)
        score = 2.0 if leak["leak"] == "critical" else 1.0
        summary = f"{entity} detects a leak: {leak['leak']}"
        return Finding(time, due[0], entity, self.name, due[1], score, summary, shown, (_SIGNAL,))
